"""The host is one step ahead of its device, no more and no less."""

import torch

from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.throttle import Throttle


def test_a_step_begins_when_the_one_before_the_last_has_ended():
    happened = []

    class End:
        def __init__(self, step: int) -> None:
            self.step = step

        def synchronize(self) -> None:
            happened.append(f"wait for {self.step}")

    class RunsAhead(Cpu):
        def end_of_work(self) -> End:
            return End(step)

    step = 0
    throttle = Throttle(RunsAhead(torch.device("cpu")))
    for step in range(4):
        throttle.begin_step()
        happened.append(f"step {step}")
        throttle.end_step()
    assert happened == [
        *("step 0", "step 1"),
        *("wait for 0", "step 2"),
        *("wait for 1", "step 3"),
    ]


def test_a_cpu_is_never_waited_for():
    throttle = Throttle(Cpu(torch.device("cpu")))
    for _ in range(3):
        throttle.begin_step()
        throttle.end_step()
    assert not throttle._ends
