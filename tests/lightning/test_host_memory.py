"""Training with boundaries in host memory, through Lightning."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from profiled import GPT, fit, in_ranks, loader

from lightning_cephalo import Plan, Planner, RankPlan
from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.emulation import active_device
from lightning_cephalo.plan import PlanError, Problem, RankProfile, StateBytes
from lightning_cephalo.preparation import prepare as planning
from lightning_cephalo.preparation.limits import HostMemory, read_limits, with_host_memory
from lightning_cephalo.preparation.options import Options

MODEL = {"width": 32, "depth": 8, "context": 128}
# State, gathered buffers and the boundaries of 12 samples take a sixth more than two ranks have, so
# that no plan without host memory exists, whatever times the profile measures.
CAPACITY_BYTES = 2_200_000
STEPS = 3  # the first finds the order of units, the second goes by it, the third by its update
PLAN = Plan(
    (
        RankPlan((3, 3, 2), 0.5, offload=True),
        RankPlan((4,), 0.5),
    )
)


class Watch(Callback):
    """Losses of every step, and most bytes alive at once in training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peak_bytes = self.host_bytes = 0

    def on_train_batch_end(self, trainer, module, outputs, *_) -> None:
        self.losses.append(float(outputs["loss"]))
        if active_device() is not None:
            self.peak_bytes = max(self.peak_bytes, active_device().peak_bytes)
        arena = trainer.strategy.session.model.executor.arena
        self.host_bytes = 0 if arena is None else arena.most_bytes


def trained(capacities=None, **strategy):
    watch = Watch()
    trainer = fit(
        GPT(**MODEL),
        loader(samples=12 * STEPS, context=128, batch_size=6),
        capacity_bytes=capacities,
        callbacks=[watch],
        max_steps=STEPS,
        strategy=strategy,
    )
    return trainer.strategy.plan, watch


def planned():
    capacities = (CAPACITY_BYTES, CAPACITY_BYTES)
    measure = planning.measure
    problems: list[Problem] = []

    def measured_once(**arguments) -> Problem:
        problems[:] = problems or [measure(**arguments)]
        return problems[0]

    planning.measure = measured_once
    try:
        plan, watch = trained(capacities)
        refused = refusal(capacities=capacities, host_memory_cap=0)
    finally:
        planning.measure = measure
    assert "Memory binds" in refused, refused
    without = [replace(rank, offload=False, host_bytes=None) for rank in plan.ranks]
    _, expected = trained(plan=Plan(tuple(without)))
    return plan, watch.losses == expected.losses, watch.peak_bytes, watch.host_bytes


def test_a_plan_moves_what_the_device_cannot_hold_and_nothing_else_changes():
    found = in_ranks(2, planned)
    plan = found[0][0]
    assert any(rank.offload for rank in plan.ranks)
    for rank, (_, same, peak_bytes, host_bytes) in zip(plan.ranks, found, strict=True):
        assert same
        assert 0.9 * rank.memory_bytes < peak_bytes < rank.memory_bytes < CAPACITY_BYTES
        assert (host_bytes > 0) == rank.offload
        assert host_bytes <= (rank.host_bytes or 0)


def by_plan(plan=PLAN, **strategy):
    _, plain = trained(plan=Plan(tuple(replace(r, offload=False) for r in plan.ranks)))
    _, watch = trained(plan=plan, **strategy)
    return watch.losses == plain.losses, watch.host_bytes


def test_a_given_plan_moves_boundaries_on_any_device():
    (same, host), (other, nothing) = in_ranks(2, by_plan)
    assert same and other
    assert host > 0 and nothing == 0


def refusal(**arguments):
    with pytest.raises((RuntimeError, PlanError)) as error:
        trained(**arguments)
    return str(error.value)


SAYS_MORE = Plan((replace(PLAN.ranks[0], host_bytes=1e9), PLAN.ranks[1]))
REFUSED = {
    "kept activations": ({"recompute": False}, "recomputation is off"),
    "less than the plan says": (
        {"plan": SAYS_MORE, "host_memory_cap": 10_000},
        "this rank may use 0.0 MiB of its host's memory",
    ),
    "less than a step needs": ({"host_memory_cap": 10_000}, "Offloaded boundaries need"),
    "above the host": ({"host_memory_cap": 10**18}, "Lower the cap to that"),
}


@functools.cache
def refused():
    """What every rank says, by case."""

    def each():
        return {name: refusal(**{"plan": PLAN, **given}) for name, (given, _) in REFUSED.items()}

    return in_ranks(2, each)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said_on_every_rank(name):
    for messages in refused():
        assert REFUSED[name][1] in messages[name]


@pytest.mark.parametrize("value", [-1, 1.5, True, "much", [1]])
def test_caps_that_are_none(value):
    with pytest.raises(PlanError, match="host_memory_cap"):
        Planner(host_memory_cap=value)


def test_caps():
    def capacity(value):
        options = Options(planner=Planner(host_memory_cap=value))
        return read_limits(accelerator_of(torch.device("cpu")), 1, 0, options).host.capacity_bytes

    assert capacity(0) == capacity(0.0) == 0.0
    assert capacity("1 MiB") == 2**20
    assert capacity(0.5) == 2 * capacity(0.25) > 0 and capacity(None) > 0


def test_equal_ranks_stay_equal_and_ranks_on_the_cpu_move_nothing():
    rank = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 100)
    problem = Problem([rank, rank], units=2, state=StateBytes(1), global_batch_size=2)
    hosts = [HostMemory(10.0, 3.0), HostMemory(20.0, 2.0)]
    first, second = with_host_memory(problem, hosts).ranks
    assert first == second
    assert (first.host_capacity_bytes, first.offload_bytes_per_s) == (10.0, 2.0)
    pinned = [replace(host, is_pinned=True) for host in hosts]
    assert with_host_memory(problem, pinned).ranks[0].host_capacity_bytes == 9.0
    moving = replace(problem, optimizer_offload="auto")  # pieces may take the double
    assert with_host_memory(moving, pinned).ranks[0].host_capacity_bytes == 9.0
    assert with_host_memory(moving, pinned).pins_host_memory
    assert with_host_memory(moving, hosts).ranks[0].host_capacity_bytes == 9.5
    assert not with_host_memory(moving, hosts).pins_host_memory
    together = [replace(host, is_apart=False) for host in hosts]
    assert with_host_memory(problem, together) == problem
