"""From a cluster and a model to a problem: sources in their order, and a whole plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_cephalo.offline.estimate.analytic import curves_of
from lightning_cephalo.offline.estimate.build import Choices, build_problem
from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.estimate.devices import find_device
from lightning_cephalo.offline.estimate.models import work_of
from lightning_cephalo.plan import InfeasibleError, Links, PlanError, Problem, predict, solve
from lightning_cephalo.plan.curves import Curves, CurveTable, save_measured

pytest.importorskip("transformers")

CLUSTER = """
nodes: [{devices: {RTX 4090: 2, RTX 3090: 1}, link: 25 GB/s, host_memory: 96 GiB}]
"""


@pytest.fixture(scope="module")
def work():
    return work_of(
        "gpt2", sequence_length=512, dtype="fp16", n_layer=24, n_embd=1024, n_head=16, name="mine"
    )


@pytest.fixture(scope="module")
def cluster():
    return Cluster.from_yaml(CLUSTER)


def _table(device: str, seconds: float, source: str, **more) -> CurveTable:
    curves = Curves(device, (seconds, 2 * seconds), (3 * seconds, 6 * seconds), source=source)
    return CurveTable("mine", "fp16", 512, (curves,))


def test_two_4090s_and_a_3090_get_a_plan(cluster, work, tmp_path):
    estimate = build_problem(cluster, work, global_batch_size=64, cache_folder=tmp_path)
    problem = estimate.problem
    assert Problem.from_yaml(problem.to_yaml()) == problem
    assert [rank.name for rank in problem.ranks] == ["RTX 4090", "RTX 4090", "RTX 3090"]
    assert problem.units == 24
    assert problem.state.held_bytes == pytest.approx(16 * work.parameters, rel=0.05)
    assert problem.links.gather_s == pytest.approx(
        2 / 3 * 2 * work.unit_parameters / 25e9 * 1.1, rel=0.1
    )
    assert problem.links.reduce_s > problem.links.gather_s
    assert problem.even_links is None  # cuts lie between rows: even slices are rare
    assert problem.fill_s == problem.links.gather_s + problem.links.reduce_s
    # estimates say what rows take, by the device's memory: 0.9 of its rate, and 28 bytes each
    assert problem.update_overhead_s == 0 and problem.shares_take_time
    assert {source.source for source in estimate.sources} == {"estimate"}
    assert all("% off" in source.detail for source in estimate.sources)
    plan = solve(problem)
    samples = [sum(rank.microbatch_sizes) for rank in plan.ranks]
    assert sum(samples) == 64
    assert samples[2] < min(samples[:2])
    prediction = predict(problem, plan.ranks)
    for own, rank, profile in zip(plan.ranks, prediction.ranks, problem.ranks, strict=True):
        rows = own.state_fraction * problem.parameters
        assert rank.update_s == pytest.approx(rows / profile.updated_parameters_per_s)
        assert 0 < rank.update_s < 0.1
        assert rank.memory_bytes <= profile.capacity_bytes


def test_embeddings_and_heads_are_priced_when_they_are_there(cluster, tmp_path):
    """As in training: the head is gathered behind the last unit, the embedding freed before."""
    small = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8000}
    tied = work_of("gpt2", sequence_length=64, dtype="fp16", **small)
    work = work_of("gpt2", sequence_length=64, dtype="fp16", tie_word_embeddings=False, **small)
    table = 8000 * 256
    assert (tied.first_parameters, tied.last_parameters) == (1024 * 256, 0)  # the positions
    assert work.first_parameters == table + 1024 * 256
    assert work.last_parameters == table

    problem, as_one = (
        build_problem(cluster, of, global_batch_size=64, cache_folder=tmp_path).problem
        for of in (work, replace(work, first_parameters=0, last_parameters=0))
    )
    assert as_one.last_links == Links()
    assert 0 < problem.last_links.gather_s < problem.last_links.reduce_s
    for name in ("gather_s", "reduce_s"):
        whole = getattr(as_one.root_links, name)
        parts = getattr(problem.root_links, name) + getattr(problem.last_links, name)
        assert whole < parts < whole + 100e-6  # one more latency
    # parameters in two bytes and gradients in four: one of the ends is never there whole
    assert as_one.gathered_bytes - problem.gathered_bytes >= 6 * table
    # one reduce receives less, too
    assert as_one.state.held_bytes - problem.state.held_bytes >= 4 * table
    assert solve(problem).step_s < solve(as_one).step_s


def test_options_are_given_only_where_asked(cluster, work, tmp_path):
    def ranks(**options):
        built = build_problem(
            cluster, work, global_batch_size=16, cache_folder=tmp_path, choices=Choices(**options)
        )
        return built.problem, built.problem.ranks[0]

    problem, plain = ranks()
    assert (plain.kept, problem.kept_bytes) == (None, 0.0)
    assert not problem.offloads_boundaries and problem.optimizer_offload is False
    problem, choosing = ranks(choose_recompute=True)
    assert problem.kept_bytes == work.kept_bytes
    assert choosing.kept.backward_s[0] < choosing.backward_s[0]
    assert problem.boundary_bytes == work.boundary_bytes
    problem, kept = ranks(recompute=False)
    assert kept.backward_s == choosing.kept.backward_s[: len(kept.backward_s)]
    assert problem.boundary_bytes == work.boundary_bytes + work.kept_bytes
    problem, offloading = ranks(allow_offload=True)
    assert problem.offloads_boundaries
    assert offloading.host_capacity_bytes == pytest.approx(0.9 * 32 * 2**30)
    assert 20e9 < offloading.offload_bytes_per_s < 31.5e9


def test_hybrid_sharding_has_the_times_and_the_memory_of_nodes(work, tmp_path):
    node = "{devices: {RTX 4090: %d, RTX 3090: 1}, link: 25 GB/s}"
    text = f"nodes: [{node % 1}, {node % 2}]\nbetween_nodes: 1 GB/s"
    cluster = Cluster.from_yaml(text)

    def built(**options):
        return build_problem(
            cluster, work, global_batch_size=64, cache_folder=tmp_path, choices=Choices(**options)
        ).problem

    together, hybrid = (
        built(optimizer_offload="auto"),
        built(hybrid_sharding=True, optimizer_offload="auto"),
    )
    assert hybrid.groups == (0, 0, 1, 1, 1) and hybrid.optimizer_offload is False
    assert Problem.from_yaml(hybrid.to_yaml()) == hybrid
    # a gather stays in the larger node, and gradients in fp32 cross to the other one once
    parameters = work.unit_parameters
    assert hybrid.links.gather_s == pytest.approx(2 / 3 * 2 * parameters / 25e9 * 1.1, rel=0.1)
    inside_s = 2 / 3 * 4 * parameters / 25e9
    assert hybrid.links.reduce_s == pytest.approx((inside_s + 4 * parameters / 1e9) * 1.1, rel=0.1)
    assert (
        together.links.gather_s > 10 * hybrid.links.gather_s
        and together.links.reduce_s < hybrid.links.reduce_s
    )
    # two rows of a rank's slice arrive
    largest = max(work.largest_unit_parameters, work.root_parameters)
    assert hybrid.state.held_bytes == together.state.held_bytes + 2 * 4 * largest
    plan = solve(hybrid)
    # the smaller node updates with two devices
    updates_s = [rank.update_s for rank in predict(hybrid, plan).ranks]
    assert max(updates_s[:2]) > max(updates_s[2:])
    assert [sum(shares) for shares in plan.fractions_of_groups] == pytest.approx([1, 1])
    with pytest.raises(PlanError, match="at least two nodes that each hold the whole state"):
        build_problem(
            Cluster.from_yaml(CLUSTER),
            work,
            global_batch_size=64,
            choices=Choices(hybrid_sharding=True),
        )


def test_optimizer_state_in_host_memory_is_planned_from_data_sheets(tmp_path):
    work = work_of("gpt2", sequence_length=128, dtype="fp16", n_layer=24, n_embd=2048, n_head=16)
    # 1.3e9 parameters: of their state, 21 GB, devices hold about 14
    cluster = Cluster.from_yaml("""
nodes: [{devices: {V100: 1}, host_memory: 64 GiB, host_bandwidth: 60 GB/s}]
""")

    def problem(**options):
        return build_problem(
            cluster, work, global_batch_size=8, cache_folder=tmp_path, choices=Choices(**options)
        ).problem

    with pytest.raises(InfeasibleError, match="optimizer_offload='auto'"):
        solve(problem())
    late, early = (problem(optimizer_offload="auto", early_update=is_) for is_ in (False, True))
    (rank,) = early.ranks
    assert sum(early.unit_parameters) == pytest.approx(work.parameters)
    assert rank.host_updated_parameters_per_s == 60e9 / 30
    assert rank.to_device_bytes_per_s == rank.to_host_bytes_per_s == 0.8 * 15.75e9
    plans = [solve(each) for each in (late, early)]
    for each, plan in zip((late, early), plans, strict=True):
        assert plan.moves_state
        assert predict(each, plan).ranks[0].memory_bytes <= rank.capacity_bytes
    # less of it moves, and that hides behind the backward
    assert plans[1].ranks[0].resident_fraction > plans[0].ranks[0].resident_fraction
    assert plans[1].step_s < plans[0].step_s


def test_measured_comes_before_tables_and_tables_before_estimates(cluster, work, tmp_path):
    def sources():
        estimate = build_problem(
            cluster,
            work,
            global_batch_size=16,
            cache_folder=tmp_path,
            tables=[_table("NVIDIA GeForce RTX 3090", 0.5, "table"), _table("T4", 9.0, "table")],
        )
        last = estimate.problem.ranks[2]
        return [source.source for source in estimate.sources], last

    names, last = sources()
    assert names == ["estimate", "estimate", "table"]
    assert last.forward_s == (0.5, 1.0)
    save_measured(_table("RTX 3090", 0.25, "measured"), tmp_path)
    names, last = sources()
    assert names == ["estimate", "estimate", "measured"]
    assert last.forward_s == (0.25, 0.5)


def test_what_a_table_leaves_out_is_filled_in_and_said(cluster, work, tmp_path):
    def tail(seconds):
        estimate = build_problem(
            cluster,
            work,
            global_batch_size=16,
            cache_folder=tmp_path,
            tables=[_table("RTX 3090", seconds, "table")],
        )
        assert "tail_s and compute_bytes estimated" in estimate.sources[2].detail
        return estimate.problem.ranks[2].tail_s

    assert tail(0.2)[1] == pytest.approx(2 * tail(0.1)[1])


def test_tables_of_other_models_do_not_count(cluster, work, tmp_path):
    for model, dtype, length in (
        ("other", "fp16", 512),
        ("mine", "fp32", 512),
        ("mine", "fp16", 1),
    ):
        table = CurveTable(model, dtype, length, _table("RTX 3090", 1.0, "table").curves)
        estimate = build_problem(
            cluster, work, global_batch_size=16, cache_folder=tmp_path, tables=[table]
        )
        assert estimate.sources[2].source == "estimate"


def test_a_broken_cache_file_is_told_and_stops_nothing(cluster, work, tmp_path):
    (tmp_path / "torn.yaml").write_text("model: [")
    estimate = build_problem(cluster, work, global_batch_size=16, cache_folder=tmp_path)
    assert len(estimate.broken_files) == 1
    assert "torn.yaml" in estimate.broken_files[0]


def test_a_device_too_small_for_one_sample_takes_none(work, tmp_path):
    cluster = Cluster.from_yaml(
        "nodes: [{devices: {RTX 4090: 1, Small: 1}, link: 10 GB/s}]\n"
        "devices: {Small: {memory: 0.7 GiB, fp32: 8 TFLOP/s, bandwidth: 300 GB/s}}"
    )
    problem = build_problem(cluster, work, global_batch_size=8, cache_folder=tmp_path).problem
    assert problem.ranks[0].largest_microbatch_size == 8
    assert problem.ranks[1].largest_microbatch_size == 0
    assert math.isfinite(problem.ranks[1].capacity_bytes)


def test_a_device_that_lacks_the_dtype_is_refused(tmp_path):
    work = work_of("gpt2", sequence_length=64, dtype="bf16", n_layer=2, n_embd=64, n_head=2)
    cluster = Cluster.from_yaml("nodes: [{devices: {V100: 1}}]")
    with pytest.raises(PlanError, match=r"'V100 16GB'.*'bf16'"):
        build_problem(cluster, work, global_batch_size=8, cache_folder=tmp_path)


def test_measured_curves_are_those_of_a_model_of_the_same_size():
    small, large = (
        work_of("llama", sequence_length=32, hidden_size=size, num_hidden_layers=2, vocab_size=64)
        for size in (64, 128)
    )
    curves = Curves("RTX 4090", (1.0,), (2.0,), (1.0,), (1.0,), source="measured")
    table = CurveTable("llama", "fp32", 32, (curves,), parameters=round(small.parameters))
    device = find_device("RTX 4090")
    assert curves_of(device, small, 4, tables=[table]).source == "measured"
    assert curves_of(device, large, 4, tables=[table]).source == "estimate"
