"""Units that stay gathered from the forward to the backward, through Lightning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from profiled import GPT, fit, in_ranks, loader

from lightning_cephalo import CephaloStrategy, Plan, RankPlan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.plan import Problem
from lightning_cephalo.preparation import prepare as planning

MODEL = {"width": 64, "depth": 6, "context": 32}
BY_HAND = Plan((RankPlan((4, 4), 0.75), RankPlan((4, 4), 0.25)))
STAY = replace(BY_HAND, reshard_after_forward=False)
IDLE = Plan((RankPlan((4, 4, 8), 0.5), RankPlan((), 0.5)), reshard_after_forward=False)


class Watch(Callback):
    """Losses, gathers of each unit in the last step, and most bytes alive at once in training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gathers: Counter[str] = Counter()
        self.peak_bytes = 0

    def on_train_start(self, trainer, *_) -> None:
        for unit in trainer.strategy.session.model.units:
            for flat in unit.flats:
                flat.gather = self.counted(unit.name, flat.gather)

    def counted(self, name, gather):
        def call():
            self.gathers[name] += 1
            return gather()

        return call

    def on_train_batch_start(self, *_) -> None:
        self.gathers.clear()

    def on_train_batch_end(self, trainer, module, outputs, *_) -> None:
        self.losses.append(float(outputs["loss"]))
        if active_device() is not None:
            self.peak_bytes = max(self.peak_bytes, active_device().peak_bytes)


def trained(capacities=None, **strategy):
    watch = Watch()
    trainer = fit(
        GPT(**MODEL),
        loader(samples=64, context=32, batch_size=8),
        capacity_bytes=capacities,
        callbacks=[watch],
        max_steps=4,
        strategy=strategy,
    )
    del watch.gathers[""]  # the root
    return trainer.strategy.plan, watch


def by_plan():
    found = []
    for strategy in (
        {"plan": BY_HAND},
        {"plan": STAY},
        {"plan": BY_HAND, "reshard_after_forward": False},
        {"plan": replace(BY_HAND, reshard_after_forward=True), "reshard_after_forward": False},
        {"plan": STAY, "recompute": False},
    ):
        _, watch = trained(**strategy)
        found.append((watch.losses, sorted(watch.gathers.values())))
    return found


def test_a_given_plan_says_whether_units_stay_and_the_strategy_where_it_does_not():
    for resharded, stay, asked, overruled, kept in in_ranks(2, by_plan):
        assert resharded[0] == stay[0] == asked[0] == overruled[0]
        assert kept[0] == pytest.approx(stay[0], rel=1e-5)
        assert resharded[1] == overruled[1] == [1, 2, 2, 2, 2, 2]
        assert stay[1] == asked[1] == kept[1] == [1] * 6


def solved(gather_s, capacities, **strategy):
    """The plan, gathers of each unit, and the peak, where gathers are taken to be that slow."""
    measure = planning.measure

    def measured(**arguments) -> Problem:
        return replace(measure(**arguments), gather_s=gather_s, even_gather_s=None)

    planning.measure = measured
    try:
        plan, watch = trained(capacities, **strategy)
    finally:
        planning.measure = measure
    return plan, sorted(watch.gathers.values()), watch.peak_bytes


def test_the_plan_keeps_units_gathered_where_gathers_take_longest_and_memory_allows():
    roomy = (40_000_000, 40_000_000)
    for rank, (plan, gathers, peak_bytes) in enumerate(in_ranks(2, solved, 10.0, roomy)):
        assert plan.reshard_after_forward is False
        assert gathers == [1] * 6
        assert peak_bytes <= plan.ranks[rank].memory_bytes
    for plan, gathers, _ in in_ranks(2, solved, 0.0, roomy):
        assert plan.reshard_after_forward is True
        assert gathers == [1, 2, 2, 2, 2, 2]
    for plan, gathers, _ in in_ranks(2, solved, 10.0, (4_500_000, 4_500_000)):
        assert plan.reshard_after_forward is True
        assert gathers == [1, 2, 2, 2, 2, 2]


def test_asked_for_it_is_so_and_not_asked_for_it_is_not():
    for plan, gathers, _ in in_ranks(2, lambda: solved(0.0, None, reshard_after_forward=False)):
        assert plan.reshard_after_forward is False
        assert gathers == [1] * 6
    for plan, gathers, _ in in_ranks(2, lambda: solved(10.0, None, reshard_after_forward=True)):
        assert plan.reshard_after_forward is True
        assert gathers == [1, 2, 2, 2, 2, 2]


class Between(Watch):
    """Samples, or saves, when the forward is done and the backward is not."""

    def __init__(self, doing: str, folder: Path) -> None:
        super().__init__()
        self.doing, self.folder = doing, folder

    def on_before_zero_grad(self, trainer, module, _) -> None:
        if self.doing == "samples":
            with torch.no_grad():
                module.network(torch.zeros(1, 32, dtype=torch.long, device=module.device))
        if self.doing == "saves":
            trainer.save_checkpoint(self.folder / "between.ckpt")


def between(folder: Path, plan: Plan, recompute: bool) -> list[list[float]]:
    losses = []
    for doing in ("nothing", "samples", "saves"):
        watch = Between(doing, folder)
        fit(
            GPT(**MODEL),
            loader(samples=64, context=32, batch_size=8),
            callbacks=[watch],
            max_steps=2,  # the first finds the order of units, the second goes by it
            strategy={"plan": plan, "recompute": recompute},
        )
        losses.append(watch.losses)
    return losses


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("plan", [BY_HAND, STAY, IDLE], ids=["given back", "stay", "without data"])
def test_what_frees_units_between_forward_and_backward_changes_nothing(plan, recompute, tmp_path):
    for nothing, samples, saves in in_ranks(2, between, tmp_path, plan, recompute):
        assert nothing == samples == saves


@pytest.mark.parametrize("value", ["never", None, 1])
def test_options_that_are_none(value):
    with pytest.raises(ValueError, match="reshard_after_forward: expected True, False or 'auto'"):
        CephaloStrategy(reshard_after_forward=value)
