"""The search for pipelines: none is faster, every rank has the memory."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from pipeline_brute_force import fastest_s, quick_plan, random_problem
from pipeline_cases import problem_of, rank

from lightning_cephalo.offline.pipeline.groups import atoms_of, kinds_of, orders, partitions
from lightning_cephalo.offline.pipeline.plan import Advice
from lightning_cephalo.offline.pipeline.search import Planned, advise, least_step_s, wave_counts
from lightning_cephalo.offline.pipeline.stages import stage_problem
from lightning_cephalo.plan import PlanError, predict, solve

FAST, SLOW = rank(2.0, 3000), rank(1.0, 3000)


def test_no_pipeline_of_brute_force_is_faster():
    for seed in (*range(10), 19, 93):  # the last two have three stages
        problem = random_problem(random.Random(seed))
        advice = advise(problem, math.inf, gap=0.0, planned=Planned(quick_plan))
        best_s = fastest_s(problem)
        found_s = advice.best.step_s if advice.best else math.inf
        assert found_s == pytest.approx(best_s, rel=1e-9), seed
        assert advice.bound_s <= best_s * (1 + 1e-9), seed


def _check_memory(advice: Advice) -> None:
    assert advice.best is not None
    pipeline, ranks = advice.best, []
    assert sum(pipeline.units) == advice.problem.units
    for planned in pipeline.stages:
        wave = stage_problem(advice.problem, planned.stage)
        held = predict(wave, planned.plan).ranks
        for own, profile in zip(held, wave.ranks, strict=True):
            assert own.memory_bytes <= profile.capacity_bytes * (1 + 1e-9)
        assert planned.plan.global_batch_size == planned.stage.wave_samples
        ranks += planned.stage.blocks
    assert pipeline.waves * pipeline.stages[0].stage.wave_samples >= advice.problem.batch
    assert sorted(ranks) == list(range(len(advice.problem.blocks)))


def test_a_slow_network_wants_a_pipeline_and_a_fast_one_does_not():
    planned = Planned()
    problems = [
        problem_of([FAST] * 2, [SLOW] * 2, between=rate, batch=16) for rate in (0.5, 1000.0)
    ]
    slow, fast = (
        advise(problem, solve(problem.whole).step_s, planned=planned) for problem in problems
    )
    assert slow.pipeline_wins and not fast.pipeline_wins
    for advice in (slow, fast):
        _check_memory(advice)
        assert advice.bound_s <= advice.best.step_s
        assert advice.gap <= 0.2
        assert least_step_s(advice.problem.whole) <= advice.today_s * (1 + 1e-12)
        simulated_s = max(own[-1].end_s for own in advice.best.simulate())
        assert simulated_s == pytest.approx(advice.best.step_s, rel=1e-9)
    units = slow.best.units
    blocks = [each.stage.blocks for each in slow.best.stages]
    assert units[blocks.index((0,))] > units[blocks.index((1,))]


def test_memory_decides_how_often_a_stage_gathers():
    def ways(capacity: float) -> set[bool]:
        node = [rank(1.0, capacity)] * 2
        advice = advise(problem_of(node, node, between=0.5, batch=8, units=12), math.inf)
        _check_memory(advice)
        return {each.stage.regathers for each in advice.best.stages}

    assert any(ways(850))
    assert ways(5000) == {False}


def test_a_pipeline_is_found_even_if_time_is_up():
    for seed in range(5):
        problem = random_problem(random.Random(seed))
        planned = Planned(quick_plan)
        at_once = advise(problem, math.inf, planned=planned, time_limit_s=1e-9)
        best_s = advise(problem, math.inf, planned=planned, gap=0.0).best.step_s
        assert at_once.bound_s <= best_s * (1 + 1e-9)
        assert at_once.best.step_s < 2 * best_s


def test_what_fits_no_pipeline_is_said():
    node = [rank(1.0, 300)] * 2
    advice = advise(problem_of(node, node, units=8), math.inf)
    assert advice.best is None and not advice.pipeline_wins


def test_one_block_is_no_pipeline():
    assert advise(problem_of([FAST, SLOW]), math.inf).best is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_limit_s": 0}, "time_limit_s: expected a number greater than 0"),
        ({"gap": -1}, "gap: expected a finite number at least 0"),
    ],
)
def test_bad_questions_are_refused_by_name(options, words):
    with pytest.raises(PlanError, match=words):
        advise(problem_of([FAST], [SLOW]), math.inf, **options)


def test_equal_nodes_count_once_and_links_tell_them_apart():
    alike = problem_of([FAST], [SLOW], [FAST])
    kinds = kinds_of(alike, atoms_of(alike))
    assert kinds == (0, 1, 0)
    assert len(list(partitions(range(3), kinds))) == 4
    assert len(list(partitions(range(3), (0, 1, 2)))) == 5
    assert len(list(orders(((0,), (1,), (2,)), kinds))) == 3
    links = [list(row) for row in alike.network.between]
    links[0][2] = links[2][0] = dataclasses.replace(links[0][1], latency_s=1.0)
    network = dataclasses.replace(alike.network, between=tuple(map(tuple, links)))
    apart = dataclasses.replace(alike, network=network)
    assert kinds_of(apart, atoms_of(apart)) == (0, 1, 2)


def test_many_nodes_stay_together_in_pairs_of_equal_ones():
    many = problem_of(*[[FAST]] * 6, *[[SLOW]] * 4)
    atoms = atoms_of(many)
    assert len(atoms) == 8
    assert sorted(block for atom in atoms for block in atom) == list(range(10))
    for atom in atoms:
        assert len({many.blocks[block].ranks for block in atom}) == 1


def test_waves_are_powers_and_their_halves_between():
    assert wave_counts(16) == [1, 2, 3, 4, 6, 8, 16]
    assert wave_counts(1) == [1]
    assert wave_counts(7) == [1, 2, 3, 4, 7]
