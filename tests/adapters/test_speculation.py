"""An update that begins before the norm is known: when its rows go to the device, and when not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_cephalo.adapters.speculation import Assumed, Guess, SecondState, WhetherItPays
from lightning_cephalo.sharding.spent_gradients import SentGradient, SpentGradient


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


def sent_parameter() -> nn.Parameter:
    """A parameter whose gradient is on the host."""
    parameter = nn.Parameter(torch.zeros(1))
    stand_in = SpentGradient(torch.zeros(1), "weight")
    stand_in.sent = SentGradient(torch.tensor(1.0))
    parameter.grad = stand_in
    return parameter


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
    parameter, other = sent_parameter(), sent_parameter()
    groups = [{"params": [parameter]}, {"params": [other]}]
    optimizer = SGD(groups, lr=1.0, momentum=0.0)
    assumed = Assumed.of(optimizer, [[parameter], []])
    assert assumed.holds(optimizer, [[parameter], [other]])
    optimizer.param_groups[1][name] = value  # of other parameters
    assert assumed.holds(optimizer, [[parameter], [other]])
    optimizer.param_groups[0][name] = value
    assert assumed.holds(optimizer, [[parameter], []]) is holds
    assert not assumed.holds(optimizer, [[], []])
    assert not assumed.holds(SGD([parameter], lr=1.0), [[parameter]])


def test_state_of_any_kind_is_compared():
    parameter = sent_parameter()
    optimizer = SGD([parameter], lr=1.0)
    entries = optimizer.state[parameter] = {"rows": torch.zeros(1), "history": [numpy.zeros(2)]}
    assumed = Assumed.of(optimizer, [[parameter]])
    assert assumed.holds(optimizer, [[parameter]])
    entries["history"].append(1)
    assert not assumed.holds(optimizer, [[parameter]])
    entries["history"].pop()
    assert assumed.holds(optimizer, [[parameter]])
    entries["rows"].add_(0)
    assert not assumed.holds(optimizer, [[parameter]])
