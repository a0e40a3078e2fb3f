"""The cost function by hand, and how the state is shared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.plan import (
    KeptCurves,
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    predict,
)
from lightning_cephalo.plan.solver.state import Room, needed_by, share_state, to_the_byte

FAST = RankProfile("fast", [1, 1.5, 2], [2, 3, 4], [5, 6, 7], [10, 20, 30], 1000)
SLOW = RankProfile("slow", [3], [7], [8], [10], 500)
PROBLEM = Problem(
    [FAST, SLOW],
    units=4,
    links=Links(2.5, 3.0),
    state=StateBytes(100),
    global_batch_size=6,
    boundary_bytes=2,
    update_overhead_s=0.25,
    gathered_bytes=7,
    step_overhead_s=0.5,
)


def test_step_time_and_memory_by_hand():
    found = predict(PROBLEM, [RankPlan((3, 2), 0.8), RankPlan((1,), 0.2)])
    fast, slow = found.ranks
    # F: 2 + 1.5 and 3; B: 4 + 3 and 7; tails 7 + 6 and 8
    assert (fast.forward_s, fast.backward_s, fast.tail_s) == (3.5, 7, 13)
    assert (slow.forward_s, slow.backward_s, slow.tail_s) == (3, 7, 8)
    assert found.step_s == 4 * (max(2.5, 3.5) + max(5.5, 7)) + 13 + 0.25 + 0.5
    assert fast.memory_bytes == 80 + 7 + 30 + 2 * 4 * 5
    assert slow.memory_bytes == 20 + 7 + 10 + 2 * 4 * 1


def test_every_microbatch_may_keep_something_whatever_its_samples():
    plans = [RankPlan((3, 2), 0.8), RankPlan((1,), 0.2)]
    before = predict(PROBLEM, plans).ranks
    after = predict(replace(PROBLEM, microbatch_bytes=5), plans).ranks
    more = [one.memory_bytes - other.memory_bytes for one, other in zip(after, before, strict=True)]
    assert more == [10, 5]


def test_a_gather_that_takes_longer_than_all_compute_sets_the_pace():
    found = predict(PROBLEM, [RankPlan((1,), 1.0), RankPlan((), 0.0)])
    # beside the last forward nothing is gathered, beside the first backward nothing is reduced
    forward_s, backward_s = 3 * 2.5 + 1, 2.5 + 2 * 5.5 + 3
    assert found.step_s == forward_s + backward_s + 5 + 0.75


def test_units_that_stay_gathered_leave_the_backward_a_reduce_to_hide_and_take_their_room():
    plans = [RankPlan((1,), 1.0), RankPlan((), 0.0)]
    problem = replace(PROBLEM, unresharded_bytes=11)
    before, stay = predict(problem, plans), replace(problem, reshard_after_forward=False)
    after = predict(stay, plans)
    assert after.step_s == 3 * 2.5 + 1 + 2 + 3 * 3 + 5 + 0.75
    assert [rank.memory_bytes - 11 for rank in after.ranks] == [
        rank.memory_bytes for rank in before.ranks
    ]
    # a plan says more than the problem, and without a word of either they are given back
    either = replace(problem, reshard_after_forward="auto")
    assert predict(either, Plan(plans, reshard_after_forward=False)) == after
    assert predict(stay, Plan(plans, reshard_after_forward=True)) == before
    assert predict(stay, Plan(plans)) == after
    assert predict(either, Plan(plans)) == predict(either, plans) == before


def test_a_gather_and_a_reduce_beside_each_other_take_what_was_measured_of_both():
    plans = [RankPlan((1,), 1.0), RankPlan((), 0.0)]
    apart = predict(PROBLEM, plans).step_s
    # two of four units have both in their backward: 5.5 one after the other
    for both_s, longer_s in ((5.5, 0), (4.0, 2 * -1.5), (7.0, 2 * 1.5), (1.0, 2 * -2.5)):
        problem = replace(PROBLEM, links=replace(PROBLEM.links, gather_and_reduce_s=both_s))
        assert predict(problem, plans).step_s == apart + longer_s
    # units that stay gathered have no gather there
    stay = replace(PROBLEM, reshard_after_forward=False)
    measured = replace(stay, links=replace(stay.links, gather_and_reduce_s=4.0))
    assert predict(measured, plans).step_s == predict(stay, plans).step_s


def test_equal_shares_take_the_least_of_what_was_measured_of_both():
    case = replace(PROBLEM, links=Links(2.5, 3.0, 5.0), even_links=Links(1.0, 3.0, 5.0))
    assert case.with_even_shares().links == Links(1.0, 3.0, 5.0)
    # both may take longer than one after the other: that alone is no gain of equal shares
    waiting = replace(PROBLEM, links=Links(2.5, 3.0, 7.0))
    assert waiting.with_even_shares().links == waiting.links
    apart = replace(PROBLEM, even_links=Links(1.0, 3.0))
    assert apart.with_even_shares().links == Links(1.0, 3.0)
    measured = replace(case, even_links=Links(1.0, 3.0, 3.5))
    assert measured.with_even_shares().links == Links(1.0, 3.0, 3.5)
    slow = replace(case, even_links=Links(4.0, 5.0, 9.0))
    assert slow.with_even_shares().links == Links(2.5, 3.0, 5.0)


def test_early_updates_hide_behind_collectives_and_hold_less_state():
    plans = [RankPlan((1,), 1.0), RankPlan((), 0.0)]
    late = replace(
        PROBLEM,
        update_overhead_s=2.0,
        unit_update_s=0.5,
        fill_s=5.5,
        root_links=replace(PROBLEM.root_links, reduce_s=1.0),
        early_state=StateBytes(75, reducing_bytes=5, updating_bytes=9),
    )
    early = late.with_early_update()
    # with the update a unit's backward takes 2.5, its collectives 5.5; the root unit's reduce 1
    backward_s = 2.5 + 5.5 + 5.5 + 3
    expected_s = 3 * 2.5 + 1 + backward_s + 5 + 5.5 + 1 + (2.0 - 4 * 0.5) + 0.5
    assert predict(early, plans).step_s == expected_s
    assert predict(late, plans).step_s - predict(early, plans).step_s == 4 * 0.5
    # where a unit's compute takes longer, only the last two reduces hide updates
    busy = [RankPlan((3, 2), 0.8), RankPlan((1,), 0.2)]
    assert predict(late, busy).step_s - predict(early, busy).step_s == 2 * 0.5
    # an update that takes longer than a reduce, too, has a gather to hide
    long = replace(early, unit_update_s=4.0, update_overhead_s=16.0)
    backward_s = 2.5 + 5.5 + (4 + 2.5) + (4 + 2)
    expected_s = 3 * 2.5 + 1 + backward_s + 5 + 2.5 + 4 + 4 + 0.5
    assert predict(long, plans).step_s == expected_s
    before, after = (predict(case, busy).ranks for case in (late, early))
    less = [one.memory_bytes - other.memory_bytes for one, other in zip(before, after, strict=True)]
    assert less == pytest.approx([25 * 0.8, 25 * 0.2])
    assert early.state.totals_bytes == (75, 80, 84) and early.state.most_bytes == 84
    # a plan says more than the problem, and files of before say nothing
    assert predict(late, Plan(busy, early_update=True)) == predict(early, busy)
    assert predict(late, Plan(busy)) == predict(late, busy)
    assert late.with_early_update().with_early_update() == early


def test_a_rank_needs_what_the_fullest_moment_of_its_step_needs():
    rank = replace(
        FAST,
        reducing_compute_bytes=[4, 8, 12],
        kept=KeptCurves([1, 2, 3], [11, 22, 33], [5, 10, 15]),
        host_capacity_bytes=1000,
    )
    problem = replace(PROBLEM, ranks=[rank, SLOW], kept_bytes=3)

    def held(bytes_of=problem, sizes=(3, 2), fraction=0.8, **modes):
        busy = RankPlan(sizes, fraction, **modes)
        found = predict(bytes_of, [busy, RankPlan((), 1 - fraction)])
        return found.ranks[0].memory_bytes

    before = 80 + 7 + 30 + 2 * 4 * 5
    assert held() == before
    # from the first reduce on the last unit's boundaries are gone; shares of 30 and of 60 come
    reducing = replace(problem, state=replace(problem.state, reducing_bytes=30))
    assert held(reducing) == before  # 80 + 24 + 7 + 12 + 2 * 3 * 5 are less
    reducing = replace(problem, state=replace(problem.state, reducing_bytes=60))
    assert held(reducing) == 80 + 48 + 7 + 12 + 2 * 3 * 5
    measured = replace(reducing, reducing_retained_bytes=7)
    assert held(measured) == 80 + 48 + 7 + 12 + 7 * 5
    # without recomputation, and with offloaded boundaries, of which those of three units stay
    assert held(reducing, recompute=False) == 80 + 48 + 7 + 15 + (2 + 3) * 3 * 5
    assert held(measured, recompute=False) == held(reducing, recompute=False)
    assert held(measured, offload=True) == 80 + 48 + 7 + 12 + 2 * 3 * 5
    # in an update nothing computes, and the backward has passed two units
    updating = replace(reducing, state=replace(reducing.state, updating_bytes=90))
    assert held(updating) == 80 + 72 + 7 + 2 * 2 * 5
    assert held(updating, sizes=()) == 80 + 72 + 7
    # if all ranks hold equal shares, a share is a part of what each rank holds
    even = replace(updating, has_even_state=True)
    assert held(even, fraction=0.5) == held(updating, fraction=0.5)
    # a curve that is not known is the one of the whole step
    unknown = replace(reducing, ranks=[FAST, SLOW])
    assert held(unknown) == 80 + 48 + 7 + 30 + 2 * 3 * 5


def test_a_rank_without_samples_holds_state_and_buffers_only():
    idle = predict(PROBLEM, [RankPlan((1,), 0.5), RankPlan((), 0.5)]).ranks[1]
    assert (idle.forward_s, idle.backward_s, idle.tail_s) == (0, 0, 0)
    assert idle.memory_bytes == 50 + 7


def test_the_order_of_microbatches_changes_nothing():
    rank = RankProfile("a", [0.1, 0.2, 0.3], [0.7, 0.1, 0.2], [0.1, 0.7, 0.3], [1, 1, 1], 9)
    problem = Problem([rank], 1, state=StateBytes(1), global_batch_size=9)
    one, other = (predict(problem, [RankPlan(sizes, 1.0)]) for sizes in ((3, 2, 1), (1, 3, 2)))
    assert one == other


def test_predict_refuses_what_was_not_profiled():
    with pytest.raises(PlanError, match=r"rank 1 \('slow'\): microbatch size 2 was not profiled"):
        predict(PROBLEM, [RankPlan((1,), 0.5), RankPlan((2,), 0.5)])
    with pytest.raises(PlanError, match=r"each of the problem's 2 ranks, but got 1"):
        predict(PROBLEM, [RankPlan((1,), 1.0)])


def test_state_is_shared_in_proportion_to_free_memory():
    assert share_state([180, 100]) == pytest.approx([180 / 280, 100 / 280])


def test_a_full_rank_holds_no_state():
    assert share_state([0, 100, 100]) == [0.0, 0.5, 0.5]


def test_state_without_limits_or_without_room_is_even():
    assert share_state([math.inf, math.inf]) == [0.5, 0.5]
    assert share_state([100, math.inf]) == [0.0, 1.0]
    assert share_state([0, 0, 0]) == [1 / 3] * 3


@given(
    ranks=st.lists(st.tuples(st.floats(0, 1e12), st.floats(1, 1e12)), min_size=1, max_size=6),
    part=st.floats(0, 1),
)
def test_shares_sum_to_one_and_break_no_cap(ranks, part):
    profiles = [RankProfile("r", [1], [1], [1], [own], own + room) for own, room in ranks]
    full = part * math.fsum(
        profile.capacity_bytes - own for profile, (own, _) in zip(profiles, ranks, strict=True)
    )
    problem = Problem(profiles, 1, state=StateBytes(full), global_batch_size=len(ranks))
    runs, room = [RankPlan((1,), 0.0)] * len(ranks), Room(problem, most_share=math.inf)
    pairs = list(zip(profiles, runs, strict=True))
    free = [float(room.held_bytes(own, needed_by(problem, own, run))) for own, run in pairs]
    fractions = [
        to_the_byte(problem, own, run, share)
        for (own, run), share in zip(pairs, share_state(free), strict=True)
    ]
    assert math.fsum(fractions) == pytest.approx(1, abs=1e-6)
    planned = [
        replace(run, state_fraction=share) for run, share in zip(runs, fractions, strict=True)
    ]
    for own, part in zip(profiles, predict(problem, planned).ranks, strict=True):
        assert part.memory_bytes <= own.capacity_bytes
