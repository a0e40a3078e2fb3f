"""In a step the host waits for the device in one place only: the throttle."""

from __future__ import annotations

import os

import pytest
from device_jobs import Encoder, data, half, strategy, trainer
from launch import torchrun_environments
from plans import plan_of
from test_training import IDLE_WITH_ALL_STATE, ONE, UNEVEN

pytestmark = pytest.mark.simulated

STEADY = (2, 4)
"""From the start of this step to the start of that one, everything is as it stays. The second epoch
begins in between."""
STEPS = STEADY[1] - STEADY[0]
LENGTH = {"max_epochs": 2, "max_steps": STEADY[1] + 1}


def counted(rank, environments, ranks, given):
    """What the host waited for between two steps, by what for and the innermost line."""
    import simulated_cuda

    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    counts = []

    class Watched(Encoder):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step in STEADY:
                counts.append(simulated_cuda.waits())

    options = dict(given.get("trainer", {}))
    if "scale" in given:
        options["plugins"] = [half("cuda", given["scale"])]
    plan = plan_of(*ranks, **given.get("plan", {}))
    used = trainer(strategy(plan, **given.get("strategy", {})), **options, **LENGTH)
    used.fit(Watched(**given.get("model", {})), data(**given.get("data", {})))
    before, after = counts
    found = {}
    for line, count in after.items():
        if count > before.get(line, 0):
            what, lines = line.split(" | ")
            found[f"{what} in {lines.split(' < ')[0]}"] = count - before.get(line, 0)
    return found


def waits_of_each(simulated, cases):
    """What each rank of each case waited for; all cases have the same number of ranks."""
    environments = torchrun_environments(len(next(iter(cases.values()))[0]))
    calls = [(environments, ranks, given) for ranks, given in cases.values()]
    found = {}
    for name, outcomes in zip(
        cases, simulated.run_each(len(environments), counted, calls), strict=True
    ):
        assert not any(outcome.findings for outcome in outcomes), name
        found[name] = [
            {line.rsplit(":", 1)[0]: count for line, count in outcome.value.items()}
            for outcome in outcomes
        ]
    return found


ONLY_THE_THROTTLE = {"event in throttle.py": STEPS}
# torch's gradient scaler itself reads whether the step overflowed, with or without us
AND_THE_SCALER = {**ONLY_THE_THROTTLE, "aten::_local_scalar_dense in amp.py": STEPS}
# of each unit this rank without samples asks whether any sample has used it, before it updates it
AND_WHAT_IS_USED = {**ONLY_THE_THROTTLE, "copy to the host in gradient.py": 3 * STEPS}
LOCAL = {"model": {"sync_dist": False}}


def test_only_the_throttle_waits_on_one_rank(simulated):
    cases = {"synchronised logs": (ONE, {}), "local logs": (ONE, LOCAL)}
    for name, (found,) in waits_of_each(simulated, cases).items():
        assert found == ONLY_THE_THROTTLE, name


def test_only_the_throttle_waits_in_every_mode(simulated):
    cases = {
        "plain": (UNEVEN, {}),
        "keep, local logs": (UNEVEN, {"strategy": {"recompute": False}, **LOCAL}),
        "offload, clip": (
            UNEVEN,
            {"plan": {"offload": True}, "trainer": {"gradient_clip_val": 0.1}},
        ),
        "idle": (IDLE_WITH_ALL_STATE, {}),
    }
    for name, (first, second) in waits_of_each(simulated, cases).items():
        assert first == ONLY_THE_THROTTLE, name
        assert second == (AND_WHAT_IS_USED if name == "idle" else ONLY_THE_THROTTLE), name


def test_weights_on_the_device_and_16_mixed_wait_where_they_must(simulated):
    weighted = {"model": {"weighted": True}, "data": {"without_target": 3}}
    cases = {"weighted": (UNEVEN, weighted), "16-mixed": (UNEVEN, {"scale": 2.0**10})}
    found = waits_of_each(simulated, cases)
    # weights on the device are read once, while it has work
    once = {**ONLY_THE_THROTTLE, "event in torch_device.py": STEPS}
    assert found == {"weighted": [once, once], "16-mixed": [AND_THE_SCALER, AND_THE_SCALER]}
