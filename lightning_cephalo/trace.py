"""A simulation as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process per rank with one thread per stream, memory as counters, times in microseconds. Format:
"Trace Event Format", the JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.plan import PlanError, Problem, _files
from lightning_cephalo.timeline import Event, Simulation, StepFunction, Stream

_RANKS_IN_FULL = 64
_MICROSECONDS = 1e6
_THREADS = {stream: number for number, stream in enumerate(Stream)}


def write_trace(simulation: Simulation, problem: Problem, path: str | PathLike[str]) -> None:
    """Write the trace as JSON; the file is replaced whole or not at all.

    Beyond 64 ranks there is one process for all ranks that do the same, named after the number of
    them: a trace of every rank would be too large to open.

    Args:
        simulation: what to write.
        problem: what was simulated; its ranks' names are shown.
        path: of the file, ending in ``.json``.

    Raises:
        PlanError: another suffix, the problem has another number of ranks, or the file cannot be
            written.
    """
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise PlanError(
            f"{target}: expected a file name that ends in .json, "
            f"but got the suffix {target.suffix!r}. Rename the file."
        )
    if len(problem.ranks) != simulation.world_size:
        raise PlanError(
            f"Expected the problem that was simulated, with {simulation.world_size} ranks, "
            f"but got one with {len(problem.ranks)}. Give the same problem as to simulate()."
        )
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": [
            entry
            for timeline in simulation.timelines
            for rank in (
                timeline.ranks if simulation.world_size <= _RANKS_IN_FULL else timeline.ranks[:1]
            )
            for entry in _process(simulation, problem, rank)
        ],
    }
    _files.write_text(target, json.dumps(content, separators=(",", ":"), allow_nan=False))


def _process(simulation: Simulation, problem: Problem, rank: int) -> Iterator[dict[str, Any]]:
    name = problem.ranks[rank].name
    alike = len(simulation.timeline(rank).ranks)
    label = f"rank {rank} ({name})"
    if simulation.world_size > _RANKS_IN_FULL:
        label = f"{alike} × {name} (rank {rank} and alike)" if alike > 1 else label
    yield _metadata(rank, "process_name", name=label)
    yield _metadata(rank, "process_sort_index", sort_index=rank)
    for stream, thread in _THREADS.items():
        yield _metadata(rank, "thread_name", thread, name=stream.value)
        yield _metadata(rank, "thread_sort_index", thread, sort_index=thread)
    for event in simulation.events_of(rank):
        yield _complete(event)
    yield from _counters(rank, "memory", simulation.memory_of(rank))
    host = simulation.host_memory_of(rank)
    if any(size for _, size in host):
        yield from _counters(rank, "host memory", host)


def _metadata(rank: int, kind: str, thread: int = 0, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _complete(event: Event) -> dict[str, Any]:
    start_us, end_us = (_microseconds(time_s) for time_s in (event.start_s, event.end_s))
    what = f" {event.unit}" if event.unit >= 0 else ""
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": _THREADS[event.stream],
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "name": f"{event.name.value}{what}",
        "cat": event.name.value,
        "args": {
            name: value
            for name, value in (("unit", event.unit), ("microbatch", event.microbatch))
            if value >= 0
        },
    }


def _counters(rank: int, name: str, function: StepFunction) -> Iterator[dict[str, Any]]:
    for time_s, size in function:
        yield {
            "ph": "C",
            "pid": rank,
            "ts": _microseconds(time_s),
            "name": name,
            "args": {"bytes": size},
        }


def _microseconds(time_s: float) -> float:
    """To the nanosecond: ends are rounded as starts are, so that neighbours do not overlap."""
    return round(time_s * _MICROSECONDS, 3)
