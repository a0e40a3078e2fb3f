"""An update that begins before the norm is known: when its rows go to the device, and when not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_cephalo.adapters.speculation import Assumed, Guess, SecondState, WhetherItPays


class Host:
    """A thread that updates when it may, and notes what goes to the device."""

    def __init__(self, step: Callable[[], None] = lambda: None) -> None:
        self.may, self.stepped, self.sent = threading.Event(), 0, 0
        self.step = step
        optimizer = SGD([torch.zeros(1)], lr=1.0)
        assumed = Assumed.of(optimizer, [[]])
        self.guess = Guess(assumed, SecondState(lambda *_: torch.empty(0)), optimizer, self.send)
        self.pool = ThreadPoolExecutor(1)
        self.guess.future = self.pool.submit(self.run)

    def run(self) -> list[Any]:
        assert self.may.wait(20)
        self.guess.work(self.count)
        return self.guess.then([])

    def count(self) -> None:
        self.stepped += 1
        self.step()

    def send(self, after: Sequence[Any]) -> list[Any]:
        self.sent += 1
        return ["on its way"]

    def end(self) -> None:
        self.may.set()
        self.pool.shutdown()


def arrivals(future: Future[list[Any]]) -> list[Any]:
    return future.result(timeout=20)


def test_rows_leave_when_the_norm_is_known_whether_the_update_is_done_by_then_or_not():
    early, late = Host(), Host()
    early.may.set()
    early.guess.wait()
    assert (early.stepped, early.sent) == (1, 0)
    assert arrivals(early.guess.confirm()) == ["on its way"]
    copies = late.guess.confirm()
    assert not copies.done() and late.sent == 0
    late.may.set()
    assert arrivals(copies) == ["on its way"]
    assert early.sent == late.sent == 1
    early.end()
    late.end()


def test_an_update_that_is_forgotten_before_it_begins_does_nothing():
    host = Host()
    host.guess.forget()
    host.may.set()
    host.guess.wait()
    assert (host.stepped, host.sent) == (0, 0)
    host.end()


def test_an_update_that_fails_is_known_to_have_and_sends_nothing():
    def fail() -> None:
        raise MemoryError("none left")

    host = Host(fail)
    assert not host.guess.has_failed
    copies = host.guess.confirm()
    host.may.set()
    with pytest.raises(MemoryError, match="none left"):
        arrivals(copies)
    assert host.guess.has_failed and not host.sent
    host.end()


def test_a_step_counts_when_the_update_holds_and_its_tensor_stays():
    parameter, step = torch.zeros(3), torch.tensor(4.0)
    for count in (5.0, 6.0):
        second = SecondState(lambda *_: torch.empty(0))
        found = second.of(parameter, {"step": step, "name": "x"})
        found["step"] += 1
        assert step == count - 1 and found["name"] == "x"
        places = second.change_places()
        assert step == count and places[id(found["step"])] is step


def test_a_step_assumes_something_behind_twice_as_many_steps_after_each_error():
    def told(clipped: str) -> str:
        """Steps that are clipped (c) or not (n); returns those that assume something."""
        pays, found = WhetherItPays(), ""
        for step in clipped:
            pays.begin_step()
            found += "x" if pays.now else "."
            if pays.now:
                pays.begun()
            if step != "r":  # it is repeated: nothing is known
                pays.learn(step == "c")
        return found

    assert told("nnnn") == ".xxx"
    assert told("cccc") == "...."
    assert told("ncncncnc") == ".x......"
    # wrong at the fourth step: two wait, and one right step forgives it
    assert told("nnncnnnncnn") == ".xxx..xxx.."
    assert told("nncnncnnnnn") == ".xx..x....x"
    assert told("nrnr") == ".xxx"


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("lr", 1.0, True),
        ("lr", 0.5, False),
        ("momentum", 0.0, True),
        ("momentum", 0, False),  # another type may be another kernel
        ("extra", 1, False),
        ("lr", torch.tensor(1.0), False),
    ],
)
def test_another_option_of_a_group_is_another_update(name, value, holds):
    optimizer = SGD([torch.zeros(1)], lr=1.0, momentum=0.0)
    assumed = Assumed.of(optimizer, [[]])
    optimizer.param_groups[0][name] = value
    assert assumed.holds(optimizer, [[]]) is holds
    assert not assumed.holds(SGD([torch.zeros(1)], lr=1.0), [[]])


def test_options_that_are_tensors_are_compared_by_what_they_were():
    optimizer = SGD([torch.zeros(1)], lr=torch.tensor(1.0))
    assumed = Assumed.of(optimizer, [[]])
    assert assumed.holds(optimizer, [[]])
    optimizer.param_groups[0]["lr"].mul_(2)
    assert not assumed.holds(optimizer, [[]])
    optimizer.param_groups[0].update(lr=torch.tensor(1.0), pair=(torch.tensor(0.9),))
    assert not Assumed.of(optimizer, [[]]).holds(optimizer, [[]])
