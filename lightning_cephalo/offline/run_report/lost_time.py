"""What was lost where in a recorded step: waiting for slower ranks, for the network, and the rest.

A wait for a collective is for others until the last rank has issued it, then for the network. An
exchange of a few bytes only waits for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cephalo.plan.program import NONE, Operation
from lightning_cephalo.plan.timeline import Event, Recording, Stream

# Collectives report their end in another thread, which may be late by as much.
_LATE_S = 1e-3
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
    # gathers and reduces have the same name on all ranks: operation, unit, and how often before
    named: list[dict[tuple[Operation, int, int], Event]] = []
    begun_s: dict[tuple[Operation, int, int], float] = {}
    for recording in recordings:
        seen: Counter[tuple[Operation, int]] = Counter()
        named.append({})
        for event in sorted(recording.events, key=lambda event: event.start_s):
            if event.operation in (Operation.GATHER, Operation.REDUCE):
                key = event.operation, event.unit
                name = (*key, seen[key])
                seen[key] += 1
                named[-1][name] = event
                begun_s[name] = max(begun_s.get(name, event.start_s), event.start_s)
    return tuple(
        _of_rank(recording, [(event, begun_s[name]) for name, event in own.items()])
        for recording, own in zip(recordings, named, strict=True)
        if recording.phases
    )


def _of_rank(recording: Recording, collectives: _Begun) -> LostTime:
    step_s = recording.phases[-1].end_s - recording.phases[0].start_s
    compute_s = update_s = others_s = network_s = 0.0
    for event in recording.events:
        seconds = event.end_s - event.start_s
        if event.operation is Operation.WAIT:
            waited_s = _for_others_s(event, collectives)
            others_s += waited_s
            network_s += seconds - waited_s
        elif event.operation is Operation.UPDATE:
            update_s += seconds
        elif event.stream is Stream.COMPUTE:
            compute_s += seconds
    rest_s = max(step_s - (compute_s + update_s + others_s + network_s), 0.0)
    known_s = (compute_s, update_s, others_s, network_s)
    return LostTime(recording.rank, recording.name, step_s, *known_s, rest_s)


def _for_others_s(wait: Event, collectives: _Begun) -> float:
    """Return the seconds of a wait in which not all ranks had come."""
    near = [
        (abs(event.end_s - wait.end_s), event.end_s, begun_s)
        for event, begun_s in collectives
        if event.start_s < wait.end_s
        and wait.start_s - _LATE_S < event.end_s < wait.end_s + _LATE_S
    ]
    seconds = wait.end_s - wait.start_s
    if not near:
        return seconds
    _, end_s, begun_s = min(near, key=lambda one: one[0])
    for_others_s = min(max(begun_s - wait.start_s, 0.0), seconds)
    if wait.unit == NONE:  # an exchange, behind the collective
        for_others_s += max(wait.end_s - max(end_s, wait.start_s + for_others_s), 0.0)
    return for_others_s
