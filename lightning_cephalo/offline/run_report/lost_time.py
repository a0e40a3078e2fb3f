"""What was lost where in a recorded step: waiting for slower ranks, for the network, and the rest.

A wait for a collective is for others until the last rank has issued it, then for the network. An
exchange of a few bytes only waits for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_cephalo.plan.program import NONE, Operation
from lightning_cephalo.plan.timeline import Event, Recording, Stream

# Collectives report their end in another thread, which may be late by as much.
_LATE_S = 1e-3
_COLLECTIVES = (Operation.GATHER, Operation.REDUCE)
_Name = tuple[Operation, int, int]


@dataclass(frozen=True)
class LostTime:
    """How one rank spent a recorded step, in seconds that sum to the step."""

    rank: int
    name: str
    step_s: float
    compute_s: float
    update_s: float
    others_s: float
    network_s: float
    rest_s: float


@dataclass(frozen=True)
class _Collective:
    event: Event
    name: _Name


def lost_time(recordings: Sequence[Recording]) -> tuple[LostTime, ...]:
    """Return how each rank spent its recorded step; ranks without one are left out."""
    collectives = [_collectives(recording.events) for recording in recordings]
    begun_s: dict[_Name, float] = {}
    for found in collectives:
        for one in found:
            begun_s[one.name] = max(begun_s.get(one.name, one.event.start_s), one.event.start_s)
    return tuple(
        _of_rank(recording, own, begun_s)
        for recording, own in zip(recordings, collectives, strict=True)
        if recording.phases
    )


def _collectives(events: Iterable[Event]) -> list[_Collective]:
    """Return gathers and reduces, named alike on all ranks: by unit, and how often before."""
    seen: dict[tuple[Operation, int], int] = defaultdict(int)
    found = []
    for event in sorted(events, key=lambda event: event.start_s):
        if event.operation in _COLLECTIVES:
            key = event.operation, event.unit
            found.append(_Collective(event, (*key, seen[key])))
            seen[key] += 1
    return found


def _of_rank(
    recording: Recording, collectives: Sequence[_Collective], begun_s: dict[_Name, float]
) -> LostTime:
    step_s = recording.phases[-1].end_s - recording.phases[0].start_s
    compute_s = update_s = others_s = network_s = 0.0
    for event in recording.events:
        seconds = event.end_s - event.start_s
        if event.operation is Operation.WAIT:
            waited_s = _for_others_s(event, collectives, begun_s)
            others_s += waited_s
            network_s += seconds - waited_s
        elif event.operation is Operation.UPDATE:
            update_s += seconds
        elif event.stream is Stream.COMPUTE:
            compute_s += seconds
    known_s = compute_s + update_s + others_s + network_s
    return LostTime(
        rank=recording.rank,
        name=recording.name,
        step_s=step_s,
        compute_s=compute_s,
        update_s=update_s,
        others_s=others_s,
        network_s=network_s,
        rest_s=max(step_s - known_s, 0.0),
    )


def _for_others_s(
    wait: Event, collectives: Sequence[_Collective], begun_s: dict[_Name, float]
) -> float:
    """Return the seconds of a wait in which not all ranks had come."""
    awaited = min(
        (
            one
            for one in collectives
            if one.event.start_s < wait.end_s
            and wait.start_s - _LATE_S < one.event.end_s < wait.end_s + _LATE_S
        ),
        key=lambda one: abs(one.event.end_s - wait.end_s),
        default=None,
    )
    seconds = wait.end_s - wait.start_s
    if awaited is None:
        return seconds
    for_others_s = min(max(begun_s[awaited.name] - wait.start_s, 0.0), seconds)
    if wait.unit == NONE:  # an exchange, behind the collective
        for_others_s += max(wait.end_s - max(awaited.event.end_s, wait.start_s + for_others_s), 0.0)
    return for_others_s
