"""Keeps the state of training after steps, where the next start of the ranks finds it.

What Lightning would save is kept, with each rank's rows in place of whole tensors, and the states
of its generators. A step counts as kept when all ranks have it, which each says with the exchange
of the next step.

[Note: Lightning's loops] Lightning has no hook for strategies behind all hooks of a batch or of an
epoch. ``on_advance_end`` of its loops is replaced on the instances while training runs. Only this
file does so; tests/lightning/test_recovery.py fails when they change.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
import warnings
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.adapters.resuming import KEY, saved_order
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.options import Wish, fitting_every
from lightning_cephalo.recovery.pieces import taken_apart
from lightning_cephalo.recovery.store import Piece, Store

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SLOTS = 2
"""Kept steps of each rank."""


class Kind(Enum):
    """Where in the loops a step was kept."""

    BETWEEN = "before the first epoch, or between two epochs"
    INSIDE = "inside an epoch"


class Facts(NamedTuple):
    """Numbers of a kept step.

    Attributes:
        kind: Where in the loops it was kept.
        steps: Updates that are done.
        batches: Batches that are trained, over all epochs.
        global_batch_size: Samples of a step over all ranks, as at the first start.
        fits: Calls of fit() that had ended in the process.
        should_stop: Whether training was to stop.
    """

    kind: Kind
    steps: int
    batches: int
    global_batch_size: int
    fits: int
    should_stop: bool


class Snapshot(NamedTuple):
    """What a rank keeps of a step.

    Attributes:
        checkpoint: What Lightning would save, of rank 0's order of samples.
        metrics: Values that callbacks monitor.
        random: States of the rank's generators.
        facts: Numbers of the step.
    """

    checkpoint: dict[str, Any]
    metrics: dict[str, Tensor]
    random: tuple[Any, ...]
    facts: Facts


class Keeper:
    """Keeps steps while a training runs.

    Args:
        trainer: The trainer that trains.
        control: Messages between ranks.
        accelerator: This rank's device.
        store: Where to keep.
        wish: The user's option.
        inventory: What lay there at the start.
        found: The pieces that training goes on from; None: it begins.
        global_batch_size: Samples of a step over all ranks.
        fits: Calls of fit() that have ended in the process.

    Attributes:
        is_dumping: Whether the strategy is asked for rows in place of whole tensors.
    """

    def __init__(
        self,
        trainer: Trainer,
        control: ControlGroup,
        accelerator: Accelerator,
        store: Store,
        wish: Wish,
        inventory: Inventory,
        found: Sequence[Piece] | None,
        global_batch_size: int,
        fits: int,
    ) -> None:
        self.is_dumping = False
        self._trainer, self._control, self._accelerator = trainer, control, accelerator
        self._store, self._inventory = store, inventory
        self._every_given = None if wish.recovery is None else wish.recovery.every
        self._is_automatic = wish.is_automatic
        self._global_batch_size, self._fits = global_batch_size, fits
        self._attempt, self._run = inventory.last_attempt + 1, 0
        # the newest piece of this rank, and the newest step that all ranks have
        self._newest: Piece | None = None
        self._agreed = -1.0
        if found is not None:
            first = found[0]
            self._newest = dataclasses.replace(first, rank=control.rank)
            self._agreed = float(first.serial)
        self._has_old = bool(store.ranks())
        self._is_off = False
        self._updates = 0
        # how far apart this rank wants kept steps, and all ranks agree to keep them
        self._wanted = self._every = float(self._every_given or 1)
        self._since_s = time.monotonic()
        # between two updates, gradients may add up, which are not kept
        self._steps_before, self._has_updated = trainer.global_step, False
        # batches of the step that was kept last
        self._batches = -1

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    # -- while training runs ----------------------------------------------------------------------

    def begin(self, resumed_batches: int | None) -> None:
        """Keep the state at the beginning, and from now on that of steps; collective.

        Args:
            resumed_batches: Batches that are trained if training is resumed; None: it begins.

        Raises:
            RecoveryError: On every rank, if there is too little room.
            BaseException: If the state cannot be kept.
        """
        # not of the generators that training draws from
        self._run = self._control.broadcast(secrets.randbits(63))
        snapshot = self._snapshot(Kind.BETWEEN)
        pack = partial(taken_apart, snapshot, self._control.rank)
        meta, tensors = self._control.together("keeping the state of training", pack)
        self._check_room(sum(tensor.nbytes for tensor in tensors))
        if resumed_batches is None:
            write = partial(self._write, meta, tensors)
            self._control.together("keeping the state of training", write)
        else:
            self._batches = resumed_batches
        vars(self._loop)["on_advance_end"] = self._after_batch
        vars(self._trainer.fit_loop)["on_advance_end"] = self._after_epoch

    def end(self) -> None:
        """Keep no more steps."""
        for loop in (self._loop, self._trainer.fit_loop):
            vars(loop).pop("on_advance_end", None)

    def note(self) -> tuple[float, float]:
        """Return what the exchange of a step carries to all ranks.

        These are the newest step of this rank, and how far apart it wants kept steps.
        """
        return -1.0 if self._newest is None else float(self._newest.serial), self._wanted

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Read the notes of all ranks."""
        before = self._agreed
        self._agreed = min(newest for newest, _ in notes)
        self._every = max(wanted for _, wanted in notes)
        is_new = self._newest is not None and self._newest.attempt == self._attempt
        if self._has_old and is_new and self._agreed > before >= -1.0:
            self._has_old = False
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove the files of ranks that are not on this host any more."""
        rank = self._control.rank
        if self._inventory.leads(rank):
            self._store.remove(self._store.ranks() - self._inventory.neighbours(rank))

    def _after_batch(self, data_fetcher: Any) -> None:
        loop, steps = self._loop, self._trainer.global_step
        self._has_updated, self._steps_before = steps > self._steps_before, steps
        try:
            type(loop).on_advance_end(loop, data_fetcher)
        except SIGTERMException:  # of all ranks together
            self._keep_batch()
            raise
        self._keep_batch()

    def _keep_batch(self) -> None:
        loop = self._loop
        # an epoch's last batch is kept with its end, whose hooks would lack their metrics
        if loop._num_ready_batches_reached() or not self._has_updated:
            return
        if loop.batch_progress.total.processed == self._batches:
            return  # kept behind its validation, which is not repeated then
        self._updates += 1
        if self._updates >= self._every:
            self._keep(Kind.INSIDE)

    def after_validation(self) -> None:
        """Keep a step behind its validation, before Lightning goes on."""
        loop = self._loop
        is_within = self._has_updated and not loop._num_ready_batches_reached()
        if is_within and not self._trainer.sanity_checking:
            self._keep(Kind.INSIDE)

    def _after_epoch(self) -> None:
        loop = self._trainer.fit_loop
        try:
            type(loop).on_advance_end(loop)
        except SIGTERMException:
            self._keep_epoch()
            raise
        self._keep_epoch()

    def _keep_epoch(self) -> None:
        self.learn(self._control.gather(list(self.note())))  # no step lies between two kept ones
        self._keep(Kind.BETWEEN)

    # -- keeping ----------------------------------------------------------------------------------

    def _keep(self, kind: Kind) -> None:
        if self._is_off or (self._newest is not None and self._agreed < self._newest.serial):
            return  # a rank has failed to keep a step: the last that all have stays
        begin_s, updates = time.monotonic(), self._updates
        try:
            snapshot = self._snapshot(kind)
            meta, tensors = taken_apart(snapshot, self._control.rank)
        except Exception as error:
            if not self._is_automatic:
                raise
            self._stop(
                f"{type(error).__name__}: {error}",
                "on_save_checkpoint() and state_dict() of callbacks run at each kept step.",
            )
            return
        try:
            self._write(meta, tensors)
            self._learn_cost(begin_s, updates)
        except OSError as error:
            self._stop(
                f"{error.strerror} in {self._store.folder}",
                "Make room there, or give recover=Recovery(folder=...).",
            )

    def _stop(self, why: str, remedy: str) -> None:
        """Keep no more steps, and let training go on."""
        self._is_off = True
        warnings.warn(
            f"Rank {self._control.rank} keeps no more steps: {why}. A restart would go on from step"
            f" {int(self._agreed)} of those kept. {remedy}",
            stacklevel=3,
        )

    def _learn_cost(self, begin_s: float, updates: int) -> None:
        """Compare the time that keeping has taken with that of the updates before it."""
        since_s, self._since_s = self._since_s, time.monotonic()
        if self._every_given is None and updates:
            update_s = (begin_s - since_s) / updates
            self._wanted = float(fitting_every(self._since_s - begin_s, update_s))

    def _write(self, meta: bytes, tensors: list[Tensor]) -> None:
        serial = 0 if self._newest is None else self._newest.serial + 1
        rank, world_size = self._control.rank, self._control.world_size
        piece = Piece(serial, self._attempt, rank, world_size, self._run)
        self._store.keep(piece, self._newest, meta, tensors)
        self._newest, self._updates = piece, 0
        self._batches = self._loop.batch_progress.total.processed

    def _snapshot(self, kind: Kind) -> Snapshot:
        trainer = self._trainer
        self.is_dumping = True
        try:
            # Private: the public method also writes a file.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.is_dumping = False
        order = saved_order(trainer)
        if order is not None:
            checkpoint[KEY] = order
        facts = Facts(
            kind,
            trainer.global_step,
            self._loop.batch_progress.total.processed,
            self._global_batch_size,
            self._fits,
            bool(trainer.should_stop),
        )
        return Snapshot(
            checkpoint, dict(trainer.callback_metrics), read_generators(self._accelerator), facts
        )

    def _check_room(self, held_bytes: int) -> None:
        """Compare the room with what all ranks of the host will keep; collective."""
        # most optimizers make two tensors of state for each parameter, at their first step
        has_state = any(optimizer.state for optimizer in self._trainer.optimizers)
        needed = SLOTS * held_bytes * (1 if has_state else 3)
        rows = self._control.gather((self._store.place, needed, self._store.free_bytes))
        for rank, (place, _, free) in enumerate(rows):
            together = sum(n for other, n, _ in rows if other == place)
            if together > free:
                raise RecoveryError(
                    f"Keeping steps takes about {format_mib(together)} on the host of rank {rank},"
                    f" but {self._store.folder} has room for {format_mib(free)}. Make it larger"
                    " (in containers: docker run --shm-size=..., an emptyDir of medium Memory), or"
                    " keep steps on a local disk: recover=Recovery(folder=...)."
                )


def searches_learning_rate(trainer: Trainer) -> bool:
    """Return whether the loop that runs is a trial of Lightning's search for a learning rate.

    Private: nothing else tells its steps from those of training.
    """
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def only_searches(trainer: Trainer) -> bool:
    """Return whether ``fit`` is called by Lightning's ``Tuner``, and ends behind its search.

    Private: the tuner marks its callback so, and nothing else tells it from one in a training.
    """
    finders = (c for c in trainer.callbacks if isinstance(c, LearningRateFinder))  # type: ignore[attr-defined]
    return any(finder._early_exit for finder in finders)


def searches_before_training(trainer: Trainer) -> bool:
    """Return whether a callback searches for a learning rate before the first epoch.

    The search loads a file of its own, and so drops what training would go on from.
    """
    finders = (c for c in trainer.callbacks if isinstance(c, LearningRateFinder))  # type: ignore[attr-defined]
    return any(type(f).on_fit_start is LearningRateFinder.on_fit_start for f in finders)


def read_generators(accelerator: Accelerator) -> tuple[Any, ...]:
    """Return the states of the generators of this process and its device."""
    return accelerator.random_states(), np.random.get_state(), random.getstate()


def write_generators(accelerator: Accelerator, states: tuple[Any, ...]) -> None:
    """Set the states that :func:`read_generators` has read."""
    accelerator.restore_random_states(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
