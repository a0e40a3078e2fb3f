"""Windows, which are read from compiled programs, against a closed form of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cephalo.plan import Links, Problem, RankProfile, StateBytes, windows
from lightning_cephalo.plan.windows import Windows

RANK = RankProfile("a", [1], [2], [0.5], [1], math.inf)
seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5])
problems = st.builds(
    Problem,
    st.just([RANK]),
    st.sampled_from([1, 2, 3, 4, 5, 8, 24]),
    state=st.just(StateBytes(1.0)),
    global_batch_size=st.just(1),
    links=st.builds(Links, seconds, seconds, st.none() | seconds),
    root_links=st.builds(Links, reduce_s=seconds),
    last_links=st.builds(Links, seconds, seconds),
    fill_s=seconds,
    reshard_after_forward=st.booleans(),
    early_update=st.booleans(),
    unit_update_s=seconds,
)


def closed_form(problem: Problem) -> tuple[Windows, Windows, float, float]:
    """Windows of forward and backward, that of a middle unit, and updates that hide behind."""
    units, gather_s, reduce_s = problem.units, problem.links.gather_s, problem.links.reduce_s
    both_s, update_s = problem.links.both_s, problem.unit_update_s * problem.early_update
    ahead_s = gather_s + problem.last_links.gather_s
    forward = ((gather_s, units - 2), (ahead_s, 1)) if units > 1 else ()
    if not problem.reshard_after_forward:
        gather_s, both_s = 0.0, reduce_s
    middle_s, first_s = max(gather_s, both_s - update_s), gather_s + problem.last_links.reduce_s
    last_s = max(0.0, reduce_s - update_s)
    backward = {
        1: ((problem.last_links.reduce_s, 1),),
        2: ((first_s, 1), (reduce_s, 1)),
    }.get(units, ((first_s, 1), (both_s, 1), (middle_s, units - 3), (last_s, 1)))
    behind_s = min(reduce_s, problem.fill_s) if units > 1 else 0.0
    hidden_s = min(update_s, behind_s) + min(update_s, problem.root_links.reduce_s)
    return (*forward, (0.0, 1)), backward, middle_s, hidden_s


def one_by_one(found: Windows) -> list[float]:
    return [window_s for window_s, count in found for _ in range(count)]


@settings(deadline=None, max_examples=400)
@given(problems)
def test_a_compiled_program_has_the_windows_of_the_closed_form(problem):
    forward, backward, middle_s, hidden_s = closed_form(problem)
    assert one_by_one(windows.forward_windows(problem)) == one_by_one(forward)
    assert one_by_one(windows.backward_windows(problem)) == one_by_one(backward)
    assert windows.backward_collectives_s(problem) == middle_s
    assert windows.hidden_updates_s(problem) == pytest.approx(hidden_s)


@settings(deadline=None, max_examples=100)
@given(problems)
def test_windows_with_and_without_resharding_are_of_the_same_units(problem):
    both = [windows.backward_windows(problem.resharding(choice)) for choice in (True, False)]
    assert [count for _, count in both[0]] == [count for _, count in both[1]]


@settings(deadline=None, max_examples=200)
@given(problems, seconds)
def test_updates_have_the_rooms_that_passes_and_collectives_leave(problem, backward_s):
    reduce_s, update_s = problem.links.reduce_s, problem.unit_update_s * problem.early_update
    gather_s, both_s = problem.links.gather_s, problem.links.both_s
    if not problem.reshard_after_forward:
        gather_s, both_s = 0.0, reduce_s
    rooms = [problem.root_links.reduce_s]
    if problem.units > 1:
        rooms.append(min(reduce_s, problem.fill_s))
    if problem.units > 2:
        rooms.append(reduce_s - backward_s)
        rooms += [both_s - max(gather_s, backward_s)] * (problem.units - 3)
    expected = sorted(max(0.0, room_s - update_s) for room_s in rooms)
    assert one_by_one(windows.rooms_of_updates(problem, backward_s)) == expected
