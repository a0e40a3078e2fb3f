"""Recomputation as the plan chooses: what is measured for it, and what it comes to."""

from dataclasses import replace

import numpy as np
import pytest
from lightning.pytorch import Callback
from profiled import GPT, fit, in_ranks, loader, profile

from lightning_cephalo import CephaloStrategy, Plan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.plan import KeptCurves, RankPlan, RankProfile, predict
from lightning_cephalo.profiling.rank_curves import compute_curve, merge_equal_ranks

MODEL = {"width": 64, "depth": 3, "context": 32}


def data():
    return loader(samples=96, context=32, batch_size=8)


def measured(recompute):
    options = {"strategy": {"recompute": recompute}, "total_flops_per_s": 4e8}
    return profile(GPT(**MODEL), data(), capacity_bytes=(None, None), **options)


@pytest.mark.slow
def test_curves_without_recomputation_are_those_of_a_profile_without():
    def both():
        return measured("auto"), measured(False)

    chosen, kept = in_ranks(2, both)[0]
    for own, other in zip(chosen.ranks, kept.ranks, strict=True):
        length = min(own.largest_microbatch_size, other.largest_microbatch_size)
        assert length >= 4
        assert own.kept.backward_s[length - 1] == pytest.approx(
            other.backward_s[length - 1], rel=0.01
        )
        # the forward again ends before a block's last product, a third of its forward; without
        # that, what is repeated would be half of a backward, and the ratio 2 / 3
        ratio = own.kept.backward_s[length - 1] / own.backward_s[length - 1]
        assert ratio == pytest.approx(3 / 4, rel=0.02)
        for size in (1, length):
            plan = [RankPlan((size, size), 0.5, recompute=False), RankPlan((), 0.5)]
            plain = [replace(rank, recompute=None) for rank in plan]
            found = predict(chosen, plan).ranks[0].memory_bytes
            assert found == pytest.approx(predict(kept, plain).ranks[0].memory_bytes, rel=0.02)


class Peak(Callback):
    peak_bytes, recomputes = 0, None

    def on_train_batch_end(self, trainer, *_):
        self.recomputes = trainer.strategy.session.model.executor.recompute
        if active_device() is not None:
            self.peak_bytes = max(self.peak_bytes, active_device().peak_bytes)


def trained(capacities):
    peak = Peak()
    trainer = fit(
        GPT(**MODEL),
        data(),
        capacity_bytes=capacities,
        total_flops_per_s=4e8,
        strategy={"recompute": "auto", "host_memory_cap": 0},
        callbacks=[peak],
        max_steps=3,
    )
    return trainer.strategy.plan, peak.recomputes, peak.peak_bytes


def test_a_small_rank_recomputes_and_a_large_one_does_not():
    found = in_ranks(2, trained, (60_000_000, 3_200_000))
    plan = found[0][0]
    assert [rank.recompute for rank in plan.ranks] == [False, True]
    for rank, (_, recomputes, peak_bytes) in zip(plan.ranks, found, strict=True):
        assert recomputes == rank.recompute
        assert 0.85 * rank.memory_bytes < peak_bytes <= rank.memory_bytes


def test_sizes_that_did_not_run_get_the_memory_that_they_lack():
    found = compute_curve([1, 3], [10.0, 30.0], np.arange(1, 6), 0.0, 0.0)
    assert found == pytest.approx([10, 20, 30, 40, 50])
    single = compute_curve([2], [10.0], np.arange(1, 5), 0.0, 0.0)
    assert single == pytest.approx([10, 10, 15, 20])


def test_equal_ranks_keep_the_choice_only_if_all_have_it():
    rank = RankProfile("a", [1.0], [2.0], [1.0], [5.0], 100, kept=KeptCurves([1.0], [9.0]))
    other = replace(rank, kept=KeptCurves((1.2,), (11.0,)))
    first, second = merge_equal_ranks([rank, other])
    assert first == second
    assert first.kept.backward_s == (pytest.approx(np.median([1.0, 1.2])),)
    assert first.kept.compute_bytes == (11.0,)
    without = replace(rank, kept=None)
    assert all(found.kept is None for found in merge_equal_ranks([rank, without]))


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_what_recompute_may_be(value):
    with pytest.raises(ValueError, match="expected True, False or 'auto'"):
        CephaloStrategy(plan=Plan((RankPlan((1,), 1.0),)), recompute=value)
