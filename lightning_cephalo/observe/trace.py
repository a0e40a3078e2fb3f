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
_LANES = 100
_SIMULATED = (Stream.COMPUTE, Stream.COMMUNICATION, Stream.COPY)
_OF_STATE = (Stream.TO_DEVICE, Stream.TO_HOST, Stream.HOST)
_THREADS = {stream: number for number, stream in enumerate(Stream)}


def write_trace(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Write the trace as JSON; the file is replaced completely or not at all.

    Beyond 64 ranks, all ranks that do the same share one process: a trace of every rank would be
    too large to open.

    Raises:
        PlanError: if the suffix is not ``.json``, the problem has another number of ranks, or the
            file cannot be written.
    """
    target = json_path(path)
    if len(problem.ranks) != simulation.world_size:
        raise PlanError(
            f"Expected the problem that was simulated, with {simulation.world_size} ranks, "
            f"but got one with {len(problem.ranks)}. Give the same problem as to simulate()."
        )
    entries = (
        entry
        for timeline in simulation.timelines
        for rank in (
            timeline.ranks if simulation.world_size <= RANKS_IN_FULL else timeline.ranks[:1]
        )
        for entry in _process(simulation, problem, rank)
    )
    _write(entries, target)


def write_recording(recordings: Sequence[Recording], path: str | PathLike[str]) -> None:
    """Write a recorded step of every rank as JSON, with memory and traffic as counters."""
    shown = recordings[:RANKS_IN_FULL]
    _write((entry for recording in shown for entry in _recorded(recording)), json_path(path))


def json_path(path: str | PathLike[str]) -> Path:
    """Return the path of a trace; raise PlanError for a name that does not end in ``.json``."""
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise PlanError(
            f"{target}: expected a file name that ends in .json, "
            f"but got the suffix {target.suffix!r}. Rename the file."
        )
    return target


def _write(entries: Iterable[dict[str, Any]], target: Path) -> None:
    content = {"displayTimeUnit": "ms", "traceEvents": list(entries)}
    files.write_text(target, json.dumps(content, separators=(",", ":"), allow_nan=False))


def _recorded(recording: Recording) -> Iterator[dict[str, Any]]:
    rank = recording.rank
    yield from _head(rank, f"rank {rank} ({recording.name})")
    for stream, number in _THREADS.items():
        # overlapping events would hide each other in one thread: each takes the first free thread
        free_s: list[float] = []
        for event in recording.events:
            if event.stream is not stream:
                continue
            lane = next((i for i, end_s in enumerate(free_s) if end_s <= event.start_s), None)
            if lane is None:
                lane = len(free_s)
                free_s.append(0.0)
                name = stream.value if not lane else f"{stream.value} ({lane + 1})"
                yield from _thread(rank, _LANES * number + lane, name)
            free_s[lane] = event.end_s
            yield {**_complete(event), "tid": _LANES * number + lane}
    for held in recording.held:
        sizes = {kind.value: size for kind, size in zip(MEASURED_KINDS, held.sizes, strict=True)}
        yield _counter(rank, "memory by kind", held.time_s, sizes)
    if any(held.host_bytes for held in recording.held):
        host = ((held.time_s, held.host_bytes) for held in recording.held)
        yield from _counters(rank, "host memory", merged(host))
    for way in Way:
        for time_s, per_s in rate(recording.events, way):
            yield _counter(rank, way.value, time_s, {"bytes per second": round(per_s)})


def _process(simulation: Simulation, problem: Problem, rank: int) -> Iterator[dict[str, Any]]:
    name = problem.ranks[rank].name
    alike = len(simulation.timeline(rank).ranks)
    label = f"rank {rank} ({name})"
    if simulation.world_size > RANKS_IN_FULL:
        label = f"{alike} × {name} (rank {rank} and alike)" if alike > 1 else label
    yield from _head(rank, label)
    used = {event.stream for event in simulation.timeline(rank).events}
    for stream in (*_SIMULATED, *(each for each in _OF_STATE if each in used)):
        yield from _thread(rank, _THREADS[stream], stream.value)
    for event in simulation.events_of(rank):
        yield _complete(event)
    yield from _counters(rank, "memory", simulation.memory_of(rank))
    host = simulation.host_memory_of(rank)
    if any(size for _, size in host):
        yield from _counters(rank, "host memory", host)


def _head(rank: int, label: str) -> Iterator[dict[str, Any]]:
    yield _metadata(rank, "process_name", name=label)
    yield _metadata(rank, "process_sort_index", sort_index=rank)


def _thread(rank: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    yield _metadata(rank, "thread_name", thread, name=name)
    yield _metadata(rank, "thread_sort_index", thread, sort_index=thread)


_NAMES = {NONE: "", ROOT: " root"}


def _metadata(rank: int, kind: str, thread: int = 0, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _complete(event: Event) -> dict[str, Any]:
    start_us, end_us = (_microseconds(time_s) for time_s in (event.start_s, event.end_s))
    unit = _NAMES.get(event.unit, f" {event.unit}")
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": _THREADS[event.stream],
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "name": f"{event.operation.value}{unit}",
        "cat": event.operation.value,
        "args": {
            name: value
            for name, value in (("unit", event.unit), ("microbatch", event.microbatch))
            if value >= 0
        },
    }


def _counters(rank: int, name: str, function: StepFunction) -> Iterator[dict[str, Any]]:
    for time_s, size in function:
        yield _counter(rank, name, time_s, {"bytes": size})


def _counter(rank: int, name: str, time_s: float, series: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "ts": _microseconds(time_s), "name": name, "args": series}


def _microseconds(time_s: float) -> float:
    """Round to the nanosecond, ends as well as starts, so that neighbours do not overlap."""
    return round(time_s * _MICROSECONDS, 3)
