"""The record of a run: its plan, its predictions and measurements, and one recorded step.

``CephaloStrategy(record="folder")`` writes it on rank 0, before the first step and after the last.
``cephalo report`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import Amount, FileRecord, ListOf, Record, Text, YesOrNo
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.pace import MeasuredRank
from lightning_cephalo.observe.recording import MEASURED_KINDS, Event, Held, Recording, Stream
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.program import Instruction, Operation

RECORD_NAME = "cephalo-run.json"
STEPS_IN_FULL = 2000
_PLACES = 9  # of seconds: a nanosecond
# fields of a RankRecord that are those of a MeasuredRank, and of a Recording
_TIMES = ("name", "step_s", "busy_s", "waiting_s", "between_s", "predicted_busy_s")
_STEP = ("events", "held", "start_s", "end_s")


def _record(kind: type[Record], field: str, value: Any) -> Record:
    return value if isinstance(value, kind) else kind.from_dict(value, where=field)


def _rows(kind: type, read: Callable[[Any], Any], field: str, value: Any) -> tuple[Any, ...]:
    """Return values of a kind that has one row of a file each."""
    found = []
    for index, row in enumerate(records.items(field, value, of="rows")):
        try:
            found.append(row if isinstance(row, kind) else read(row))
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"{field}[{index}]: expected a row of {kind.__name__}, but got"
                f" {records.shortened(row)}: {error}."
            ) from None
    return tuple(found)


def _event(row: Sequence[Any]) -> Event:
    stream, operation, unit, visit, microbatch, *numbers = row
    start_s, end_s, moved_bytes = map(float, numbers)
    instruction = Instruction(Operation(operation), int(unit), int(visit), int(microbatch))
    return Event(Stream(stream), instruction, start_s, end_s, moved_bytes)


def _row_of(event: Event) -> list[Any]:
    start_s, end_s = round(event.start_s, _PLACES), round(event.end_s, _PLACES)
    what = (event.stream.value, event.operation.value)
    where = (event.unit, event.instruction.visit, event.microbatch)
    return [*what, *where, start_s, end_s, event.moved_bytes]


def _held(row: Sequence[Any]) -> Held:
    time_s, host_bytes, *sizes = map(float, row)
    if len(sizes) != len(MEASURED_KINDS):
        raise ValueError(f"expected {len(MEASURED_KINDS)} sizes, but got {len(sizes)}")
    return Held(time_s, tuple(sizes), host_bytes)


def _moment(field: str, value: Any) -> float:
    # a rank may begin before the first event of any
    return records.real(field, value, minimum=-1e9)


def _texts(field: str, value: Any) -> tuple[str, ...]:
    entries = records.items(field, value, of="texts")
    return tuple(records.text(f"{field}[{index}]", entry) for index, entry in enumerate(entries))


@dataclass(frozen=True)
class RankRecord(Record):
    """What is known of one rank at the end of a run; what was not measured is None or empty.

    Its seconds are those of a ``MeasuredRank``; events, and what it held, are of one step.
    """

    kind = "rank record"

    rank: Annotated[int, partial(records.whole, minimum=0)]
    name: Text = ""
    step_s: Amount | None = None
    busy_s: Amount | None = None
    waiting_s: Amount | None = None
    between_s: Amount | None = None
    predicted_busy_s: Amount | None = None
    predicted_memory: Annotated[RankMemory, partial(_record, RankMemory)] | None = None
    measured_memory: Annotated[RankMemory, partial(_record, RankMemory)] | None = None
    events: Annotated[tuple[Event, ...], partial(_rows, Event, _event)] = ()
    held: Annotated[tuple[Held, ...], partial(_rows, Held, _held)] = ()
    start_s: Annotated[float, _moment] = 0.0
    end_s: Annotated[float, _moment] | None = None

    @classmethod
    def of(
        cls,
        rank: int,
        name: str,
        predicted: RankMemory | None,
        measured: RankMemory | None,
        times: MeasuredRank | None,
        step: Recording | None,
    ) -> RankRecord:
        """Return the record of what is known of a rank."""
        known: dict[str, Any] = {"predicted_memory": predicted, "measured_memory": measured}
        for source, names in ((times, _TIMES), (step, _STEP)):
            known |= {each: getattr(source, each) for each in names if source is not None}
        return cls(rank, **{"name": name} | known)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; an event, and what is held, are a list each."""
        rows = {
            "events": [_row_of(event) for event in self.events],
            "held": [[round(one.time_s, _PLACES), one.host_bytes, *one.sizes] for one in self.held],
        }
        return super().to_dict() | {name: entries for name, entries in rows.items() if entries}


@dataclass(frozen=True)
class RunRecord(FileRecord):
    """A run of one plan.

    ::

        record = RunRecord.load(folder / RECORD_NAME)
        record.timelines()[0].peak_bytes

    Attributes:
        plan: The plan that training followed last.
        is_finished: Whether the run has ended without an error. Before, nothing is measured.
        is_given: Whether the user gave the plan.
        model: The units of the model, in a few words.
        updates: When updates run, in a few words.
        notes: Why the plan divides the work so.
        remarks: What was unlike the plan.
        steps_s: Seconds of the steps on rank 0, in their order; of many, medians of equal runs.
    """

    kind = "run record"

    plan: Annotated[Plan, partial(_record, Plan)]
    ranks: Annotated[tuple[RankRecord, ...], ListOf(RankRecord, "a RankRecord", "rank records")]
    is_finished: YesOrNo = False
    is_given: YesOrNo = False
    model: Text = ""
    updates: Text = ""
    notes: Annotated[tuple[str, ...], _texts] = ()
    remarks: Annotated[tuple[str, ...], _texts] = ()
    changes: Annotated[tuple[str, ...], _texts] = ()
    steps_s: records.Curve = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if [one.rank for one in self.ranks] != list(range(self.plan.world_size)):
            raise PlanError(
                f"run record: expected ranks 0 to {self.plan.world_size - 1}, as the plan has, but"
                f" got {[one.rank for one in self.ranks]}. Write the record again."
            )

    def to_json(self) -> str:
        """Return the record as JSON in one line: indented, a step would have a line per number."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    def timelines(self) -> tuple[Recording, ...]:
        """Return the recorded step of every rank that has one."""
        return tuple(
            Recording(
                one.rank,
                one.name,
                **{name: getattr(one, name) for name in _STEP},
                planned_bytes=part.memory_bytes,
                capacity_bytes=part.capacity_bytes,
            )
            for one, part in zip(self.ranks, self.plan.ranks, strict=True)
            if one.end_s is not None
        )
