"""Reads back from the storage what hosts have lost, before a restarted training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.storage import Committed, Storage
from lightning_cephalo.recovery.store import Piece, Store, age


class ReadingBack:
    """What the storage has for a start of the ranks; all methods are collective."""

    def __init__(self, storage: Storage, store: Store, control: ControlGroup) -> None:
        self._storage, self._store, self._control = storage, store, control
        self.steps: Sequence[Committed] = ()

    def look(self, inventory: Inventory) -> Inventory:
        """Read back what the newest step lacks in memory; return what the ranks see then."""
        whole, last = inventory.whole(), -1
        try:
            self.steps, last = self._ask(is_whole=bool(whole))
            found = self._complete(inventory, whole[0][0] if whole else None)
            return replace(found, last_sent=last)
        except Exception as error:
            if not whole:
                raise
            if self._control.rank == 0:
                warnings.warn(
                    f"Training goes on from hosts' memory, without the storage: {error}",
                    stacklevel=4,
                )
            # what was read has taken the place of what lay in files of older copies
            return replace(Inventory.take(self._store, self._control), last_sent=last)

    def _ask(self, is_whole: bool) -> tuple[Sequence[Committed], int]:
        """Let rank 0 look into the storage, which must be writable where training may begin."""

        def look() -> tuple[Sequence[Committed], int]:
            if self._control.rank != 0:
                return (), -1
            try:
                steps = self._storage.committed()
                if not steps and not is_whole:
                    self._storage.check_writable()
                return steps, self._storage.last_attempt()
            except RecoveryError as error:
                raise RecoveryError(
                    f"{error} Steps may lie there. Training does not begin anew before it answers:"
                    " start again then, or give another storage=."
                ) from error

        found = self._control.together("looking for steps in the storage", look)
        asked: tuple[Sequence[Committed], int] = self._control.broadcast(found)
        return asked

    def _complete(self, inventory: Inventory, newest: Piece | None) -> Inventory:
        fault: Exception | None = None
        for step in self.steps:
            if newest is not None and age(step.piece) <= age(newest):
                break
            try:
                read = partial(self._read, step, inventory, newest)
                nbytes: float = self._control.together("reading back a step", read)
            except Exception as error:
                fault = fault or error
                # a file that was written to may have held a piece of an older step
                inventory = Inventory.take(self._store, self._control)
                continue
            if fault is not None and self._control.rank == 0:
                warnings.warn(f"Training goes on from an older step: {fault}", stacklevel=5)
            total = sum(self._control.gather(float(nbytes)))
            rank_zero_info(f"Read {format_mib(total)} back from {self._storage.url}.")
            return Inventory.take(self._store, self._control)
        if fault is not None:
            raise fault
        return inventory

    def _read(self, step: Committed, inventory: Inventory, newest: Piece | None) -> float:
        """Read this rank's part of the pieces that no rank sees, and return its bytes."""
        known = frozenset().union(*inventory.seen)
        missing = [piece for piece in step.pieces if piece not in known]
        own = missing[self._control.rank :: self._control.world_size]
        for piece in own:
            # not in the files of a rank: this one may be about to keep its own there
            kept = None if newest is None else newest.of(piece.rank)
            slot = self._store.slot(piece.rank, kept, is_copy=True)
            sizes = step.sent[piece.rank].sizes
            try:
                whole = slot.make_room(sizes)
            except OSError as error:
                raise RecoveryError(
                    f"{self._store.folder} has no room for {format_mib(sum(sizes[:2]))} of a step"
                    f" that was lost: {error.strerror}. Make it larger, or give"
                    " recover=Recovery(folder=...)."
                ) from error
            self._storage.read(step, piece.rank, whole)
            slot.finish(piece)
        return sum(sum(step.sent[piece.rank].sizes[:2]) for piece in own)
