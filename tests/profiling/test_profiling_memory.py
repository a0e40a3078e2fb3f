"""The planner's memory figure against the bytes that a real training step holds."""

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from profiled import GPT, fit, in_ranks, loader, profile

from lightning_cephalo import Plan, RankPlan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.plan import cost

MODEL = {"width": 64, "depth": 4, "context": 32}
ONE = (((8,), (8,)), (0.5, 0.5))
FOUR = (((2, 2, 2, 2), (2, 2, 2, 2)), (0.5, 0.5))
UNEVEN = (((4, 3, 2, 1), (1, 1, 2, 2)), (0.8, 0.2))


class Peak(Callback):
    """Most bytes alive at once in the last training step, by the emulated device's own count."""

    peak_bytes = 0

    def on_train_batch_start(self, *_):
        active_device().reset_peak()

    def on_train_batch_end(self, *_):
        self.peak_bytes = active_device().peak_bytes


def predicted_and_held(recompute, plans, precision):
    """Of this rank, for each plan."""
    options = {"speeds": (1.0, 1.0), "precision": precision}
    data = loader(context=32, batch_size=8)
    problem = profile(GPT(**MODEL), data, strategy={"recompute": recompute}, **options)
    found = []
    for microbatches, fractions in plans:
        ranks = tuple(
            RankPlan(microbatch_sizes=sizes, state_fraction=fraction)
            for sizes, fraction in zip(microbatches, fractions, strict=True)
        )
        peak = Peak()
        strategy = {"recompute": recompute, "plan": Plan(ranks=ranks)}
        fit(GPT(**MODEL), data, strategy=strategy, callbacks=[peak], max_steps=3, **options)
        predicted = cost.predict(problem, ranks).ranks[dist.get_rank()].memory_bytes
        found.append((predicted, peak.peak_bytes))
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("recompute", [True, False])
def test_predicted_bytes_are_never_less_than_held_and_within_a_tenth(recompute, precision):
    for rank in in_ranks(2, predicted_and_held, recompute, [ONE, FOUR, UNEVEN], precision):
        for predicted, held in rank:
            assert held <= predicted <= 1.1 * held
