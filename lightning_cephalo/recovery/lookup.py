"""Finds the newest step that all ranks together still have, after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.pieces import Assembly, RankState
from lightning_cephalo.recovery.store import Piece, Store, age


@dataclass(frozen=True)
class Inventory:
    """What the ranks see of the kept steps; equal on every rank."""

    seen: tuple[frozenset[Piece], ...]
    places: tuple[Any, ...]
    last_sent: int = -1

    @classmethod
    def take(cls, store: Store, control: ControlGroup) -> Inventory:
        """Ask all ranks; collective."""
        rows = control.gather((frozenset(store.pieces()), store.place))
        seen, places = zip(*rows, strict=True)
        return cls(seen, places)

    def whole(self) -> list[tuple[Piece, ...]]:
        """Return the pieces of each step of which every rank's piece is somewhere, newest first."""
        known = frozenset().union(*self.seen)
        firsts = sorted({piece.of(0) for piece in known}, key=age, reverse=True)
        steps = [tuple(piece.of(rank) for rank in range(piece.world_size)) for piece in firsts]
        return [pieces for pieces in steps if known.issuperset(pieces)]

    @property
    def last_attempt(self) -> int:
        """The number of the last start of the ranks that has kept anything; -1 if none has."""
        kept = (piece.attempt for seen in self.seen for piece in seen)
        return max(self.last_sent, *kept, -1)

    def missing(self) -> str:
        """Return what the newest steps lack, for messages; empty if nothing is kept at all."""
        known = frozenset().union(*self.seen)
        if not known:
            return ""
        newest = max(known, key=age)
        there = {p.rank for p in known if p.step == newest.step}
        lost = sorted(set(range(newest.world_size)) - there)
        return f"the newest kept step lacks the rows of rank {', '.join(map(str, lost))}"

    def leads(self, rank: int) -> bool:
        """Return whether a rank is the first of those that see its files."""
        return self.places.index(self.places[rank]) == rank

    def neighbours(self, rank: int) -> set[int]:
        """Return the ranks that see the same files as this one, itself included."""
        return {r for r, place in enumerate(self.places) if place == self.places[rank]}


def assembled(
    pieces: Sequence[Piece], inventory: Inventory, store: Store, control: ControlGroup
) -> Assembly:
    """Return what reads the tensors of a kept step; collective.

    If a rank does not see a piece, the first one that does sends from it: every rank must then read
    the same tensors in the same order.
    """
    own = store.pieces()
    holders = [
        next(rank for rank, seen in enumerate(inventory.seen) if piece in seen) for piece in pieces
    ]
    is_shared = [all(piece in seen for seen in inventory.seen) for piece in pieces]
    payloads: dict[int, Tensor] = {}
    metas: dict[int, bytes] = {}

    def read_own() -> None:
        for index, piece in enumerate(pieces):
            if piece in own:
                metas[index], payloads[index] = own[piece].read()

    control.together("reading kept steps", read_own)

    def fetch(index: int, where: slice) -> Tensor:
        if is_shared[index]:
            return payloads[index][where]
        mine = payloads[index][where].clone() if control.rank == holders[index] else None
        found: Tensor = control.broadcast(mine, holders[index])
        return found

    for index, holder in enumerate(holders):
        if not is_shared[index]:
            metas[index] = control.broadcast(metas.get(index), holder)
    states = [RankState.parse(metas[index]) for index in range(len(pieces))]
    return control.together("reading kept steps", partial(Assembly, states, fetch))
