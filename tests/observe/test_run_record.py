"""The record of a run: what is written is what is read, and damage is named."""

from __future__ import annotations

import json

import pytest

from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.recording import MEASURED_KINDS, Event, Held, Stream
from lightning_cephalo.observe.run_record import RECORD_NAME, RankRecord, RunRecord
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan import Plan, PlanError, RankPlan
from lightning_cephalo.plan.program import Instruction, Operation

PLAN = Plan((RankPlan((2, 1), 0.75, memory_bytes=100.0), RankPlan((1,), 0.25)), step_s=1.0)


def record() -> RunRecord:
    instruction = Instruction(Operation.FORWARD, 1, 0, 1)
    first = RankRecord(
        0,
        "A <b>",
        step_s=1.5,
        busy_s=1.0,
        waiting_s=0.25,
        between_s=0.125,
        predicted_memory=RankMemory(peak_bytes=100.0),
        measured_memory=RankMemory(peak_bytes=90.0, step=2, parameters=7),
        events=(Event(Stream.COMPUTE, instruction, 0.0, 0.5, 3.0),),
        held=(Held(0.0, tuple(map(float, range(len(MEASURED_KINDS)))), 5.0),),
        start_s=-0.25,
        end_s=0.5,
    )
    return RunRecord(PLAN, (first, RankRecord(1)), is_finished=True, notes=("why",), steps_s=(1, 2))


def test_what_is_written_is_what_is_read(tmp_path):
    written = record()
    written.save(tmp_path / RECORD_NAME)
    read = RunRecord.load(tmp_path / RECORD_NAME)
    assert read == written
    assert [timeline.rank for timeline in read.timelines()] == [0]
    assert read.timelines()[0].planned_bytes == 100.0
    assert (tmp_path / RECORD_NAME).read_text().count("\n") == 0


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("ranks", 0, "events", 0, 0), "computed", "'computed' is not a valid Stream"),
        (("ranks", 0, "events", 0), [1, 2], "events\\[0\\]: expected a row of Event"),
        (("ranks", 0, "events", 0, 5), "soon", "events\\[0\\]: .*could not convert string"),
        (("ranks", 0, "held", 0, 1), None, "held\\[0\\]: expected a row of Held"),
        (("ranks", 0, "held", 0), [0.0, 1.0, 2.0], "expected 8 sizes, but got 1"),
        (("ranks", 0, "end_s"), "late", "end_s: expected a finite number"),
        (("ranks", 0, "measured_memory"), {"peaks": 1}, "unknown key 'peaks'"),
        (("ranks", 1, "rank"), 5, "expected ranks 0 to 1"),
        (("plan", "ranks"), [], "expected at least one RankPlan"),
        (("notes",), "why", "expected a list of texts"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path, place, value, said):
    data = json.loads(record().to_json())
    entry = data
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    (tmp_path / RECORD_NAME).write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"{RECORD_NAME}.*{said}"):
        RunRecord.load(tmp_path / RECORD_NAME)


def test_a_file_that_is_no_record_is_named(tmp_path):
    for content, said in (("{", "the text is not JSON"), ("[]", "expected a mapping")):
        (tmp_path / RECORD_NAME).write_text(content)
        with pytest.raises(PlanError, match=rf"{RECORD_NAME}.*{said}"):
            RunRecord.load(tmp_path / RECORD_NAME)


@pytest.mark.parametrize("error", [PlanError("a rank waits nan s"), ValueError("nan"), OSError(28)])
def test_a_record_that_cannot_be_made_ends_no_training(tmp_path, error):
    def known():
        raise error

    with pytest.warns(
        UserWarning, match=f"record of the run was not written. {type(error).__name__}"
    ):
        Watch(folder=tmp_path).write_record(known)
    assert not list(tmp_path.iterdir())
