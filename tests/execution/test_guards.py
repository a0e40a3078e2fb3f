"""What guards see of a step, and what comes of their findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import Windows
from lightning_cephalo.execution.guards import FIRST_STEPS, Finding, ForeignTensors, Guard, Guards

STEP: Any = SimpleNamespace()


class Notes(Guard):
    def __init__(self, *, takes_long: bool = False) -> None:
        self.takes_long = takes_long
        self.seen: list[str] = []

    def step_begins(self, step):
        self.seen.append("begins")
        return ()

    def microbatch_pauses(self, step, index):
        self.seen.append(f"pauses {index}")
        return ()

    def backward_begins(self, step):
        self.seen.append("backward")
        return ()

    def step_ends(self, step):
        self.seen.append("ends")
        return ()


def run(guards: Guards) -> None:
    guards.begin_step()
    guards.step_begins(STEP)
    guards.microbatch_pauses(STEP, 0)
    guards.backward_begins(STEP)
    guards.step_ends(STEP)


def test_a_guard_sees_four_moments_and_a_costly_one_those_of_the_first_steps():
    always, first = Notes(), Notes(takes_long=True)
    guards = Guards([always, first])
    for _ in range(FIRST_STEPS + 2):
        run(guards)
    moments = ["begins", "pauses 0", "backward", "ends"]
    assert always.seen == moments * (FIRST_STEPS + 2)
    assert first.seen == moments * FIRST_STEPS


def test_a_step_that_is_timed_is_none_of_the_first_ones():
    first = Notes(takes_long=True)
    guards = Guards([first])
    guards.begin_step(is_timed=True)
    guards.step_begins(STEP)
    assert first.seen == [] and not guards.all_look
    for _ in range(FIRST_STEPS + 1):
        guards.begin_step()
        guards.step_begins(STEP)
    assert first.seen == ["begins"] * FIRST_STEPS


def test_an_error_is_raised_by_name_and_a_warning_is_given():
    class Finds(Guard):
        def backward_begins(self, step):
            return [Finding("this is odd", is_error=False)]

        def step_ends(self, step):
            return [Finding("this is wrong")]

    guards = Guards([Finds()])
    guards.begin_step()
    with pytest.warns(UserWarning, match="this is odd"):
        guards.backward_begins(STEP)
    with pytest.raises(UnitUseError, match="this is wrong"):
        guards.step_ends(STEP)


def test_a_result_that_depends_on_another_microbatch_is_found_when_its_code_has_returned():
    weight, windows = torch.ones(2, requires_grad=True), Windows()
    made = []
    for owner in (0, 1):
        windows.begin(owner)
        made.append(weight.sin())
        windows.end()

    def step(result: Any, *, finished: bool = True) -> Any:
        code = SimpleNamespace(finished=finished, result=result)
        return SimpleNamespace(microbatches=[SimpleNamespace(code=code)], windows=windows)

    guard = ForeignTensors()
    both = {"loss": (made[0] + made[1]).sum()}
    assert not list(guard.microbatch_pauses(step({"loss": made[0].sum()}), 0))
    assert not list(guard.microbatch_pauses(step(both, finished=False), 0))
    (finding,) = guard.microbatch_pauses(step(both), 0)
    assert finding.is_error and "another microbatch" in finding.told
