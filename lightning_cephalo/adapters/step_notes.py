"""Lets parts of the strategy tell all ranks a few numbers with the exchange that each step has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class TellsRanks(Protocol):
    """A part that sends as many numbers in every step, on every rank."""

    def note(self) -> Sequence[float]:
        """Return this rank's numbers."""

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Learn :meth:`note` of every rank."""


class StepNotes:
    """Puts the numbers of parts into one row, and takes rows apart; the last part learns first."""

    def __init__(self, *parts: TellsRanks) -> None:
        self._parts, self._ends = parts, [0]

    def of(self, first: Sequence[float]) -> tuple[float, ...]:
        """Return a row: some numbers, and then those of the parts."""
        notes = [first, *(part.note() for part in self._parts)]
        self._ends = [*accumulate(len(note) for note in notes)]
        return tuple(number for note in notes for number in note)

    def learn(self, rows: Sequence[Sequence[float]]) -> None:
        """Let every part learn its numbers of every rank."""
        for index, part in reversed([*enumerate(self._parts)]):
            part.learn([row[self._ends[index] : self._ends[index + 1]] for row in rows])
