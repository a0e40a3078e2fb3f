"""Chooses the hosts that hold copies of other hosts' pieces, and counts the room on each."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holder:
    """What a rank's host offers."""

    domain: Hashable
    nbytes: float
    room_bytes: float


@dataclass(frozen=True)
class Placement:
    """Who holds copies of each rank's piece."""

    receivers: tuple[tuple[int, ...], ...]
    # whose pieces have fewer copies than wanted, as no other host has the room
    lacking: tuple[int, ...] = ()

    def senders(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of whose pieces a rank holds copies."""
        return tuple(s for s, receivers in enumerate(self.receivers) if rank in receivers)


def placed(
    ranks: Sequence[Holder],
    copies: int,
    sources: Collection[int] | None = None,
    leaving: Collection[int] = (),
) -> Placement:
    """Return who holds copies: the largest piece first, where the most room is left.

    No two copies of a piece, nor the piece and its copy, are in one domain. On a host the rank
    receives that has the fewest bytes to receive.
    """
    chosen = range(len(ranks)) if sources is None else sources
    members: dict[Hashable, list[int]] = {}
    for rank, offer in enumerate(ranks):
        members.setdefault(offer.domain, []).append(rank)
    closed = {ranks[rank].domain for rank in leaving}
    room = {domain: ranks[own[0]].room_bytes for domain, own in members.items()}
    received = [0.0] * len(ranks)
    receivers: list[tuple[int, ...]] = [()] * len(ranks)
    lacking = set()
    for rank in sorted(chosen, key=lambda r: (-ranks[r].nbytes, r)):
        nbytes = ranks[rank].nbytes
        used = {ranks[rank].domain} | closed
        for _ in range(copies):
            fitting = [d for d in members if d not in used and room[d] >= nbytes]
            if not fitting:
                lacking.add(rank)
                break
            domain = max(fitting, key=lambda d: (room[d], -members[d][0]))
            holder = min(members[domain], key=lambda r: (received[r], r))
            used.add(domain)
            room[domain] -= nbytes
            received[holder] += nbytes
            receivers[rank] = (*receivers[rank], holder)
    return Placement(tuple(receivers), tuple(sorted(lacking)))


@dataclass(frozen=True)
class Needed:
    """What a rank needs of its host's room."""

    place: Hashable
    slots_bytes: float
    first_bytes: float
    left_bytes: float


def on_hosts(ranks: Sequence[Needed]) -> list[float]:
    """Return the bytes that each rank's host needs at most, over all its ranks."""
    found = []
    for rank in ranks:
        host = [other for other in ranks if other.place == rank.place]
        first = rank.left_bytes + sum(other.first_bytes for other in host)
        found.append(max(first, sum(other.slots_bytes for other in host)))
    return found
