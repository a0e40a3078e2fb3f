"""Lets parts of the strategy tell all ranks a few numbers with the exchange that each step has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TellsRanks(Protocol):
    """A part that sends as many numbers in every step, on every rank."""

    def note(self) -> Sequence[float]: ...

    def learn(self, notes: Sequence[Sequence[float]]) -> None: ...


class StepNotes:
    """Puts the numbers of parts into one row, and takes rows apart; the last part learns first."""

    def __init__(self, *parts: TellsRanks) -> None:
        self._parts, self._lengths = parts, [0] * len(parts)

    def of(self, first: Sequence[float]) -> tuple[float, ...]:
        """Return a row: some numbers, and then those of the parts."""
        notes = [part.note() for part in self._parts]
        self._lengths = [len(note) for note in notes]
        return (*first, *(number for note in notes for number in note))

    def learn(self, rows: Sequence[Sequence[float]]) -> None:
        """Let every part learn its numbers of every rank."""
        for part, length in reversed([*zip(self._parts, self._lengths, strict=True)]):
            part.learn([row[len(row) - length :] for row in rows])
            rows = [row[: len(row) - length] for row in rows]
