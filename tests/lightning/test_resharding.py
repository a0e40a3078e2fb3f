"""Units that stay gathered from the forward to the backward, through Lightning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from profiled import GPT, fit, loader
from profiled import in_ranks as in_ranks_of_virtual_time
from warm_ranks import in_ranks

from lightning_cephalo import CephaloStrategy, Plan, RankPlan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.plan import Links, Problem
from lightning_cephalo.preparation import prepare as planning

MODEL = {"width": 64, "depth": 3, "context": 8}
BY_HAND = Plan((RankPlan((2, 2), 0.75), RankPlan((2, 2), 0.25)))
STAY = replace(BY_HAND, reshard_after_forward=False)
IDLE = Plan((RankPlan((2, 2, 4), 0.5), RankPlan((), 0.5)), reshard_after_forward=False)
STEPS = 3  # the first finds the order of units, the second goes by it, the third by its update
TIGHT_BYTES = 2_500_000
GIVEN_BACK, STAYED = [1, 2, 2], [1, 1, 1]
"""Gathers of each unit in a step: the last one's backward follows its forward."""


def batches():
    return loader(samples=4 * 2 * STEPS, context=8, batch_size=4)


class Watch(Callback):
    """Losses, gathers of each unit in the last step, and most bytes alive at once in training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gathers: Counter[str] = Counter()
        self.peak_bytes = 0

    def on_train_start(self, trainer, *_) -> None:
        for unit in trainer.strategy.session.model.units:
            for flat in unit.flats:
                flat.gathered.gather = self.counted(unit.name, flat.gathered.gather)

    def counted(self, name, gather):
        def call(*slices):
            self.gathers[name] += 1
            return gather(*slices)

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
        batches(),
        capacity_bytes=capacities,
        callbacks=[watch],
        max_steps=STEPS,
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
        assert resharded[1] == overruled[1] == GIVEN_BACK
        assert stay[1] == asked[1] == kept[1] == STAYED


class Solving:
    """Solves for plans as if gathers were that slow, with what was measured once."""

    def __init__(self, capacities: tuple[int, int] | None) -> None:
        self.capacities = capacities
        self.measured: Problem | None = None

    def found(self, gather_s: float, **strategy):
        """The plan, gathers of each unit, and the peak."""
        measure = planning.measure

        def measured(**arguments) -> Problem:
            self.measured = self.measured or measure(**arguments)
            links = Links(gather_s, self.measured.links.reduce_s)
            return replace(self.measured, links=links, even_links=None)

        planning.measure = measured
        try:
            plan, watch = trained(self.capacities, remeasure=True, **strategy)
        finally:
            planning.measure = measure
        return plan, sorted(watch.gathers.values()), watch.peak_bytes


def where_memory_allows():
    solving = Solving((40_000_000, 40_000_000))
    return solving.found(10.0), solving.found(0.0)


def where_memory_is_short():
    return Solving((TIGHT_BYTES, TIGHT_BYTES)).found(10.0)


@pytest.mark.slow
def test_the_plan_keeps_units_gathered_where_gathers_take_longest_and_memory_allows():
    for rank, (slow, quick) in enumerate(in_ranks_of_virtual_time(2, where_memory_allows)):
        plan, gathers, peak_bytes = slow
        assert plan.reshard_after_forward is False
        assert gathers == STAYED
        assert peak_bytes <= plan.ranks[rank].memory_bytes
        assert plan.ranks[rank].memory_bytes > TIGHT_BYTES
        plan, gathers, _ = quick
        assert plan.reshard_after_forward is True
        assert gathers == GIVEN_BACK
    for plan, gathers, _ in in_ranks_of_virtual_time(2, where_memory_is_short):
        assert plan.reshard_after_forward is True
        assert gathers == GIVEN_BACK


def asked():
    solving = Solving(None)
    return (
        solving.found(0.0, reshard_after_forward=False),
        solving.found(10.0, reshard_after_forward=True),
    )


def test_asked_for_it_is_so_and_not_asked_for_it_is_not():
    for stays, is_given_back in in_ranks(2, asked):
        plan, gathers, _ = stays
        assert plan.reshard_after_forward is False
        assert gathers == STAYED
        plan, gathers, _ = is_given_back
        assert plan.reshard_after_forward is True
        assert gathers == GIVEN_BACK


class Between(Watch):
    """Samples, or saves, when the forward is done and the backward is not."""

    def __init__(self, doing: str, folder: Path) -> None:
        super().__init__()
        self.doing, self.folder = doing, folder

    def on_before_zero_grad(self, trainer, module, _) -> None:
        if self.doing == "samples":
            with torch.no_grad():
                module.network(torch.zeros(1, 8, dtype=torch.long, device=module.device))
        if self.doing == "saves":
            trainer.save_checkpoint(self.folder / "between.ckpt")


def between(folder: Path, plan: Plan, recompute: bool) -> list[tuple[list[float], list[float]]]:
    """Losses, and sums of the weights that training ends with, for each thing that is done."""
    found = []
    for doing in ("nothing", "samples", "saves"):
        watch, model = Between(doing, folder), GPT(**MODEL)
        fit(
            model,
            batches(),
            callbacks=[watch],
            max_steps=2,  # the first finds the order of units, the second goes by it
            strategy={"plan": plan, "recompute": recompute},
        )
        weights = [float(parameter.detach().sum()) for parameter in model.parameters()]
        found.append((watch.losses, weights))
    return found


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [BY_HAND, STAY, IDLE], ids=["given back", "stay", "without data"])
def test_what_frees_units_between_forward_and_backward_changes_nothing(plan, recompute, tmp_path):
    for nothing, samples, saves in in_ranks(2, between, tmp_path, plan, recompute):
        assert nothing == samples == saves


@pytest.mark.parametrize("value", ["never", None, 1])
def test_options_that_are_none(value):
    with pytest.raises(ValueError, match="reshard_after_forward: expected True, False or 'auto'"):
        CephaloStrategy(reshard_after_forward=value)
