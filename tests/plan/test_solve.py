"""The solver against brute force, by example, in its refusals, and under a time limit."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_brute_force import least_step

import lightning_cephalo.plan as plan_package
from lightning_cephalo.plan import (
    InfeasibleError,
    KeptCurves,
    Links,
    Plan,
    PlanError,
    Problem,
    RankProfile,
    SolverError,
    StateBytes,
    predict,
    solve,
)
from lightning_cephalo.plan.cost import NEEDS, PLAIN, Mode, Need
from lightning_cephalo.plan.solver import columns, infeasible, state
from lightning_cephalo.plan.solver.search import Search

PACKAGE = Path(plan_package.__file__).parents[1]


def affine(name: str, speed: float, capacity: float = 1000.0, longest: int = 4) -> RankProfile:
    """A fixed cost and a cost per sample, and ten bytes per sample."""
    size = range(1, longest + 1)
    return RankProfile(
        name,
        [(0.2 + own) / speed for own in size],
        [(0.4 + 2 * own) / speed for own in size],
        [(0.1 + own) / speed for own in size],
        [10.0 * own for own in size],
        capacity,
    )


def checked(problem: Problem, plan: Plan) -> Plan:
    """Whatever the plan is, it must be true: batch, caps, predictions."""
    plan.check(world_size=len(problem.ranks), global_batch_size=problem.global_batch_size)
    prediction = predict(problem, plan)
    assert plan.step_s == prediction.step_s
    for rank, part, profile in zip(plan.ranks, prediction.ranks, problem.ranks, strict=True):
        assert part.memory_bytes <= profile.capacity_bytes
        assert part.host_bytes <= profile.host_capacity_bytes
        assert rank.memory_bytes == part.memory_bytes
        assert (rank.forward_s, rank.backward_s) == (part.forward_s, part.backward_s)
        assert rank.tail_s == part.tail_s
        assert (rank.name, rank.capacity_bytes) == (profile.name, profile.capacity_bytes)
        assert all(size >= problem.minimum_microbatch_size for size in rank.microbatch_sizes)
    if problem.single_microbatch:
        assert {len(rank.microbatch_sizes) for rank in plan.ranks} == {1}
    assert plan.bound_s is not None
    assert plan.bound_s <= plan.step_s
    return plan


_numbers = st.integers(0, 9).map(float) | st.floats(1e-6, 5)


@st.composite
def profiles(draw) -> RankProfile:
    longest = draw(st.integers(0, 4))
    curve = st.lists(_numbers, min_size=longest, max_size=longest)
    none = st.just(())
    keeps = draw(st.sampled_from([False, False, True]))
    return RankProfile(
        "r",
        draw(curve),
        draw(curve),
        draw(curve),
        draw(curve),
        draw(st.integers(10, 60)),
        kept=KeptCurves(draw(curve), draw(curve), draw(curve)) if keeps else None,
        reducing_compute_bytes=draw(st.sampled_from([none, curve]).flatmap(lambda own: own)),
        host_capacity_bytes=draw(st.sampled_from([0, 0, 5, 1000])),
        offload_bytes_per_s=draw(st.sampled_from([math.inf, 1.0, 0.1])),
    )


@st.composite
def problems(draw) -> Problem:
    ranks = draw(st.lists(profiles(), min_size=1, max_size=2))
    if draw(st.booleans()):
        ranks.append(ranks[0])
    even = st.sampled_from([1.0, 20.0]), st.sampled_from([1.0, 2.0]), st.sampled_from([None, 2.0])
    problem = Problem(
        ranks,
        units=draw(st.integers(1, 3)),
        links=Links(
            draw(st.sampled_from([0.0, 3.0, 20.0])),
            draw(st.sampled_from([0.0, 2.0])),
            gather_and_reduce_s=draw(st.sampled_from([None, None, 20.0, 30.0])),
        ),
        state=StateBytes(draw(st.integers(0, 40) | st.floats(1e-6, 80))),
        global_batch_size=draw(st.integers(1, 8 if len(ranks) < 3 else 5)),
        boundary_bytes=draw(st.sampled_from([0.0, 0.3, 1.0])),
        gathered_bytes=draw(st.sampled_from([0.0, 2.0])),
        minimum_microbatch_size=draw(st.sampled_from([1, 1, 1, 2])),
        single_microbatch=draw(st.sampled_from([False, False, True])),
        no_idle_ranks=draw(st.sampled_from([False, False, False, True])),
        update_overhead_s=draw(st.sampled_from([0.0, 1.0])),
        even_links=draw(st.none() | st.none() | st.builds(Links, *even)),
        padded_bytes=draw(st.sampled_from([0.0, 0.0, 4.0])),
        root_links=Links(reduce_s=draw(st.sampled_from([0.0, 0.5]))),
        last_links=Links(
            draw(st.sampled_from([0.0, 0.0, 6.0])), draw(st.sampled_from([0.0, 0.0, 4.0]))
        ),
        kept_bytes=draw(st.sampled_from([0.0, 0.5])),
        microbatch_bytes=draw(st.sampled_from([0.0, 0.0, 1.5])),
        reshard_after_forward=draw(st.sampled_from([True, True, "auto", "auto", False])),
        unresharded_bytes=draw(st.sampled_from([0.0, 5.0, 30.0])),
        unit_update_s=draw(st.sampled_from([0.0, 0.25])),
        reducing_retained_bytes=draw(st.sampled_from([None, None, 0.5])),
        kept_reducing_retained_bytes=draw(st.sampled_from([None, None, 2.0])),
    )
    # stretched by these, bytes stay what they are to the last bit
    problem = dataclasses.replace(
        problem,
        state=dataclasses.replace(
            problem.state,
            reducing_bytes=draw(st.sampled_from([0, 0, 0.25, 1])) * problem.state.held_bytes,
            updating_bytes=draw(st.sampled_from([0, 0, 1, 3])) * problem.state.held_bytes,
        ),
    )
    if len(ranks) > 1 and draw(st.booleans()):
        problem = hybrid(draw, problem)
    return problem.with_early_update() if draw(st.booleans()) else problem


def hybrid(draw, problem: Problem) -> Problem:
    """The problem with groups of ranks that each hold the whole state."""
    groups = [0, *[draw(st.integers(0, 1)) for _ in problem.ranks[2:]], 1]
    return dataclasses.replace(problem, groups=groups, even_links=None, padded_bytes=0.0)


def assert_optimal(problem: Problem) -> None:
    expected = least_step(problem)
    if expected is None:
        # without remedies: the next test but one looks for them, and at what they are
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InfeasibleError, match="bind"):
            patch.setattr(infeasible, "_TIME_S", 0.0)
            solve(problem)
        return
    plan = checked(problem, solve(problem))
    assert plan.gap == 0
    # a thousandth may be spent on headroom, and counts as proof
    assert plan.step_s * (1 - 1e-3) <= plan.bound_s <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= plan.step_s <= expected * (1.001 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_the_optimum_of_brute_force_no_more_and_no_less(problem):
    assert_optimal(problem)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(problem=problems())
def test_the_optimum_of_brute_force_of_many_problems(problem):
    assert_optimal(problem)


@pytest.mark.parametrize("state_bytes", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("longest", [0, 1])
def test_units_stay_gathered_only_where_every_rank_can_hold_them(state_bytes, longest):
    """Also a rank that has no samples, whatever room the others have left."""
    small, large = affine("small", 1.0, 10.0, longest), affine("large", 9.0, 500.0)
    problem = Problem(
        [small, large],
        units=2,
        links=Links(3.0),
        state=StateBytes(state_bytes),
        global_batch_size=1,
        reshard_after_forward="auto",
        unresharded_bytes=30.0,
    )
    assert checked(problem, solve(problem)).reshard_after_forward is True
    roomy = dataclasses.replace(small, capacity_bytes=40.0)
    other = dataclasses.replace(problem, ranks=[roomy, large])
    assert checked(other, solve(other)).reshard_after_forward is False


def test_the_reduce_of_the_last_layers_makes_a_gather_beside_it_longer():
    """With it the gather is not hidden: units that stay gathered take a second less."""
    zero = (0.0,)
    problem = Problem(
        [RankProfile("r", zero, (1.0,), zero, zero, 10.0)],
        units=2,
        links=Links(3.0),
        even_links=Links(1.0),
        last_links=Links(reduce_s=4.0),
        state=StateBytes(0.0),
        global_batch_size=1,
        reshard_after_forward="auto",
    )
    plan = checked(problem, solve(problem))
    assert plan.reshard_after_forward is False and plan.bound_s == least_step(problem) == 6.0


def test_a_gather_that_takes_time_beside_a_reduce_only_counts():
    zero = (0.0,)
    problem = Problem(
        [RankProfile("r", zero, zero, zero, zero, 10.0)],
        units=3,
        links=Links(gather_and_reduce_s=20.0),
        state=StateBytes(0.0),
        global_batch_size=1,
        reshard_after_forward="auto",
    )
    plan = checked(problem, solve(problem))
    assert plan.reshard_after_forward is False and plan.bound_s == least_step(problem) == 0.0


def fits(problem: Problem, **changes) -> bool:
    return least_step(dataclasses.replace(problem, **changes)) is not None


def assert_refused_truly(problem: Problem) -> None:
    """Missing bytes and remedies, against every plan that there is."""
    if fits(problem):
        return
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    message, batch = str(caught.value), problem.global_batch_size
    if higher := re.search(r"raise global_batch_size to (\d+)", message):
        assert fits(problem, global_batch_size=int(higher[1]))
    if lower := re.search(r"lower global_batch_size to (\d+)", message):
        largest = int(lower[1])
        assert fits(problem, global_batch_size=largest)
        assert not any(fits(problem, global_batch_size=b) for b in range(largest + 1, batch))
    elif ("What would do" in message and not higher) or "No smaller batch" in message:
        assert not any(fits(problem, global_batch_size=b) for b in range(1, batch))
    if missing := re.search(r"(\d+) bytes are missing\. (What|No)", message):
        full_bytes = problem.state.most_bytes

        def fits_of_state(left_bytes: float) -> bool:
            part = max(left_bytes, 0) / full_bytes if full_bytes else 1.0
            names = ("held_bytes", "reducing_bytes", "updating_bytes")
            parts = {name: part * getattr(problem.state, name) for name in names}
            return fits(problem, state=StateBytes(**parts))

        assert fits_of_state(full_bytes - int(missing[1]) - 1e-9)  # parts of bytes are rounded
        assert not fits_of_state(full_bytes - int(missing[1]) + 1 + 1e-9)
    if "drop minimum_microbatch_size" in message:
        assert fits(problem, minimum_microbatch_size=1)
    # what brute force can try
    if "add 1 more 'r'" in message and len(problem.ranks) < 3 and batch < 6:
        groups = problem.groups
        assert any(
            fits(
                problem,
                ranks=(*problem.ranks, rank),
                groups=(*groups, groups[number]) if groups else (),
            )
            for number, rank in enumerate(problem.ranks)
        )


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_what_a_refusal_says_is_true(problem):
    assert_refused_truly(problem)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_what_refusals_of_many_problems_say_is_true(problem):
    assert_refused_truly(problem)


def test_a_batch_too_small_for_a_microbatch_on_each_rank_is_refused():
    """The closest batch is further away than one microbatch is large."""
    few = {"global_batch_size": 1, "minimum_microbatch_size": 2, "single_microbatch": True}
    message = refused([affine("r", 1, longest=2)] * 2, **few)
    assert "The closest that they can is 4, 3 more" in message


def test_work_follows_speed_and_state_follows_memory():
    problem = Problem(
        [affine("fast", 3, capacity=100), affine("slow", 1, capacity=300)],
        units=8,
        state=StateBytes(200),
        global_batch_size=16,
    )
    plan = checked(problem, solve(problem))
    assert [rank.batch_size for rank in plan.ranks] == [12, 4]
    assert plan.ranks[1].state_fraction > plan.ranks[0].state_fraction
    given = [
        rank.state_fraction
        * 200
        / (rank.capacity_bytes - rank.memory_bytes + rank.state_fraction * 200)
        for rank in plan.ranks
    ]
    assert given[0] == pytest.approx(given[1])
    assert plan.backend == "cvxpy/HiGHS"
    assert plan.solve_s > 0


def test_a_ragged_last_microbatch():
    problem = Problem([affine("a", 1)], units=2, state=StateBytes(0), global_batch_size=11)
    plan = checked(problem, solve(problem))
    # three microbatches are the fewest; of those the split with the least memory would be 4 too
    assert len(plan.ranks[0].microbatch_sizes) == 3
    assert max(plan.ranks[0].microbatch_sizes) == 4


def test_a_rank_too_slow_to_help_only_holds_state():
    problem = Problem(
        [affine("fast", 100), affine("slow", 0.01)],
        units=2,
        state=StateBytes(100),
        global_batch_size=4,
    )
    plan = checked(problem, solve(problem))
    assert plan.ranks[1].microbatch_sizes == ()
    assert plan.ranks[1].state_fraction > 0


def test_a_rank_with_empty_curves_holds_state():
    store = RankProfile("store", [], [], [], [], 500)
    problem = Problem([affine("a", 1), store], units=2, state=StateBytes(300), global_batch_size=4)
    plan = checked(problem, solve(problem))
    assert plan.ranks[1].batch_size == 0
    assert plan.ranks[1].state_fraction > 0.3


def test_memory_that_all_share_moves_samples_to_smaller_microbatches():
    def plan_for(state_bytes):
        ranks = [affine("a", 1, capacity=100), affine("b", 1, capacity=100)]
        problem = Problem(ranks, units=2, state=StateBytes(state_bytes), global_batch_size=8)
        return checked(problem, solve(problem))

    roomy, tight = plan_for(100), plan_for(180)
    assert max(roomy.ranks[0].microbatch_sizes) == 4
    assert all(rank.microbatch_sizes == (1, 1, 1, 1) for rank in tight.ranks)
    assert tight.step_s > roomy.step_s
    assert tight.gap == 0


def test_equal_ranks_get_equal_shares_and_unlimited_memory_even_ones():
    problem = Problem(
        [affine(f"host{index}", 1, capacity=math.inf) for index in range(4)],
        units=2,
        links=Links(100),
        state=StateBytes(100),
        global_batch_size=16,
    )
    plan = checked(problem, solve(problem))
    assert [rank.state_fraction for rank in plan.ranks] == [0.25] * 4
    # the gather hides all of it, which is no reason to leave it to one rank
    assert [rank.batch_size for rank in plan.ranks] == [4] * 4
    assert [rank.name for rank in plan.ranks] == ["host0", "host1", "host2", "host3"]


def test_many_distinct_sizes_and_a_large_batch():
    ranks = [affine("a", 3, longest=24), *[affine("b", 1.1, longest=24)] * 2]
    problem = Problem(
        ranks, units=2, state=StateBytes(1500), global_batch_size=300, boundary_bytes=0.1
    )
    plan = checked(problem, solve(problem))
    assert plan.gap == 0


def test_a_thousand_ranks_of_few_types_are_as_much_work_as_a_hundred(monkeypatch):
    import cvxpy

    chain = cvxpy.reductions.solvers.solving_chain.SolvingChain
    solve_via_data, variables = chain.solve_via_data, []

    def counted(self, problem, data, *options):
        variables.append(data["c"].size)
        return solve_via_data(self, problem, data, *options)

    monkeypatch.setattr(chain, "solve_via_data", counted)
    kinds = [affine(name, speed, 200, 12) for name, speed in (("a", 3), ("b", 2), ("c", 1))]

    def variables_of(times: int, state_bytes: int, batch: int) -> int:
        variables.clear()
        problem = Problem(
            kinds * times, units=8, state=StateBytes(state_bytes), global_batch_size=batch
        )
        plan = checked(problem, solve(problem))
        assert plan.gap == 0
        return sum(variables)

    hundred, thousand = variables_of(34, 8_000, 1638), variables_of(340, 80_000, 16_384)
    assert 0 < thousand <= 2 * hundred <= 400


def test_solving_twice_gives_the_same_plan():
    problem = Problem(
        [affine("a", 3), affine("b", 2), affine("c", 1)],
        units=2,
        state=StateBytes(900),
        global_batch_size=24,
    )
    first, second = solve(problem), solve(problem)
    assert first.ranks == second.ranks


def test_out_of_time_is_a_plan_with_its_gap_or_an_error_with_the_reason():
    ranks = [affine(f"r{index}", 1 + index / 7, 150 + index, 16) for index in range(24)]
    problem = Problem(
        ranks, units=8, state=StateBytes(2500), global_batch_size=700, boundary_bytes=0.2
    )
    try:
        plan = solve(problem, time_limit_s=1e-3)
    except SolverError as error:
        assert "time limit" in str(error)
        assert "time_limit_s" in str(error)
    else:
        checked(problem, plan)
        assert plan.gap >= 0


class Steps:
    """A clock that is a second on whenever someone looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_the_time_limit_holds_while_ways_to_run_ranks_are_made(monkeypatch):
    """Where all ranks differ this takes longer than the programs of the solver."""
    ranks = [affine(f"r{index}", 1 + index / 7, 150 + index, 16) for index in range(64)]
    problem = Problem(ranks, units=8, state=StateBytes(2500), global_batch_size=700)
    clock = Steps()
    monkeypatch.setattr("time.perf_counter", clock)
    with pytest.raises(SolverError, match=r"within the time limit: .* of 64 types"):
        solve(problem, time_limit_s=10)
    assert clock.now_s < 20


def test_equal_ranks_of_many_groups_are_looked_at_once(monkeypatch):
    """They are of different types: each group has memory of its own for the state."""
    made: list[str] = []

    def counted(self: columns._Builder) -> columns.Columns:
        made.append(self.profile.name)
        return own(self)

    own = columns._Builder.columns
    monkeypatch.setattr(columns._Builder, "columns", counted)
    ranks = [affine(name, speed) for _ in range(8) for name, speed in (("a", 1), ("b", 2))]
    problem = Problem(
        ranks,
        units=2,
        state=StateBytes(60),
        global_batch_size=48,
        groups=tuple(rank // 2 for rank in range(16)),
    )
    plan = solve(problem)
    assert plan.gap == 0 and len(plan.fractions_of_groups) == 8
    assert made.count("a") == made.count("b") > 0
    assert len(made) < 16


def test_a_failing_solver_is_reported(monkeypatch):
    import cvxpy

    def fail(*_, **__):
        raise cvxpy.error.SolverError("no such luck")

    monkeypatch.setattr(cvxpy.reductions.solvers.solving_chain.SolvingChain, "solve_via_data", fail)
    problem = Problem([affine("a", 1)], units=1, state=StateBytes(1), global_batch_size=1)
    with pytest.raises(SolverError, match="HiGHS failed: no such luck"):
        solve(problem)


def test_arguments_are_checked():
    with pytest.raises(PlanError, match="expected a Problem, but got 3"):
        solve(3)
    problem = Problem([affine("a", 1)], units=1, state=StateBytes(1), global_batch_size=1)
    with pytest.raises(PlanError, match=r"time_limit_s: .* greater than 0, but got 0"):
        solve(problem, time_limit_s=0)


def refused(ranks, **changes) -> str:
    values = {"units": 2, "state": StateBytes(0), "global_batch_size": 4}
    with pytest.raises(InfeasibleError) as caught:
        solve(Problem(ranks, **{**values, **changes}))
    return str(caught.value)


def test_recomputation_and_offload_only_where_memory_binds():
    rank = dataclasses.replace(
        affine("a", 1, 200),
        kept=KeptCurves([0.2 + own for own in range(1, 5)], [5.0 * own for own in range(1, 5)]),
        host_capacity_bytes=1000,
        offload_bytes_per_s=1.0,
    )

    def modes(state_bytes: float, capacity: float = 200) -> tuple[bool | None, bool]:
        ranks = [dataclasses.replace(rank, capacity_bytes=capacity)]
        problem = Problem(
            ranks,
            units=4,
            state=StateBytes(state_bytes),
            global_batch_size=4,
            boundary_bytes=2,
            kept_bytes=8,
        )
        plan = checked(problem, solve(problem))
        return plan.ranks[0].recompute, plan.ranks[0].offload

    assert modes(10) == (False, False)
    assert modes(100) == (True, False)  # keeping takes 4 * 4 * 8 bytes more
    assert modes(160) == (True, True)  # boundaries of three units instead of four


def test_no_rank_offloads_for_headroom_alone():
    def offloading(small: float, large: float) -> list[bool]:
        ranks = [
            dataclasses.replace(
                affine(name, 1, capacity), host_capacity_bytes=1e6, offload_bytes_per_s=1e9
            )
            for name, capacity in (("small", small), ("large", large))
        ]
        problem = Problem(
            ranks, units=12, state=StateBytes(40), global_batch_size=8, boundary_bytes=4
        )
        plan = checked(problem, solve(problem))
        assert plan.gap == 0
        return [rank.offload for rank in plan.ranks]

    assert offloading(1000, 1000) == [False, False]
    assert offloading(70, 1000) == [True, False]
    assert offloading(90, 90) == [True, True]


def test_no_rank_offloads_where_memory_has_no_limit():
    rank = dataclasses.replace(
        affine("a", 1, math.inf), host_capacity_bytes=1e6, offload_bytes_per_s=1e9
    )
    problem = Problem(
        [rank] * 2, units=12, state=StateBytes(40), global_batch_size=8, boundary_bytes=4
    )
    assert not any(part.offload for part in checked(problem, solve(problem)).ranks)


def test_fewer_microbatches_keep_less_though_their_peak_is_larger():
    # (1, 1) takes 1 + 2 * 4 bytes and (2,) 5.5 + 4, but (1, 1, 1, 1) 17 and (2, 2) 13.5
    rank = RankProfile("a", [1, 2], [1, 2], [1, 2], [1, 5.5], 14)
    problem = Problem([rank], units=1, state=StateBytes(0), global_batch_size=4, microbatch_bytes=4)
    assert checked(problem, solve(problem)).ranks[0].microbatch_sizes == (2, 2)


def test_a_new_resource_is_an_entry_in_the_table(monkeypatch):
    """What the design note of plan/solver/__init__.py promises to whoever adds a constraint."""

    def batches(total: float, ranks: list[RankProfile]) -> list[int]:
        def energy(problem: Problem, profile: RankProfile, mode: Mode = PLAIN) -> Need:
            per_sample = 3.0 if profile.name == "hungry" else 1.0
            peaks = (0.0,) * profile.largest_microbatch_size
            return Need(0.0, 0.0, peaks, per_sample, 0.0, capacity=math.inf, shared=total)

        for module in (columns, infeasible, state):
            monkeypatch.setattr(module, "NEEDS", (*NEEDS, energy))
        problem = Problem(ranks, units=2, state=StateBytes(10), global_batch_size=8)
        return [rank.batch_size for rank in checked(problem, solve(problem)).ranks]

    ranks = [affine("hungry", 9), affine("frugal", 1)]
    assert batches(math.inf, ranks) == [8, 0]
    assert batches(14, ranks) == [3, 5]
    with pytest.raises(InfeasibleError):
        batches(7, ranks)


def test_where_many_ranks_differ_a_thousandth_is_proof_enough():
    noisy = np.random.default_rng(0)

    def rank(index: int) -> RankProfile:
        size = np.arange(1, 13)
        curves = [
            each * (0.3 + size) * (1 + 0.01 * noisy.standard_normal(12)) for each in (1, 2, 3)
        ]
        return RankProfile(f"r{index}", *curves, 10.0 * size, 300)

    ranks = [rank(index) for index in range(24)]
    problem = Problem(
        ranks, units=8, state=StateBytes(4000), global_batch_size=500, boundary_bytes=0.2
    )
    plan = checked(problem, solve(problem))
    assert 0 <= plan.gap <= 1e-3
    assert plan.step_s <= plan.bound_s * 1.002


def test_units_stay_gathered_where_that_is_faster_and_there_is_room():
    def stays(reduce_s: float, capacity: float = 1000, unresharded: float = 50, asked="auto"):
        problem = Problem(
            [affine("a", 1, capacity)] * 2,
            units=4,
            links=Links(2, reduce_s),
            state=StateBytes(100),
            global_batch_size=4,
            unresharded_bytes=unresharded,
            reshard_after_forward=asked,
        )
        plan = checked(problem, solve(problem))
        assert plan.gap == 0
        return plan.reshard_after_forward

    # two samples on a rank: backward 4.4, beside which 2 are gathered and these reduced
    assert stays(reduce_s=2) is True
    assert stays(reduce_s=3) is False
    assert stays(reduce_s=3, capacity=119.9) is True  # 20 of a microbatch, 50 of the state
    assert stays(reduce_s=3, capacity=120) is False
    assert stays(reduce_s=2, asked=False) is False
    assert stays(reduce_s=3, asked=True) is True


def test_what_cannot_be_faster_is_not_searched(monkeypatch):
    searched = []
    run = Search.run

    def noted(self):
        searched.append(self.problem.reshard_after_forward)
        return run(self)

    monkeypatch.setattr(Search, "run", noted)

    def searches(gather_s: float) -> list[bool]:
        searched.clear()
        problem = Problem(
            [affine("a", 1), affine("b", 3)],
            units=4,
            links=Links(gather_s, gather_s),
            state=StateBytes(100),
            global_batch_size=8,
            reshard_after_forward="auto",
        )
        assert solve(problem).gap == 0
        return searched

    assert searches(0.1) == [True]  # hidden by every plan
    assert searches(100) == [False]  # three collectives of a unit are longer than two
    assert searches(0) == [True]


def test_out_of_time_the_better_half_is_kept_and_the_other_only_bounded():
    ranks = [affine(f"r{index}", 1 + index / 9, longest=4) for index in range(24)]
    asked = {"units": 4, "links": Links(500, 500), "state": StateBytes(100)}
    problem = Problem(ranks, global_batch_size=64, reshard_after_forward="auto", **asked)
    plan = solve(problem, time_limit_s=1e-3)
    assert plan.reshard_after_forward is False
    assert plan.bound_s <= plan.step_s < 4 * 1500


def test_even_shares_are_taken_where_they_travel_enough_faster():
    def fractions(even_gather_s: float | None, capacity: float = 100) -> list[float]:
        problem = Problem(
            [affine("small", 1, capacity), affine("large", 1, 300)],
            units=8,
            links=Links(20.0),
            even_links=None if even_gather_s is None else Links(even_gather_s),
            state=StateBytes(120),
            global_batch_size=8,
        )
        return [rank.state_fraction for rank in checked(problem, solve(problem)).ranks]

    assert fractions(None) != [0.5, 0.5]
    assert fractions(18.0) == [0.5, 0.5]
    assert fractions(18.0, capacity=55) != [0.5, 0.5]  # half of the state does not fit


def test_even_shares_count_the_buffers_of_an_idle_rank():
    ranks = [affine("small", 1, 13), affine("large", 1, 60)]
    problem = Problem(
        ranks,
        units=1,
        links=Links(20.0),
        even_links=Links(1.0),
        state=StateBytes(23),
        gathered_bytes=2,
        global_batch_size=2,
    )
    plan = checked(problem, solve(problem))
    assert plan.ranks[0].state_fraction < 0.5  # half is 11.5 of the 11 that the buffers leave


def test_even_shares_may_fill_a_rank_to_the_last_byte():
    ranks = [affine("full", 1, 30), affine("large", 1, 100)]
    problem = Problem(
        ranks,
        units=2,
        links=Links(20.0),
        even_links=Links(1.0),
        state=StateBytes(40),
        gathered_bytes=10,
        global_batch_size=2,
    )
    plan = checked(problem, solve(problem))
    assert plan.ranks[0].state_fraction == 0.5
    assert plan.ranks[0].memory_bytes == 30


def test_slices_of_even_shares_are_padded_where_that_was_measured_faster_and_fits():
    def plan(padded_bytes: float, even_gather_s: float | None = 1.0) -> Plan:
        problem = Problem(
            [affine("alike", 1, 50)] * 2,
            units=2,
            links=Links(20.0),
            even_links=None if even_gather_s is None else Links(even_gather_s),
            padded_bytes=padded_bytes,
            state=StateBytes(60),
            global_batch_size=2,
        )
        return checked(problem, solve(problem))

    assert plan(padded_bytes=0).padded is False  # as they are, they were measured faster
    padded, unpadded = plan(padded_bytes=5), plan(padded_bytes=15)
    assert (padded.padded, padded.ranks[0].memory_bytes) == (True, 30 + 5 + 10)
    assert padded.step_s < unpadded.step_s
    # shares are even by chance, and there is no room for slots
    assert (unpadded.padded, unpadded.ranks[0].memory_bytes) == (False, 30 + 10)
    assert unpadded.shares_are_even


def test_boundaries_are_offloaded_only_with_recomputation():
    rank = dataclasses.replace(
        affine("a", 1, 40, longest=2),
        kept=KeptCurves([0.5, 1.0], [5.0, 6.0]),
        host_capacity_bytes=1000,
    )
    problem = Problem(
        [rank],
        units=8,
        state=StateBytes(18),
        global_batch_size=2,
        boundary_bytes=1,
        kept_bytes=0.1,
    )
    # kept activations, faster by far, would fit if their boundaries could go: they hold them
    assert 18 + 5 + 2 * (3 * 1 + 8 * 0.1) < 40 < 18 + 5 + 2 * (8 * 1 + 8 * 0.1)
    plan = checked(problem, solve(problem))
    assert (plan.ranks[0].recompute, plan.ranks[0].offload) == (True, True)


def test_a_variant_without_time_does_not_hide_the_other(monkeypatch):
    run = Search.run

    def fails_for_uneven(self):
        if not self.problem.has_even_state:
            raise SolverError("no time")
        return run(self)

    monkeypatch.setattr(Search, "run", fails_for_uneven)
    problem = Problem(
        [affine("a", 1), affine("b", 2)],
        units=4,
        links=Links(20.0),
        even_links=Links(10.0),
        state=StateBytes(100),
        global_batch_size=6,
    )
    plan = solve(problem)
    assert [rank.state_fraction for rank in plan.ranks] == [0.5, 0.5]
    assert plan.gap == 0 or plan.bound_s < plan.step_s


def test_a_part_of_a_thousandth_is_spent_on_headroom():
    # one microbatch of 4 is the fastest by a hair, and fills the rank; four of 1 leave it room
    def curve(hair: float) -> RankProfile:
        times = [1.0, 2.0, 3.0, 4.0 * (1 - hair)]
        return RankProfile("a", times, times, times, [10, 40, 70, 95], 100)

    def sizes(hair: float) -> tuple[int, ...]:
        problem = Problem([curve(hair)], units=8, state=StateBytes(1), global_batch_size=4)
        plan = checked(problem, solve(problem))
        assert plan.gap == 0
        assert plan.step_s <= plan.bound_s * 1.001
        return plan.ranks[0].microbatch_sizes

    assert sizes(0.0003) == (1, 1, 1, 1)
    assert sizes(0.0011) == (4,)


def test_refusal_when_the_buffers_do_not_fit_a_rank():
    message = refused([affine("a", 1), affine("b", 1, capacity=30)], gathered_bytes=50)
    assert "Memory binds on rank 1 ('b')" in message
    assert "20 bytes are missing" in message


def test_refusal_names_the_room_that_units_which_stay_gathered_take():
    stay = {"reshard_after_forward": False, "unresharded_bytes": 60}
    message = refused([affine("a", 1, 100), affine("b", 1, 50)], **stay)
    assert "the gathered buffers that every rank holds need" in message
    assert "Use smaller units, reshard_after_forward=True, raise" in message
    message = refused([affine("a", 1, 100)] * 2, state=StateBytes(100), **stay)
    assert "reshard_after_forward=True (60 bytes on every rank)" in message
    message = refused([affine("a", 1, 100)] * 2, state=StateBytes(250), **stay)
    assert "reshard_after_forward" not in message


def test_refusal_when_the_state_fits_nowhere():
    message = refused([affine("a", 1, 100)] * 2, state=StateBytes(250))
    assert "Memory binds over all 2 ranks together" in message
    assert "60 bytes are missing" in message
    assert "add 1 more 'a'" in message
    assert "global_batch_size" not in message  # the state alone is too large


def test_refusal_when_samples_have_no_room():
    message = refused([affine("a", 1, 100)] * 2, boundary_bytes=10, global_batch_size=12)
    assert "Samples bind: 2 ranks cannot run a global batch of 12, even without any" in message
    assert "The closest that they can is 8, 4 fewer." in message
    assert "lower global_batch_size to 8; or add 1 more 'a'" in message


def test_refusal_when_no_rank_takes_samples():
    store = RankProfile("store", [], [], [], [], 500)
    message = refused([store, affine("small", 1, 4)])
    assert "no rank can take any of the global batch of 4" in message
    assert "rank 0 ('store'): profiled up to size 0, below minimum_microbatch_size=1" in message
    assert "rank 1 ('small'): one microbatch needs 10 bytes" in message
    assert "6 bytes are missing" in message
    message = refused([affine("a", 1)], minimum_microbatch_size=5)
    assert "profiled up to size 4, below minimum_microbatch_size=5" in message


def test_refusal_when_the_batch_cannot_be_cut_into_microbatches():
    message = refused([affine("a", 1)], global_batch_size=1, minimum_microbatch_size=2)
    assert "cannot run a global batch of 1 under minimum_microbatch_size=2" in message
    assert "The closest that they can is 2, 1 more. What would do: raise global_batch" in message


def test_refusal_with_one_microbatch_on_every_rank():
    message = refused([affine("a", 1)] * 5, single_microbatch=True)
    assert "5 ranks cannot run a global batch of 4 under one microbatch on each rank" in message
    assert "The closest that they can is 5, 1 more" in message
    assert "What would do: raise global_batch_size to 5" in message
    store = RankProfile("store", [], [], [], [], 500)
    message = refused([affine("a", 1), store], single_microbatch=True)
    assert "every rank runs one microbatch (single_microbatch=True), but some can" in message
    assert "(rank 1 ('store'): profiled up to size 0" in message


def test_refusal_after_the_search_names_memory_and_what_helps():
    ranks = [affine("a", 1, 100), affine("b", 1, 100)]
    message = refused(ranks, state=StateBytes(165), single_microbatch=True)
    assert "Memory binds over all 2 ranks together: the state needs 165 bytes" in message
    assert "the samples under one microbatch on each rank at least 40 bytes" in message
    assert "5 bytes are missing" in message
    assert "What would do: lower global_batch_size to 3; or add 1 more 'a'." in message


def test_refusal_names_host_memory_only_where_it_is_enough():
    ranks = [affine("a", 1, 100)]
    change = {"units": 8, "boundary_bytes": 4, "state": StateBytes(30), "global_batch_size": 3}
    message = refused(ranks, **change)
    assert "lower global_batch_size to 1" in message
    assert "more host memory, up to 96 bytes in all" in message
    offloading = [dataclasses.replace(ranks[0], host_capacity_bytes=96)]
    plan = solve(Problem(offloading, **change))
    assert plan.ranks[0].offload
    assert plan.ranks[0].host_bytes == 96
    message = refused([dataclasses.replace(ranks[0], host_capacity_bytes=95)], **change)
    assert "more host memory, up to 96 bytes in all" in message
    message = refused(ranks, **{**change, "state": StateBytes(85)})
    assert "host memory" not in message.split("What would do")[1]


def test_remedies_start_at_the_least_batch_that_is_possible_at_all():
    ranks = [affine("a", 1, 100)] * 2
    change = {"boundary_bytes": 10, "global_batch_size": 12}
    message = refused(ranks, minimum_microbatch_size=2, **change)
    assert "lower global_batch_size to 8;" in message


def test_types_of_one_name_are_named_once():
    message = refused([affine("a", 1, 40), affine("a", 1, 50)], state=StateBytes(100))
    assert message.count("more 'a'") == 1


def test_remedies_that_take_too_long_are_said_to_be_open(monkeypatch):
    monkeypatch.setattr(infeasible, "_TIME_S", 0.0)
    message = refused([affine("a", 1, 100)] * 2, state=StateBytes(250))
    assert "was found within 0 s" in message and "Memory binds" in message


@pytest.mark.processes
def test_importing_the_planner_does_not_import_the_solver():
    # Only the planner: what the package imports beside it is not judged here.
    code = (
        "import sys, types, pathlib, importlib; "
        "package = types.ModuleType('lightning_cephalo'); "
        f"package.__path__ = [{str(PACKAGE)!r}]; "
        "sys.modules['lightning_cephalo'] = package; "
        "importlib.import_module('lightning_cephalo.plan'); "
        "found = {'cvxpy', 'torch', 'lightning', 'scipy'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
