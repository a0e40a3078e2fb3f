"""Lets a training go on after a restart: one object that the strategy's hooks call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.generators import write_generators
from lightning_cephalo.common.errors import KeptForAnotherError, RecoveryError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.copying import SLOTS, slots_of_rank
from lightning_cephalo.recovery.keeper import Keeper
from lightning_cephalo.recovery.lookup import Inventory, assembled
from lightning_cephalo.recovery.options import AGENT, Wish, attempt
from lightning_cephalo.recovery.pieces import Assembly
from lightning_cephalo.recovery.reading_back import ReadingBack
from lightning_cephalo.recovery.snapshot import (
    Facts,
    Kind,
    Snapshot,
    only_searches,
    searches_before_training,
    searches_learning_rate,
)
from lightning_cephalo.recovery.storage import Committed, Storage
from lightning_cephalo.recovery.store import Piece, Store
from lightning_cephalo.recovery.uploading import Uploading
from lightning_cephalo.recovery.waiting import wait_for_hosts
from lightning_cephalo.sharding.placement import as_dtensor, local_part

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# fits that have ended in this process: a restarted script calls fit() in the same order
_FITS = "LIGHTNING_CEPHALO_FITS"
_NOT_KEPT = "Nothing is kept for a restart, which would begin anew"
_DROPPED = (
    "Kept steps are removed, and training begins where a first start does, at ckpt_path if fit()"
    " has one, else at step 0"
)
_NO_SEARCH = (
    "LearningRateFinder cannot run in a training that is resumed. Search in a run of its own."
)
# of a parameter and its optimizer's state, in single precision
_KEPT_BYTES = 12


@dataclass(frozen=True)
class _Found:
    """A kept step that training goes on from."""

    pieces: tuple[Piece, ...]
    facts: Facts
    checkpoint: dict[str, Any]
    metrics: dict[str, Any]
    random: tuple[Any, ...] | None


class Recovering:
    """Keeps steps in the hosts' memory, and lets a restarted training go on from the newest."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._forget()

    def _forget(self) -> None:
        self._trainer: Trainer | None = None
        self._control: ControlGroup | None = None
        self._store: Store | None = None
        self._inventory: Inventory | None = None
        self._found: _Found | None = None
        self._lost = ""
        self._keeper: Keeper | None = None
        self._storage: Storage | None = None
        self._sent: Sequence[Committed] = ()
        self._has_loaded_file = self._has_resumed = False

    @property
    def is_dumping(self) -> bool:
        """Whether the strategy is asked for rows in place of whole tensors."""
        return self._keeper is not None and self._keeper.is_dumping

    # -- before training --------------------------------------------------------------------------

    def look_up(self, trainer: Trainer, control: ControlGroup) -> None:
        """Look for kept steps, and let Lightning resume from the newest; collective.

        Raises:
            RecoveryError: On every rank, if the user wants steps kept and they cannot be.
        """
        self._forget()
        if trainer.state.fn != TrainerFn.FITTING or self._wish.recovery is None:
            return
        if only_searches(trainer):
            return
        self._trainer, self._control = trainer, control
        self._store = self._try("finding where steps are kept", self._open, _NOT_KEPT)
        if self._store is None:
            return
        begin_s = time.monotonic()
        self._inventory = Inventory.take(self._store, control)
        if self._outlasts_fit and _fits():
            self._drop()  # of the fit before, which has ended
            return
        if self._wish.recovery.storage is not None:
            self._look_into_storage(self._wish.recovery.storage)
        steps = self._inventory.whole()
        if not steps:
            self._say_nothing_found()
            return
        self._found = self._newest_of(steps)
        if self._found is None:
            self._drop()
            return
        # Private: `fit` without ckpt_path loads nothing, and resumes from what lies here.
        trainer._checkpoint_connector._loaded_checkpoint = self._found.checkpoint
        steps_done, ranks = self._found.facts.steps, len(self._found.pieces)
        rank_zero_info(
            f"Training goes on from step {steps_done}, which {ranks} ranks have kept in"
            f" {self._store.folder} (found in {time.monotonic() - begin_s:.2f} s)."
        )

    def _look_into_storage(self, url: str | os.PathLike[str]) -> None:
        assert self._store is not None and self._control is not None
        assert self._inventory is not None
        opened = partial(Storage, os.fspath(url))
        self._storage = self._control.together("opening the storage", opened)
        reading = ReadingBack(self._storage, self._store, self._control)
        self._inventory = reading.look(self._inventory)
        self._sent = reading.steps

    def _newest_of(self, steps: Sequence[tuple[Piece, ...]]) -> _Found | None:
        """Return the newest step that can be read; None if there is none, and a warning will do."""
        assert self._control is not None
        fault: Exception | None = None
        for pieces in steps[:-1]:
            try:
                read = partial(self._read, pieces)
                found: _Found = self._control.together("reading kept steps", read)
            except Exception as error:  # damaged files may raise anything
                fault = fault or error
                continue
            break
        else:
            read = partial(self._read, steps[-1])
            found = self._try("reading kept steps", read, _DROPPED)
        if found is not None and fault is not None:
            self._warn(f"Training goes on from an older kept step: {fault}")
        return found

    def _warn(self, message: str) -> None:
        if self._control is not None and self._control.rank == 0:
            warnings.warn(message, stacklevel=4)

    def _try(self, doing: str, function: Callable[[], Any], result: str) -> Any:
        """Call a function on all ranks; where recovery is automatic, warn if any cannot."""
        assert self._control is not None
        try:
            return self._control.together(doing, function)
        except Exception as error:  # damaged files may raise anything
            if not self._wish.is_automatic:
                raise
            self._warn(f"{result}: {error}")
            return None

    def _drop(self) -> None:
        """Remove what is kept and cannot be gone on from, and begin as without it; collective."""
        assert self._control is not None and self._store is not None
        self._control.barrier()
        self._store.remove()
        self._control.barrier()
        self._store = self._try("finding where steps are kept", self._open, _NOT_KEPT)
        if self._store is not None:
            self._inventory = Inventory.take(self._store, self._control)

    def _open(self) -> Store | None:
        recovery, job = self._wish.recovery, self._wish.job()
        if recovery is None or job is None:
            return None
        store = Store(recovery.path, job)
        said = store.remove_stale()
        if said is not None:
            warnings.warn(said, stacklevel=2)
        return store

    def _say_nothing_found(self) -> None:
        assert self._inventory is not None and self._store is not None
        self._lost = self._inventory.missing()
        # what a fit that has ended had kept is not looked for
        if attempt() and not _fits() and not self._lost:
            places = str(self._store.folder)
            if self._storage is not None:
                places += f" and {self._storage.url}"
            self._warn(
                f"The ranks were restarted (attempt {attempt()}), but {places} keeps no"
                " step: training begins where a first start does, at ckpt_path if fit() has one,"
                " else at step 0. That is right if it had not begun before."
            )

    def _read(self, pieces: tuple[Piece, ...]) -> _Found:
        assert self._store is not None and self._control is not None
        assert self._inventory is not None
        control = self._control
        if self._trainer is not None and searches_before_training(self._trainer):
            raise KeptForAnotherError(_NO_SEARCH)
        assembly = assembled(pieces, self._inventory, self._store, control)
        kept: Snapshot = assembly.states[0].tree
        facts = kept.facts
        if any(state.tree.facts != facts for state in assembly.states):
            raise RecoveryError(
                f"{self._store.folder} keeps pieces of different steps, which do not fit together."
                " Remove the folder; training then begins at ckpt_path, or anew."
            )
        if facts.fits != _fits():
            raise KeptForAnotherError(
                f"{self._store.folder} keeps steps of fit() number {facts.fits + 1} of the script,"
                f" and this is number {_fits() + 1}. A script that is restarted can have one fit()"
                " that keeps steps: give the others CephaloStrategy(recover=False)."
            )
        metrics = assembly.resolved(kept.metrics)
        states = [
            assembly.resolved(state.tree.random, r) for r, state in enumerate(assembly.states)
        ]
        own = states[control.rank] if len(pieces) == control.world_size else None
        return _Found(pieces, facts, _checkpoint(assembly, kept.checkpoint), metrics, own)

    def of_file(self, path: Any) -> dict[str, Any] | None:
        """Return what takes the place of the checkpoint that ``fit`` loads; None: the file."""
        if self._trainer is not None and path != self._trainer.ckpt_path:
            return None  # another file than fit's, such as a teacher's
        found = self._found
        if found is None or self._has_loaded_file:
            self._has_loaded_file = True
            if self._lost:
                self._warn(f"Training begins at {path}: {self._lost}.")
            return None
        self._has_loaded_file = True
        return found.checkpoint

    def check_model(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Raise KeptForAnotherError if the kept step that is loaded is of another model."""
        if self._found is None or checkpoint is not self._found.checkpoint:
            return
        assert self._store is not None
        kept, wanted = set(checkpoint["state_dict"]), set(module.state_dict(keep_vars=True))
        if kept != wanted and len(kept ^ wanted) == len(kept | wanted):
            raise KeptForAnotherError(
                f"{self._store.folder} keeps steps of another model: none of its tensors has the"
                " name of one of this model's. Give the job another name, Recovery(job=...), or"
                " remove the folder."
            )

    def check_begin(self) -> None:
        """Raise RecoveryError if steps were kept, none is whole, and no checkpoint is loaded."""
        if self._lost and not self._has_loaded_file:
            assert self._store is not None
            raise RecoveryError(
                f"Training cannot go on: {self._lost} ({self._store.folder}). Give"
                " fit(ckpt_path=...) a checkpoint, such as 'last', to begin there; to begin anew,"
                " remove the folder."
            )

    def kept_bytes(self, module: nn.Module) -> float:
        """Return the bytes of host memory that a rank of an unsharded model keeps, on average."""
        if self._store is None or self._control is None or not self._store.is_in_memory:
            return 0.0
        elements = sum(parameter.numel() for parameter in module.parameters())
        copies = 0 if self._wish.recovery is None else self._wish.recovery.copies
        steps = slots_of_rank(self._storage is not None) + SLOTS * copies
        return steps * _KEPT_BYTES * elements / self._control.world_size

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a step at the first start, if other ranks than now have kept the step."""
        found = self._found
        if found is None or self._control is None:
            return None
        if len(found.pieces) == self._control.world_size:
            return None
        return found.facts.global_batch_size

    def wait_for_hosts(self, error: Exception, is_noticed: Callable[[], bool]) -> None:
        """Wait for more hosts if an error says that the present ones are too few; collective then.

        Raises:
            SIGTERMException: On every rank, if ``is_noticed`` tells any that its agent ends it.
        """
        recovery = self._wish.recovery
        if recovery is not None and self._control is not None and self._store is not None:
            wait_for_hosts(error, recovery.wait_s, self._control, is_noticed)

    def resume_loops(self) -> None:
        """Correct what Lightning's loops have loaded.

        They would run through an empty epoch first if training is limited by steps, and was kept
        between two epochs. Private, as ``FitLoop`` itself does it.
        """
        found = self._found
        if found is None or self._trainer is None:
            return
        self._has_resumed = True
        self._trainer.should_stop = found.facts.should_stop
        if found.facts.kind is Kind.BETWEEN:
            _Loop.restarting.fset(self._trainer.fit_loop, False)  # type: ignore[attr-defined]

    def before_pass(self, accelerator: Accelerator) -> None:
        """Restore generators from which the loader of the first pass will draw."""
        found = self._found
        if found is None or self._keeper is not None or found.random is None:
            return
        if found.facts.kind is Kind.BETWEEN and found.facts.batches:
            write_generators(accelerator, found.random)

    # -- while training runs ----------------------------------------------------------------------

    def start(self, accelerator: Accelerator, global_batch_size: int, is_resumed: bool) -> None:
        """Begin to keep steps; collective.

        Raises:
            RecoveryError: On every rank, if steps cannot be kept, or the kept one was lost.
        """
        trainer, control, store, found = self._trainer, self._control, self._store, self._found
        if trainer is None or control is None or store is None:
            return
        if found is not None and not self._has_resumed:
            raise KeptForAnotherError(_NO_SEARCH)
        if searches_learning_rate(trainer) or self._wish.recovery is None:
            return
        if found is not None:
            trainer.callback_metrics.update(found.metrics)
            at_start = found.facts.kind is Kind.INSIDE or not found.facts.batches
            if found.random is not None and at_start:
                write_generators(accelerator, found.random)
        assert self._inventory is not None
        uploading = None
        if self._storage is not None:
            sent = self._sent[0].piece.of(control.rank) if self._sent else None
            every_s = self._wish.recovery.storage_every_s
            uploading = Uploading(self._storage, every_s, control, sent)
        keeper = self._keeper = Keeper(
            trainer,
            control,
            accelerator,
            store,
            self._wish,
            self._inventory,
            None if found is None else found.pieces,
            global_batch_size,
            _fits(),
            uploading,
        )
        batches = None
        if is_resumed:
            progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
            batches = progress.processed
        try:
            keeper.begin(batches)
        except Exception as error:  # on every rank
            if not self._wish.is_automatic:
                raise
            self._keeper = None
            self._warn(f"{_NOT_KEPT}: {error}")
        self._found = None  # its memory is not needed any more

    def note(self) -> tuple[float, float, float, float]:
        """Return what the exchange of a step carries to all ranks."""
        return (-1.0, 1.0, 0.0, 0.0) if self._keeper is None else self._keeper.note()

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Read the notes of all ranks."""
        if self._keeper is not None:
            self._keeper.learn(notes)

    def settle(self) -> None:
        """Wait until the state of training may change."""
        if self._keeper is not None:
            self._keeper.settle()

    def leave(self, is_noticed: bool) -> None:
        """Let what was kept survive the hosts that are told to leave; collective."""
        if self._keeper is not None:
            self._keeper.leave(is_noticed)

    def after_validation(self) -> None:
        """Keep a step behind its validation."""
        if self._keeper is not None:
            self._keeper.after_validation()

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Keep no more steps; those that are kept stay."""
        if self._keeper is not None:
            self._keeper.end()
        self._forget()

    @property
    def _outlasts_fit(self) -> bool:
        """Whether kept steps stay when training has ended well, until the launcher removes them.

        Hooks of the end and code behind ``fit`` may still fail. The restart then ends ``fit`` where
        it had ended, and trains nothing anew.
        """
        recovery = self._wish.recovery
        assert recovery is not None
        others = (recovery.job, recovery.folder, recovery.storage)
        return AGENT in os.environ and others == (None, None, None)

    def finish(self) -> None:
        """Remove what is kept, unless the launcher will, as training has ended well; collective."""
        # a training that had ended before the restart begins no steps, and has no keeper
        if self._control is not None and self._store is not None:
            has_stopped = self._keeper is None or self._keeper.end()
            # all ranks wait here before any removes what others read
            stopped = self._control.gather(float(has_stopped))
            os.environ[_FITS] = str(_fits() + 1)
            if not self._outlasts_fit:
                self._store.remove()
            if self._storage is not None and self._control.rank == 0:
                self._clear(self._storage, [r for r, flag in enumerate(stopped) if not flag])
        self._forget()

    def _clear(self, storage: Storage, writing: Sequence[int]) -> None:
        """Remove all steps from the storage, unless some ranks still write to it.

        What they write could come behind the removal: a step that looks whole and is not.
        """
        try:
            if writing:
                ranks = ", ".join(map(str, writing))
                raise RecoveryError(
                    f"storage={storage.url!r}: what rank {ranks} writes to it has not ended."
                )
            storage.remove()
        except RecoveryError as error:
            warnings.warn(
                f"Training has ended well, but its kept steps stay in the storage: {error} Remove"
                " them; the next start would go on from them.",
                stacklevel=3,
            )


def _fits() -> int:
    return int(os.environ.get(_FITS, "0"))


def rows_of_model(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return a model's state with the rows of this rank; nothing is gathered."""
    found: dict[int, Any] = {}
    # hooks that save may write to their tensors, as where all is gathered
    is_copied = _saves(trainer, module)

    def shown(value: Any) -> Any:
        if id(value) not in found:  # tied weights stay one
            is_sharded = isinstance(value, DTensor)
            # not detach() of a sharded tensor: it gives the same rows, and takes 0.1 ms
            local = local_part(value) if is_sharded else value.detach()
            own = local.clone() if is_copied else local
            found[id(value)] = as_dtensor(own, value._spec) if is_sharded else own
        return found[id(value)]

    state = module.state_dict(keep_vars=True)
    return {n: shown(v) if isinstance(v, Tensor) else v for n, v in state.items()}


def _saves(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether a hook of the user's gets what is saved."""
    owners = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    hooks = [type(owner).on_save_checkpoint for owner in owners]
    return any(not hook.__module__.startswith("lightning.") for hook in hooks)


def rows_of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with the rows of this rank; nothing is gathered."""
    state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
    return state


def _checkpoint(assembly: Assembly, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose large tensors are put together one by one."""
    states = kept.get("optimizer_states", [])
    lazy = {
        "state_dict": assembly.lazily(kept["state_dict"]),
        "optimizer_states": [
            {
                **assembly.resolved({n: v for n, v in state.items() if n != "state"}),
                "state": assembly.lazily(state["state"]),
            }
            if "state" in state
            else assembly.resolved(state)
            for state in states
        ],
    }
    rest = {name: value for name, value in kept.items() if name not in lazy}
    return {**assembly.resolved(rest), **{n: v for n, v in lazy.items() if n in kept}}
