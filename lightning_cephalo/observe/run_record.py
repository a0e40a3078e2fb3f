"""The record of a run: its plan, its predictions and measurements, and one recorded step.

``CephaloStrategy(record="folder")`` writes it on rank 0, before the first step and after the last.
``cephalo report`` reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import Amount, FileRecord, ListOf, Record, Text, YesOrNo
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.memory_timeline import MemoryTimeline
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.plan.timeline import (
    MEASURED_KINDS,
    Event,
    Held,
    Phase,
    Recording,
    Span,
    Stream,
)

RECORD_NAME = "cephalo-run.json"
STEPS_IN_FULL = 2000
_PLACES = 9  # of seconds: a nanosecond
_INDEX = partial(records.whole, minimum=-1)
_E = TypeVar("_E", Stream, Operation, Phase)


def _event(field: str, value: Any) -> Event:
    stream, operation, unit, visit, microbatch, start_s, end_s, moved_bytes = _row(field, value, 8)
    instruction = Instruction(
        _member(field, Operation, operation),
        _INDEX(f"{field}: unit", unit),
        _INDEX(f"{field}: visit", visit),
        _INDEX(f"{field}: microbatch", microbatch),
    )
    return Event(
        0,
        _member(field, Stream, stream),
        instruction,
        _seconds(f"{field}: start", start_s),
        _seconds(f"{field}: end", end_s),
        records.real(f"{field}: bytes", moved_bytes),
    )


def _held(field: str, value: Any) -> Held:
    time_s, host_bytes, *sizes = _row(field, value, 2 + len(MEASURED_KINDS))
    return Held(
        _seconds(f"{field}: time", time_s),
        tuple(records.real(f"{field}: bytes", size) for size in sizes),
        records.real(f"{field}: host bytes", host_bytes),
    )


def _span(field: str, value: Any) -> Span:
    phase, start_s, end_s = _row(field, value, 3)
    return Span(
        _member(field, Phase, phase),
        _seconds(f"{field}: start", start_s),
        _seconds(f"{field}: end", end_s),
    )


def _row(field: str, value: Any, length: int) -> tuple[Any, ...]:
    entries = records.items(field, value, of=f"{length} entries")
    if len(entries) != length:
        raise PlanError(f"{field}: expected {length} entries, but got {len(entries)}.")
    return entries


def _seconds(field: str, value: Any) -> float:
    # a rank may begin before the first event of any
    return records.real(field, value, minimum=-1e9)


def _member(field: str, kind: type[_E], value: Any) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise PlanError(
            f"{field}: expected one of {', '.join(one.value for one in kind)}, but got"
            f" {records.shortened(value)}."
        ) from None


def _each(read: Any, kind: type, field: str, value: Any) -> tuple[Any, ...]:
    return tuple(
        entry if isinstance(entry, kind) else read(f"{field}[{index}]", entry)
        for index, entry in enumerate(records.items(field, value, of="rows"))
    )


def _memory(field: str, value: Any) -> RankMemory:
    if isinstance(value, RankMemory):
        return value
    known = [one.name for one in fields(RankMemory)]
    given = records.mapping(field, value, known=known, required=())
    whole = {"step", "parameters"}
    sizes: dict[str, Any] = {
        name: records.whole(f"{field}: {name}", size, minimum=0)
        if name in whole
        else records.real(f"{field}: {name}", size)
        for name, size in given.items()
        if size is not None
    }
    return RankMemory(**sizes)


def _plan(field: str, value: Any) -> Plan:
    return value if isinstance(value, Plan) else Plan.from_dict(value, where=field)


def _texts(field: str, value: Any) -> tuple[str, ...]:
    entries = records.items(field, value, of="texts")
    return tuple(records.text(f"{field}[{index}]", entry) for index, entry in enumerate(entries))


@dataclass(frozen=True)
class RankRecord(Record):
    """What is known of one rank at the end of a run; what was not measured is None or empty.

    Its seconds are those of a ``MeasuredRank``; events, phases, and what it held are of one step.
    """

    kind = "rank record"

    rank: Annotated[int, partial(records.whole, minimum=0)]
    name: Text = ""
    step_s: Amount | None = None
    busy_s: Amount | None = None
    waiting_s: Amount | None = None
    between_s: Amount | None = None
    predicted_busy_s: Amount | None = None
    predicted_memory: Annotated[RankMemory, _memory] | None = None
    measured_memory: Annotated[RankMemory, _memory] | None = None
    events: Annotated[tuple[Event, ...], partial(_each, _event, Event)] = ()
    held: Annotated[tuple[Held, ...], partial(_each, _held, Held)] = ()
    phases: Annotated[tuple[Span, ...], partial(_each, _span, Span)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        own = tuple(replace(event, rank=self.rank) for event in self.events)
        object.__setattr__(self, "events", own)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; an event, a phase, and what is held are a list each."""
        data = super().to_dict()
        for name in ("predicted_memory", "measured_memory"):
            memory = getattr(self, name)
            if memory is not None:
                data[name] = {key: size for key, size in asdict(memory).items() if size is not None}
        rows: dict[str, list[list[Any]]] = {
            "events": [
                [
                    event.stream.value,
                    event.operation.value,
                    event.unit,
                    event.instruction.visit,
                    event.microbatch,
                    round(event.start_s, _PLACES),
                    round(event.end_s, _PLACES),
                    event.moved_bytes,
                ]
                for event in self.events
            ],
            "held": [[round(one.time_s, _PLACES), one.host_bytes, *one.sizes] for one in self.held],
            "phases": [
                [one.phase.value, round(one.start_s, _PLACES), round(one.end_s, _PLACES)]
                for one in self.phases
            ],
        }
        return data | {name: entries for name, entries in rows.items() if entries}

    @property
    def recording(self) -> Recording:
        """The recorded step."""
        return Recording(self.rank, self.name, self.events, self.held, self.phases)


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

    plan: Annotated[Plan, _plan]
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

    def timelines(self) -> tuple[MemoryTimeline, ...]:
        """Return the recorded step of every rank that has one."""
        return tuple(
            MemoryTimeline.of_recording(one.recording, part)
            for one, part in zip(self.ranks, self.plan.ranks, strict=True)
            if one.phases
        )
