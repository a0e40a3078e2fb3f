"""The planner's figure for a rank's work against what its device did, on a clock without noise.

An emulated device knows how many seconds of work it was given. With that in place of real time, in
profiling and in training, nothing on this machine can disturb the comparison.
"""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from profiled import GPT, fit, in_ranks, loader, profile
from torch.utils.data import DataLoader
from zoo import build

from lightning_cephalo import Plan, RankPlan
from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.emulation import active_device
from lightning_cephalo.observe.pace import predicted_busy_s
from lightning_cephalo.plan import cost

SPEEDS, SAMPLES = (3.0, 1.0), 8


class Work(Callback):
    """Seconds of work in the last training step, by the emulated device's own count."""

    seconds = 0.0

    def on_train_batch_start(self, *_):
        self.before = active_device().busy_s

    def on_train_batch_end(self, *_):
        self.seconds = active_device().busy_s - self.before


class TwoStacks(LightningModule):
    """T5: units of two kinds, and of two sizes."""

    def __init__(self):
        super().__init__()
        self.network, _ = build("t5", 1)

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def sequences():
    _, batch = build("t5", 8 * SAMPLES)
    rows = [{name: column[at] for name, column in batch.items()} for at in range(8 * SAMPLES)]
    return DataLoader(rows, batch_size=SAMPLES // 2)


# microbatches, whether activations are recomputed, and whether boundaries are offloaded
PLANS = [
    (((3, 2, 1), (2,)), (True, True), (False, False)),
    (((1, 1, 1, 1), (4,)), (True, True), (True, False)),
    (((4, 4), ()), (True, True), (False, False)),
    (((3, 3), (1, 1)), (False, True), (False, True)),
]
# with the plans: units of several kinds change nothing about microbatches of unequal sizes
MODELS = {
    "gpt": (lambda: GPT(64, depth=3, context=32), lambda: loader(64, 32, SAMPLES // 2), PLANS),
    "t5": (TwoStacks, sequences, PLANS[2:]),
}


def predicted_and_done(name):
    """Seconds of every rank's work, for each plan."""
    make, data, plans = MODELS[name]
    clock = Emulated.clock
    Emulated.clock = lambda accelerator: accelerator.emulated.busy_s
    options = {"speeds": SPEEDS, "total_flops_per_s": 1e12, "is_time_shared": False}
    try:
        problem = profile(make(), data(), strategy={"recompute": "auto"}, **options)
    finally:
        Emulated.clock = clock
    found = []
    for batches, recomputing, offloading in plans:
        ranks = tuple(
            RankPlan(sizes, 0.5, recompute=recompute, offload=offload)
            for sizes, recompute, offload in zip(batches, recomputing, offloading, strict=True)
        )
        work = Work()
        trainer = fit(
            make(),
            data(),
            strategy={"plan": Plan(ranks)},
            callbacks=[work],
            max_steps=2,
            **options,
        )
        part = cost.predict(problem, ranks).ranks[trainer.global_rank]
        own = RankPlan((), 0.0, forward_s=part.forward_s, backward_s=part.backward_s,
                       tail_s=part.tail_s)  # fmt: skip
        found.append((predicted_busy_s(own, problem.units), work.seconds))
    return found


@pytest.mark.parametrize("name", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_predicted_work_is_what_the_device_did(name):
    for rank, found in enumerate(in_ranks(2, predicted_and_done, name)):
        for (predicted_s, done_s), (batches, _, _) in zip(found, MODELS[name][2], strict=True):
            assert predicted_s == pytest.approx(done_s, rel=0.01)
            assert (done_s > 0) == bool(batches[rank])
