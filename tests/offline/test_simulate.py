"""The simulated step: small ones by hand, all against the schedule and the closed form."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_simulator import reference_step
from simulated_cases import random_case as drawn_case

from lightning_cephalo.observe.recording import Event, Stream, merged
from lightning_cephalo.offline.simulate import Simulation, program_of, simulate
from lightning_cephalo.plan import (
    KeptCurves,
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    cost,
    predict,
)
from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.program import COLLECTIVES, COMPUTE, Operation

FAST = RankProfile("fast", [1, 1.5], [3, 4], [1, 2], [10, 20], 1000)
SLOW = RankProfile("slow", [2], [5], [1], [10], 500)
PLAN = Plan([RankPlan((1,), 0.75), RankPlan((1,), 0.25)])

seeds = st.integers(0, 2**32 - 1)
fixed = settings(max_examples=40, derandomize=True, deadline=None)


def problem(gather_s: float, reduce_s: float, **changes) -> Problem:
    given = {
        "ranks": [FAST, SLOW],
        "units": 2,
        "links": Links(gather_s, reduce_s),
        "state": StateBytes(100),
        "global_batch_size": 2,
        "boundary_bytes": 2,
        "update_overhead_s": 0.5,
        "gathered_bytes": 7,
        "step_overhead_s": 0.25,
        "root_links": Links(1, 1),
    }
    return Problem(**given | changes)


def random_case(seed: int, units: int) -> tuple[Problem, Plan]:
    return drawn_case(np.random.default_rng(seed), units)


def early(case: Problem, seed: int) -> Problem:
    """The case with updates inside the backward, of a part of the optimizer's time or all of it."""
    update_s = case.update_overhead_s * (1 + seed % 4) / 4 / case.units
    held = 0.75 * case.state.held_bytes
    ranks = tuple(
        dataclasses.replace(
            rank,
            reducing_compute_bytes=[0.9 * size for size in rank.compute_bytes],
            kept=dataclasses.replace(
                rank.kept, reducing_compute_bytes=[0.8 * size for size in rank.kept.compute_bytes]
            ),
        )
        for rank in case.ranks
    )
    return dataclasses.replace(
        case,
        ranks=ranks,
        unit_update_s=update_s,
        early_state=StateBytes(
            held,
            reducing_bytes=held / case.units,
            updating_bytes=held * (1 + seed % 3) / case.units,
        ),
    ).with_early_update()


def with_rows(case: Problem, seed: int) -> Problem:
    """The case with updates that take each rank as long as its share of the rows takes its device.

    The rows of all units take a device from nothing up to twice the backwards of all units.
    """
    draw = np.random.default_rng(seed)
    sizes = (int(draw.integers(0, 300)), *[100] * case.units)
    slowest_s = max(rank.backward_s[0] for rank in case.ranks if rank.backward_s)
    rate = 100 / slowest_s * 10 ** draw.uniform(-0.3, 1)
    ranks = tuple(
        dataclasses.replace(
            rank, updated_parameters_per_s=draw.choice([rate, rate * draw.uniform(1, 4), math.inf])
        )
        for rank in case.ranks
    )
    return dataclasses.replace(case, ranks=ranks, unit_parameters=sizes)


def spans(simulation: Simulation, rank: int, stream: Stream) -> list[tuple[str, int, float, float]]:
    return [
        (event.operation.value, event.unit, event.start_s, event.end_s)
        for event in simulation.timeline(rank).events
        if event.stream is stream
    ]


def by_stream(simulation: Simulation) -> dict[tuple[int, Stream], list[Event]]:
    found = defaultdict(list)
    for timeline in simulation.timelines:
        for rank, event in itertools.product(timeline.ranks, timeline.events):
            found[rank, event.stream].append(event)
    return found


def memory(simulation: Simulation, rank: int) -> tuple[tuple[float, float], ...]:
    """Seconds and bytes on the device."""
    held = simulation.timeline(rank).held
    return merged((each.time_s, each.device_bytes) for each in held)


def host_memory(simulation: Simulation, rank: int) -> tuple[tuple[float, float], ...]:
    held = simulation.timeline(rank).held
    return merged((each.time_s, each.host_bytes) for each in held)


# -- by hand ----------------------------------------------------------------------------------


def test_compute_that_hides_all_communication_by_hand():
    simulation = simulate(problem(1, 1), PLAN)
    assert spans(simulation, 1, Stream.COMPUTE) == [
        ("forward", 1, 2, 4),
        ("forward", 2, 4, 6),
        ("loss", 0, 6, 7),
        ("backward", 2, 7, 12),
        ("backward", 1, 12, 17),
        ("update", -1, 19, 19.5),
    ]
    assert spans(simulation, 0, Stream.COMPUTE) == [
        ("forward", 1, 2, 3),
        ("forward", 2, 3, 4),
        ("loss", 0, 4, 5),
        ("backward", 2, 5, 8),
        ("backward", 1, 8, 11),
        ("update", -1, 19, 19.5),
    ]
    communication = [
        ("gather", 0, 0, 1),
        ("gather", 1, 1, 2),
        ("gather", 2, 2, 3),
        ("gather", 1, 7, 8),
        ("reduce", 2, 12, 13),
        ("reduce", 1, 17, 18),
        ("reduce", 0, 18, 19),
        ("overhead", -1, 19.5, 19.75),
    ]
    assert spans(simulation, 0, Stream.COMMUNICATION) == communication
    assert spans(simulation, 1, Stream.COMMUNICATION) == communication
    assert simulation.step_s == 19.75
    # the closed form, and the fill: the first gather and the last reduce
    assert simulation.step_s == predict(problem(1, 1), PLAN.ranks).step_s + 1 + 1


def test_communication_that_sets_the_pace_by_hand():
    simulation = simulate(problem(4, 3), PLAN)
    assert spans(simulation, 1, Stream.COMPUTE) == [
        ("forward", 1, 5, 7),
        ("forward", 2, 9, 11),
        ("loss", 0, 11, 12),
        ("backward", 2, 12, 17),
        ("backward", 1, 17, 22),
        ("update", -1, 26, 26.5),
    ]
    assert spans(simulation, 1, Stream.COMMUNICATION) == [
        ("gather", 0, 0, 1),
        ("gather", 1, 1, 5),
        ("gather", 2, 5, 9),
        ("gather", 1, 12, 16),
        ("reduce", 2, 17, 20),
        ("reduce", 1, 22, 25),
        ("reduce", 0, 25, 26),
        ("overhead", -1, 26.5, 26.75),
    ]
    assert simulation.step_s == 26.75


def test_memory_by_hand():
    simulation = simulate(problem(1, 1), PLAN)
    # 25 state and 7 gathered; while computing 10 more; a boundary of 2 for each of two units
    assert memory(simulation, 1) == ((0, 32), (2, 44), (4, 46), (12, 44), (17, 32))
    assert host_memory(simulation, 1) == ((0, 0),)
    assert simulation.timeline(1).held[2].sizes == (7, 10, 4, 25)


def test_busy_streams_by_hand():
    timeline = simulate(problem(1, 1), PLAN).timeline(0)
    assert timeline.busy_s(Stream.COMPUTE) == 9.5
    assert timeline.busy_s(Stream.COMMUNICATION) == 8 - 0.75
    assert timeline.busy_s(Stream.COPY) == 0
    assert timeline.end_s == 19.75


def test_equal_shares_use_the_times_of_even_collectives():
    case = problem(4, 3, even_links=Links(1, 1))
    even = Plan([dataclasses.replace(rank, state_fraction=0.5) for rank in PLAN.ranks])
    assert simulate(case, even).step_s == 19.75
    assert simulate(case, PLAN).step_s == 26.75


def test_a_rank_without_samples_only_communicates():
    simulation = simulate(problem(1, 1), Plan([RankPlan((), 0.5), RankPlan((1,), 0.5)]))
    assert [event[0] for event in spans(simulation, 0, Stream.COMPUTE)] == ["update"]
    assert spans(simulation, 0, Stream.COMMUNICATION) == spans(simulation, 1, Stream.COMMUNICATION)
    assert memory(simulation, 0) == ((0, 57),)


def test_copies_by_hand():
    copying = dataclasses.replace(SLOW, host_capacity_bytes=100, offload_bytes_per_s=0.5)
    case = problem(0, 0, ranks=[copying], units=4, boundary_bytes=3, root_links=Links(0, 0))
    simulation = simulate(case, Plan([RankPlan((1,), 1.0, offload=True)]))
    # a copy takes 6: unit 2 waits for the room of unit 0's boundary; the last two units' stay
    assert spans(simulation, 0, Stream.COMPUTE) == [
        ("forward", 1, 0, 2),
        ("forward", 2, 2, 4),
        ("forward", 3, 8, 10),
        ("forward", 4, 14, 16),
        ("loss", 0, 16, 17),
        ("backward", 4, 17, 22),
        ("backward", 3, 22, 27),
        ("backward", 2, 28, 33),
        ("backward", 1, 34, 39),
        ("update", -1, 39, 39.5),
    ]
    assert spans(simulation, 0, Stream.COPY) == [
        ("offload", 1, 2, 8),
        ("offload", 2, 8, 14),
        ("fetch", 2, 22, 28),
        ("fetch", 1, 28, 34),
    ]
    assert simulation.timeline(0).peak_bytes == 100 + 7 + 10 + 3 * 3
    assert host_memory(simulation, 0) == ((0, 0), (2, 3), (8, 6), (28, 3), (34, 0))


# -- against a second simulator ----------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("cases", [72, pytest.param(250, marks=pytest.mark.slow)])
def test_programs_take_the_time_and_the_memory_of_a_simulator_made_of_loops(cases, reshard):
    random = np.random.default_rng(7)
    for case in range(cases):
        random_problem, plan = random_case(int(random.integers(2**32)), 1 + case % 12)
        plan = dataclasses.replace(plan, reshard_after_forward=reshard)
        found, expected = simulate(random_problem, plan), reference_step(random_problem, plan)
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        for rank, (peak, host) in enumerate(
            zip(expected.peak_bytes, expected.host_peak_bytes, strict=True)
        ):
            assert found.timeline(rank).peak_bytes == pytest.approx(peak, rel=1e-12)
            on_host = max(size for _, size in host_memory(found, rank))
            assert on_host == pytest.approx(host, rel=1e-12)


# -- the order --------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("units", "microbatches"), [(1, 2), (2, 1), (5, 3)])
def test_the_events_are_the_instructions_of_the_program(units, microbatches, reshard):
    case = problem(1, 1, units=units)
    parts = [RankPlan((1,) * microbatches, 0.5), RankPlan((), 0.5)]
    plan = Plan(parts, reshard_after_forward=reshard)
    planned = cost.as_planned(case, plan)
    program, other = (program_of(planned, part) for part in parts)
    check([program, other])
    streams = by_stream(simulate(case, plan))
    takes_time = [i for i in program.instructions if i.operation in COMPUTE and i.visit >= 0]
    computed = [event.instruction for event in streams[0, Stream.COMPUTE]]
    assert computed == [*takes_time, *program.update]
    communicated = [event.instruction for event in streams[0, Stream.COMMUNICATION]]
    assert communicated[:-1] == [
        i
        for i in program.instructions
        if i.operation in COLLECTIVES and i.operation is not Operation.AGREE
    ]
    assert communicated[-1].operation is Operation.OVERHEAD


@fixed
@given(seeds, st.integers(1, 12))
def test_no_unit_is_gathered_more_than_one_ahead(seed, units):
    simulation = simulate(*random_case(seed, units))
    for timeline in simulation.timelines:
        finished = defaultdict(float)
        gathers = []
        for event in timeline.events:
            if event.operation is Operation.FORWARD:
                finished[event.unit] = event.end_s
            if event.operation is Operation.GATHER and event.unit > 0:
                gathers.append(event)
        for event in gathers[:units]:
            assert event.start_s >= finished[event.unit - 2]


@fixed
@given(seeds, st.integers(1, 12))
def test_collectives_are_rendezvous_and_compute_waits_for_its_unit(seed, units):
    simulation = simulate(*random_case(seed, units))
    streams = by_stream(simulation)
    shared = [
        (event.operation, event.unit, event.start_s, event.end_s)
        for event in streams[0, Stream.COMMUNICATION]
    ]
    for rank in {rank for rank, _ in streams}:
        own = streams[rank, Stream.COMMUNICATION]
        assert [(e.operation, e.unit, e.start_s, e.end_s) for e in own] == shared
        gathered = {e.unit: e for e in own if e.operation is Operation.GATHER}  # the later of two
        computed = streams[rank, Stream.COMPUTE]
        for event in computed:
            if event.operation is Operation.BACKWARD:
                assert event.start_s >= gathered[event.unit].end_s
        for event in own:
            if event.operation is Operation.REDUCE and event.unit > 0:
                backward = [
                    e.end_s
                    for e in computed
                    if e.operation is Operation.BACKWARD and e.unit == event.unit
                ]
                assert event.start_s >= max(backward, default=0.0)


@fixed
@given(seeds, st.integers(1, 12))
def test_events_of_a_stream_do_not_overlap_and_the_step_ends_with_the_last(seed, units):
    simulation = simulate(*random_case(seed, units))
    for events in by_stream(simulation).values():
        for before, after in itertools.pairwise(events):
            assert before.start_s < before.end_s <= after.start_s + 1e-12
    last = max(event.end_s for each in simulation.timelines for event in each.events)
    assert last == pytest.approx(simulation.step_s)


# -- what must come out whatever the plan is --------------------------------------------------


@fixed
@given(seeds, st.integers(1, 12))
def test_a_stream_is_busy_for_the_work_that_it_has(seed, units):
    case, plan = random_case(seed, units)
    simulation = simulate(case, plan)
    planned = cost.as_planned(case, plan)
    gather_s, reduce_s = planned.links.gather_s, planned.links.reduce_s
    for rank, (profile, part) in enumerate(zip(case.ranks, plan.ranks, strict=True)):
        mode = cost.Mode.of(part)
        one_pass = [
            math.fsum(curve[size - 1] for size in part.microbatch_sizes)
            for curve in cost.time_curves(profile, mode)
        ]
        timeline = simulation.timeline(rank)
        assert timeline.busy_s(Stream.COMPUTE) == pytest.approx(
            units * (one_pass[0] + one_pass[1]) + one_pass[2] + case.update_overhead_s
        )
        assert timeline.busy_s(Stream.COMMUNICATION) == pytest.approx(
            (2 * units - 1) * gather_s
            + units * reduce_s
            + max(0, units - 2) * (planned.links.both_s - gather_s - reduce_s)
            + (case.root_links.gather_s + case.root_links.reduce_s)
        )
        assert timeline.busy_s(Stream.COPY) == pytest.approx(
            2 * max(units - 2, 0) * cost.copy_time(case, profile, part.batch_size, mode)
        )


@fixed
@given(seeds, st.integers(1, 12), st.booleans())
def test_memory_is_what_the_cost_function_says(seed, units, is_early):
    case, plan = random_case(seed, units)
    case = early(case, seed) if is_early else case
    simulation = simulate(case, plan)
    for rank, (part, predicted) in enumerate(
        zip(plan.ranks, predict(case, plan.ranks).ranks, strict=True)
    ):
        most = simulation.timeline(rank).peak_bytes
        sizes = part.microbatch_sizes
        if not sizes or max(sizes) == sizes[-1]:  # the last one begins the backward
            assert most == pytest.approx(predicted.memory_bytes, rel=1e-12)
        unit_bytes = case.boundary_bytes + (case.kept_bytes if part.recompute is False else 0)
        assert most <= predicted.memory_bytes * (1 + 1e-12)
        assert most >= predicted.memory_bytes - unit_bytes * part.batch_size
        on_host = max(size for _, size in host_memory(simulation, rank))
        staying = 2 * case.boundary_bytes * part.batch_size if part.offload else 0
        assert on_host == max(predicted.host_bytes - staying, 0)
        assert memory(simulation, rank)[-1][1] == memory(simulation, rank)[0][1]


def test_a_peak_in_the_middle_comes_before_the_last_boundaries():
    tall = RankProfile("tall", [1, 1], [1, 1], [1, 1], [1, 100], 1000)
    case = problem(0, 0, ranks=[tall])
    plan = Plan([RankPlan((1, 2, 1), 1.0)])
    most = simulate(case, plan).timeline(0).peak_bytes
    assert most == predict(case, plan.ranks).ranks[0].memory_bytes - 1 * 2


# -- against the closed form ------------------------------------------------------------------


@settings(fixed, max_examples=20)
@given(seeds, st.integers(24, 96))
def test_from_24_units_on_the_closed_form_is_within_3_per_cent(seed, units):
    case, plan = random_case(seed, units)
    assert abs(simulate(case, plan).step_s / predict(case, plan).step_s - 1) < 0.03


@fixed
@given(seeds, st.integers(1, 24), st.booleans(), st.booleans())
def test_no_step_is_longer_than_the_closed_form(seed, units, is_early, has_rows):
    case, plan = random_case(seed, units)
    case = early(case, seed) if is_early else case
    case = with_rows(case, seed) if has_rows else case
    for reshard in (True, False):
        plan = dataclasses.replace(plan, reshard_after_forward=reshard)
        assert simulate(case, plan).step_s <= predict(case, plan).step_s * (1 + 1e-12)


@fixed
@given(seeds, st.integers(1, 24))
def test_late_updates_add_what_the_closed_form_says_and_early_ones_no_more(seed, units):
    case, plan = random_case(seed, units)
    late = with_rows(case, seed)
    rows_s = [
        part.state_fraction * late.parameters / rank.updated_parameters_per_s
        for rank, part in zip(late.ranks, plan.ranks, strict=True)
    ]
    predicted = predict(late, plan)
    assert [rank.update_s for rank in predicted.ranks] == pytest.approx(rows_s)
    simulated = simulate(late, plan)
    added_s = simulated.step_s - simulate(case, plan).step_s
    assert added_s == pytest.approx(max(rows_s), abs=1e-9 * simulated.step_s)
    assert predicted.step_s == pytest.approx(predict(case, plan).step_s + max(rows_s))
    before = early(case, seed)
    soon = with_rows(before, seed)
    added_s = simulate(soon, plan).step_s - simulate(before, plan).step_s
    assert added_s <= max(rows_s) + 1e-9 * simulated.step_s
    assert predict(soon, plan).step_s <= predict(before, plan).step_s + max(rows_s) * (1 + 1e-9)
    for rank in range(len(plan.ranks)):
        both = [simulate(each, plan).timeline(rank).busy_s(Stream.COMPUTE) for each in (late, soon)]
        assert both[0] == pytest.approx(both[1])


def test_updates_by_shares_and_devices_by_hand():
    # 30 parameters of the root unit and 20 of each unit; 80 % of them on the slow device
    slow = dataclasses.replace(SLOW, updated_parameters_per_s=16)
    fast = dataclasses.replace(FAST, updated_parameters_per_s=64)
    plan = Plan([RankPlan((1,), 0.2), RankPlan((1,), 0.8)])
    late = problem(1, 1, ranks=[fast, slow], unit_parameters=(30, 20, 20), fill_s=2)
    simulation = simulate(late, plan)
    assert spans(simulation, 0, Stream.COMPUTE)[-1] == ("update", -1, 19, 19.71875)
    assert spans(simulation, 1, Stream.COMPUTE)[-1] == ("update", -1, 19, 19.5 + 0.8 * 70 / 16)
    predicted = predict(late, plan)
    assert [rank.update_s for rank in predicted.ranks] == [0.21875, 3.5]
    # the root unit's reduce takes 1 s, the first unit's takes 1 s, too: each hides an update of 1 s
    soon = late.with_early_update()
    assert predict(soon, plan).step_s == predicted.step_s - 2 * 1
    simulation = simulate(soon, plan)
    assert spans(simulation, 1, Stream.COMPUTE)[-3:] == [
        ("update", 2, 17, 18),
        ("update", 1, 18, 19),
        ("update", -1, 19, 19.5 + 1.5),
    ]
    # by rates, the fast device holds most: both take equally long
    by_rates = Plan([RankPlan((1,), 0.8), RankPlan((1,), 0.2)])
    assert [rank.update_s for rank in predict(late, by_rates).ranks] == [0.875, 0.875]


@fixed
@given(seeds, st.integers(1, 12), st.booleans(), st.floats(0, 20), st.floats(0, 20))
def test_nor_is_one_whose_last_layers_move_apart_and_it_is_shorter_for_that(
    seed, units, is_early, gathers, reduces
):
    whole, plan = random_case(seed, units)
    whole = early(whole, seed) if is_early else whole
    last_s = gathers * whole.links.gather_s, reduces * whole.links.reduce_s
    root_s = whole.root_links.gather_s + last_s[0], whole.root_links.reduce_s + last_s[1]
    apart = dataclasses.replace(
        whole,
        last_links=dataclasses.replace(whole.last_links, gather_s=last_s[0], reduce_s=last_s[1]),
    )
    whole = dataclasses.replace(
        whole,
        root_links=dataclasses.replace(whole.root_links, gather_s=root_s[0], reduce_s=root_s[1]),
    )
    for reshard in (True, False):
        plan = dataclasses.replace(plan, reshard_after_forward=reshard)
        found_s = simulate(apart, plan).step_s
        assert found_s <= predict(apart, plan).step_s * (1 + 1e-12)
        assert predict(apart, plan).step_s <= predict(whole, plan).step_s * (1 + 1e-12)
        assert found_s <= simulate(whole, plan).step_s * (1 + 1e-12)


def test_last_layers_hide_behind_the_last_units_by_hand():
    # forward 1 and backward 2 of each of four units; root: 10, of which the last layers are 8
    profile = RankProfile("a", [1], [2], [3], [1], math.inf)
    whole = problem(0, 0, ranks=[profile], units=4, root_links=Links(10, 10))
    apart = dataclasses.replace(
        whole,
        root_links=dataclasses.replace(whole.root_links, gather_s=2, reduce_s=2),
        last_links=dataclasses.replace(whole.last_links, gather_s=8, reduce_s=8),
    )
    plan = Plan([RankPlan((1,), 1.0)])
    whole_s = predict(whole, plan).step_s
    # the gather hides behind the third unit and the fourth one, of which the formula counts the
    # third; the reduce behind the backward of the fourth
    assert predict(apart, plan).step_s == whole_s - 1 - 2
    assert simulate(apart, plan).step_s == whole_s - 2 - 2


@fixed
@given(seeds, st.integers(1, 12))
def test_early_updates_take_no_longer_and_as_much_compute(seed, units):
    case, plan = random_case(seed, units)
    late, soon = simulate(case, plan), simulate(early(case, seed), plan)
    assert soon.step_s <= late.step_s * (1 + 1e-12)
    for rank in range(len(plan.ranks)):
        own = soon.timeline(rank).events
        busy_s = [each.timeline(rank).busy_s(Stream.COMPUTE) for each in (soon, late)]
        assert busy_s[0] == pytest.approx(busy_s[1])
        for event in own:
            if event.operation is Operation.UPDATE and event.unit != -1:
                reduced = [
                    e for e in own if e.operation is Operation.REDUCE and e.unit == event.unit
                ]
                assert event.start_s >= reduced[0].end_s


def test_updates_that_hide_behind_a_slow_link_by_hand():
    late = dataclasses.replace(problem(4, 4), unit_update_s=0.25, fill_s=8)
    soon = late.with_early_update()
    # a unit's gather and reduce take 8, its backward 5: an update of 0.25 hides
    assert predict(late, PLAN.ranks).step_s - predict(soon, PLAN.ranks).step_s == 2 * 0.25
    assert simulate(late, PLAN).step_s - simulate(soon, PLAN).step_s == 2 * 0.25
    # only the root unit's reduce is left to hide one
    slow = dataclasses.replace(problem(0, 0), unit_update_s=0.25)
    both = slow, slow.with_early_update()
    for seconds in (
        lambda case: predict(case, PLAN.ranks).step_s,
        lambda c: simulate(c, PLAN).step_s,
    ):
        assert seconds(both[0]) - seconds(both[1]) == 0.25


@settings(max_examples=200, derandomize=True, deadline=None)
@given(*[st.integers(0, 40)] * 4, st.integers(1, 6), st.booleans(), st.none() | st.integers(0, 80))
def test_a_step_of_equal_ranks_is_the_closed_form(
    gather, reduce, forward, backward, units, reshard, more
):
    profile = RankProfile("a", [forward], [backward], [3], [1], math.inf)
    both = None if more is None else max(gather, reduce) + more
    fill = gather + reduce
    case = problem(
        *(gather, reduce),
        ranks=[profile] * 3,
        units=units,
        fill_s=fill,
        links=Links(gather, reduce, both),
    )
    plan = Plan([RankPlan((1,), 1 / 3)] * 3, reshard_after_forward=reshard)
    assert simulate(case, plan).step_s == pytest.approx(predict(case, plan).step_s, rel=1e-12)


# -- many ranks, many steps, bad input --------------------------------------------------------


def test_equal_ranks_are_played_once_and_as_if_alone():
    def named(names: str) -> Problem:
        ranks = [dataclasses.replace(FAST, name=name) for name in names]
        return problem(1, 1, ranks=[*ranks, SLOW], units=3)

    plan = Plan([*[RankPlan((2, 1), 0.25)] * 3, RankPlan((1,), 0.25)])
    together, apart = simulate(named("aaa"), plan), simulate(named("abc"), plan)
    assert [timeline.ranks for timeline in together.timelines] == [(0, 1, 2), (3,)]
    assert len(apart.timelines) == 4
    for rank in range(4):
        assert together.timeline(rank).events == apart.timeline(rank).events
        assert together.timeline(rank).held == apart.timeline(rank).held
    assert together.step_s == apart.step_s


@pytest.mark.parametrize(
    "part",
    [
        RankPlan((1,), 0.4),
        RankPlan((2,), 0.3),
        RankPlan((1,), 0.3, offload=True),
        RankPlan((1,), 0.3, recompute=False),
    ],
)
def test_a_rank_that_is_planned_otherwise_is_another_kind(part):
    choosing = dataclasses.replace(FAST, kept=KeptCurves([1, 2], [1, 2]))
    rest = RankPlan((1,), 1 - 0.3 - part.state_fraction)
    case = problem(1, 1, ranks=[choosing] * 3)
    simulation = simulate(case, Plan([RankPlan((1,), 0.3), part, rest]))
    assert simulation.timeline(0).ranks == (0,)
    assert simulation.timeline(1).ranks == (1,)


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(PlanError, match=r"problem's 2 ranks, but got 1"):
        simulate(problem(1, 1), Plan([RankPlan((1,), 1.0)]))


def test_what_was_not_profiled_is_refused():
    with pytest.raises(PlanError, match=r"rank 1 \('slow'\): microbatch size 2 was not profiled"):
        simulate(problem(1, 1), Plan([RankPlan((1,), 0.5), RankPlan((2,), 0.5)]))
    with pytest.raises(PlanError, match="kept curves"):
        simulate(problem(1, 1), Plan([RankPlan((1,), 0.5, recompute=False), RankPlan((), 0.5)]))


# -- optimizer state in host memory -----------------------------------------------------------


def moving(seed: int, units: int, is_early: bool) -> tuple[Problem, Plan]:
    """A random case whose ranks keep the same parts of their state in host memory."""
    case, plan = random_case(seed, units)
    case = early(case, seed) if is_early else case
    draw = np.random.default_rng(seed)
    sizes = (int(draw.integers(0, 3000)), *[int(draw.integers(10, 1000))] * units)
    backward_s = max(rank.backward_s for rank in predict(case, plan).ranks) or 1.0
    rate = 8 * sizes[1] / len(plan.ranks) / backward_s * 10 ** draw.uniform(-2, 1)
    ranks = tuple(
        dataclasses.replace(
            rank,
            to_device_bytes_per_s=rate * draw.uniform(0.5, 2),
            to_host_bytes_per_s=rate * draw.uniform(0.5, 2),
            host_updated_parameters_per_s=rate / 8 * draw.uniform(0.1, 2),
        )
        for rank in case.ranks
    )
    resident = draw.choice([0, 0.25, 0.5, 0.8])
    on_host = (1 - resident) * draw.choice([0, 0, 0.3, 0.5, 1])
    parts = [
        dataclasses.replace(rank, resident_fraction=resident, host_update_fraction=on_host)
        for rank in plan.ranks
    ]
    case = dataclasses.replace(case, ranks=ranks, unit_parameters=sizes, moment_bytes=8.0)
    if draw.random() < 0.5:
        rates = 8 * rate * 10 ** draw.uniform(-2, 1, size=len(ranks))
        ranks = tuple(
            dataclasses.replace(rank, updated_parameters_per_s=own)
            for rank, own in zip(ranks, rates.tolist(), strict=True)
        )
        case = dataclasses.replace(case, ranks=ranks)
    return case, dataclasses.replace(plan, ranks=tuple(parts))


@pytest.mark.parametrize("index", range(40))
def test_state_that_moves_takes_no_longer_than_the_closed_form_and_the_fill(index):
    # of 1,500 others, 7 with early updates take up to 13 % longer
    draw = np.random.default_rng(index)
    case, plan = moving(int(draw.integers(2**32)), int(draw.integers(1, 25)), index % 2 == 1)
    planned = cost.as_planned(case, plan)
    simulation = simulate(case, plan)
    fill_s = planned.links.gather_s + planned.links.reduce_s
    predicted = predict(case, plan)
    # copies of two kinds may leave gaps on a link that hold none of the others
    mixed = all(0 < r.host_update_fraction < 1 - r.resident_fraction for r in plan.ranks)
    longest_s = (predicted.step_s + fill_s) * (1.05 if mixed else 1 + 1e-12)
    assert simulation.step_s <= longest_s
    for rank, part in enumerate(predicted.ranks):
        host = host_memory(simulation, rank)
        assert simulation.timeline(rank).peak_bytes <= part.memory_bytes * (1 + 1e-12)
        most = part.host_bytes + part.state_host_bytes
        assert part.state_host_bytes <= max(size for _, size in host) <= most * (1 + 1e-12)
    for events in by_stream(simulation).values():
        events.sort(key=lambda event: event.start_s)
        for one, other in itertools.pairwise(events):
            assert one.end_s <= other.start_s * (1 + 1e-12) + 1e-12


def test_the_ways_of_state_by_hand():
    ranks = [
        dataclasses.replace(rank, to_device_bytes_per_s=8, to_host_bytes_per_s=4)
        for rank in (FAST,)
    ]
    case = problem(0, 0, ranks=ranks, global_batch_size=1, root_links=Links(0, 0))
    case = dataclasses.replace(case, unit_parameters=(0, 1, 1), moment_bytes=8.0)
    plan = Plan([RankPlan((1,), 1.0, resident_fraction=0.5)])
    soon = simulate(case.with_early_update(), plan)
    # forward 2 x 1, tail 1; unit 2's backward ends at 6, and unit 1's at 9
    assert spans(soon, 0, Stream.TO_DEVICE) == [("fetch state", 2, 6, 7)]
    assert spans(soon, 0, Stream.TO_HOST) == [("store state", 2, 9, 11)]
    late = simulate(case, plan)
    assert spans(late, 0, Stream.TO_DEVICE) == [("fetch state", 2, 9, 10)]
    assert spans(late, 0, Stream.TO_HOST) == [("store state", 2, 10, 12)]
    assert late.step_s == 12 + case.step_overhead_s


def test_streamed_state_waits_for_a_buffer_that_has_left_by_hand():
    one = dataclasses.replace(FAST, to_device_bytes_per_s=8, to_host_bytes_per_s=1)
    case = problem(0, 0, ranks=[one], units=3, global_batch_size=1, root_links=Links(0, 0))
    case = dataclasses.replace(case, unit_parameters=(0, 1, 1, 1), moment_bytes=8.0)
    simulation = simulate(case, Plan([RankPlan((1,), 1.0, resident_fraction=0.0)]))
    # the backward ends at 3 + 1 + 9; the state of unit 3 has left a buffer 8 s after its update
    assert spans(simulation, 0, Stream.TO_HOST)[0] == ("store state", 3, 14, 22)
    assert spans(simulation, 0, Stream.TO_DEVICE) == [
        ("fetch state", 3, 13, 14),
        ("fetch state", 2, 14, 15),
        ("fetch state", 1, 22, 23),
    ]
