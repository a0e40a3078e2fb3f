"""The importer of published profiles, on a small folder written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lightning_cephalo.offline.paper.profiles import read_published
from lightning_cephalo.plan import PlanError, solve

FOLDER = Path(__file__).resolve().parents[4] / "shared/data/cephalo-profiles"
GIB = 2**30


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
def profiles(tmp_path):
    return read_published(written(tmp_path, contents()))


def test_measured_points_come_before_the_line(profiles):
    times = profiles.times("toy", "a6000", "fp32", 512, 5)
    assert times.measured_sizes == 3
    # Dips that were measured stay (22, 21), and the line is raised to no less than any point.
    assert times.forward_s == pytest.approx([0.009, 0.022, 0.021, 0.041, 0.051])
    # with recompute: 19 + 9, 41 + 22, 60 + 21, and the lines 82 + 41 and 102 + 51
    assert times.backward_s == pytest.approx([0.028, 0.063, 0.081, 0.123, 0.153])
    assert profiles.times("toy", "a6000", "fp32", 512, 2).forward_s == (0.009, 0.022)


def test_the_line_never_falls_below_a_measured_point(tmp_path):
    data = contents()
    data["model_latencies.json"]["toy"]["l4"]["512"]["float32"] = [[10, 0], [1, 0], [45], [1]]
    times = read_published(written(tmp_path, data)).times("toy", "l4", "fp32", 512, 6)
    assert times.forward_s == pytest.approx([0.045, 0.045, 0.045, 0.045, 0.050, 0.060])


def test_a_line_below_zero_costs_what_its_first_positive_size_costs(profiles):
    # 10 m - 25 is positive from 3 on
    times = profiles.times("toy", "l4", "fp32", 512, 4)
    assert times.forward_s == pytest.approx([0.005, 0.005, 0.005, 0.015])
    assert times.measured_sizes == 0


def test_plain_numbers_are_one_line_of_both_passes(profiles):
    times = profiles.times("toy", "l4", "float16", 1024, 2)
    # 40 and 70 ms in all, two fifths of them forward; the backward is with recompute
    assert times.forward_s == pytest.approx([0.016, 0.028])
    assert times.backward_s == pytest.approx([0.040, 0.070])


def test_a_plain_number_is_a_line_through_zero(tmp_path):
    data = contents()
    data["model_latencies.json"]["toy"]["l4"]["512"]["float32"] = 10
    times = read_published(written(tmp_path, data)).times("toy", "l4", "fp32", 512, 2)
    assert times.forward_s == pytest.approx([0.004, 0.008])
    assert times.backward_s == pytest.approx([0.010, 0.020])


def test_memory_goes_on_with_the_mean_growth_of_the_last_five(profiles):
    found = profiles.compute_bytes("toy", "fp32", 8)
    assert found == pytest.approx([GIB * own for own in (1, 1, 2, 3, 4, 7, 8.5, 10)])
    assert profiles.compute_bytes("toy", "fp32", 2) == (GIB, GIB)


def test_a_problem_has_the_units_of_the_planner(profiles):
    problem = profiles.problem(
        model="toy",
        dtype="fp32",
        devices=["l4", "A6000", "l4"],
        global_batch_size=16,
        gather_s=0.5,
        memory_share=0.5,
    )
    assert (problem.units, problem.global_batch_size, problem.gather_s) == (12, 16, 0.5)
    assert problem.state_bytes == 16 * 1000
    assert problem.gathered_bytes == 2 * GIB
    assert [rank.name for rank in problem.ranks] == ["L4", "A6000", "L4"]
    assert problem.ranks[0].capacity_bytes == 0.5 * 22.5 * GIB
    # 11.25 - 2 GiB leave room for 8.5 GiB, size 7
    assert problem.ranks[0].largest_microbatch_size == 7
    # 23.995 - 2 GiB: size 16 would take 22
    assert problem.ranks[1].largest_microbatch_size == 15
    assert problem.ranks[0].forward_s[3] == pytest.approx(0.015)
    assert solve(problem).global_batch_size == 16


def test_a_rank_without_room_takes_no_samples(profiles):
    problem = profiles.problem(
        model="toy", dtype="fp32", devices=["l4"], global_batch_size=4, memory_share=0.1
    )
    assert problem.ranks[0].largest_microbatch_size == 0


def test_entries_list_what_is_there(profiles):
    found = {(e.model, e.dtype, e.sequence_length): e.devices for e in profiles.entries()}
    assert found == {
        ("toy", "fp32", 512): ("a6000", "l4", "tpu"),
        ("toy", "fp16", 1024): ("l4",),
    }


def test_a_curve_table_has_every_device_under_its_own_name(profiles):
    table = profiles.curve_table(model="toy", dtype="float32", largest=5, memory="paper")
    assert (table.model, table.dtype, table.sequence_length) == ("toy", "fp32", 512)
    assert [curves.device for curves in table.curves] == ["A6000", "L4", "tpu"]
    curves = table.find("A6000")
    assert curves.source == "table"
    assert "sizes 1 to 3 measured" in curves.detail
    assert curves.forward_s == profiles.times("toy", "a6000", "fp32", 512, 5).forward_s
    assert curves.compute_bytes == profiles.compute_bytes("toy", "fp32", 5)
    assert curves.tail_s == ()
    assert profiles.curve_table(model="toy", dtype="fp32").find("L4").compute_bytes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "tiy"}, r"expected one of toy, but got 'tiy'. Did you mean 'toy'"),
        ({"dtype": "int8"}, r"dtype: expected one of fp32, but got 'int8'"),
        ({"devices": ["l4", "a600"]}, r"device: expected one of a6000, l4, tpu, but got 'a600'"),
        ({"devices": ["tpu"]}, r"devices: expected one of a6000, l4, .*, but got 'tpu'"),
        ({"sequence_length": 8}, r"sequence length: expected one of 512, 1024, but got '8'"),
        ({"memory": "papre"}, r"memory: expected one of paper, but got 'papre'. Did you mean"),
        ({"global_batch_size": 0}, r"global_batch_size: expected a whole number of at least 1"),
        ({"memory_share": math.nan}, r"memory_share: expected a finite number"),
    ],
)
def test_a_wrong_argument_is_named(profiles, change, message):
    asked = {"model": "toy", "dtype": "fp32", "devices": ["l4"], "global_batch_size": 4}
    with pytest.raises(PlanError, match=message):
        profiles.problem(**{**asked, **change})


def test_a_table_of_what_is_not_there_is_refused(profiles):
    with pytest.raises(PlanError, match=r"expected one of fp32 at 512, fp16 at 1024, but got"):
        profiles.curve_table(model="toy", dtype="fp32", sequence_length=1024)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([[1, 2], [3, 4], [1, math.nan], [1, 2]], r"\[2\] at microbatch size 2: .* got nan"),
        ([[1, 2], [3, 4], [1, 2], [1]], r"as many measured points .* but got 2 and 1"),
        ([[1, 2], [3, "x"]], r"\[1\]: size of the intercept: expected a finite number"),
        ([[0, 2], [3, 4]], r"\[0\]: slope: expected a finite number greater than 0"),
        ([[1, 2, 3], [3, 4]], r"\[0\]: expected a slope and an intercept"),
        ([[1, 2]], r"expected 2 entries \(lines\) or 4"),
        ("5", r"expected a list of lines and points, but got '5'"),
    ],
)
def test_a_broken_entry_is_named(tmp_path, entry, message):
    data = contents()
    data["model_latencies.json"]["toy"]["l4"]["512"]["float32"] = entry
    profiles = read_published(written(tmp_path, data))
    where = r"model_latencies.json: \['toy'\]\['l4'\]\['512'\]\['float32'\]"
    with pytest.raises(PlanError, match=where + ".*" + message):
        profiles.times("toy", "l4", "fp32", 512, 4)


def test_broken_memory_and_statistics_are_named(tmp_path):
    data = contents()
    data["model_memory.json"]["paper"]["toy"] = {
        "parameters": -1,
        "profiled_compute_memory": {"float32": []},
    }
    data["model_stats.json"]["toy"] = {"num_layers": 1.5}
    profiles = read_published(written(tmp_path, data))
    with pytest.raises(PlanError, match=r"parameters: expected a finite number greater than 0"):
        profiles.state_bytes("toy")
    with pytest.raises(PlanError, match=r"expected at least one number of GiB"):
        profiles.compute_bytes("toy", "fp32", 1)
    with pytest.raises(PlanError, match=r"num_layers: expected a whole number"):
        profiles.units("toy")


def test_a_folder_that_is_not_one_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"model_latencies.json: expected .* no such file"):
        read_published(tmp_path)
    written(tmp_path, contents())
    (tmp_path / "model_memory.json").write_text("{not json")
    with pytest.raises(PlanError, match=r"model_memory.json: .* the text is not JSON"):
        read_published(tmp_path)
    (tmp_path / "model_memory.json").write_text("[1]")
    with pytest.raises(PlanError, match=r"model_memory.json: expected a mapping, but got \[1\]"):
        read_published(tmp_path)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published profiles are not here")
def test_every_published_entry_can_be_read():
    profiles = read_published(FOLDER)
    entries = profiles.entries()
    assert len(entries) > 50
    for entry in entries:
        for device in entry.devices:
            times = profiles.times(entry.model, device, entry.dtype, entry.sequence_length, 64)
            assert all(0 < f < g for f, g in zip(times.forward_s, times.backward_s, strict=True))
            beyond = times.forward_s[times.measured_sizes :]
            assert list(beyond) == sorted(beyond)
        table = profiles.curve_table(
            model=entry.model, dtype=entry.dtype, sequence_length=entry.sequence_length
        )
        assert table.curves
