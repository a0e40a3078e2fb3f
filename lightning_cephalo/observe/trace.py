"""Writes simulated and recorded steps as traces for Perfetto (ui.perfetto.dev) or chrome://tracing.

A trace has one process per rank with one thread per stream. Memory appears as counters, times are
in microseconds. Format: "Trace Event Format", the JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.observe.recording import Recording, Stream, merged
from lightning_cephalo.plan.program import NONE, ROOT

RANKS_IN_FULL = 64
TRACE_NAME = "trace.json"  # in the record of a run
_MICROSECONDS = 1e6
_STREAMS = list(Stream)
_NAMES = {NONE: "", ROOT: " root"}


def write_trace(steps: Sequence[Recording], path: str | PathLike[str]) -> None:
    """Write steps of ranks as JSON, with memory as counters; of many, the first ones.

    The file is replaced completely or not at all.

    Raises:
        PlanError: if the suffix is not ``.json``, or the file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise PlanError(
            f"{target}: expected a file name that ends in .json, "
            f"but got the suffix {target.suffix!r}. Rename the file."
        )
    entries = [entry for step in steps[:RANKS_IN_FULL] for entry in _process(step)]
    content = {"displayTimeUnit": "ms", "traceEvents": entries}
    files.write_text(target, json.dumps(content, separators=(",", ":"), allow_nan=False))


def _process(step: Recording) -> Iterator[dict[str, Any]]:
    """Yield a process with its events; those of a stream that overlap are in several threads."""
    rank = step.rank
    yield _metadata(rank, "process_name", name=f"rank {rank} ({step.name})")
    yield _metadata(rank, "process_sort_index", sort_index=rank)
    free_us: dict[Stream, list[float]] = {}
    for event in step.events:
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
        more: dict[str, float] = {"unit": event.unit, "microbatch": event.microbatch}
        more |= {"bytes": event.moved_bytes} if event.moved_bytes else {}
        yield {
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "name": event.operation.value + _NAMES.get(event.unit, f" {event.unit}"),
            "cat": event.operation.value,
            "args": {name: number for name, number in more.items() if number >= 0},
        }
    for held in step.held:
        by_kind = dict(zip(step.kinds, held.sizes, strict=True))
        yield _counter(rank, "memory by kind", held.time_s, by_kind)
    on_host = merged((held.time_s, held.host_bytes) for held in step.held)
    for time_s, size in on_host if any(size for _, size in on_host) else ():
        yield _counter(rank, "host memory", time_s, {"bytes": size})


def _metadata(rank: int, kind: str, thread: int = 0, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _counter(rank: int, name: str, time_s: float, series: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "ts": _microseconds(time_s), "name": name, "args": series}


def _microseconds(time_s: float) -> float:
    """Round to the nanosecond, ends as well as starts, so that neighbours do not overlap."""
    return round(time_s * _MICROSECONDS, 3)
