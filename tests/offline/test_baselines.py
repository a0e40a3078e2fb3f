"""The baselines by their definitions, and the published program by its figures."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from lightning_cephalo.offline.baselines import (
    BASELINES,
    compute_balance,
    even,
    proportional,
    state_by_memory,
)
from lightning_cephalo.offline.paper.planner import PublishedModel, published
from lightning_cephalo.offline.paper.profiles import PublishedProfiles, read_published
from lightning_cephalo.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    SolverError,
    predict,
    solve,
)

FOLDER = Path(__file__).resolve().parents[3] / "shared/data/cephalo-profiles"
FOUR = ("l4", "l4", "a6000", "p40")
EIGHT = (*FOUR, "p40", "p40", "p100", "p100")
OOM = None
# Plain constants, so that figures can be checked by hand.
FREE = PublishedModel(memory_share=1.0, overhead_bytes=0.0, between_microbatches_s=0.0)


def rank(name="a", speed=1.0, sizes=8, capacity=math.inf, **more) -> RankProfile:
    """One second per sample and pass at speed 1, one byte per sample of a microbatch."""
    forward = [size / speed for size in range(1, sizes + 1)]
    return RankProfile(
        name,
        forward_s=forward,
        backward_s=[2 * own for own in forward],
        tail_s=[0.0] * sizes,
        compute_bytes=range(1, sizes + 1),
        capacity_bytes=capacity,
        **more,
    )


def problem(ranks, batch, state=0.0, units=1, **more) -> Problem:
    return Problem(ranks, units=units, state_bytes=state, global_batch_size=batch, **more)


def batches(plan: Plan) -> list[int]:
    return [part.batch_size for part in plan.ranks]


def fractions(plan: Plan) -> list[float]:
    return [part.state_fraction for part in plan.ranks]


def counts(plan: Plan) -> list[int]:
    return [len(part.microbatch_sizes) for part in plan.ranks]


# -- even ------------------------------------------------------------------------------------------


def test_even_deals_the_remainder_to_the_first_ranks():
    plan = even(problem([rank()] * 4, 10, state=8))
    assert batches(plan) == [3, 3, 2, 2]
    assert fractions(plan) == [0.25] * 4
    assert plan.step_s == predict(problem([rank()] * 4, 10, state=8), plan.ranks).step_s == 9


def test_even_shards_stay_gathered_where_cephalo_may_have_them_stay():
    """FSDP2 has the same option: a comparison must not count it as the planner's."""
    slow = {"units": 2, "gather_s": 20, "reduce_s": 20, "unresharded_bytes": 5}
    for baseline in (even, proportional, state_by_memory):
        plans = [
            baseline(problem([rank(capacity=capacity)] * 2, 4, reshard_after_forward=asked, **slow))
            for capacity in (20, 5)
            for asked in ("auto", True)
        ]
        assert [plan.reshard_after_forward for plan in plans] == [False, True, True, True]
        # forwards 20 and 2; backwards 4 and 20, or 20 and 20
        assert [plan.step_s for plan in plans] == [46, 62, 62, 62]


def test_even_accumulates_until_the_smallest_rank_fits():
    # 4 of 8 bytes of state and at most 2 of compute
    plan = even(problem([rank(), rank("small", capacity=6)], 8, state=8))
    assert [part.microbatch_sizes for part in plan.ranks] == [(2, 2), (2, 2)]


def test_even_takes_the_fastest_count_that_fits_not_the_largest_microbatch():
    slow_at_four = RankProfile("a", [1, 2, 3, 9], [1, 2, 3, 9], [0] * 4, [1] * 4, math.inf)
    plan = even(problem([slow_at_four], 4))
    assert plan.ranks[0].microbatch_sizes == (2, 2)


def test_even_uses_no_size_beyond_the_curves():
    assert counts(even(problem([rank(sizes=3), rank()], 8))) == [2, 2]
    with pytest.raises(InfeasibleError, match=r"rank 1 \('none'\) was profiled for no microbatch"):
        even(problem([rank(), rank("none", sizes=0)], 8))


def test_even_leaves_ranks_without_samples_when_there_are_too_few():
    assert batches(even(problem([rank()] * 3, 2))) == [1, 1, 0]


def test_even_names_the_rank_that_does_not_fit():
    with pytest.raises(InfeasibleError, match=r"rank 1 \('small'\) needs .* has 0.00 GiB next"):
        even(problem([rank(capacity=100), rank("small", capacity=3)], 2, state=8))


def test_even_keeps_activations_where_that_fits():
    keeps = rank(capacity=10, kept_backward_s=[1.0] * 8, kept_compute_bytes=[5.0] * 8)
    plan = even(problem([keeps, rank()], 2, state=8))
    assert [part.recompute for part in plan.ranks] == [False, None]
    assert [part.recompute for part in even(problem([keeps, rank()], 2, state=14)).ranks] == [
        True,
        None,
    ]


# -- batch by speed, state by memory ---------------------------------------------------------------


def test_proportional_batches_follow_speed_and_state_stays_even():
    plan = proportional(problem([rank(speed=3), rank()], 8, state=4))
    assert batches(plan) == [6, 2]
    assert fractions(plan) == [0.5, 0.5]


def test_proportional_rounds_by_largest_remainder():
    # shares of 10: 1.43, 2.86, 5.71
    plan = proportional(problem([rank(), rank(speed=2), rank(speed=4)], 10))
    assert batches(plan) == [1, 3, 6]


def test_proportional_gives_nothing_to_a_rank_that_can_take_none():
    assert batches(proportional(problem([rank(), rank(sizes=0)], 4))) == [4, 0]


def test_proportional_needs_room_for_even_state():
    asked = problem([rank(capacity=100), rank("small", capacity=3)], 4, state=8)
    with pytest.raises(InfeasibleError, match=r"batch by speed, even state: rank 1 \('small'\)"):
        proportional(asked)
    assert solve(asked).global_batch_size == 4


def test_proportional_runs_equal_counts_where_asked():
    asked = problem([rank(speed=3, sizes=4), rank()], 8, equal_microbatches=True)
    assert counts(proportional(asked)) == [2, 2]


def test_state_by_memory_fits_where_even_state_does_not():
    asked = problem([rank(capacity=100), rank("small", capacity=3)], 4, state=8)
    with pytest.raises(InfeasibleError):
        even(asked)
    plan = state_by_memory(asked)
    assert batches(plan) == [2, 2]
    assert plan.ranks[0].state_fraction > 0.9
    assert all(part.memory_bytes <= part.capacity_bytes for part in plan.ranks)


def test_state_by_memory_is_refused_where_state_finds_no_place():
    with pytest.raises(InfeasibleError, match="no number of microbatches fits all 2 ranks"):
        state_by_memory(problem([rank(capacity=6)] * 2, 2, state=11))


def test_state_by_memory_recomputes_to_make_room_for_state():
    keeps = rank(capacity=10, kept_backward_s=[1.0] * 8, kept_compute_bytes=[8.0] * 8)
    assert state_by_memory(problem([keeps], 1, state=1)).ranks[0].recompute is False
    assert state_by_memory(problem([keeps], 1, state=8)).ranks[0].recompute is True


def test_state_by_memory_refuses_collectives_of_uneven_state_no_less_than_predict():
    ranks = [rank(capacity=100), rank(capacity=9)]
    asked = problem(ranks, 4, 8, units=2, gather_s=50, even_gather_s=1)
    assert state_by_memory(asked).step_s == (50 + 2) + (50 + 4)
    assert even(asked).step_s == 2 * (2 + 4)


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=list(BASELINES))
def test_no_baseline_beats_the_solver(baseline):
    ranks = [rank(capacity=40), rank("b", speed=2.3, capacity=25), rank("c", speed=5, capacity=30)]
    for batch in (3, 7, 16):
        asked = problem(ranks, batch, state=30, gathered_bytes=1)
        try:
            plan = baseline(asked)
        except InfeasibleError:
            continue
        plan.check(world_size=3, global_batch_size=batch)
        assert plan.step_s >= solve(asked).bound_s * (1 - 1e-9)
        assert plan.backend and plan.solve_s is not None


# -- the published program -------------------------------------------------------------------------


def test_the_published_model_by_hand():
    asked = problem([rank(capacity=10)] * 2, 8, state=4, gather_s=100, even_gather_s=2, reduce_s=30)
    model = PublishedModel(1.0, 5.0, uneven_factor=1.5, between_microbatches_s=0.25)
    # 10 - 5 - 2 leave room for size 3 beside even state, so that 4 is uneven
    small, large = RankPlan((2, 2), 0.5), RankPlan((4,), 0.5)
    assert model.step_s(asked, [small, small]) == max(2, 4) + max(32, 8.25)
    assert model.step_s(asked, [small, large]) == max(3, 4) + max(48, 8)
    with pytest.raises(PlanError, match="one size on every rank"):
        model.step_s(asked, [small, RankPlan((3, 1), 0.5)])


def tabulated(asked: Problem, model: PublishedModel) -> tuple[float, list[int]] | None:
    """The published program as its facts have it: the whole table, nothing cut off."""
    batch, ranks = asked.global_batch_size, asked.ranks
    best = {(0, 0): (0.0, ())}
    for profile in ranks:
        reached: dict[tuple[int, int], tuple[float, tuple]] = {}
        largest = model.fitting_sizes(asked, profile)
        beside_even = model.fitting_sizes(asked, profile, even_state=True)
        for size in range(1, largest + 1):
            for count in range(1, batch // size + 1):
                own = model.unit_s(asked, profile, size, count, uneven=size > beside_even)
                for (taken, total), (seconds, chosen) in best.items():
                    key = (taken + size * count, total + size)
                    slowest = max(seconds, own)
                    if key[0] <= batch and slowest < reached.get(key, (math.inf,))[0]:
                        reached[key] = (slowest, (*chosen, (size, count)))
        best = reached
    room = model.memory_share * sum(own.capacity_bytes for own in ranks) - asked.state_bytes
    answer = None
    for total in range(1, batch + 1):
        seconds, chosen = best.get((batch, total), (math.inf, ()))
        used = [
            own.compute_bytes[size - 1] + model.overhead_bytes
            for own, (size, _) in zip(ranks, chosen, strict=False)
        ]
        if seconds < (answer or (math.inf,))[0] and math.fsum(used) < room:
            answer = (seconds, [size * count for size, count in chosen])
    return answer


@pytest.mark.parametrize("cases", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_published_equals_its_whole_table(cases):
    draw = random.Random(0)
    compared = 0
    for _ in range(cases):
        ranks = [
            RankProfile(
                name,
                forward_s=sorted(draw.uniform(0.1, 3) for _ in range(6)),
                backward_s=[draw.uniform(0.5, 6) for _ in range(6)],
                tail_s=[0.0] * 6,
                compute_bytes=sorted(draw.uniform(1, 9) for _ in range(6)),
                capacity_bytes=draw.uniform(6, 16),
            )
            for name in "abc"
        ]
        gathers = {"gather_s": draw.uniform(0, 4), "reduce_s": draw.uniform(0, 4)}
        asked = problem(ranks, draw.randint(3, 14), draw.uniform(0, 18), **gathers)
        model = PublishedModel(0.9, 1.0, 1.25, 0.3)
        expected = tabulated(asked, model)
        if expected is None:
            with pytest.raises(InfeasibleError):
                published(asked, model)
            continue
        plan = published(asked, model)
        assert model.step_s(asked, plan.ranks) == pytest.approx(expected[0], rel=1e-12)
        assert batches(plan) == expected[1]
        compared += 1
    assert cases / 3 < compared < cases


def test_published_variants_keep_what_they_are_to_keep():
    asked = problem([rank(speed=3, capacity=20), rank(capacity=12)], 12, state=10)
    assert batches(published(asked, FREE, even_batch=True)) == [6, 6]
    assert fractions(published(asked, FREE, even_state=True)) == [0.5, 0.5]
    plan = compute_balance(asked, FREE)
    assert counts(plan) == [1, 1]
    assert fractions(plan) == [0.5, 0.5]
    # speed 3 beside speed 1, but no more than 8 samples at once
    assert batches(plan) == [8, 4]


def test_the_release_splits_state_by_the_number_of_microbatches():
    # One microbatch of 6: the release counts 1 byte for it, and leaves the state even.
    asked = problem([rank(speed=6, capacity=10), rank(capacity=40)], 7, state=12)
    model = PublishedModel(1.0, 0.0, between_microbatches_s=1.0)
    plan = published(asked, model)
    assert plan.ranks[0].microbatch_sizes == (6,)
    assert plan.ranks[0].memory_bytes <= 10
    with pytest.raises(InfeasibleError, match=r"rank 0 \('a'\) would hold"):
        published(asked, model, released_state_split=True)


def test_the_release_moves_state_off_ranks_that_it_thinks_full():
    # Of 12 each, rank 0 has room for 3 beside its byte, ranks 1 and 2 for 1 and 2 more.
    ranks = [rank(capacity=own) for own in (4, 14, 15, 40)]
    plan = published(problem(ranks, 4, state=48), FREE, released_state_split=True)
    assert [part.state_fraction * 48 for part in plan.ranks] == pytest.approx([3, 13, 14, 18])


def test_published_is_refused_with_the_reason():
    with pytest.raises(InfeasibleError, match=r"rank 1 \('b'\) can run no microbatch"):
        published(problem([rank(capacity=9), rank("b", capacity=0.5)], 4, state=1), FREE)
    with pytest.raises(InfeasibleError, match="state and the smallest microbatches need"):
        published(problem([rank(capacity=9)] * 2, 4, state=17), FREE)
    with pytest.raises(InfeasibleError, match="2 ranks cannot take 1 samples"):
        published(problem([rank(capacity=9)] * 2, 1, state=1), FREE)


def test_published_does_not_fill_a_table_without_end(monkeypatch):
    monkeypatch.setattr("lightning_cephalo.offline.paper.table._MOST_UPDATES", 10)
    with pytest.raises(SolverError, match=r"needs .* updates, more than"):
        published(problem([rank(capacity=90)] * 4, 32, state=1), FREE)


def test_published_offloads_and_recomputes_as_the_release_does():
    own = rank(
        capacity=100,
        kept_backward_s=[1.0] * 8,
        kept_compute_bytes=[1.0] * 8,
        host_capacity_bytes=1e3,
    )
    part = published(problem([own], 4, boundary_bytes=1.0), FREE).ranks[0]
    assert (part.recompute, part.offload, part.host_bytes) == (True, True, 4)


# -- the figures known of it -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiles() -> PublishedProfiles:
    if not FOLDER.is_dir():
        pytest.skip(f"the published profiles are not in {FOLDER}")
    return read_published(FOLDER)


def test_the_published_example(profiles):
    asked = profiles.problem(
        model="deepspeedgpt_2.7b", dtype="fp16", devices=FOUR, global_batch_size=64
    )
    for released in (False, True):
        plan = published(asked, released_state_split=released)
        assert batches(plan) == [13, 12, 34, 5]
        assert counts(plan) == [1, 2, 1, 1]
        assert round(64 / PublishedModel().step_s(asked, plan.ranks), 2) == 5.84
    assert fractions(plan) == [0.25] * 4


@pytest.mark.parametrize(
    ("model", "four", "eight"),
    [
        ("vit_g", (4.77, 1.94, 1.94, 4.77), (6.95, 3.87, 3.87, 6.57)),
        ("vit_e", (2.56, OOM, 1.01, OOM), (3.66, OOM, 2.02, OOM)),
        ("bert_large", (26.3, 15.1, 15.1, 26.3), (41.4, 30.2, 30.2, 41.4)),
        ("gpt_1.3b", (4.32, 2.86, 2.86, 4.32), (7.54, 5.71, 5.71, 6.17)),
        ("gpt_2.7b", (2.88, 1.91, 1.91, 1.98), (4.83, OOM, 3.83, OOM)),
        ("llama_3b", (3.01, OOM, 2.29, OOM), (5.23, OOM, 4.46, OOM)),
    ],
)
def test_what_the_published_model_predicts(profiles, model, four, eight):
    """fp32, 512 tokens, compute only: program, even batch and state, state only, compute only."""
    ways = (
        published,
        lambda asked: published(asked, even_batch=True, even_state=True),
        lambda asked: published(asked, even_batch=True),
        compute_balance,
    )
    for devices, batch, expected in ((FOUR, 64, four), (EIGHT, 128, eight)):
        asked = profiles.problem(
            model=f"deepspeed{model}", dtype="fp32", devices=devices, global_batch_size=batch
        )
        for way, known in itertools.zip_longest(ways, expected):
            if known is OOM:
                with pytest.raises(InfeasibleError):
                    way(asked)
            else:
                found = batch / PublishedModel().step_s(asked, way(asked).ranks)
                assert found == pytest.approx(known, rel=0.01)
