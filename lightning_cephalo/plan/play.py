"""Plays the programs of ranks side by side: the one loop in which ranks meet.

A player is a generator that reads a rank's program. At a collective it yields a :class:`Meeting`.
Once all ranks of the group have yielded the same, each is sent when the collective starts and ends.
``check.py`` plays programs without seconds, ``offline/simulate.py`` with seconds and bytes, and
``offline/pipeline/simulate.py`` stages that pass waves on to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from lightning_cephalo.common.errors import ProgramError


class Meeting(NamedTuple):
    """What a rank does together with others.

    ``ranks`` is the group, whose link carries one thing after another, and ``what`` is equal on
    all of them. A meeting starts no earlier than any rank's ``ready_s``.
    """

    ranks: tuple[int, ...]
    what: Any
    ready_s: float = 0.0


_NOWHERE = Meeting((), "none")

Player = Generator[Meeting, tuple[float, float], None]


def play(
    players: Sequence[Player],
    seconds_of: Callable[[Meeting], float] = lambda meeting: 0.0,
) -> None:
    """Run all players to their ends; ``seconds_of`` is asked once for each meeting.

    Raises:
        ProgramError: Ranks would wait for each other forever.
    """
    free_s: dict[tuple[int, ...], float] = {}
    met: Counter[tuple[int, ...]] = Counter()
    at: dict[int, Meeting] = {}

    def read_on(rank: int, times: tuple[float, float] | None) -> None:
        try:
            at[rank] = players[rank].send(times)  # type: ignore[arg-type]
        except StopIteration:
            at.pop(rank, None)

    for rank in range(len(players)):
        read_on(rank, None)
    while at:
        groups = {meeting.ranks: meeting for meeting in at.values()}
        ready = [
            meeting
            for ranks, meeting in groups.items()
            if all(rank in at and at[rank][:2] == meeting[:2] for rank in ranks)
        ]
        if not ready:
            raise _deadlock(at, met)
        for meeting in ready:
            ranks = meeting.ranks
            start_s = max(free_s.get(ranks, 0.0), *(at[rank].ready_s for rank in ranks))
            free_s[ranks] = start_s + seconds_of(meeting)
            met[ranks] += 1
            for rank in ranks:
                read_on(rank, (start_s, free_s[ranks]))


def _deadlock(at: dict[int, Meeting], met: Counter[tuple[int, ...]]) -> ProgramError:
    ranks = min(meeting.ranks for meeting in at.values())
    first, *others = ranks
    other = next(
        rank for rank in others if at.get(rank, _NOWHERE)[:2] != at.get(first, _NOWHERE)[:2]
    )
    has, but = (at.get(rank, _NOWHERE).what for rank in (first, other))
    return ProgramError(
        f"Collectives must come in one order on all ranks; as number {met[ranks] + 1} rank {first}"
        f" has {has}, but rank {other} has {but}."
    )
