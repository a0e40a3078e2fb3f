"""What the host updates on simulated CUDA devices: nothing out of order, and all in its place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from device_jobs import Encoder, data, strategy, trainer
from launch import torchrun_environments
from lightning.pytorch import Callback
from plans import GLOBAL_BATCH, plan_of
from torch.optim import Optimizer

pytestmark = pytest.mark.simulated

UNEVEN = [((3, 3), 0.75), ((2,), 0.25)]
ON_HOST = {"resident_fraction": 0.0, "host_update_fraction": 1.0}
STEPS = 6


class Trained(Encoder):
    """Has an optimizer with some options."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.options)


class Between(Callback):
    """Loads state behind the third step, or changes the plan; notes where all is at the end."""

    def __init__(self, loads: bool, plan: dict[str, float] | None) -> None:
        self.loads, self.plan = loads, plan

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any, **__: Any) -> None:
        optimizer = trainer.optimizers[0]
        if self.loads and rest[-1] == 2:
            optimizer.load_state_dict(optimizer.state_dict())  # torch puts it on the device
        if self.plan is not None and rest[-1] == 2:
            trainer.strategy.change_plan(plan_of(*UNEVEN, **self.plan))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        entries = trainer.optimizers[0].state.values()
        self.steps = {each["step"].device.type for each in entries}


def fitted(
    rank: int,
    environments: list[dict[str, str]],
    plan: dict[str, float],
    options: dict[str, Any],
    loads: bool = False,
    other: dict[str, float] | None = None,
) -> Any:
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    between, model = Between(loads, other), Trained(options)
    chosen = strategy(plan_of(*UNEVEN, **plan), early_update="auto")
    runs = trainer(chosen, callbacks=[between], gradient_clip_val=1e3)
    runs.fit(model, data(GLOBAL_BATCH * STEPS))
    values = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return values, between.steps


def run(simulated: Any, *cases: tuple[Any, ...]) -> list[Any]:
    """What rank 0 has at the end of each case, after a look at what the checker found."""
    environments = torchrun_environments(2)
    calls = [(environments, *case) for case in cases]
    found = simulated.run_each(2, fitted, calls)
    for outcomes in found:
        for outcome in outcomes:
            assert not outcome.findings, "\n".join(outcome.findings)
    return [outcomes[0].value for outcomes in found]


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["fused"])
def test_step_counts_go_to_the_device_with_their_updates(simulated, option):
    away = {"resident_fraction": 0.0}
    on_host, resident, streamed = run(
        simulated,
        (ON_HOST, {option: True}),
        (ON_HOST, {option: True}, False, {}),
        (ON_HOST, {option: True}, False, away),
    )
    assert on_host[1] == {"cpu"}
    assert resident[1] == streamed[1] == {"cuda"}
    assert_equal(resident[0], streamed[0])
