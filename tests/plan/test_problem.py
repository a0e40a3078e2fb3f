"""Problems and profiles: what they take, what they refuse and how they say it, and how they are
saved.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_cephalo.plan import KeptCurves, Links, PlanError, Problem, RankProfile, StateBytes

EARLIER = Path(__file__).parent / "earlier"


def profile(**changes) -> RankProfile:
    values = {
        "name": "A6000",
        "forward_s": [1.0, 2.0],
        "backward_s": [2.0, 4.0],
        "tail_s": [0.5, 1.0],
        "compute_bytes": [10.0, 20.0],
        "capacity_bytes": 100.0,
    }
    return RankProfile(**{**values, **changes})


def problem(**changes) -> Problem:
    values = {"ranks": [profile()], "units": 4, "state": StateBytes(40.0), "global_batch_size": 8}
    return Problem(**{**values, **changes})


def test_lists_arrays_and_numpy_numbers_are_stored_as_tuples_of_float():
    rank = profile(forward_s=np.array([1, 2]), capacity_bytes=np.int64(7))
    assert rank.forward_s == (1.0, 2.0)
    assert type(rank.forward_s[0]) is float
    assert rank.capacity_bytes == 7.0
    assert problem(global_batch_size=np.int32(3)).global_batch_size == 3


def test_a_rank_with_empty_curves_is_legal():
    rank = profile(forward_s=[], backward_s=[], tail_s=[], compute_bytes=[])
    assert rank.largest_microbatch_size == 0


def test_unlimited_capacity_is_legal():
    assert math.isinf(profile(capacity_bytes=math.inf).capacity_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"forward_s": [1.0, math.nan]},
            r"rank 'A6000': forward_s at microbatch size 2: expected a finite .* at least 0.* nan",
        ),
        ({"tail_s": [1.0, -1.0]}, r"tail_s at microbatch size 2.*at least 0, but got -1"),
        ({"backward_s": [math.inf, 1.0]}, r"backward_s at microbatch size 1.*finite.*got inf"),
        ({"compute_bytes": ["many", 1]}, r"compute_bytes at microbatch size 1.*got 'many'"),
        ({"forward_s": 3.0}, r"forward_s: expected a list of numbers, but got 3.0"),
        (
            {"forward_s": [1.0]},
            r"lengths forward_s 1, backward_s 2, tail_s 2, compute_bytes 2. Profile the same",
        ),
        ({"capacity_bytes": 0}, r"capacity_bytes: expected a number greater than 0, but got 0"),
        ({"capacity_bytes": -5}, r"capacity_bytes: .* got -5"),
        ({"capacity_bytes": math.nan}, r"capacity_bytes: .* got nan"),
        ({"capacity_bytes": True}, r"capacity_bytes: .* got True"),
        ({"name": 3}, r"RankProfile.name: expected text, but got 3"),
    ],
)
def test_profile_names_the_field_and_what_came(changes, message):
    with pytest.raises(PlanError, match=message):
        profile(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": []}, r"Problem.ranks: expected at least one RankProfile, but got none"),
        ({"ranks": ["A6000"]}, r"Problem.ranks\[0\]: expected a RankProfile, but got 'A6000'"),
        ({"ranks": 4}, r"Problem.ranks: expected a list of RankProfile, but got 4"),
        ({"units": 0}, r"Problem.units: expected a whole number of at least 1, but got 0"),
        ({"global_batch_size": 0}, r"Problem.global_batch_size: .* at least 1, but got 0"),
        ({"global_batch_size": 8.0}, r"Problem.global_batch_size: .*whole.* but got 8.0"),
        ({"minimum_microbatch_size": True}, r"minimum_microbatch_size: .* but got True"),
        ({"links": (1.0, 2.0)}, r"Problem.links: expected Links\(...\), but got \(1.0, 2.0\)"),
        ({"even_links": 3}, r"Problem.even_links: expected Links\(...\), but got 3"),
        ({"state": 40}, r"Problem.state: expected StateBytes\(...\), but got 40"),
        ({"boundary_bytes": -1}, r"Problem.boundary_bytes"),
        ({"gathered_bytes": None}, r"Problem.gathered_bytes: .* but got None"),
        ({"update_overhead_s": "slow"}, r"Problem.update_overhead_s: .* but got 'slow'"),
        ({"step_overhead_s": -1}, r"Problem.step_overhead_s"),
        ({"unresharded_bytes": -1}, r"Problem.unresharded_bytes"),
        (
            {"reshard_after_forward": None},
            r"reshard_after_forward: expected True, False or 'auto', but got None",
        ),
        ({"single_microbatch": 1}, r"single_microbatch: expected true or false, but got 1"),
        ({"unit_parameters": [5]}, r"unit_parameters: expected .* one or more other.* number, 5\."),
        ({"unit_parameters": [5, -1]}, r"unit_parameters\[1\]: .* at least 0, but got -1"),
        ({"unit_parameters": [5, 1.5]}, r"unit_parameters\[1\]: expected a whole number.* 1.5"),
        ({"unit_parameters": 5}, r"unit_parameters: expected a list of whole numbers, but got 5"),
        (
            {"unit_parameters": [5, 1], "moment_bytes": 8},
            r"moment_bytes: .* part of the state \(40\), but 8 for each of 6 .* are 48\.",
        ),
    ],
)
def test_problem_names_the_field_and_what_came(changes, message):
    with pytest.raises(PlanError, match=message):
        problem(**changes)


def test_problems_of_earlier_versions_load():
    """Their files have a field for each time and size, as in ``even_gather_s``."""
    full = Problem.load(EARLIER / "problem.yaml")
    assert full.links == Links(2.0, 3.0, 4.0) and full.even_links == Links(1.5, 2.5, 3.5)
    assert full.root_links == Links(0.75, 0.875) and full.last_links == Links(0.625, 0.5)
    assert full.state == StateBytes(400.0, 25.0, 15.0)
    assert full.early_state == StateBytes(300.0, 35.0, 45.0)
    assert full.ranks[0].kept == KeptCurves([1.0, 2.5], [11.0, 22.0], [9.0, 18.0])
    assert full.ranks[0].reducing_compute_bytes == (8.0, 16.0) and full.ranks[1].kept is None
    given = yaml.safe_load((EARLIER / "problem.yaml").read_text())
    same = given.keys() & {field.name for field in dataclasses.fields(Problem)} - {"ranks"}
    assert len(same) == 27
    assert {name: getattr(full, name) for name in same} == {
        name: tuple(given[name]) if name == "unit_parameters" else given[name] for name in same
    }
    assert Problem.from_yaml(full.to_yaml()) == full
    grouped = Problem.load(EARLIER / "hybrid_problem.json")
    assert grouped.groups == (0, 0, 1) and grouped.state == StateBytes(40.0)
    assert grouped == Problem(
        grouped.ranks,
        2,
        links=Links(2, 3),
        groups=(0, 0, 1),
        state=StateBytes(40),
        global_batch_size=8,
    )


def test_a_time_that_an_earlier_file_lacks_is_that_of_uneven_shares_or_late_updates():
    flat = {"units": 4, "global_batch_size": 8, "ranks": [profile().to_dict()]}
    flat |= {"gather_s": 4.0, "reduce_s": 3.0, "gather_and_reduce_s": 5.0, "even_gather_s": 1.0}
    flat |= {"state_bytes": 40.0, "reducing_state_bytes": 7.0}
    flat |= {"early_state_bytes": 30.0, "early_updating_state_bytes": 2.0}
    found = Problem.from_dict(flat)
    assert found.links == Links(4.0, 3.0, 5.0) and found.even_links == Links(1.0, 3.0, 5.0)
    assert found.state == StateBytes(40.0, 7.0)
    assert found.early_state == StateBytes(30.0, 7.0, 2.0)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_saved_and_loaded_problems_are_equal(tmp_path, suffix):
    came = problem(
        ranks=[
            profile(forward_s=[0.1, 1 / 3], capacity_bytes=math.inf),
            profile(name="", forward_s=[], backward_s=[], tail_s=[], compute_bytes=[]),
        ],
        links=Links(1e-5),
        state=StateBytes(1e20),
        single_microbatch=True,
        minimum_microbatch_size=2,
        reshard_after_forward="auto",
        unresharded_bytes=3,
    )
    path = tmp_path / f"problem{suffix}"
    came.save(path)
    assert Problem.load(path) == came
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_unknown_and_missing_keys_are_named_with_the_file(tmp_path):
    data = problem().to_dict()
    path = tmp_path / "problem.yaml"
    path.write_text(Problem.from_dict(data).to_yaml().replace("units", "unit"))
    with pytest.raises(PlanError, match=r"problem.yaml: problem: unknown key 'unit'.*'units'"):
        Problem.load(path)
    del data["state"]
    with pytest.raises(PlanError, match=r"problem: missing 'state'"):
        Problem.from_dict(data)
    data = problem().to_dict()
    data["ranks"][0]["speed"] = 3
    with pytest.raises(PlanError, match=r"problem: ranks\[0\]: unknown key 'speed'"):
        Problem.from_dict(data)


def test_what_earlier_versions_measured_of_other_work_is_ignored():
    data = problem().to_dict()
    measured = ("to_device_alone_bytes_per_s", "copies_beside_gathers")
    data["ranks"][0].update(dict.fromkeys(measured, 1.5))
    data["disturbance"] = "Other programs used 1.5 processors."
    assert Problem.from_dict(data) == problem()


def test_files_of_before_load_unless_they_count_on_what_is_gone(tmp_path):
    path = tmp_path / "problem.json"
    for kept in ({"turn_s": 0.0}, {"turn_state_bytes": 0.0}, {"one_microbatch_reason": "a norm"}):
        path.write_text(json.dumps(problem().to_dict() | kept))
        assert Problem.load(path) == problem()
    path.write_text(json.dumps(problem().to_dict() | {"turn_s": 0.5}))
    with pytest.raises(PlanError, match=r"turn_s: 0.5 asks for what only.*Measure the job again"):
        Problem.load(path)
    single = problem(single_microbatch=True)
    both = single.to_dict() | {"equal_microbatches": True, "may_speculate": True}
    assert Problem.from_dict(both) == single
    with pytest.raises(PlanError, match=r"equal_microbatches: True asks for .* single_microbatch"):
        Problem.from_dict(problem().to_dict() | {"equal_microbatches": True})
