"""Keeps copies of pieces on other hosts: where there is room, beside training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from functools import partial

import torch.distributed as dist

from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.drafts import Task
from lightning_cephalo.recovery.peers import Peers, VoidPieceError, own_domain
from lightning_cephalo.recovery.placing import Holder, Placement, placed
from lightning_cephalo.recovery.store import Piece, Slot, Store

SLOTS = 2
"""Kept steps of each rank, and copies of each piece on a host."""


def slots_of_rank(has_storage: bool) -> int:
    """Return how many steps a rank keeps: with a storage the newest there, too."""
    return SLOTS + has_storage


class Copying:
    """Sends each kept step to other hosts, in a thread."""

    def __init__(self, copies: int, store: Store, control: ControlGroup) -> None:
        self._copies, self._store, self._control = copies, store, control
        self._placement = Placement(((),) * control.world_size)
        self._peers: Peers | None = None
        self._task: Task | None = None
        self.took_s = 0.0

    def place(self, needed_bytes: float, others_bytes: float) -> Placement:
        """Choose who holds copies of whose pieces; collective."""
        if self._copies:
            own = Holder(own_domain(), needed_bytes, self._store.free_bytes - others_bytes)
            rows = self._control.gather(own)
            self._placement = placed(rows, self._copies)
            self._connect(rows)
        return self._placement

    def _connect(self, rows: list[Holder]) -> None:
        self._warn(rows)
        if self._peers is None:
            group = dist.new_group(backend="gloo")
            self._peers = Peers(group, self._store)

    def _warn(self, rows: list[Holder]) -> None:
        if self._control.rank != 0 or not self._placement.lacking:
            return
        if len({row.domain for row in rows}) == 1:
            why = "all ranks are on one host"
        else:
            most = max(rows[rank].nbytes for rank in self._placement.lacking)
            why = f"no other host has room for {format_mib(most)}"
        ranks = ", ".join(map(str, self._placement.lacking))
        warnings.warn(
            f"Kept steps have fewer copies than recover=Recovery(copies={self._copies}) wants, of"
            f" the rows of rank {ranks}: {why}. They are lost with their host.",
            stacklevel=5,
        )

    def kept_for(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks of whose pieces some ranks hold copies."""
        return {sender for rank in ranks for sender in self._placement.senders(rank)}

    # -- a round ----------------------------------------------------------------------------------

    def start(self, piece: Piece, slot: Slot | None, spared: Piece | None) -> None:
        """Begin to copy a step; every rank does."""
        if self._peers is not None:
            exchange = partial(self._peers.exchange, self._placement, piece, slot, spared)

            def timed() -> None:
                begin_s = time.monotonic()
                exchange()
                self.took_s = time.monotonic() - begin_s

            self._task = Task("copying a step", timed)

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way."""
        return self._task is not None and not self._task.is_done

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait for the copies, and return whether they are whole."""
        task = self._task
        if task is None:
            return True
        try:
            task.wait(timeout_s)
        except VoidPieceError:
            return False
        finally:
            if task.is_done:
                self._task = None
        return True

    # -- leaving ----------------------------------------------------------------------------------

    def leave(
        self, is_leaving: bool, piece: Piece | None, slot: Slot | None, spared: Piece | None
    ) -> None:
        """Copy the newest step before the ranks end; collective.

        The pieces of hosts that are about to leave go to hosts that stay, whether copies are
        wanted or not.
        """
        nbytes = 0 if slot is None else slot.path.stat().st_size
        room = self._store.free_bytes - self._store.held_bytes
        own = Holder(own_domain(), nbytes, room)
        rows = self._control.gather((is_leaving, piece is not None, own))
        if not all(has_piece for _, has_piece, _ in rows) or piece is None:
            return
        holders = [holder for *_, holder in rows]
        gone = {holder.domain for leaves, _, holder in rows if leaves}
        leaving = [rank for rank, holder in enumerate(holders) if holder.domain in gone]
        if len(leaving) == len(rows):
            leaving = []  # the job ends, or all ranks start anew
        sources = None if self._copies else leaving
        self._copies = max(1, self._copies)
        if leaving:
            self._placement = placed(holders, self._copies, sources, leaving)
            self._connect(holders)
        self.start(piece, slot, spared)
        self.finish()
