"""Rows of several parts' numbers, put together and taken apart."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.adapters.step_notes import StepNotes


class Part:
    def __init__(self, *own: float) -> None:
        self.own, self.learnt = own, []

    def note(self) -> tuple[float, ...]:
        return self.own

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        self.learnt = [tuple(note) for note in notes]


def test_every_part_learns_its_own_numbers_of_every_rank_whatever_comes_first():
    parts = [Part(1.0, 2.0), Part(), Part(3.0)]
    notes = StepNotes(*parts)
    assert notes.of((9.0, 8.0)) == (9.0, 8.0, 1.0, 2.0, 3.0)
    notes.learn([(9.0, 8.0, 1.0, 2.0, 3.0), (7.0, 6.0, 4.0, 5.0, 0.0)])
    assert [part.learnt for part in parts] == [
        [(1.0, 2.0), (4.0, 5.0)],
        [(), ()],
        [(3.0,), (0.0,)],
    ]


def test_without_parts_nothing_is_added_or_read():
    notes = StepNotes()
    assert notes.of((1.0,)) == (1.0,)
    notes.learn([(1.0,), (2.0,)])
