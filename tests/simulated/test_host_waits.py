"""In a step the host waits for the device in one place only: the throttle."""

from __future__ import annotations

import os

import pytest
from device_jobs import Encoder, data, half, strategy, trainer
from launch import torchrun_environments
from plans import plan_of
from test_training import IDLE_WITH_ALL_STATE, ONE, UNEVEN

pytestmark = pytest.mark.simulated

STEADY = (3, 7)
"""From the start of this step to the start of that one, everything is as it stays."""


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
    used = trainer(strategy(plan, **given.get("strategy", {})), max_epochs=2, **options)
    used.fit(Watched(**given.get("model", {})), data(**given.get("data", {})))
    before, after = counts
    found = {}
    for line, count in after.items():
        if count > before.get(line, 0):
            what, lines = line.split(" | ")
            found[f"{what} in {lines.split(' < ')[0]}"] = count - before.get(line, 0)
    return found


def waits(simulated, ranks, **given):
    environments = torchrun_environments(len(ranks))
    outcomes = simulated.run(len(ranks), counted, environments, ranks, given)
    assert not any(outcome.findings for outcome in outcomes)
    return [
        {line.rsplit(":", 1)[0]: count for line, count in outcome.value.items()}
        for outcome in outcomes
    ]


ONLY_THE_THROTTLE = {"event in throttle.py": STEADY[1] - STEADY[0]}
# torch's gradient scaler itself reads whether the step overflowed, with or without us
AND_THE_SCALER = {**ONLY_THE_THROTTLE, "aten::_local_scalar_dense in amp.py": 4}


@pytest.mark.parametrize("ranks", [ONE, UNEVEN, IDLE_WITH_ALL_STATE], ids=["one", "two", "idle"])
@pytest.mark.parametrize("sync_dist", [False, True])
def test_only_the_throttle_waits(simulated, ranks, sync_dist):
    # a rank without samples asks of each unit whether any sample has used it, before it updates it
    asks = (
        [{}, {"copy to the host in flat.py": 3 * 4}] if ranks is IDLE_WITH_ALL_STATE else [{}, {}]
    )
    for found, also in zip(
        waits(simulated, ranks, model={"sync_dist": sync_dist}), asks, strict=False
    ):
        assert found == {**ONLY_THE_THROTTLE, **also}


@pytest.mark.parametrize(
    "given",
    [
        {"plan": {"offload": True}},
        {"strategy": {"recompute": False}},
        {"trainer": {"gradient_clip_val": 0.1}},
    ],
    ids=["offload", "keep", "clip"],
)
def test_no_mode_makes_the_host_wait(simulated, given):
    for found in waits(simulated, UNEVEN, **given):
        assert found == ONLY_THE_THROTTLE


def test_weights_on_the_device_are_read_once_while_it_has_work(simulated):
    given = {"model": {"weighted": True}, "data": {"without_target": 3}}
    for rank, found in enumerate(waits(simulated, UNEVEN, **given)):
        assert found == {**ONLY_THE_THROTTLE, "event in torch_device.py": 4}, rank


def test_16_mixed_waits_where_torch_itself_does(simulated):
    for found in waits(simulated, UNEVEN, scale=2.0**10):
        assert found == AND_THE_SCALER
