"""Writes simulated and recorded steps as traces for Perfetto (ui.perfetto.dev) or chrome://tracing.

A trace has one process per rank with one thread per stream. Memory appears as counters, times are
in microseconds. Format: "Trace Event Format", the JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.memory_timeline import Way, rate
from lightning_cephalo.plan.program import NONE, ROOT
from lightning_cephalo.plan.timeline import (
    MEASURED_KINDS,
    Event,
    Recording,
    Simulation,
    StepFunction,
    Stream,
    merged,
)

RANKS_IN_FULL = 64
TRACE_NAME = "trace.json"  # in the record of a run
_MICROSECONDS = 1e6
_STREAMS = list(Stream)
_NAMES = {NONE: "", ROOT: " root"}


def write_trace(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Write the trace as JSON; the file is replaced completely or not at all.

    Beyond 64 ranks, all ranks that do the same share one process: a trace of every rank would be
    too large to open.

    Raises:
        PlanError: if the suffix is not ``.json``, the problem has another number of ranks, or the
            file cannot be written.
    """
    if len(problem.ranks) != simulation.world_size:
        raise PlanError(
            f"Expected the problem that was simulated, with {simulation.world_size} ranks, "
            f"but got one with {len(problem.ranks)}. Give the same problem as to simulate()."
        )
    is_short = simulation.world_size <= RANKS_IN_FULL
    entries = (
        entry
        for timeline in simulation.timelines
        for rank in (timeline.ranks if is_short else timeline.ranks[:1])
        for entry in _simulated(simulation, rank, problem.ranks[rank].name, is_short)
    )
    _write(entries, path)


def write_recording(recordings: Sequence[Recording], path: str | PathLike[str]) -> None:
    """Write a recorded step of every rank as JSON, with memory and traffic as counters."""
    shown = recordings[:RANKS_IN_FULL]
    _write((entry for recording in shown for entry in _recorded(recording)), path)


def _write(entries: Iterable[dict[str, Any]], path: str | PathLike[str]) -> None:
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise PlanError(
            f"{target}: expected a file name that ends in .json, "
            f"but got the suffix {target.suffix!r}. Rename the file."
        )
    content = {"displayTimeUnit": "ms", "traceEvents": list(entries)}
    files.write_text(target, json.dumps(content, separators=(",", ":"), allow_nan=False))


def _recorded(recording: Recording) -> Iterator[dict[str, Any]]:
    rank, held = recording.rank, recording.held
    yield from _process(rank, f"rank {rank} ({recording.name})", recording.events)
    for one in held:
        sizes = {kind.value: size for kind, size in zip(MEASURED_KINDS, one.sizes, strict=True)}
        yield _counter(rank, "memory by kind", one.time_s, sizes)
    yield from _host_memory(rank, merged((one.time_s, one.host_bytes) for one in held))
    for way in Way:
        for time_s, per_s in rate(recording.events, way):
            yield _counter(rank, way.value, time_s, {"bytes per second": round(per_s)})


def _simulated(
    simulation: Simulation, rank: int, name: str, is_short: bool
) -> Iterator[dict[str, Any]]:
    alike = 1 if is_short else len(simulation.timeline(rank).ranks)
    label = f"{alike} × {name} (rank {rank} and alike)" if alike > 1 else f"rank {rank} ({name})"
    yield from _process(rank, label, simulation.events_of(rank))
    for time_s, size in simulation.memory_of(rank):
        yield _counter(rank, "memory", time_s, {"bytes": size})
    yield from _host_memory(rank, simulation.host_memory_of(rank))


def _process(rank: int, label: str, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Yield a process with its events; those of a stream that overlap are in several threads."""
    yield _metadata(rank, "process_name", name=label)
    yield _metadata(rank, "process_sort_index", sort_index=rank)
    free_us: dict[Stream, list[float]] = {}
    for event in events:
        start_us, end_us = (_microseconds(time_s) for time_s in (event.start_s, event.end_s))
        lanes = free_us.setdefault(event.stream, [])
        lane = next((i for i, free in enumerate(lanes) if free <= start_us), len(lanes))
        number = _STREAMS.index(event.stream)
        thread = number + len(_STREAMS) * lane
        if lane == len(lanes):
            lanes.append(0.0)
            name = f"{event.stream.value} ({lane + 1})" if lane else event.stream.value
            yield _metadata(rank, "thread_name", thread, name=name)
            yield _metadata(rank, "thread_sort_index", thread, sort_index=100 * number + lane)
        lanes[lane] = end_us
        places = {"unit": event.unit, "microbatch": event.microbatch}
        yield {
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "name": event.operation.value + _NAMES.get(event.unit, f" {event.unit}"),
            "cat": event.operation.value,
            "args": {place: index for place, index in places.items() if index >= 0},
        }


def _metadata(rank: int, kind: str, thread: int = 0, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _host_memory(rank: int, sizes: StepFunction) -> Iterator[dict[str, Any]]:
    if any(size for _, size in sizes):
        for time_s, size in sizes:
            yield _counter(rank, "host memory", time_s, {"bytes": size})


def _counter(rank: int, name: str, time_s: float, series: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "ts": _microseconds(time_s), "name": name, "args": series}


def _microseconds(time_s: float) -> float:
    """Round to the nanosecond, ends as well as starts, so that neighbours do not overlap."""
    return round(time_s * _MICROSECONDS, 3)
