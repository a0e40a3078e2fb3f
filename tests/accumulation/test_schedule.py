"""The order of a step: what is gathered when, that every pass finds its unit, one reduce each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cephalo.plan.program import (
    Action,
    Operation,
    Visit,
    backward_actions,
    forward_actions,
)

COLLECTIVE = (Operation.GATHER, Operation.REDUCE, Operation.FREE)


def step(
    visits: list[Visit],
    microbatches: int,
    trainable: list[bool] | None = None,
    *,
    prefetch: bool = True,
    reshard: bool = True,
) -> list[Action]:
    trainable = [True] * 9 if trainable is None else trainable
    return [
        *forward_actions(visits, microbatches, prefetch=prefetch, reshard=reshard),
        *backward_actions(visits, microbatches, trainable, prefetch=prefetch, reshard=reshard),
    ]


def written(actions: list[Action]) -> str:
    """``ga`` gather a, ``a0`` forward of microbatch 0, ``A0`` backward, ``ra`` reduce, ``fa``."""
    words = []
    for action in actions:
        letter = "abcdefgh"[action.unit] if action.unit >= 0 else ""
        words.append(
            {
                Operation.GATHER: f"g{letter}",
                Operation.FORWARD: f"{letter}{action.microbatch}",
                Operation.TAIL: f"tail{action.microbatch}",
                Operation.BACKWARD: f"{letter.upper()}{action.microbatch}",
                Operation.REDUCE: f"r{letter}",
                Operation.FREE: f"f{letter}",
            }[action.operation]
        )
    return " ".join(words)


def chain(length: int) -> list[Visit]:
    return [Visit(unit) for unit in range(length)]


# -- examples ---------------------------------------------------------------------------------


def test_the_worked_example_of_the_docstring():
    assert written(list(forward_actions(chain(3), 2))) == (
        "ga gb a0 a1 fa gc b0 b1 fb c0 tail0 c1 tail1"
    )
    assert written(list(backward_actions(chain(3), 2, [True] * 3))) == (
        "gb C0 C1 rc fc ga B0 B1 rb fb A0 A1 ra fa"
    )


def test_an_order_that_is_being_discovered_is_never_pulled_ahead_of_use():
    pulled = []

    def visits():
        for unit in range(3):
            pulled.append(unit)
            yield Visit(unit)

    for action in forward_actions(visits(), 2, prefetch=False):
        if action.operation is Operation.FORWARD:
            assert pulled[-1] == action.unit


def test_a_rank_without_data_gathers_and_reduces_in_the_same_order():
    assert written(step(chain(2), 0)) == "ga gb fa ga rb fb ra fa"


def test_a_single_unit_is_gathered_once_and_stays():
    assert written(step(chain(1), 1)) == "ga a0 tail0 A0 ra fa"


def test_no_visit_at_all_is_an_empty_step():
    assert step([], 2) == []


def test_a_unit_used_twice_in_a_row_is_kept_gathered_and_reduced_once():
    assert written(step([Visit(0), Visit(0)], 1)) == "ga a0 a0 tail0 A0 A0 ra fa"


def test_a_unit_used_again_later_is_reduced_after_its_first_use_which_comes_last_in_the_backward():
    assert written(step([Visit(0), Visit(1), Visit(0)], 1)) == (
        "ga gb a0 fa ga b0 fb a0 tail0 gb A0 fa ga B0 rb fb A0 ra fa"
    )


def test_a_frozen_unit_passes_gradients_on_and_is_not_reduced():
    assert written(list(backward_actions(chain(2), 1, [True, False]))) == "ga B0 fb A0 ra fa"


def test_visits_without_gradient_are_not_in_the_backward():
    visits = [Visit(0, False), Visit(1), Visit(2)]
    assert written(list(backward_actions(visits, 1, [True] * 3))) == "gb C0 rc fc B0 rb fb"


def test_a_last_visit_without_gradient_is_given_back_before_the_backward_gathers():
    visits = [Visit(0), Visit(1, False)]
    assert written(list(backward_actions(visits, 1, [True] * 2))) == "fb ga A0 ra fa"


def test_when_no_visit_has_a_gradient_what_is_held_is_given_back():
    assert written(list(backward_actions([Visit(0, False)], 3, [True]))) == "fa"


def test_a_unit_used_with_and_without_gradient_is_reduced_once():
    visits = [Visit(0, False), Visit(0), Visit(1)]
    assert written(list(backward_actions(visits, 1, [True] * 2))) == "ga B0 rb fb A0 ra fa"


def test_without_resharding_units_stay_until_their_last_backward():
    assert written(step(chain(3), 2, reshard=False)) == (
        "ga gb a0 a1 gc b0 b1 c0 tail0 c1 tail1 C0 C1 rc fc B0 B1 rb fb A0 A1 ra fa"
    )


def test_without_resharding_a_unit_used_again_stays_for_both():
    assert written(step([Visit(0), Visit(1), Visit(0)], 1, reshard=False)) == (
        "ga gb a0 b0 a0 tail0 A0 B0 rb fb A0 ra fa"
    )


def test_without_resharding_what_has_no_backward_is_given_back_before_it():
    visits = [Visit(0, False), Visit(1), Visit(2, False), Visit(3)]
    assert written(list(backward_actions(visits, 1, [True] * 4, reshard=False))) == (
        "fa fc D0 rd fd B0 rb fb"
    )


# -- properties -------------------------------------------------------------------------------

some_visits = st.lists(st.builds(Visit, st.integers(0, 4), st.booleans()), max_size=12)
some_trainable = st.lists(st.booleans(), min_size=5, max_size=5)
counts = st.integers(0, 3)


@given(some_visits, counts, some_trainable, st.booleans(), st.booleans())
def test_whatever_is_computed_is_gathered_and_nothing_is_left_gathered(
    visits, microbatches, trainable, prefetch, reshard
):
    gathered: set[int] = set()
    for action in step(visits, microbatches, trainable, prefetch=prefetch, reshard=reshard):
        match action.operation:
            case Operation.GATHER:
                assert action.unit not in gathered, "gathered twice"
                gathered.add(action.unit)
            case Operation.FREE:
                gathered.remove(action.unit)
            case Operation.FORWARD | Operation.BACKWARD:
                assert action.unit in gathered
                assert visits[action.visit].unit == action.unit
        if reshard:
            assert len(gathered) <= (2 if prefetch else 1)
    assert not gathered


@given(some_visits, counts, some_trainable)
def test_every_microbatch_makes_every_visit_once_forward_and_once_backward(
    visits, microbatches, trainable
):
    done = Counter(
        (action.operation, action.visit, action.microbatch)
        for action in step(visits, microbatches, trainable)
        if action.operation in (Operation.FORWARD, Operation.BACKWARD)
    )
    expected = Counter()
    for position, visit in enumerate(visits):
        for microbatch in range(microbatches):
            expected[Operation.FORWARD, position, microbatch] = 1
            if visit.differentiable:
                expected[Operation.BACKWARD, position, microbatch] = 1
    assert done == expected


@given(some_visits, counts, some_trainable)
def test_visits_go_in_order_forward_and_in_reverse_backward(visits, microbatches, trainable):
    actions = step(visits, microbatches, trainable)
    forward = [a.visit for a in actions if a.operation is Operation.FORWARD]
    backward = [a.visit for a in actions if a.operation is Operation.BACKWARD]
    assert forward == sorted(forward)
    assert backward == sorted(backward, reverse=True)


@given(some_visits, counts, some_trainable)
def test_every_trainable_unit_with_a_backward_is_reduced_once_after_its_last_backward(
    visits, microbatches, trainable
):
    actions = step(visits, microbatches, trainable)
    reduced = [action.unit for action in actions if action.operation is Operation.REDUCE]
    used = {visit.unit for visit in visits if visit.differentiable}
    assert sorted(reduced) == sorted(unit for unit in used if trainable[unit])
    for unit in reduced:
        at = actions.index(next(a for a in actions if a == Action(Operation.REDUCE, unit, a.visit)))
        later = actions[at + 1 :]
        assert not any(a.operation is Operation.BACKWARD and a.unit == unit for a in later)


@given(some_visits, st.integers(1, 3), some_trainable, st.booleans())
def test_the_collectives_do_not_depend_on_the_number_of_microbatches(
    visits, microbatches, trainable, prefetch
):
    def collectives(count: int) -> list[Action]:
        actions = step(visits, count, trainable, prefetch=prefetch)
        return [action for action in actions if action.operation in COLLECTIVE]

    assert collectives(0) == collectives(microbatches)


@given(some_visits, counts, some_trainable, st.booleans())
def test_without_resharding_every_unit_is_gathered_once_and_nothing_else_changes(
    visits, microbatches, trainable, prefetch
):
    stays = step(visits, microbatches, trainable, prefetch=prefetch, reshard=False)
    gathers = Counter(a.unit for a in stays if a.operation is Operation.GATHER)
    assert gathers == dict.fromkeys({visit.unit for visit in visits}, 1)
    moved = (Operation.GATHER, Operation.FREE)
    resharded = step(visits, microbatches, trainable, prefetch=prefetch)
    assert [a for a in stays if a.operation not in moved] == [
        a for a in resharded if a.operation not in moved
    ]


@given(st.permutations(range(6)), counts)
def test_units_used_once_are_gathered_twice_but_the_last_which_is_gathered_once(order, count):
    actions = step([Visit(unit) for unit in order], count)
    gathers = Counter(a.unit for a in actions if a.operation is Operation.GATHER)
    assert gathers == {unit: 1 if unit == order[-1] else 2 for unit in order}
    reduces = Counter(a.unit for a in actions if a.operation is Operation.REDUCE)
    assert reduces == dict.fromkeys(order, 1)


@given(some_visits, st.integers(1, 3))
def test_every_microbatch_ends_with_one_tail_after_its_last_visit(visits, microbatches):
    actions = list(forward_actions(visits, microbatches))
    tails = [a.microbatch for a in actions if a.operation is Operation.TAIL]
    assert tails == (list(range(microbatches)) if visits else [])
    for index, action in enumerate(actions):
        if action.operation is Operation.TAIL:
            before = actions[index - 1]
            assert before.operation is Operation.FORWARD
            assert (before.visit, before.microbatch) == (len(visits) - 1, action.microbatch)


@pytest.mark.parametrize("prefetch", [True, False])
def test_with_prefetch_the_next_unit_is_gathered_before_the_current_one_is_computed(prefetch):
    actions = list(forward_actions(chain(4), 1, prefetch=prefetch))
    for unit in range(3):
        following = actions.index(Action(Operation.GATHER, unit + 1, unit + 1))
        computed = actions.index(Action(Operation.FORWARD, unit, unit, 0))
        assert (following < computed) is prefetch
