"""What was lost where in a recorded step: waiting for slower ranks, for the network, and the rest.

A wait for a collective is for others until the last rank has issued it, then for the network. An
exchange of a few bytes only waits for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_cephalo.observe.recording import Event, Recording, Stream
from lightning_cephalo.plan.program import NONE, Operation

# Collectives report their end in another thread, which may be late by as much.
_LATE_S = 1e-3
_Name = tuple[Operation, int, int]
"""What a gather or a reduce is called on all ranks: operation, unit, and how often before."""
_Begun = Sequence[tuple[Event, float]]


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

    def share(self, field: str) -> float:
        """Return the part of the step that went there, 0 to 1."""
        return float(getattr(self, field)) / self.step_s if self.step_s else 0.0


def lost_time(recordings: Sequence[Recording]) -> tuple[LostTime, ...]:
    """Return how each rank spent its recorded step; ranks without one are left out."""
    begun_s: dict[_Name, float] = {}
    for recording in recordings:
        for name, event in _collectives(recording):
            begun_s[name] = max(begun_s.get(name, event.start_s), event.start_s)
    return tuple(
        _of_rank(one, [(event, begun_s[name]) for name, event in _collectives(one)])
        for one in recordings
        if one.end_s is not None
    )


def _collectives(recording: Recording) -> Iterator[tuple[_Name, Event]]:
    seen: Counter[tuple[Operation, int]] = Counter()
    for event in recording.events:
        if event.operation in (Operation.GATHER, Operation.REDUCE):
            seen[event.operation, event.unit] += 1
            yield (event.operation, event.unit, seen[event.operation, event.unit]), event


def _of_rank(recording: Recording, collectives: _Begun) -> LostTime:
    step_s = (recording.end_s or 0.0) - recording.start_s
    spent_s = dict.fromkeys(("compute_s", "update_s", "others_s", "network_s"), 0.0)
    for event in recording.events:
        seconds = event.end_s - event.start_s
        if event.operation is Operation.WAIT:
            for_others_s = _for_others_s(event, collectives)
            spent_s["others_s"] += for_others_s
            spent_s["network_s"] += seconds - for_others_s
        elif event.operation is Operation.UPDATE:
            spent_s["update_s"] += seconds
        elif event.stream is Stream.COMPUTE:
            spent_s["compute_s"] += seconds
    rest_s = max(step_s - sum(spent_s.values()), 0.0)
    return LostTime(recording.rank, recording.name, step_s, **spent_s, rest_s=rest_s)


def _for_others_s(wait: Event, collectives: _Begun) -> float:
    """Return the seconds of a wait in which not all ranks had come."""
    seconds = wait.end_s - wait.start_s
    near = [
        (event.end_s, begun_s)
        for event, begun_s in collectives
        if event.start_s < wait.end_s
        and wait.start_s - _LATE_S < event.end_s < wait.end_s + _LATE_S
    ]
    if not near:
        return seconds
    end_s, begun_s = min(near, key=lambda one: abs(one[0] - wait.end_s))
    for_others_s = min(max(begun_s - wait.start_s, 0.0), seconds)
    if wait.unit == NONE:  # an exchange, behind the collective
        for_others_s += max(wait.end_s - max(end_s, wait.start_s + for_others_s), 0.0)
    return for_others_s
