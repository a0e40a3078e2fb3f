"""The trace: JSON as Perfetto reads it, with the numbers of the simulation."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from lightning_cephalo.observe.recording import Event, Recording, Stream
from lightning_cephalo.observe.trace import write_trace
from lightning_cephalo.observe.watch import aligned
from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import (
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
)
from lightning_cephalo.plan.program import Instruction, Operation

PROFILE = RankProfile(
    "T4",
    [1e-3, 2e-3],
    [3e-3, 5e-3],
    [1e-3, 1e-3],
    [10, 20],
    1000,
    host_capacity_bytes=1000,
    offload_bytes_per_s=3e3,
)


def case(ranks: int, **changes) -> tuple[Problem, Plan]:
    problem = Problem(
        [PROFILE] * ranks,
        units=4,
        links=Links(1e-3 / 3, 2e-3 / 3),
        state=StateBytes(100),
        global_batch_size=3 * ranks,
        boundary_bytes=1,
    )
    return problem, Plan([RankPlan((2, 1), 1 / ranks, **changes)] * ranks)


def written(path, problem: Problem, plan: Plan) -> list[dict]:
    write_trace(simulate(problem, plan).timelines, path)
    return json.loads(path.read_text())["traceEvents"]


def test_complete_events_are_those_of_the_simulation(tmp_path):
    problem, plan = case(2, offload=True)
    entries = [e for e in written(tmp_path / "a.json", problem, plan) if e["ph"] == "X"]
    (timeline,) = simulate(problem, plan).timelines
    entries.sort(key=lambda entry: (entry["tid"], entry["ts"]))
    streams = list(Stream)
    events = sorted(timeline.events, key=lambda e: (streams.index(e.stream), e.start_s))
    assert len(entries) == len(events)
    for entry, event in zip(entries, events, strict=True):
        assert entry["pid"] == 0
        assert entry["ts"] == pytest.approx(event.start_s * 1e6, abs=1e-3)
        assert entry["dur"] == pytest.approx((event.end_s - event.start_s) * 1e6, abs=2e-3)
        assert entry["cat"] == event.operation.value
    assert {entry["cat"] for entry in entries} >= {"forward", "gather", "offload", "fetch"}
    assert "gather 1" in {entry["name"] for entry in entries}


def test_events_of_a_thread_do_not_overlap(tmp_path):
    threads = defaultdict(list)
    for entry in written(tmp_path / "a.json", *case(2, offload=True)):
        if entry["ph"] == "X":
            threads[entry["pid"], entry["tid"]].append((entry["ts"], entry["dur"]))
    assert len(threads) == 3
    for spans in threads.values():
        end = 0.0
        for start, duration in spans:
            assert duration > 0
            assert start >= end - 1e-6
            end = start + duration


def test_memory_counters_rise_and_fall_as_simulated(tmp_path):
    problem, plan = case(2, offload=True)
    (timeline,) = simulate(problem, plan).timelines
    entries = written(tmp_path / "a.json", problem, plan)
    found = [e for e in entries if e["ph"] == "C" and e["name"] == "memory by kind"]
    assert [sum(e["args"].values()) for e in found] == [h.device_bytes for h in timeline.held]
    assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)
    on_host = [e["args"]["bytes"] for e in entries if e["name"] == "host memory"]
    assert max(on_host) == max(held.host_bytes for held in timeline.held) > 0


def test_host_memory_is_left_out_where_nothing_is_offloaded(tmp_path):
    entries = written(tmp_path / "a.json", *case(2))
    assert {entry["name"] for entry in entries if entry["ph"] == "C"} == {"memory by kind"}


def test_processes_and_threads_have_names(tmp_path):
    named = {
        (entry["pid"], entry["tid"], entry["args"]["name"])
        for entry in written(tmp_path / "a.json", *case(1))
        if entry["ph"] == "M" and "name" in entry["args"]
    }
    assert named == {
        (0, 0, "rank 0 (1 × T4)"),
        (0, 0, "compute"),
        (0, 1, "communication"),
    }


def test_equal_ranks_share_a_process_and_of_many_the_first_are_written(tmp_path):
    entries = written(tmp_path / "a.json", *case(65))
    assert {entry["pid"] for entry in entries} == {0}
    assert entries[0]["args"]["name"] == "rank 0 (65 × T4)"
    steps = [Recording(rank, "T4", (gather(0, 0.0, 1.0),)) for rank in range(65)]
    write_trace(steps, tmp_path / "b.json")
    entries = json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == set(range(64))


def test_nothing_is_left_beside_the_file(tmp_path):
    written(tmp_path / "a.json", *case(1))
    written(tmp_path / "a.json", *case(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    problem, plan = case(1)
    (tmp_path / "file").write_text("")
    for folder, reason in (("no", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(PlanError, match=rf"a\.json: cannot be written: {reason}"):
            write_trace(simulate(problem, plan).timelines, tmp_path / folder / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_suffix_is_refused(tmp_path):
    problem, plan = case(1)
    with pytest.raises(PlanError, match=r"ends in \.json, but got the suffix '\.yaml'"):
        write_trace(simulate(problem, plan).timelines, tmp_path / "a.yaml")


def gather(unit: int, start_s: float, end_s: float) -> Event:
    instruction = Instruction(Operation.GATHER, unit)
    return Event(Stream.COMMUNICATION, instruction, start_s, end_s)


def test_recorded_events_that_overlap_are_shown_one_below_the_other(tmp_path):
    events = (gather(0, 0.0, 2.0), gather(1, 1.0, 3.0), gather(2, 2.5, 4.0))
    write_trace([Recording(0, "T4", events)], tmp_path / "a.json")
    entries = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    shown = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"}
    first, second = shown["gather root"][0], shown["gather 1"][0]
    assert shown == {
        "gather root": (first, 0.0, 2e6),
        "gather 1": (second, 1e6, 2e6),
        "gather 2": (first, 2.5e6, 1.5e6),
    }
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert names == {first: "communication", second: "communication (2)"}


def test_recordings_of_one_host_share_its_clock_and_those_of_others_meet_it():
    said = [
        ("a", 60.0, Recording(0, "T4", (gather(0, 50.0, 51.0),))),
        ("a", 60.1, Recording(1, "T4", (gather(0, 52.0, 53.0),))),
        ("b", 960.0, Recording(2, "T4", (gather(0, 949.0, 951.0),))),
        ("b", None, Recording(3, "T4", ())),
    ]
    found = [[(e.start_s, e.end_s) for e in recording.events] for recording in aligned(said)]
    assert found == [[(1.0, 2.0)], [(3.0, 4.0)], [(0.0, 2.0)], []]
