"""Keeps the state of training after steps, where the next start of the ranks finds it.

Rows are copied while the next forward runs (:mod:`.drafts`), and to other hosts in the steps after
it (:mod:`.copying`). A step counts as kept when all ranks have it and its copies. All ranks try to
keep the same steps, and give them the same serial numbers, whether or not they can.

[Note: Lightning's loops] Lightning has no hook for strategies behind all hooks of a batch or of an
epoch. ``on_advance_end`` of its loops is replaced on the instances while training runs. Only this
file does so; tests/lightning/test_recovery.py fails when they change.
"""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.generators import read_generators
from lightning_cephalo.adapters.resuming import KEY, saved_order
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.recovery.copying import SLOTS, Copying, slots_of_rank
from lightning_cephalo.recovery.drafts import Draft, Probe
from lightning_cephalo.recovery.keeping_cost import Cost
from lightning_cephalo.recovery.pieces import taken_apart
from lightning_cephalo.recovery.place import Place
from lightning_cephalo.recovery.placing import Needed, on_hosts
from lightning_cephalo.recovery.snapshot import Facts, Kind, Snapshot
from lightning_cephalo.recovery.store import Piece, Slot
from lightning_cephalo.recovery.trees import tensors_of
from lightning_cephalo.recovery.uploading import Uploading
from lightning_cephalo.sharding.placement import local_part

_ENDING_S = 10.0


class Keeper:
    """Keeps steps while a training runs."""

    def __init__(
        self,
        place: Place,
        accelerator: Accelerator,
        found: Sequence[Piece] | None,
        global_batch_size: int,
        fits: int,
        uploading: Uploading | None,
        *,
        is_automatic: bool,
    ) -> None:
        self.is_dumping = False
        self._uploading, self._accelerator = uploading, accelerator
        self._view, self._control = view, control = place.view, place.control
        self._store, self._inventory = store, inventory = place.store, place.inventory
        self._every_given, copies = place.recovery.every, place.recovery.copies
        self._is_automatic = is_automatic
        self._copying = Copying(copies, store, control)
        self._copies = copies
        self._global_batch_size, self._fits = global_batch_size, fits
        self._attempt, self._run = inventory.last_attempt + 1, 0
        # this rank's piece of the newest step that all ranks have, and of a newer one
        self._spared = None if found is None else found[0].of(control.rank)
        self._fresh: Piece | None = None
        self._agreed = -1 if found is None else found[0].serial
        # of the last step that all ranks have tried to keep
        self._serial = self._agreed
        self._is_known = True
        self._has_old = not store.is_empty
        self._is_off = self._is_any_busy = False
        # somebody has removed files since the last step that was kept
        self._lacks_files = self._has_told_removal = False
        # how far apart this rank wants kept steps, and all ranks agree to keep them
        self._wanted = self._every = float(self._every_given or 1)
        self._updates, self._is_due = 0, False
        self._draft: Draft | None = None
        self._overlaps, self._probe = True, Probe(())
        self._cost = Cost(time.monotonic())
        # between two updates, gradients may add up, which are not kept
        self._steps_before, self._has_updated = view.step, False
        # batches of the step that was kept last
        self._batches = -1

    @property
    def _loop(self) -> Any:
        return self._view.epoch_loop

    # -- while training runs ----------------------------------------------------------------------

    def begin(self, resumed_batches: int | None) -> None:
        """Keep the state at the beginning, and from now on that of steps; collective."""
        # not of the generators that training draws from
        self._run = self._control.broadcast(secrets.randbits(63))
        snapshot = self._snapshot(Kind.BETWEEN)
        pack = partial(self._taken_apart, snapshot, overlaps=True)
        meta, tensors = self._control.together("keeping the state of training", pack)
        self._check_room(sum(tensor.nbytes for tensor in tensors))
        if resumed_batches is None:
            self._serial += 1
            write = partial(self._write, meta, tensors)
            slot = self._control.together("keeping the state of training", write)
            self._copying.start(self._piece, slot, self._spared)
            self._control.together("copying it to other hosts", self._finish_copies)
            self._count_as_kept()
        else:
            self._batches = resumed_batches
            # a host that was lost has taken copies along
            self._is_due = self._copies > 0
        # a hook that writes to parameters at each batch's beginning shows at the first one
        self._probe = Probe(tensors)
        vars(self._loop)["on_advance_end"] = self._after_batch
        vars(self._view.fit_loop)["on_advance_end"] = self._after_epoch

    def end(self) -> bool:
        """Keep no more steps; return whether this rank does nothing to the storage any more."""
        self.settle()
        has_stopped = self._uploading is None or self._uploading.cancel(_ENDING_S)
        for loop in (self._loop, self._view.fit_loop):
            vars(loop).pop("on_advance_end", None)
        with suppress(Exception):  # the run ends: what is whole is found by the next start
            self._copying.finish(_ENDING_S)
        return has_stopped

    def note(self) -> tuple[float, float, float, float]:
        """Return this rank's newest step, its distance between steps, if it copies, what it sends.

        The exchange of a step carries that to all ranks.
        """
        self.settle()
        if not self._copying.is_busy:
            self._finish_copies()
            self._look_for_files()
        if self._probe.is_written:
            self._overlaps = False
        self._probe = Probe(())
        newest = self._fresh or self._spared
        wanted = math.inf if self._is_off else self._wanted
        serial = -1.0 if newest is None or self._lacks_files else float(newest.serial)
        sends = 0.0 if self._uploading is None else self._uploading.note()
        return serial, wanted, float(self._copying.is_busy), sends

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Read the notes of all ranks."""
        before = self._agreed
        if self._uploading is not None:
            self._uploading.learn([sends for *_, sends in notes])
        self._agreed = int(min(newest for newest, *_ in notes))
        self._every = max(wanted for _, wanted, *_ in notes)
        self._is_any_busy = any(busy for *_, busy, _ in notes)
        if self._is_any_busy:
            return
        self._is_known = True
        if self._agreed < self._serial:  # a rank could not keep it: all try the next one
            self._is_due = True
        elif self._fresh is not None:
            self._count_as_kept()
            if self._uploading is not None:
                self._uploading.offer(self._spared, self._store.pieces().get)
        if self._has_old and self._agreed > before >= -1:
            self._has_old = False
            self._remove_old()

    def _count_as_kept(self) -> None:
        """Note that all ranks have the newest step."""
        self._spared, self._fresh = self._fresh, None
        self._agreed = self._serial

    def _remove_old(self) -> None:
        """Remove the files of ranks that are not on this host any more."""
        rank, inventory = self._control.rank, self._inventory
        if inventory.leads(rank):
            ranks = inventory.neighbours(rank)
            self._store.remove(ranks, self._copying.kept_for(ranks))

    def _after_batch(self, data_fetcher: Any) -> None:
        loop, steps = self._loop, self._view.step
        self._has_updated, self._steps_before = steps > self._steps_before, steps
        try:
            type(loop).on_advance_end(loop, data_fetcher)
        except SIGTERMException:  # of all ranks together
            self._keep_batch(is_last=True)
            raise
        self._keep_batch()

    def _keep_batch(self, is_last: bool = False) -> None:
        loop = self._loop
        # an epoch's last batch is kept with its end, whose hooks would lack their metrics
        if loop._num_ready_batches_reached() or not self._has_updated:
            return
        if loop.batch_progress.total.processed == self._batches:
            return  # kept behind its validation, which is not repeated then
        self._updates += 1
        if is_last:
            self._meet()
        if is_last or self._is_due or self._updates >= self._every:
            self._keep(Kind.INSIDE)

    def after_validation(self) -> None:
        """Keep a step behind its validation, before Lightning goes on."""
        loop = self._loop
        is_within = self._has_updated and not loop._num_ready_batches_reached()
        if is_within and not self._view.of.sanity_checking:
            self._keep(Kind.INSIDE)

    def _after_epoch(self) -> None:
        loop = self._view.fit_loop
        try:
            type(loop).on_advance_end(loop)
        except SIGTERMException:  # of all ranks together
            self._keep_epoch()
            raise
        self._keep_epoch()

    def _keep_epoch(self) -> None:
        self._meet()  # no step lies between two kept ones
        self._keep(Kind.BETWEEN)

    def _meet(self) -> None:
        """Wait until no copy is under way, and learn what all ranks have; collective."""
        self.settle()
        self._finish_copies()
        self.learn(self._control.gather(list(self.note())))

    def leave(self, is_noticed: bool) -> None:
        """Let what was kept last survive the hosts that are about to leave; collective."""
        self.settle()
        self._finish_copies()
        newest = self._fresh or self._spared
        is_void = newest is None or newest.attempt != self._attempt
        slot = None if newest is None or is_void else self._store.pieces().get(newest)
        self._copying.leave(is_noticed, newest, slot, self._spared)

    # -- keeping ----------------------------------------------------------------------------------

    def _keep(self, kind: Kind) -> None:
        """Try to keep a step; every rank does, at the same step."""
        if self._is_any_busy or not self._is_known or math.isinf(self._every):
            return
        self._serial += 1
        self._fresh, self._is_known, self._is_due = None, False, False
        self._lacks_files = False
        self._cost.begin(self._updates)
        self._updates = 0
        self._batches = self._loop.batch_progress.total.processed
        if self._is_off:
            self._copying.start(self._piece, None, self._spared)
            return
        try:
            meta, tensors = self._taken_apart(self._snapshot(kind), self._overlaps)
        except Exception as error:
            if not self._is_automatic:
                raise
            self._stop(
                f"{type(error).__name__}: {error}",
                "on_save_checkpoint() and state_dict() of callbacks run at each kept step.",
            )
            self._copying.start(self._piece, None, self._spared)
            return
        if self._overlaps:
            slot = self._free_slot()
            self._draft = Draft(slot, self._piece, meta, tensors, self._accelerator)
            self._cost.pause()
        else:
            self._try_to_finish(partial(self._write, meta, tensors))

    @property
    def _piece(self) -> Piece:
        """This rank's piece of the step that is kept."""
        rank, world_size = self._control.rank, self._control.world_size
        return Piece(self._serial, self._attempt, rank, world_size, self._run)

    def settle(self) -> None:
        """Wait for the copy of the last step, if it is under way: now the state may change."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._cost.go_on()
            self._try_to_finish(partial(self._finished, draft))

    def _finished(self, draft: Draft) -> Slot | None:
        is_whole = draft.finish()
        if self._accelerator.computes_on_host:
            self._cost.add(draft.took_s)  # of the same processors
        if is_whole:
            self._fresh = draft.piece
            return draft.slot
        self._overlaps = False  # a hook writes between an update and the next forward
        return None

    def _write(self, meta: bytes, tensors: list[Tensor]) -> Slot:
        slot = self._free_slot()
        slot.write(self._piece, meta, tensors)
        self._fresh = self._piece
        return slot

    def _free_slot(self) -> Slot:
        self._look_for_files()
        self._lacks_files = False  # they are about to be written
        pinned = () if self._uploading is None else (self._uploading.pinned,)
        return self._store.slot(self._control.rank, self._spared, *pinned)

    def _try_to_finish(self, finish: Callable[[], Slot | None]) -> None:
        slot = None
        try:
            slot = finish()
        except FileNotFoundError:
            self._note_removal()
        except OSError as error:
            self._stop(
                f"{error.strerror} in {self._store.folder}",
                "Make room there, or give recover=Recovery(folder=...).",
            )
        except Exception as error:  # other ranks wait for this one
            self._stop(f"{type(error).__name__}: {error}", "Training goes on.")
        self._copying.start(self._piece, slot, self._spared)
        self._cost.end()
        if self._every_given is None:
            self._wanted = self._cost.fitting_every(self._wanted, self._copying.took_s)

    def _finish_copies(self) -> None:
        """Wait for the copies of the last step."""
        try:
            if not self._copying.finish():
                self._fresh = None
        except (FileNotFoundError, RecoveryError):  # this rank's file or folder is gone
            self._fresh = None
            self._note_removal()
        except (OSError, RuntimeError) as error:
            self._fresh = None
            self._stop(f"copying to other hosts: {error}", "Make room there, or use copies=0.")

    def _look_for_files(self) -> None:
        """Let all ranks keep the next step if somebody has removed files of this one."""
        if self._is_off:
            return
        try:
            if not self._store.renew():
                return
            there = self._store.pieces()
            self._fresh, self._spared = (
                piece if piece in there else None for piece in (self._fresh, self._spared)
            )
            self._note_removal()
        except (OSError, RecoveryError) as error:
            self._stop(f"its files were removed. {error}", "Training goes on.")

    def _note_removal(self) -> None:
        self._lacks_files = True
        if not self._has_told_removal:
            self._has_told_removal = True
            warnings.warn(
                f"Rank {self._control.rank}: somebody has removed files of kept steps in"
                f" {self._store.folder} while training runs. The next step is kept anew; a restart"
                " before that lacks what was there. Leave the folder as it is.",
                stacklevel=3,
            )

    def _stop(self, why: str, remedy: str) -> None:
        """Keep no more steps, and let training go on."""
        self._is_off = True
        warnings.warn(
            f"Rank {self._control.rank} keeps no more steps: {why}. A restart would go on from step"
            f" {self._agreed} of those kept. {remedy}",
            stacklevel=3,
        )

    def _taken_apart(self, snapshot: Snapshot, overlaps: bool) -> tuple[bytes, list[Tensor]]:
        updated = None
        if overlaps:
            states = snapshot.checkpoint.get("optimizer_states", [])
            updated = set(map(id, tensors_of(states)))
        return taken_apart(snapshot, self._control.rank, updated)

    def _snapshot(self, kind: Kind) -> Snapshot:
        view = self._view
        states = [optimizer.state for optimizer in view.optimizers]
        parts = map(local_part, tensors_of([dict(state) for state in states]))
        held = Probe([part for part in parts if not part.is_inference()])
        self.is_dumping = True
        try:
            # Private: the public method also writes a file.
            checkpoint = view.connector("checkpoint").dump_checkpoint(weights_only=False)
        finally:
            self.is_dumping = False
        if held.is_written:
            raise RecoveryError(
                "on_save_checkpoint() writes to checkpoint['optimizer_states'], whose tensors are"
                " the training's own, so that training is changed. Let it write to copies."
            )
        order = saved_order(view)
        if order is not None:
            checkpoint[KEY] = order
        facts = Facts(
            kind,
            view.step,
            self._loop.batch_progress.total.processed,
            self._global_batch_size,
            self._fits,
            bool(view.of.should_stop),
        )
        return Snapshot(
            checkpoint, dict(view.of.callback_metrics), read_generators(self._accelerator), facts
        )

    def _check_room(self, held_bytes: int) -> None:
        """Compare the room with what all ranks of the host will keep; collective."""
        # most optimizers make two tensors of state for each parameter, at their first step
        has_state = any(optimizer.state for optimizer in self._view.optimizers)
        grown = held_bytes * (1 if has_state else 3)
        slots = slots_of_rank(self._uploading is not None)
        store, own = self._store, self._control.rank
        first = grown + min(store.bytes_of({own}), (slots - 1) * grown)
        left = store.held_bytes - store.bytes_of(self._inventory.neighbours(own))
        needed = Needed(store.place, slots * grown, first, left)
        rows = self._control.gather((needed, store.free_bytes))
        together = on_hosts([each for each, _ in rows])
        for rank, (_, free) in enumerate(rows):
            if together[rank] > free:
                raise RecoveryError(
                    f"Keeping steps takes about {format_mib(together[rank])} on the host of rank"
                    f" {rank}, but {self._store.folder} has room for {format_mib(free)}. Make it"
                    " larger (in containers: docker run --shm-size=..., an emptyDir of medium"
                    " Memory), or keep steps on a local disk: recover=Recovery(folder=...)."
                )
        self._copying.place(SLOTS * grown, together[own])
