"""The paper's planner and its profiles, which benchmarks compare with (benchmarks/paper)."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cephalo.offline.estimate.analytic import Efficiency, estimate
from lightning_cephalo.offline.estimate.devices import find_device
from lightning_cephalo.offline.estimate.work import Linear, ModelWork, Pass
from lightning_cephalo.plan import (
    InfeasibleError,
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    solve,
)

ROOT = Path(__file__).resolve().parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    from paper.fits import Measurement, fit, relative_errors
    from paper.planner import PublishedModel, published
    from paper.profiles import PublishedProfiles, read_published

FOLDER = ROOT.parent / "shared/data/cephalo-profiles"
GIB = 2**30
FOUR = ("l4", "l4", "a6000", "p40")
EIGHT = (*FOUR, "p40", "p40", "p100", "p100")
OOM = None
# Plain constants, so that figures can be checked by hand.
FREE = PublishedModel(memory_share=1.0, overhead_bytes=0.0, between_microbatches_s=0.0)


def contents() -> dict[str, dict]:
    return {
        "model_latencies.json": {
            "toy": {
                "a6000": {"512": {"float32": [[10, 1], [20, 2], [9, 22, 21], [19, 41, 60]]}},
                "l4": {"512": {"float32": [[10, -25], [20, 0]]}, "1024": {"float16": [30, 10]}},
                "tpu": {"512": {"float32": [[1, 0], [1, 0]]}},
            }
        },
        "model_memory.json": {
            "paper": {
                "toy": {
                    "parameters": 1000,
                    "profiled_compute_memory": {"float32": [1, 1, 2, 3, 4, 7]},
                }
            }
        },
        "model_stats.json": {"toy": {"num_layers": 12, "total_parameters": 1100}},
    }


def written(folder: Path, data: dict[str, dict]) -> Path:
    for name, content in data.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def toy(tmp_path) -> PublishedProfiles:
    return read_published(written(tmp_path, contents()))


def test_measured_points_come_before_the_line(toy):
    times = toy.times("toy", "a6000", "fp32", 512, 5)
    assert times.measured_sizes == 3
    # Dips that were measured stay (22, 21), and the line is raised to no less than any point.
    assert times.forward_s == pytest.approx([0.009, 0.022, 0.021, 0.041, 0.051])
    # with recompute: 19 + 9, 41 + 22, 60 + 21, and the lines 82 + 41 and 102 + 51
    assert times.backward_s == pytest.approx([0.028, 0.063, 0.081, 0.123, 0.153])
    assert toy.times("toy", "a6000", "fp32", 512, 2).forward_s == (0.009, 0.022)


def test_the_line_never_falls_below_a_measured_point(tmp_path):
    data = contents()
    data["model_latencies.json"]["toy"]["l4"]["512"]["float32"] = [[10, 0], [1, 0], [45], [1]]
    times = read_published(written(tmp_path, data)).times("toy", "l4", "fp32", 512, 6)
    assert times.forward_s == pytest.approx([0.045, 0.045, 0.045, 0.045, 0.050, 0.060])


def test_a_line_below_zero_costs_what_its_first_positive_size_costs(toy):
    # 10 m - 25 is positive from 3 on
    times = toy.times("toy", "l4", "fp32", 512, 4)
    assert times.forward_s == pytest.approx([0.005, 0.005, 0.005, 0.015])
    assert times.measured_sizes == 0


def test_plain_numbers_are_one_line_of_both_passes(toy):
    times = toy.times("toy", "l4", "float16", 1024, 2)
    # 40 and 70 ms in all, two fifths of them forward; the backward is with recompute
    assert times.forward_s == pytest.approx([0.016, 0.028])
    assert times.backward_s == pytest.approx([0.040, 0.070])


def test_memory_goes_on_with_the_mean_growth_of_the_last_five(toy):
    found = toy.compute_bytes("toy", "fp32", 8)
    assert found == pytest.approx([GIB * own for own in (1, 1, 2, 3, 4, 7, 8.5, 10)])
    assert toy.compute_bytes("toy", "fp32", 2) == (GIB, GIB)


def test_a_problem_has_the_units_of_the_planner(toy):
    problem = toy.problem(
        model="toy",
        dtype="fp32",
        devices=["l4", "A6000", "l4"],
        global_batch_size=16,
        gather_s=0.5,
        memory_share=0.5,
    )
    assert (problem.units, problem.global_batch_size, problem.links.gather_s) == (12, 16, 0.5)
    assert problem.state.held_bytes == 16 * 1000
    assert problem.gathered_bytes == 2 * GIB
    assert [rank.name for rank in problem.ranks] == ["L4", "A6000", "L4"]
    assert problem.ranks[0].capacity_bytes == 0.5 * 22.5 * GIB
    # 11.25 - 2 GiB leave room for 8.5 GiB, size 7
    assert problem.ranks[0].largest_microbatch_size == 7
    # 23.995 - 2 GiB: size 16 would take 22
    assert problem.ranks[1].largest_microbatch_size == 15
    assert problem.ranks[0].forward_s[3] == pytest.approx(0.015)
    assert solve(problem).global_batch_size == 16


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
    return Problem(ranks, units=units, state=StateBytes(state), global_batch_size=batch, **more)


def batches(plan: Plan) -> list[int]:
    return [part.batch_size for part in plan.ranks]


def fractions(plan: Plan) -> list[float]:
    return [part.state_fraction for part in plan.ranks]


def counts(plan: Plan) -> list[int]:
    return [len(part.microbatch_sizes) for part in plan.ranks]


def test_the_published_model_by_hand():
    asked = problem(
        [rank(capacity=10)] * 2, 8, state=4, links=Links(100, 30), even_links=Links(2, 30)
    )
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
    room = model.memory_share * sum(own.capacity_bytes for own in ranks) - asked.state.held_bytes
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
        gathers = {"links": Links(draw.uniform(0, 4), draw.uniform(0, 4))}
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
    plan = published(asked, FREE, even_state=True, accumulate_gradients=False)
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
        lambda asked: published(asked, even_state=True, accumulate_gradients=False),
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


# -- fits of estimates ---------------------------------------------------------------------------

WORK = ModelWork(
    model="block",
    dtype="fp16",
    sequence_length=512,
    units=24,
    unit_parameters=50e6,
    largest_unit_parameters=50e6,
    root_parameters=100e6,
    forward=Pass(Linear(0.0, 54e9), Linear(1e6, 0.3e9), 30),
    backward=Pass(Linear(0.0, 108e9), Linear(0.3e9, 0.5e9), 60),
    tail=Pass(Linear(0.0, 310e9), Linear(0.6e9, 1e9), 40),
    boundary_bytes=2e6,
    kept_bytes=60e6,
    unit_peak_bytes=Linear(5e6, 80e6),
    root_peak_bytes=Linear(1e6, 200e6),
)


def test_a_fit_finds_the_efficiencies_that_made_the_curves():
    made = [
        Efficiency("A100 40GB", "half", 0.8, 0.6),
        Efficiency("T4", "half", 0.4, 0.5),
    ]
    measurements = [
        Measurement(
            find_device(truth.device),
            work,
            estimate(work, find_device(truth.device), 8, efficiencies=[truth]),
        )
        for truth in made
        # another balance of arithmetic and memory, so that both can be told
        for work in (WORK, replace(WORK, forward=Pass(Linear(0.0, 20e9), Linear(0.0, 1e9), 30)))
    ]
    fitted = fit(measurements)
    assert [entry.device for entry in fitted] == ["", "A100 40GB", "T4"]
    assert 0.4 < fitted[0].compute < 0.8
    for entry, truth in zip(fitted[1:], made, strict=True):
        assert entry.compute == pytest.approx(truth.compute, rel=0.1)
        assert entry.bandwidth == pytest.approx(truth.bandwidth, rel=0.1)
    assert max(relative_errors(measurements[0], fitted[1])) < 0.1
