"""The order of a step: what is gathered when, that every pass finds its unit, one reduce each."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_cephalo.common.errors import ProgramError
from lightning_cephalo.plan import PlanError
from lightning_cephalo.plan import program as module
from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.program import (
    COLLECTIVES,
    COMPUTE,
    NO_ENDS,
    NONE,
    ROOT,
    UNITS_THAT_STAY,
    Ends,
    Instruction,
    Instructions,
    Operation,
    Program,
    Visit,
    backward_order,
    compile_step,
    evaluation_of,
    gathered_after,
    layered_forward,
    prefetch,
    text,
)
from lightning_cephalo.plan.state_homes import StateHome

MOVED = (Operation.GATHER, Operation.FREE)
COPIES = (Operation.OFFLOAD, Operation.FETCH)
ALL = [True] * 9

# the machine is shared
relaxed = settings(deadline=None)


def chain(length: int) -> list[Visit]:
    return [Visit(unit) for unit in range(1, length + 1)]


def layered(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool] = ALL,
    ends: Ends = NO_ENDS,
    reshards: bool = True,
) -> Program:
    """The order that all passes begin with."""
    return module.layered(visits, microbatches, trainable, ends, reshards)


def step(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool] = ALL,
    *,
    is_prefetched: bool = True,
    reshard: bool = True,
) -> Program:
    if is_prefetched:
        return compile_step(visits, microbatches, trainable, reshard_after_forward=reshard)
    return layered(visits, microbatches, trainable, reshards=reshard)


def of(operation: Operation, instructions: Instructions) -> list[Instruction]:
    return [each for each in instructions if each.operation is operation]


# -- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "written"),
    [
        (Instruction(Operation.GATHER, ROOT), "G0"),
        (Instruction(Operation.ARM, 3, 2), "Z3"),
        (Instruction(Operation.FORWARD, 2, 1, 0), "F2.0"),
        (Instruction(Operation.LOSS, ROOT, 1, 12), "L0.12"),
        (Instruction(Operation.OFFLOAD, 2, 1, 0), "O2.0"),
        (Instruction(Operation.FETCH, 2, 1, 0), "H2.0"),
        (Instruction(Operation.BACKWARD, 10, 9, 3), "B10.3"),
        (Instruction(Operation.REDUCE, 1, 0), "R1"),
        (Instruction(Operation.FREE, 1), "X1"),
        (Instruction(Operation.MEET, 1, 0), "M1"),
        (Instruction(Operation.AGREE), "A"),
        (Instruction(Operation.UPDATE), "U"),
        (Instruction(Operation.FETCH_STATE, 3), "I3"),
        (Instruction(Operation.HOST_UPDATE, 2), "C2"),
        (Instruction(Operation.STORE_STATE, ROOT), "S0"),
        (Instruction(Operation.WAIT), "W"),
        (Instruction(Operation.OVERHEAD), "V"),
    ],
)
def test_an_instruction_is_written_as_letter_unit_and_microbatch(instruction, written):
    assert str(instruction) == written


def test_every_operation_has_a_letter_of_its_own_and_a_colour():
    assert len({each.letter for each in Operation}) == len(Operation)
    assert all(re.fullmatch("#[0-9A-F]{6}", each.colour) for each in Operation)
    assert [pickle.loads(pickle.dumps(each)) for each in Operation] == list(Operation)
    assert Operation("fetch state") is Operation.FETCH_STATE


def test_instructions_are_written_in_their_order():
    assert text([]) == ""
    assert text(iter([Instruction(Operation.GATHER, 2), Instruction(Operation.AGREE)])) == "G2 A"


def test_a_program_is_its_three_parts_in_order_and_is_written_in_three_lines():
    gather, free = Instruction(Operation.GATHER, 1), Instruction(Operation.FREE, 1)
    update = Instruction(Operation.UPDATE)
    program = Program((gather,), (free,))
    assert program.instructions == (gather, free, update)
    assert str(program) == "G1\nX1\nU"
    assert Program((), (gather, free), (update, free)).instructions == (gather, free, update, free)


# -- the worked examples of the module --------------------------------------------------------


def test_the_layered_order_is_the_one_that_the_module_explains():
    program = layered(chain(2), 2)
    assert str(program) == (
        "G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 X1 G2 F2.0 L0.0 F2.1 L0.1 A\n"
        "Z2 B2.1 B2.0 R2 X2 G1 Z1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )
    assert "layered " + " ".join(str(program).split()) in " ".join(module.__doc__.split())


def test_without_resharding_there_is_no_free_in_the_forward_and_no_gather_in_the_backward():
    assert str(layered(chain(2), 2, reshards=False)) == (
        "G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 G2 F2.0 L0.0 F2.1 L0.1 A\n"
        "Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )


def test_prefetch_moves_each_gather_before_the_visit_ahead_of_it():
    program = layered(chain(2), 2)
    assert text(prefetch(program.forward)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 F1.1 X1 F2.0 L0.0 F2.1 L0.1 A"
    )
    assert text(prefetch(program.backward)) == "G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A"


def test_offload_copies_behind_the_forward_and_fetches_two_visits_ahead():
    assert str(compile_step(chain(3), 2, ALL, offload_boundaries=True)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 O1.0 F1.1 O1.1 X1 G3 F2.0 F2.1 X2 F3.0 L0.0 F3.1 L0.1 A\n"
        "G2 Z3 B3.1 H1.1 B3.0 H1.0 R3 X3 G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )


def test_an_early_update_follows_the_next_reduce_and_the_rest_is_left_to_the_last():
    assert str(compile_step(chain(2), 2, ALL, updates_early=True)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 F1.1 X1 F2.0 L0.0 F2.1 L0.1 A\n"
        "G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 U2 R0 X0 U1 A\n"
        "U"
    )
    assert compile_step([], 1, ALL, updates_early=True) == compile_step([], 1, ALL)


def homes_of(letters: str) -> tuple[StateHome, ...]:
    kinds = {"r": StateHome.RESIDENT, "s": StateHome.STREAMED, "h": StateHome.HOST}
    return tuple(kinds[letter] for letter in letters)


def test_state_in_host_memory_travels_with_the_units_updates():
    def moved(homes: str, updates_early: bool = True) -> Program:
        return compile_step(chain(4), 0, ALL, updates_early=updates_early, homes=homes_of(homes))

    streamed = moved("rrsss")
    assert text(streamed.backward) == (
        "G3 Z4 R4 I4 X4 G2 Z3 R3 I3 X3 G1 U4 S4 Z2 R2 I2 X2 U3 S3 Z1 R1 X1 U2 S2 R0 X0 U1 A"
    )
    assert text(streamed.update) == "U"
    # the host begins at once; what it has updated is taken at last
    mixed = moved("srhsh")
    assert text(mixed.backward) == (
        "G3 Z4 R4 X4 G2 Z3 R3 I3 X3 G1 C4 Z2 R2 X2 U3 S3 Z1 R1 X1 C2 R0 X0 U1 A"
    )
    assert text(mixed.update) == "I0 U0 S0 U S4 S2"
    behind = moved("rshss", updates_early=False)
    assert behind.backward == compile_step(chain(4), 0, ALL).backward
    assert text(behind.update) == "C2 I4 I3 U4 S4 I1 U3 S3 U1 S1 U S2"
    assert moved("rrrrr") == compile_step(chain(4), 0, ALL, updates_early=True)


def test_embeddings_and_heads_are_there_while_they_are_needed():
    visits = [Visit(unit) for unit in (1, 2, 3)]
    program = layered(visits, 2, ALL, Ends(frozenset({1}), frozenset({3})))
    assert str(program) == (
        "G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 X1 G2 G3 F2.0 F2.1 Z3 L3.0 L3.1 A\n"
        "R3 X3 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 R0 X0 A\n"
        "U"
    )
    names = str.maketrans({"1": "e", "2": "1", "3": "h"})
    for part in (program.forward, program.backward):
        shown = " ".join(
            word[:-1].translate(names) + word[-1] if "." in word else word.translate(names)
            for word in text(part).split()
        )
        assert shown in " ".join(module.__doc__.split())
    # the gather hides behind the unit before, which stays
    ahead = compile_step(visits, 1, ALL, ends=program.ends)
    assert text(ahead.forward) == "G0 G1 Z0 F0.0 G2 G3 F1.0 X1 F2.0 Z3 L3.0 A"
    kept = compile_step(visits, 1, ALL, ends=program.ends, reshard_after_forward=False)
    assert text(kept.forward) == "G0 G1 Z0 F0.0 G2 G3 F1.0 X1 F2.0 Z3 L3.0 A"
    assert text(kept.backward) == "R3 X3 Z2 B2.0 R2 X2 Z1 B1.0 R1 R0 X0 A"
    early = compile_step(visits, 1, ALL, ends=program.ends, updates_early=True)
    assert text(early.backward) == "R3 X3 Z2 B2.0 R2 X2 U3 Z1 B1.0 R1 U2 R0 X0 U1 A"


def test_frozen_ends_have_no_gradients():
    ends = Ends(frozenset({1}), frozenset({3}))
    visits = [Visit(1, False), Visit(2, False), Visit(3)]
    program = compile_step(visits, 1, [True, False, True, False], ends=ends)
    assert text(program.forward) == "G0 G1 Z0 F0.0 G2 G3 F1.0 X1 F2.0 L3.0 A"
    assert text(program.backward) == "X3 X2 R0 X0 A"


def test_a_head_that_is_visited_before_too_is_reduced_once():
    ends = Ends(heads=frozenset({2}))
    program = layered([Visit(2), Visit(1), Visit(2)], 1, ALL, ends)
    assert text(program.forward) == "G0 Z0 F0.0 G2 F2.0 X2 G1 F1.0 G2 Z2 L2.0 A"
    assert text(program.backward) == "Z1 B1.0 R1 B2.0 R2 X1 X2 R0 X0 A"
    twice = layered([Visit(1), Visit(2), Visit(2)], 1, ALL, ends)
    assert text(twice.forward) == "G0 Z0 F0.0 G1 F1.0 G2 F2.0 Z2 L2.0 A"
    assert text(twice.backward) == "B2.0 R2 Z1 B1.0 R1 X1 X2 R0 X0 A"


def test_a_head_where_microbatches_meet_runs_like_other_units():
    visits = [Visit(1), Visit(2), Visit(2, meeting=0)]
    program = layered(visits, 1, ALL, Ends(heads=frozenset({2})))
    assert text(program.forward) == "G0 Z0 F0.0 G1 F1.0 G2 F2.0 M2 F2.0 L0.0 A"
    check([program])


def test_a_traced_forward_arms_a_head_before_the_first_loss_behind_it():
    forward = layered_forward(
        [Visit(1), Visit(2)],
        2,
        lambda visit, microbatch: (visit, microbatch) == (1, 1),
        Ends(heads=frozenset({2})),
        ALL,
    )
    assert text(forward) == "G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 G2 F2.0 F2.1 Z2 L2.1 A"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("G0 Z0 F0.0 L3.0", "not gathered"),
        ("G0 Z0 G1 X1 F1.0", "not gathered"),
        ("Z3", "not gathered"),
        ("G0 Z0 Z1 Z1", "armed already"),
        ("G0 Z0 G3 F0.0 L3.0 A R0 X0 A", r"\[3\] still gathered"),
    ],
)
def test_ends_that_are_not_there_are_refused(wrong, message):
    letters = {each.letter: each for each in Operation}

    def read(word: str) -> Instruction:
        unit, _, microbatch = word[1:].partition(".")
        return Instruction(letters[word[0]], int(unit or NONE), microbatch=int(microbatch or NONE))

    ends = Ends(frozenset({1}), frozenset({3}))
    program = Program(tuple(map(read, wrong.split())), (), ends=ends)
    with pytest.raises(ProgramError, match=message):
        check([program])


def test_a_step_of_three_units_and_two_microbatches():
    program = compile_step(chain(3), 2, ALL)
    assert text(program.forward) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 F1.1 X1 G3 F2.0 F2.1 X2 F3.0 L0.0 F3.1 L0.1 A"
    )
    assert text(program.backward) == (
        "G2 Z3 B3.1 B3.0 R3 X3 G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A"
    )
    assert text(program.update) == "U"


@pytest.mark.parametrize("reshards", [True, False])
def test_an_order_that_is_being_discovered_is_never_pulled_ahead_of_use(reshards):
    pulled: list[int] = []

    def visits() -> Iterator[Visit]:
        for unit in (1, 2, 2, 3):
            pulled.append(unit)
            yield Visit(unit)

    taken = []
    case = (visits(), 2, lambda visit, _: visit == 3)
    for instruction in layered_forward(*case, reshards=reshards):
        if instruction.operation in COMPUTE:
            assert len(pulled) == instruction.visit + 1
            taken.append(str(instruction))
    assert " ".join(taken) == "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 F2.0 F2.1 F3.0 L0.0 F3.1 L0.1"


def test_without_resharding_a_traced_forward_gathers_each_unit_once():
    visits = [Visit(1), Visit(2), Visit(1)]
    forward = layered_forward(visits, 1, lambda visit, _: visit == 2, reshards=False)
    assert text(forward) == "G0 Z0 F0.0 G1 F1.0 G2 F2.0 F1.0 L0.0 A"


def test_whether_a_microbatch_has_returned_is_asked_when_its_forward_has_been_taken():
    asked: list[tuple[int, int]] = []
    returns = {(0, 1), (1, 0)}

    def has_returned(visit: int, microbatch: int) -> bool:
        asked.append((visit, microbatch))
        return (visit, microbatch) in returns

    taken = []
    for instruction in layered_forward(chain(2), 2, has_returned):
        if instruction.operation is Operation.FORWARD:
            assert (instruction.visit, instruction.microbatch) not in asked
        taken.append(instruction)
    assert text(taken) == "G0 Z0 F0.0 F0.1 G1 F1.0 F1.1 L0.1 X1 G2 F2.0 L0.0 F2.1 A"
    assert asked == [(visit, microbatch) for visit in (NONE, 0, 1) for microbatch in (0, 1)]


def test_a_forward_that_stands_in_front_of_a_visit_goes_on_from_there():
    rest = tuple(layered_forward(chain(3)[1:], 2, lambda visit, _: visit == 2, start=1))
    assert text(rest) == "G2 F2.0 F2.1 X2 G3 F3.0 L0.0 F3.1 L0.1 A"
    assert rest == layered(chain(3), 2).forward[-len(rest) :]


def test_a_forward_whose_visits_are_over_goes_on_with_the_losses_that_are_due():
    rest = list(layered_forward([], 3, lambda visit, microbatch: microbatch != 1, start=2))
    assert text(rest) == "L0.0 L0.2 A"
    assert [each.visit for each in rest] == [1, 1, NONE]


def test_a_forward_that_goes_on_never_pulls_an_order_ahead_of_use():
    pulled: list[int] = []

    def visits() -> Iterator[Visit]:
        for unit in (3, 1, 1):
            pulled.append(unit)
            yield Visit(unit)

    for instruction in layered_forward(visits(), 2, lambda visit, _: visit == 6, start=4):
        if instruction.operation in COMPUTE:
            assert len(pulled) == instruction.visit - 4 + 1


def test_a_rank_without_data_gathers_and_reduces_in_the_same_order():
    assert str(step(chain(2), 0)) == "G0 G1 Z0 G2 X1 A\nG1 Z2 R2 X2 Z1 R1 X1 R0 X0 A\nU"


def test_a_single_unit_is_gathered_once_and_stays():
    assert str(step(chain(1), 1)) == "G0 G1 Z0 F0.0 F1.0 L0.0 A\nZ1 B1.0 R1 X1 R0 X0 A\nU"


def test_no_visit_at_all_is_a_step_of_the_root_unit_alone():
    assert str(step([], 2)) == "G0 Z0 F0.0 L0.0 F0.1 L0.1 A\nR0 X0 A\nU"


def test_a_unit_used_twice_in_a_row_is_kept_gathered_and_reduced_once():
    assert str(step([Visit(1), Visit(1)], 1)) == (
        "G0 G1 Z0 F0.0 F1.0 F1.0 L0.0 A\nZ1 B1.0 B1.0 R1 X1 R0 X0 A\nU"
    )


def test_a_unit_used_again_later_is_reduced_after_its_first_use_which_comes_last_in_the_backward():
    assert str(step([Visit(1), Visit(2), Visit(1)], 1)) == (
        "G0 G1 Z0 F0.0 G2 F1.0 X1 G1 F2.0 X2 F1.0 L0.0 A\n"
        "G2 Z1 B1.0 X1 G1 Z2 B2.0 R2 X2 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )


def test_microbatches_meet_in_units_and_between_them_while_the_next_unit_is_gathered():
    visits = [
        Visit(1),
        Visit(1, meeting=0),
        Visit(ROOT, meeting=1),
        Visit(2),
        Visit(2, meeting=2),
        Visit(2, meeting=3),
    ]
    assert str(step(visits, 2)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 F1.1 M1 F1.0 F1.1 M0 F0.0 F0.1 X1"
        " F2.0 F2.1 M2 F2.0 F2.1 M2 F2.0 L0.0 F2.1 L0.1 A\n"
        "G1 Z2 B2.1 B2.0 M2 B2.1 B2.0 M2 B2.1 B2.0 R2 B0.1 B0.0 M0 X2"
        " Z1 B1.1 B1.0 M1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )
    for reshard in (True, False):
        for offloads in (True, False):
            options = {"reshard_after_forward": reshard, "offload_boundaries": offloads}
            check([compile_step(visits, count, ALL, **options) for count in (2, 0, 1)])


def test_a_meeting_in_a_unit_that_is_not_gathered_is_refused():
    program = layered([Visit(1), Visit(1, meeting=0)], 1)
    moved = [each for each in program.forward if each.operation is not Operation.MEET]
    meeting = Instruction(Operation.MEET, 1, 1)
    with pytest.raises(ProgramError, match=r"cannot run M1 .*the unit is not gathered"):
        check([replace(program, forward=(meeting, *moved))])


def test_a_frozen_unit_passes_gradients_on_and_is_not_reduced():
    program = step(chain(2), 1, [True, True, False])
    assert text(program.backward) == "G1 B2.0 X2 Z1 B1.0 R1 X1 R0 X0 A"


def test_visits_without_gradient_are_not_in_the_backward():
    program = step([Visit(1, False), Visit(2), Visit(3)], 1)
    assert text(program.backward) == "G2 Z3 B3.0 R3 X3 Z2 B2.0 R2 X2 R0 X0 A"


def test_a_last_visit_without_gradient_is_given_back_before_the_backward_gathers():
    program = step([Visit(1), Visit(2, False)], 1)
    assert text(program.backward) == "X2 G1 Z1 B1.0 R1 X1 R0 X0 A"


def test_when_no_visit_has_a_gradient_what_is_held_is_given_back():
    assert text(step([Visit(1, False)], 3).backward) == "X1 R0 X0 A"


def test_a_unit_used_with_and_without_gradient_is_reduced_once():
    program = step([Visit(1, False), Visit(1), Visit(2)], 1)
    assert text(program.backward) == "G1 Z2 B2.0 R2 X2 Z1 B1.0 R1 X1 R0 X0 A"


def test_without_resharding_units_stay_until_their_last_backward():
    assert str(step(chain(3), 2, reshard=False)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 F1.1 G3 F2.0 F2.1 F3.0 L0.0 F3.1 L0.1 A\n"
        "Z3 B3.1 B3.0 R3 X3 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )


def test_without_resharding_a_unit_used_again_stays_for_both():
    assert str(step([Visit(1), Visit(2), Visit(1)], 1, reshard=False)) == (
        "G0 G1 Z0 F0.0 G2 F1.0 F2.0 F1.0 L0.0 A\nZ1 B1.0 Z2 B2.0 R2 X2 B1.0 R1 X1 R0 X0 A\nU"
    )


def test_without_resharding_what_has_no_backward_is_given_back_before_it():
    visits = [Visit(1, False), Visit(2), Visit(3, False), Visit(4)]
    assert text(step(visits, 1, reshard=False).backward) == (
        "X1 X3 Z4 B4.0 R4 X4 Z2 B2.0 R2 X2 R0 X0 A"
    )


def test_a_step_without_gradients_passes_a_unit_where_a_rank_asks_for_it():
    assert text(evaluation_of(2, takes_part=True)) == "G2 F2.0 X2"
    assert text(evaluation_of(2, takes_part=False)) == "G2 X2"


def test_a_backward_passes_the_differentiable_visits_in_reverse():
    assert backward_order([]) == []
    assert backward_order([Visit(1), Visit(2, False), Visit(1), Visit(3)]) == [3, 2, 0]


def test_units_are_gathered_until_they_are_freed_in_the_order_of_their_gathers():
    program = compile_step(chain(3), 1, ALL)
    assert gathered_after(()) == ()
    assert gathered_after(program.forward[:2]) == (0, 1)
    assert gathered_after(program.forward[: text(program.forward).split().index("X2")]) == (0, 2, 3)
    assert gathered_after(program.forward) == (0, 3)
    assert gathered_after(program.backward[:1]) == (2,)
    assert gathered_after(iter(program.instructions)) == ()
    assert gathered_after(layered(chain(3), 1, reshards=False).forward) == (0, 1, 2, 3)


def test_a_unit_that_is_gathered_again_is_the_latest():
    gathers = [Instruction(Operation.GATHER, unit) for unit in (2, 1)]
    again = [Instruction(Operation.FREE, 2), Instruction(Operation.GATHER, 2)]
    assert gathered_after(gathers) == (2, 1)
    assert gathered_after([*gathers, *again]) == (1, 2)


# -- properties of a program ------------------------------------------------------------------

some_visits = st.lists(st.builds(Visit, st.integers(1, 5), st.booleans()), max_size=12)
some_trainable = st.lists(st.booleans(), min_size=6, max_size=6)
counts = st.integers(0, 3)


@relaxed
@given(some_visits, counts, some_trainable, st.booleans(), st.booleans())
def test_whatever_is_computed_is_gathered_and_nothing_is_left_gathered(
    visits, microbatches, trainable, is_prefetched, reshard
):
    gathered: set[int] = set()
    program = step(visits, microbatches, trainable, is_prefetched=is_prefetched, reshard=reshard)
    for instruction in program.instructions:
        match instruction.operation:
            case Operation.GATHER:
                assert instruction.unit not in gathered, "gathered twice"
                gathered.add(instruction.unit)
            case Operation.FREE:
                gathered.remove(instruction.unit)
            case Operation.FORWARD | Operation.BACKWARD:
                assert instruction.unit in gathered
                is_root = instruction.visit == NONE
                expected = ROOT if is_root else visits[instruction.visit].unit
                assert instruction.unit == expected
            case Operation.LOSS | Operation.ARM:
                assert instruction.unit in gathered
        if reshard:
            assert len(gathered - {ROOT}) <= (2 if is_prefetched else 1)
    assert not gathered


@relaxed
@given(some_visits, counts, some_trainable)
def test_every_microbatch_makes_every_visit_once_forward_and_once_backward(
    visits, microbatches, trainable
):
    passes = (Operation.FORWARD, Operation.BACKWARD)
    done = Counter(
        (each.operation, each.visit, each.microbatch)
        for each in step(visits, microbatches, trainable).instructions
        if each.operation in passes
    )
    expected: Counter[tuple[Operation, int, int]] = Counter()
    for microbatch in range(microbatches):
        expected[Operation.FORWARD, NONE, microbatch] = 1
        for position, visit in enumerate(visits):
            expected[Operation.FORWARD, position, microbatch] = 1
            if visit.differentiable:
                expected[Operation.BACKWARD, position, microbatch] = 1
    assert done == expected


@relaxed
@given(some_visits, counts, some_trainable, st.booleans())
def test_visits_go_in_order_forward_and_in_reverse_backward(
    visits, microbatches, trainable, is_prefetched
):
    program = step(visits, microbatches, trainable, is_prefetched=is_prefetched)
    forward = [(each.visit, each.microbatch) for each in of(Operation.FORWARD, program.forward)]
    backward = [
        (-each.visit, -each.microbatch) for each in of(Operation.BACKWARD, program.backward)
    ]
    assert forward == sorted(forward)
    assert backward == sorted(backward)
    assert not of(Operation.BACKWARD, program.forward)
    assert not of(Operation.FORWARD, program.backward)


@relaxed
@given(some_visits, counts, some_trainable, st.booleans())
def test_every_trainable_unit_with_a_backward_is_armed_before_and_reduced_once_after_it(
    visits, microbatches, trainable, reshard
):
    program = step(visits, microbatches, trainable, reshard=reshard)
    instructions = program.instructions
    used = {visit.unit for visit in visits if visit.differentiable}
    expected = sorted(unit for unit in used if trainable[unit])
    for operation in (Operation.ARM, Operation.REDUCE):
        units = [each.unit for each in of(operation, instructions) if each.unit != ROOT]
        assert sorted(units) == expected
    for unit in expected:
        own = [each.operation for each in program.backward if each.unit == unit]
        passes = [at for at, each in enumerate(own) if each is Operation.BACKWARD]
        armed, reduced = own.index(Operation.ARM), own.index(Operation.REDUCE)
        assert all(armed < at < reduced for at in passes)
        assert armed < reduced


@relaxed
@given(some_visits, counts, some_trainable)
def test_the_root_unit_is_armed_before_all_losses_and_reduced_behind_all_units(
    visits, microbatches, trainable
):
    program = step(visits, microbatches, trainable)
    words = text(program.forward).split()
    assert words.count("G0") == words.count("Z0") == 1
    assert all(words.index("Z0") < at for at, word in enumerate(words) if word[0] == "L")
    assert words[0] == "G0"
    assert words[-1] == "A"
    assert text(program.backward[-3:]) == "R0 X0 A"
    assert text(program.backward).split().count("R0") == 1


@relaxed
@given(some_visits, st.integers(1, 3), some_trainable, st.booleans(), st.booleans())
def test_the_collectives_do_not_depend_on_the_number_of_microbatches(
    visits, microbatches, trainable, is_prefetched, reshard
):
    def shared(count: int) -> list[Instruction]:
        program = step(visits, count, trainable, is_prefetched=is_prefetched, reshard=reshard)
        kinds = {*COLLECTIVES, Operation.FREE}
        return [each for each in program.instructions if each.operation in kinds]

    assert shared(0) == shared(microbatches)


@relaxed
@given(some_visits, counts, some_trainable, st.booleans())
def test_without_resharding_every_unit_is_gathered_once_and_nothing_else_changes(
    visits, microbatches, trainable, is_prefetched
):
    def instructions(reshard: bool) -> Instructions:
        return step(
            visits, microbatches, trainable, is_prefetched=is_prefetched, reshard=reshard
        ).instructions

    stays = instructions(False)
    gathers = Counter(each.unit for each in of(Operation.GATHER, stays))
    assert gathers == dict.fromkeys({ROOT, *(visit.unit for visit in visits)}, 1)
    resharded = instructions(True)
    assert [each for each in stays if each.operation not in MOVED] == [
        each for each in resharded if each.operation not in MOVED
    ]


@relaxed
@given(some_visits, counts, some_trainable)
def test_without_resharding_a_unit_is_freed_when_its_last_backward_is_done(
    visits, microbatches, trainable
):
    backward = step(visits, microbatches, trainable, reshard=False).backward
    used = {visit.unit for visit in visits if visit.differentiable}
    unused = {visit.unit for visit in visits} - used
    before = backward[: len(unused)]
    assert {each.unit for each in before} == unused
    assert all(each.operation is Operation.FREE for each in before)
    rest = backward[len(unused) :]
    last = {each.unit: at for at, each in enumerate(rest) if each.operation is not Operation.FREE}
    for unit in used & last.keys():
        assert rest[last[unit] + 1] == Instruction(
            Operation.FREE, unit, min(p for p in backward_order(visits) if visits[p].unit == unit)
        )


@relaxed
@given(st.permutations(range(1, 7)), counts)
def test_units_used_once_are_gathered_twice_but_the_last_which_is_gathered_once(order, count):
    instructions = step([Visit(unit) for unit in order], count).instructions
    gathers = Counter(each.unit for each in of(Operation.GATHER, instructions))
    assert gathers == {unit: 1 if unit in (ROOT, order[-1]) else 2 for unit in (ROOT, *order)}
    reduces = Counter(each.unit for each in of(Operation.REDUCE, instructions))
    assert reduces == dict.fromkeys((ROOT, *order), 1)


@relaxed
@given(some_visits, st.integers(1, 3))
def test_every_microbatch_ends_with_one_loss_after_its_last_visit(visits, microbatches):
    forward = step(visits, microbatches).forward
    losses = [each.microbatch for each in of(Operation.LOSS, forward)]
    assert losses == list(range(microbatches))
    for index, loss in enumerate(forward):
        if loss.operation is Operation.LOSS:
            before = forward[index - 1]
            assert before.operation is Operation.FORWARD
            assert (before.visit, before.microbatch) == (len(visits) - 1, loss.microbatch)


@relaxed
@given(some_visits, counts, st.integers(0, 12))
def test_a_forward_that_goes_on_is_the_end_of_the_whole_one(visits, microbatches, start):
    start = min(start, len(visits))
    last = len(visits) - 1
    rest = tuple(
        layered_forward(visits[start:], microbatches, lambda visit, _: visit == last, start=start)
    )
    whole = layered(visits, microbatches).forward
    operations = {Operation.FORWARD, Operation.LOSS, Operation.AGREE}
    assert [each for each in rest if each.operation in operations] == [
        each
        for each in whole
        if each.operation in operations
        and (each.visit >= start or each.operation is not Operation.FORWARD)
    ]
    # nothing is gathered where it begins
    held = [visits[start].unit] if start < len(visits) else []
    assert [each.unit for each in of(Operation.GATHER, rest)][:1] == held
    assert gathered_after(rest) == gathered_after(whole)[1:][: len(held)]


# -- passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_prefetched", [True, False])
def test_with_prefetch_the_next_unit_is_gathered_before_the_current_one_is_computed(is_prefetched):
    forward = text(step(chain(4), 1, is_prefetched=is_prefetched).forward).split()
    for unit in range(4):
        assert (forward.index(f"G{unit + 1}") < forward.index(f"F{unit}.0")) is is_prefetched


@pytest.mark.parametrize("is_prefetched", [True, False])
def test_with_prefetch_the_backward_gathers_the_next_unit_before_it_computes(is_prefetched):
    backward = text(step(chain(4), 1, is_prefetched=is_prefetched).backward).split()
    for unit in (4, 3, 2):
        assert (backward.index(f"G{unit - 1}") < backward.index(f"B{unit}.0")) is is_prefetched


@relaxed
@given(some_visits, counts, some_trainable, st.booleans())
def test_prefetch_moves_nothing_but_gathers_and_what_was_left_over(
    visits, microbatches, trainable, reshard
):
    plain, moved = (
        step(visits, microbatches, trainable, is_prefetched=is_prefetched, reshard=reshard)
        for is_prefetched in (False, True)
    )
    for before, after in ((plain.forward, moved.forward), (plain.backward, moved.backward)):
        assert Counter(before) == Counter(after)
        still = [[each for each in part if each.operation not in MOVED] for part in (before, after)]
        assert still[0] == still[1]
        gathers = [of(Operation.GATHER, part) for part in (before, after)]
        assert gathers[0] == gathers[1]


def test_offload_of_a_whole_step_with_prefetch():
    assert str(compile_step(chain(4), 2, ALL, offload_boundaries=True)) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 O1.0 F1.1 O1.1 X1 G3 F2.0 O2.0 F2.1 O2.1 X2"
        " G4 F3.0 F3.1 X3 F4.0 L0.0 F4.1 L0.1 A\n"
        "G3 Z4 B4.1 H2.1 B4.0 H2.0 R4 X4 G2 Z3 B3.1 H1.1 B3.0 H1.0 R3 X3"
        " G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A\n"
        "U"
    )


def test_two_visits_leave_nothing_to_offload():
    assert UNITS_THAT_STAY == 2
    away = compile_step(chain(2), 2, ALL, offload_boundaries=True)
    assert away == compile_step(chain(2), 2, ALL)


def test_offload_counts_visits_with_a_backward_only():
    visits = [Visit(1, False), Visit(2), Visit(3, False), Visit(4), Visit(5)]
    program = compile_step(visits, 1, ALL, offload_boundaries=True)
    assert text(program.forward) == (
        "G0 G1 Z0 F0.0 G2 F1.0 X1 G3 F2.0 O2.0 X2 G4 F3.0 X3 G5 F4.0 X4 F5.0 L0.0 A"
    )
    assert text(program.backward) == (
        "G4 Z5 B5.0 H2.0 R5 X5 G2 Z4 B4.0 R4 X4 Z2 B2.0 R2 X2 R0 X0 A"
    )


@relaxed
@given(some_visits, counts, some_trainable, st.booleans())
def test_every_offloaded_passage_is_fetched_once_two_backward_visits_ahead_of_its_own(
    visits, microbatches, trainable, reshard
):
    plain, program = (
        compile_step(
            visits,
            microbatches,
            trainable,
            reshard_after_forward=reshard,
            offload_boundaries=offloads,
        )
        for offloads in (False, True)
    )
    order = [position for position, visit in enumerate(visits) if visit.differentiable][::-1]
    away = {(position, microbatch) for position in order[2:] for microbatch in range(microbatches)}
    for part, copy, compute in (
        (program.forward, Operation.OFFLOAD, Operation.FORWARD),
        (program.backward, Operation.FETCH, Operation.BACKWARD),
    ):
        copies = of(copy, part)
        assert Counter((each.visit, each.microbatch) for each in copies) == dict.fromkeys(away, 1)
        for copied in copies:
            assert copied.unit == visits[copied.visit].unit
            ahead = 2 if copy is Operation.FETCH else 0
            beside = order[order.index(copied.visit) - ahead]
            expected = Instruction(compute, visits[beside].unit, beside, copied.microbatch)
            assert part[part.index(copied) - 1] == expected
    kept = [each for each in program.instructions if each.operation not in COPIES]
    assert kept == list(plain.instructions)


def test_a_traced_forward_copies_each_input_that_is_away_before_anything_follows():
    asked: list[int] = []

    def is_away(visit: int) -> bool:
        asked.append(visit)
        return visit == 1

    found = []
    forward = layered_forward(chain(2), 1, lambda visit, _: visit == 1, is_away=is_away)
    for instruction in forward:
        found.append(instruction)
        if instruction.operation is Operation.FORWARD:
            assert instruction.visit not in asked
    # what enters the root unit stays; a copy stands before the loss of its microbatch
    assert asked == [0, 1]
    assert text(found) == "G0 Z0 F0.0 G1 F1.0 X1 G2 F2.0 O2.0 L0.0 A"


# -- check: programs that pass ----------------------------------------------------------------

# per rank: how many microbatches, and whether their boundaries are offloaded
some_ranks = st.lists(st.tuples(counts, st.booleans()), min_size=2, max_size=4)


def programs_of(
    ranks: Sequence[tuple[int, bool]],
    visits: Sequence[Visit],
    trainable: Sequence[bool] = ALL,
    reshard: bool = True,
    early: bool = False,
    ends: Ends = NO_ENDS,
    homes: Sequence[StateHome] = (),
) -> list[Program]:
    return [
        compile_step(
            visits,
            microbatches,
            trainable,
            reshard_after_forward=reshard,
            offload_boundaries=offloads,
            updates_early=early,
            ends=ends,
            homes=homes,
        )
        for microbatches, offloads in ranks
    ]


@relaxed
@given(some_ranks, some_visits, some_trainable, st.booleans())
def test_ranks_with_any_number_of_microbatches_can_run_together(ranks, visits, trainable, reshard):
    check(programs_of(ranks, visits, trainable, reshard))


some_ends = st.lists(st.sampled_from(["block", "embedding", "head"]), min_size=3, max_size=3).map(
    lambda kinds: Ends(
        *(
            frozenset(n for n, own in enumerate(kinds, 1) if own == kind)
            for kind in ("embedding", "head")
        )
    )
)


@relaxed
@given(some_ranks, some_visits, some_trainable, st.booleans(), st.booleans(), some_ends)
@example(
    [(1, False)] * 2, [Visit(3), Visit(1), Visit(3)], ALL, True, False, Ends(heads=frozenset({3}))
)
@example([(0, False)] * 2, [Visit(1), Visit(3)] * 2, ALL, False, False, Ends(frozenset({3})))
@example(
    [(0, False), (1, False)],
    [Visit(1), Visit(3), Visit(2), Visit(1, False)],
    [False, False, True, False],
    True,
    False,
    Ends(heads=frozenset({1, 2})),
)
@example(
    [(0, False), (1, False)],
    [Visit(1), Visit(2), Visit(5)],
    [False] * 5 + [True],
    True,
    False,
    Ends(frozenset({2})),
)
def test_so_can_they_with_any_ends(ranks, visits, trainable, reshard, early, ends):
    programs = programs_of(ranks, visits, trainable, reshard, early, ends)
    check(programs)
    for program in programs:
        of_embeddings = [i for i in program.backward if i.unit in ends.embeddings]
        assert not any(i.operation is Operation.GATHER for i in of_embeddings)


@relaxed
@given(some_ranks, some_visits, some_trainable, st.booleans())
def test_early_updates_are_one_for_each_reduce_but_the_roots_and_change_nothing_else(
    ranks, visits, trainable, reshard
):
    late, early = (programs_of(ranks, visits, trainable, reshard, e) for e in (False, True))
    check(early)
    for before, after in zip(late, early, strict=True):
        found = list(after.backward)
        updates = [i for i in found if i.operation is Operation.UPDATE]
        assert [i.unit for i in updates] == [
            i.unit for i in before.backward if i.operation is Operation.REDUCE and i.unit != ROOT
        ]
        assert [i for i in found if i not in updates] == list(before.backward)


@relaxed
@given(
    some_ranks,
    some_visits,
    some_trainable,
    st.booleans(),
    st.lists(st.sampled_from(StateHome), min_size=9, max_size=9),
)
def test_wherever_state_lives_each_unit_is_updated_once_and_nothing_else_changes(
    ranks, visits, trainable, early, homes
):
    before, after = (
        programs_of(ranks, visits, trainable, early=early, homes=own) for own in ((), homes)
    )
    check(after)
    moves = (Operation.FETCH_STATE, Operation.HOST_UPDATE, Operation.STORE_STATE, Operation.UPDATE)
    for plain, program in zip(before, after, strict=True):
        rest = [[i for i in p.instructions if i.operation not in moves] for p in (plain, program)]
        assert rest[0] == rest[1]
        done = Counter(i.unit for i in program.instructions if i.operation in moves[1::2])
        reduced = {i.unit for i in plain.backward if i.operation is Operation.REDUCE}
        away = {unit for unit in reduced if homes[unit] is not StateHome.RESIDENT}
        assert max(done.values()) == 1 and away <= set(done) <= reduced | {NONE}


@relaxed
@given(some_visits, some_trainable, st.booleans(), st.booleans())
def test_the_passes_may_be_left_out_on_all_ranks(visits, trainable, is_prefetched, reshard):
    check(
        [
            step(visits, count, trainable, is_prefetched=is_prefetched, reshard=reshard)
            for count in (1, 0, 3)
        ]
    )


def test_no_rank_and_one_rank_pass():
    check([])
    check([compile_step(chain(3), 2, ALL, offload_boundaries=True)])


# -- check: programs that do not ---------------------------------------------------------------

VALID = compile_step(chain(3), 2, ALL, offload_boundaries=True)
WORDS = {str(each): each for each in VALID.instructions}


@pytest.mark.parametrize(
    ("was", "becomes", "because"),
    [
        ("X2 U3", "U3 X2 U3", "cannot run U3 (update of unit 3): the unit is updated already"),
        ("R3", "U3 R3", "cannot run U3 (update of unit 3): the unit is not reduced yet"),
        ("R3 X3", "R3 U3 X3", "cannot run U3 (update of unit 3): the unit is gathered already"),
        ("X0 U1", "X0", "cannot run U (update): units [1] have missed their early update"),
        ("X0 U1 A", "X0 U1 G1 X1 A", "cannot run G1 (gather of unit 1): the unit is updated"),
    ],
)
def test_an_early_update_that_is_too_early_left_out_or_followed_by_a_use_is_refused(
    was, becomes, because
):
    (program,) = programs_of([(1, False)], chain(3), early=True)
    words = {str(i): i for i in program.instructions}
    line = f" {text(program.backward)} "
    assert line.count(f" {was} ") == 1, line
    line = line.replace(f" {was} ", f" {becomes} ")
    wrong = replace(program, backward=tuple(words[word] for word in line.split()))
    assert because in refusal_of([wrong])


MOVED_STATE = compile_step(chain(4), 0, ALL, updates_early=True, homes=homes_of("srhss"))


@pytest.mark.parametrize(
    ("was", "becomes", "because"),
    [
        ("backward: R4 I4", "R4", "its state is neither fetched nor with the host"),
        ("backward: I4", "I4 I4", "its state is on the device"),
        ("backward: U4 S4", "S4 U4", "cannot run S4 (store state of unit 4): the unit is not"),
        ("backward: U4 S4", "U4", "cannot run U (update): units [4] hold state"),
        ("backward: C2", "S2", "run S2 (store state of unit 2): the unit is not updated yet"),
        ("update: U0 S0", "U0", "cannot run U (update): units [0] hold state"),
        ("update: S2", "", "ends its step with [2] still without S"),
    ],
)
def test_state_that_does_not_come_or_go_is_refused(was, becomes, because):
    words = {str(each): each for each in MOVED_STATE.instructions}
    part, wrong = was.split(": ")
    line = f" {text(getattr(MOVED_STATE, part))} "
    assert line.count(f" {wrong} ") == 1, line
    line = line.replace(f" {wrong} ", f" {becomes} ")
    said = tuple(words[word] for word in line.split())
    assert because in refusal_of([replace(MOVED_STATE, **{part: said})])


def refusal_of(programs: Sequence[Program]) -> str:
    with pytest.raises(ProgramError) as refused:
        check(programs)
    return str(refused.value)


def edited(edits: dict[str, str]) -> Program:
    """The valid program with other words; a key names the part, then the words to replace."""
    program = VALID
    for was, becomes in edits.items():
        part, words = was.split(": ")
        line = f" {text(getattr(program, part))} "
        assert line.count(f" {words} ") == 1, f"{words!r} is not there once in {line!r}"
        line = line.replace(f" {words} ", f" {becomes} ")
        program = replace(program, **{part: tuple(WORDS[word] for word in line.split())})
    return program


def test_the_program_that_is_edited_is_valid():
    assert text(VALID.forward) == (
        "G0 G1 Z0 F0.0 F0.1 G2 F1.0 O1.0 F1.1 O1.1 X1 G3 F2.0 F2.1 X2 F3.0 L0.0 F3.1 L0.1 A"
    )
    assert text(VALID.backward) == (
        "G2 Z3 B3.1 H1.1 B3.0 H1.0 R3 X3 G1 Z2 B2.1 B2.0 R2 X2 Z1 B1.1 B1.0 R1 X1 R0 X0 A"
    )
    assert edited({"forward: F2.0 F2.1": "F2.0 F2.1"}) == VALID
    check([compile_step(chain(3), 1, ALL), VALID])


NOT_GATHERED = "the unit is not gathered"
NOTHING_WENT = "nothing went forward there"


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        # left out
        ({"forward: G0": ""}, f"Rank 1 cannot run Z0 (arm of unit 0): {NOT_GATHERED}."),
        ({"forward: G1": ""}, f"Rank 1 cannot run F1.0 (forward of unit 1): {NOT_GATHERED}."),
        (
            {"forward: Z0": ""},
            "Rank 1 cannot run L0.0 (loss of unit 0): the root unit is not armed.",
        ),
        (
            {"forward: F1.0 O1.0": "O1.0"},
            f"Rank 1 cannot run O1.0 (offload of unit 1): {NOTHING_WENT}.",
        ),
        (
            {"forward: F2.1": ""},
            "Rank 1 cannot run F3.1 (forward of unit 3): its microbatch was not at the visit"
            " before.",
        ),
        (
            {"forward: L0.1": ""},
            "Rank 1 cannot run A (agree): a microbatch has no loss yet.",
        ),
        (
            {"forward: O1.1": ""},
            "Rank 1 cannot run H1.1 (fetch of unit 1): nothing was offloaded there.",
        ),
        (
            {"forward: X1": ""},
            "Rank 1 cannot run G1 (gather of unit 1): the unit is gathered already.",
        ),
        (
            {"forward: A": ""},
            "Collectives must come in one order on all ranks; as number 5 rank 0 has A, but rank 1"
            " has G2.",
        ),
        ({"backward: G2": ""}, f"Rank 1 cannot run Z2 (arm of unit 2): {NOT_GATHERED}."),
        ({"backward: Z2": ""}, "Rank 1 cannot run R2 (reduce of unit 2): the unit is not armed."),
        (
            {"backward: H1.0": ""},
            "Rank 1 cannot run B1.0 (backward of unit 1): what entered is on the host.",
        ),
        ({"backward: R2": ""}, "Rank 1 ends its step with [2] still armed."),
        ({"backward: R0": ""}, "Rank 1 ends its step with [0] still armed."),
        ({"backward: X1": ""}, "Rank 1 ends its step with [1] still gathered."),
        ({"backward: X0": ""}, "Rank 1 ends its step with [0] still gathered."),
        (
            {"backward: A": ""},
            "Collectives must come in one order on all ranks; as number 12 rank 0 has A, but rank"
            " 1 has none.",
        ),
        # there twice
        (
            {"forward: G2": "G2 G2"},
            "Rank 1 cannot run G2 (gather of unit 2): the unit is gathered already.",
        ),
        ({"forward: X1": "X1 X1"}, f"Rank 1 cannot run X1 (free of unit 1): {NOT_GATHERED}."),
        (
            {"forward: L0.0": "L0.0 L0.0"},
            "Rank 1 cannot run L0.0 (loss of unit 0): its microbatch did not go forward.",
        ),
        (
            {"backward: B2.0": "B2.0 B2.0"},
            f"Rank 1 cannot run B2.0 (backward of unit 2): {NOTHING_WENT}.",
        ),
        (
            {"backward: H1.0": "H1.0 H1.0"},
            "Rank 1 cannot run H1.0 (fetch of unit 1): nothing was offloaded there.",
        ),
        (
            {"backward: R2": "R2 R2"},
            "Rank 1 cannot run R2 (reduce of unit 2): the unit is not armed.",
        ),
        (
            {"forward: A": "A A"},
            "Collectives must come in one order on all ranks; as number 6 rank 0 has G2, but rank 1"
            " has A.",
        ),
        (
            {"backward: A": "A A"},
            "Collectives must come in one order on all ranks; as number 13 rank 0 has none, but"
            " rank 1 has A.",
        ),
        # in another place
        (
            {"forward: G2 F1.0 O1.0 F1.1 O1.1 X1 G3 F2.0": "F1.0 O1.0 F1.1 O1.1 X1 G3 F2.0 G2"},
            f"Rank 1 cannot run F2.0 (forward of unit 2): {NOT_GATHERED}.",
        ),
        (
            {"forward: F2.1 X2": "X2 F2.1"},
            f"Rank 1 cannot run F2.1 (forward of unit 2): {NOT_GATHERED}.",
        ),
        (
            {"forward: F1.0 O1.0": "O1.0 F1.0"},
            f"Rank 1 cannot run O1.0 (offload of unit 1): {NOTHING_WENT}.",
        ),
        (
            {"forward: Z0": "", "forward: L0.0": "L0.0 Z0"},
            "Rank 1 cannot run L0.0 (loss of unit 0): the root unit is not armed.",
        ),
        (
            {"forward: F3.1 L0.1": "L0.1 F3.1"},
            "Rank 1 cannot run A (agree): a microbatch has no loss yet.",
        ),
        (
            {"forward: F0.0": "L0.0 F0.0"},
            "Rank 1 cannot run L0.0 (loss of unit 0): its microbatch did not go forward.",
        ),
        (
            {"backward: H1.0": "", "backward: B1.0": "B1.0 H1.0"},
            "Rank 1 cannot run B1.0 (backward of unit 1): what entered is on the host.",
        ),
        (
            {"backward: H1.0": "", "forward: F1.0 O1.0": "F1.0 H1.0 O1.0"},
            "Rank 1 cannot run H1.0 (fetch of unit 1): nothing was offloaded there.",
        ),
        (
            {"backward: Z1": "", "backward: G1": "Z1 G1"},
            f"Rank 1 cannot run Z1 (arm of unit 1): {NOT_GATHERED}.",
        ),
        (
            {"backward: R2 X2": "X2", "backward: Z2": "R2 Z2"},
            "Rank 1 cannot run R2 (reduce of unit 2): the unit is not armed.",
        ),
        (
            {"backward: R2": "R2 Z2"},
            "Rank 1 cannot run Z2 (arm of unit 2): the unit is reduced already.",
        ),
        (
            {"backward: B2.0 R2 X2": "R2 X2 B2.0"},
            f"Rank 1 cannot run B2.0 (backward of unit 2): {NOT_GATHERED}.",
        ),
        # what hangs: each rank alone could run
        (
            {"backward: R3 X3 G1": "G1 R3 X3"},
            "Collectives must come in one order on all ranks; as number 7 rank 0 has R3, but rank 1"
            " has G1.",
        ),
        (
            {"backward: R1 X1 R0": "R0 R1 X1"},
            "Collectives must come in one order on all ranks; as number 10 rank 0 has R1, but rank"
            " 1 has R0.",
        ),
    ],
    ids=lambda value: (
        ", ".join(f"{was} > {becomes or 'nothing'}" for was, becomes in value.items())
        if isinstance(value, dict)
        else ""
    ),
)
def test_a_program_that_is_wrong_in_one_place_is_refused_with_rank_and_instruction(edits, message):
    broken = edited(edits)
    assert refusal_of([compile_step(chain(3), 1, ALL), broken]) == message
    # nor does it pass as the first rank, or with the same fault on every rank
    assert re.search(r"\b[Rr]ank 0\b", refusal_of([broken, VALID]))
    if not message.startswith("Collectives"):
        assert refusal_of([broken, broken]) == message.replace("Rank 1", "Rank 0")


def test_a_refusal_is_an_error_of_the_plan():
    assert issubclass(ProgramError, PlanError)


def test_ranks_that_make_other_visits_cannot_run_together():
    two, three = compile_step(chain(2), 1, ALL), compile_step(chain(3), 1, ALL)
    assert refusal_of([two, two, three]) == (
        "Collectives must come in one order on all ranks; as number 4 rank 0 has A, but rank 2"
        " has G3."
    )


def test_ranks_of_which_one_reduces_a_unit_more_cannot_run_together():
    programs = [compile_step(chain(2), 1, trainable) for trainable in (ALL, [True, True, False])]
    assert refusal_of(programs) == (
        "Collectives must come in one order on all ranks; as number 6 rank 0 has R2, but rank 1"
        " has R1."
    )


def test_ranks_of_which_one_does_not_prefetch_cannot_run_together():
    programs = [step(chain(2), 1, is_prefetched=is_prefetched) for is_prefetched in (True, False)]
    assert refusal_of(programs) == (
        "Collectives must come in one order on all ranks; as number 5 rank 0 has G1, but rank 1"
        " has R2."
    )


def test_offload_without_fetch_is_refused_whether_or_not_a_backward_follows():
    visits = [*chain(3), Visit(4, False)]
    program = compile_step(visits, 1, ALL)
    forward = [*program.forward]
    at = next(at for at, each in enumerate(forward) if str(each) == "F4.0")
    forward.insert(at + 1, replace(forward[at], operation=Operation.OFFLOAD))
    assert (
        refusal_of([replace(program, forward=tuple(forward))])
        == "Rank 0 ends its step with [(3, 0)] still offloaded."
    )


def test_a_microbatch_without_loss_is_refused_though_no_backward_follows():
    program = compile_step([Visit(1, False)], 2, ALL)
    forward = [each for each in program.forward if str(each) != "L0.1"]
    assert refusal_of([replace(program, forward=tuple(forward))]) == (
        "Rank 0 cannot run A (agree): a microbatch has no loss yet."
    )


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        # gradients are lost or wrong, no rank hangs
        ({"backward: B2.0 R2": "R2 B2.0"}, "B2.0"),  # reduced before the last backward
        ({"backward: Z2 B2.1": "B2.1 Z2"}, "Z2"),  # zeroed behind a backward
        ({"backward: Z2 B2.1": "Z2 B2.1 Z2"}, "Z2"),  # zeroed twice
        ({"forward: L0.0": "L0.0 Z0"}, "Z0"),  # the root unit zeroed again behind a loss
        ({"backward: B2.1": ""}, "(1, 1)"),  # a microbatch does not come back
        ({"backward: B3.1 H1.1 B3.0 H1.0 R3": "H1.0 H1.1 R3"}, "[0, 1]"),  # none does
        # gathered early by prefetch, and used early
        ({"backward: Z2 B2.1": "Z2", "backward: Z3 B3.1": "Z3 B2.1 B3.1"}, "B3.1"),
        ({"forward: G3 F2.0": "G3", "forward: G2 F1.0": "G2 F2.0 F1.0"}, "F2.0"),
        # computed too often, too late or not at all
        ({"forward: F2.0": "F2.0 F2.0"}, "F2.0"),
        ({"forward: F0.0": ""}, "F1.0"),
        ({"forward: O1.0": "O1.0 O1.0"}, "O1.0"),
        ({"forward: L0.1 A": "A L0.1"}, "A"),  # weights agreed on before the last loss
        ({"backward: A": "", "update: U": "U A"}, "A"),
        ({"update: U": ""}, "U"),
        ({"update: U": "U U"}, "U"),
        ({"update: U": "", "backward: R0": "U R0"}, "[0]"),
    ],
)
def test_gradients_that_would_be_lost_or_wrong_are_found(edits, named):
    message = refusal_of([compile_step(chain(3), 1, ALL), edited(edits)])
    assert "ank 1" in message
    assert named in message


# all single mutations of small programs of several ranks

few_ranks = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=2, max_size=3)
few_visits = st.lists(st.builds(Visit, st.integers(1, 3), st.booleans()), max_size=4)


def mutated(program: Program, change: Callable[[list[list[Instruction]], int, int], None]):
    """Every program that differs in one instruction; ``change`` is given the parts and a place."""
    parts = (program.forward, program.backward, program.update)
    for number, part in enumerate(parts):
        for at in range(len(part)):
            copies = [list(each) for each in parts]
            change(copies, number, at)
            yield part[at], Program(*map(tuple, copies))


def leave_out(parts: list[list[Instruction]], number: int, at: int) -> None:
    del parts[number][at]


def repeat(parts: list[list[Instruction]], number: int, at: int) -> None:
    parts[number].insert(at, parts[number][at])


def assert_refused(programs: list[Program], rank: int, broken: Program) -> None:
    message = refusal_of([*programs[:rank], broken, *programs[rank + 1 :]])
    assert re.search(rf"\b[Rr]ank {rank}\b", message)
    named = r"cannot run [A-Z]\d*(\.\d)? \(|rank 0 has [A-Zn]\w*, but rank \d has [A-Zn]|still \w+"
    assert re.search(named, message)


@settings(relaxed, max_examples=25)
@given(few_ranks, few_visits, st.booleans())
def test_an_instruction_that_is_left_out_is_missed(ranks, visits, reshard):
    programs = programs_of(ranks, visits, reshard=reshard)
    differentiable = {*backward_order(visits)}
    needed = {*COLLECTIVES, *COPIES, Operation.ARM, Operation.LOSS, Operation.FREE}
    for rank, program in enumerate(programs):
        for instruction, broken in mutated(program, leave_out):
            comes_back = instruction.operation is Operation.FORWARD and (
                instruction.visit in differentiable
            )
            if instruction.operation in needed or comes_back:
                assert_refused(programs, rank, broken)


@settings(relaxed, max_examples=25)
@given(few_ranks, few_visits, st.booleans())
def test_an_instruction_that_is_there_twice_is_found(ranks, visits, reshard):
    programs = programs_of(ranks, visits, reshard=reshard)
    once = {
        *COLLECTIVES,
        Operation.LOSS,
        Operation.FETCH,
        Operation.BACKWARD,
        Operation.FREE,
    }
    for rank, program in enumerate(programs):
        for instruction, broken in mutated(program, repeat):
            if instruction.operation in once:
                assert_refused(programs, rank, broken)


@settings(relaxed, max_examples=25)
@given(few_ranks, few_visits, st.booleans())
def test_collectives_in_another_order_on_one_rank_are_found(ranks, visits, reshard):
    programs = programs_of(ranks, visits, reshard=reshard)

    def exchange(parts: list[list[Instruction]], number: int, at: int) -> None:
        part = parts[number]
        places = [place for place, each in enumerate(part) if each.operation in COLLECTIVES]
        if at in places[:-1]:
            following = places[places.index(at) + 1]
            part[at], part[following] = part[following], part[at]

    for rank, program in enumerate(programs):
        for _, broken in mutated(program, exchange):
            if broken != program:
                assert_refused(programs, rank, broken)


@settings(relaxed, max_examples=25)
@given(few_ranks, few_visits, st.booleans())
def test_a_fetch_behind_its_backward_is_found(ranks, visits, reshard):
    programs = programs_of(ranks, visits, reshard=reshard)

    def delay(parts: list[list[Instruction]], number: int, at: int) -> None:
        fetch = parts[number][at]
        if fetch.operation is Operation.FETCH:
            del parts[number][at]
            used = replace(fetch, operation=Operation.BACKWARD)
            parts[number].insert(parts[number].index(used) + 1, fetch)

    for rank, program in enumerate(programs):
        for _, broken in mutated(program, delay):
            if broken != program:
                assert_refused(programs, rank, broken)
