"""Lets a training go on after a restart: one object that the strategy's hooks call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.generators import write_generators
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import KeptForAnotherError, RecoveryError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.copying import SLOTS, slots_of_rank
from lightning_cephalo.recovery.keeper import Keeper
from lightning_cephalo.recovery.lookup import Inventory, assembled
from lightning_cephalo.recovery.options import AGENT, Recovery, Wish, attempt
from lightning_cephalo.recovery.pieces import Assembly
from lightning_cephalo.recovery.place import Place
from lightning_cephalo.recovery.reading_back import ReadingBack
from lightning_cephalo.recovery.snapshot import (
    Facts,
    Kind,
    Snapshot,
    only_searches,
    searches_before_training,
    searches_learning_rate,
)
from lightning_cephalo.recovery.storage import Storage
from lightning_cephalo.recovery.store import Piece, Store
from lightning_cephalo.recovery.uploading import Uploading
from lightning_cephalo.recovery.waiting import wait_for_hosts
from lightning_cephalo.sharding.placement import as_dtensor, local_part

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

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
        self._place: Place | None = None  # None: nothing is kept
        self._found: _Found | None = None
        self._lost = ""
        self._keeper: Keeper | None = None
        self._has_loaded_file = self._has_resumed = False

    @property
    def is_dumping(self) -> bool:
        """Whether the strategy is asked for rows in place of whole tensors."""
        return self._keeper is not None and self._keeper.is_dumping

    # -- before training --------------------------------------------------------------------------

    def look_up(self, view: TrainerView, control: ControlGroup) -> None:
        """Look for kept steps, and let Lightning resume from the newest; collective.

        Raises:
            RecoveryError: On every rank, if the user wants steps kept and they cannot be.
        """
        self._forget()
        recovery = self._wish.recovery
        if not view.is_fitting or recovery is None or only_searches(view):
            return
        store = self._try(control, "finding where steps are kept", self._open, _NOT_KEPT)
        if store is None:
            return
        begin_s = time.monotonic()
        place = Place(view, control, recovery, store, Inventory.take(store, control))
        self._place = place
        if self._outlasts_fit(recovery) and _fits():
            self._drop(place)  # of the fit before, which has ended
            return
        if recovery.storage is not None:
            _look_into_storage(place, recovery.storage)
        steps = place.inventory.whole()
        if not steps:
            self._say_nothing_found(place)
            return
        self._found = self._newest_of(place, steps)
        if self._found is None:
            self._drop(place)
            return
        # Private: `fit` without ckpt_path loads nothing, and resumes from what lies here.
        view.connector("checkpoint")._loaded_checkpoint = self._found.checkpoint
        steps_done, ranks = self._found.facts.steps, len(self._found.pieces)
        rank_zero_info(
            f"Training goes on from step {steps_done}, which {ranks} ranks have kept in"
            f" {store.folder} (found in {time.monotonic() - begin_s:.2f} s)."
        )

    def _newest_of(self, place: Place, steps: Sequence[tuple[Piece, ...]]) -> _Found | None:
        """Return the newest step that can be read; None if there is none, and a warning will do."""
        fault: Exception | None = None
        for pieces in steps[:-1]:
            try:
                read = partial(_read, place, pieces)
                found: _Found = place.control.together("reading kept steps", read)
            except Exception as error:  # damaged files may raise anything
                fault = fault or error
                continue
            break
        else:
            read = partial(_read, place, steps[-1])
            found = self._try(place.control, "reading kept steps", read, _DROPPED)
        if found is not None and fault is not None:
            _warn(place.control, f"Training goes on from an older kept step: {fault}")
        return found

    def _try(
        self, control: ControlGroup, doing: str, function: Callable[[], Any], result: str
    ) -> Any:
        """Call a function on all ranks; where recovery is automatic, warn if any cannot."""
        try:
            return control.together(doing, function)
        except Exception as error:  # damaged files may raise anything
            if not self._wish.is_automatic:
                raise
            _warn(control, f"{result}: {error}")
            return None

    def _drop(self, place: Place) -> None:
        """Remove what is kept and cannot be gone on from, and begin as without it; collective."""
        control = place.control
        control.barrier()
        place.store.remove()
        control.barrier()
        store = self._try(control, "finding where steps are kept", self._open, _NOT_KEPT)
        self._place = None
        if store is not None:
            inventory = Inventory.take(store, control)
            self._place = replace(place, store=store, inventory=inventory)

    def _open(self) -> Store | None:
        recovery, job = self._wish.recovery, self._wish.job()
        if recovery is None or job is None:
            return None
        store = Store(recovery.path, job)
        said = store.remove_stale()
        if said is not None:
            warnings.warn(said, stacklevel=2)
        return store

    def _say_nothing_found(self, place: Place) -> None:
        self._lost = place.inventory.missing()
        # what a fit that has ended had kept is not looked for
        if attempt() and not _fits() and not self._lost:
            places = str(place.store.folder)
            if place.storage is not None:
                places += f" and {place.storage.url}"
            _warn(
                place.control,
                f"The ranks were restarted (attempt {attempt()}), but {places} keeps no"
                " step: training begins where a first start does, at ckpt_path if fit() has one,"
                " else at step 0. That is right if it had not begun before.",
            )

    def of_file(self, path: Any) -> dict[str, Any] | None:
        """Return what takes the place of the checkpoint that ``fit`` loads; None: the file."""
        place = self._place
        if place is not None and path != place.view.of.ckpt_path:
            return None  # another file than fit's, such as a teacher's
        found = self._found
        if found is None or self._has_loaded_file:
            self._has_loaded_file = True
            if self._lost and place is not None:
                _warn(place.control, f"Training begins at {path}: {self._lost}.")
            return None
        self._has_loaded_file = True
        return found.checkpoint

    def check_model(self, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Raise KeptForAnotherError if the kept step that is loaded is of another model."""
        place, found = self._place, self._found
        if place is None or found is None or checkpoint is not found.checkpoint:
            return
        kept, wanted = set(checkpoint["state_dict"]), set(module.state_dict(keep_vars=True))
        if kept != wanted and len(kept ^ wanted) == len(kept | wanted):
            raise KeptForAnotherError(
                f"{place.store.folder} keeps steps of another model: none of its tensors has the"
                " name of one of this model's. Give the job another name, Recovery(job=...), or"
                " remove the folder."
            )

    def check_begin(self) -> None:
        """Raise RecoveryError if steps were kept, none is whole, and no checkpoint is loaded."""
        if self._lost and not self._has_loaded_file and self._place is not None:
            raise RecoveryError(
                f"Training cannot go on: {self._lost} ({self._place.store.folder}). Give"
                " fit(ckpt_path=...) a checkpoint, such as 'last', to begin there; to begin anew,"
                " remove the folder."
            )

    def kept_bytes(self, module: nn.Module) -> float:
        """Return the bytes of host memory that a rank of an unsharded model keeps, on average."""
        place = self._place
        if place is None or not place.store.is_in_memory:
            return 0.0
        elements = sum(parameter.numel() for parameter in module.parameters())
        steps = slots_of_rank(place.storage is not None) + SLOTS * place.recovery.copies
        return steps * _KEPT_BYTES * elements / place.control.world_size

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a step at the first start, if other ranks than now have kept the step."""
        place, found = self._place, self._found
        if place is None or found is None or len(found.pieces) == place.control.world_size:
            return None
        return found.facts.global_batch_size

    def wait_for_hosts(self, error: Exception) -> None:
        """Wait for more hosts if an error says that the present ones are too few; collective then.

        The agent's SIGTERM ends the process, as Lightning's handlers come later.
        """
        place = self._place
        if place is not None:
            wait_for_hosts(error, place.recovery.wait_s, place.control)

    def resume_loops(self) -> None:
        """Correct what Lightning's loops have loaded.

        They would run through an empty epoch first if training is limited by steps, and was kept
        between two epochs. Private, as ``FitLoop`` itself does it.
        """
        place, found = self._place, self._found
        if found is None or place is None:
            return
        self._has_resumed = True
        place.view.of.should_stop = found.facts.should_stop
        if found.facts.kind is Kind.BETWEEN:
            _Loop.restarting.fset(place.view.fit_loop, False)  # type: ignore[attr-defined]

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
        place, found = self._place, self._found
        if place is None:
            return
        if found is not None and not self._has_resumed:
            raise KeptForAnotherError(_NO_SEARCH)
        if searches_learning_rate(place.view):
            return
        if found is not None:
            place.view.of.callback_metrics.update(found.metrics)
            at_start = found.facts.kind is Kind.INSIDE or not found.facts.batches
            if found.random is not None and at_start:
                write_generators(accelerator, found.random)
        uploading = None
        if place.storage is not None:
            sent = place.sent[0].piece.of(place.control.rank) if place.sent else None
            every_s = place.recovery.storage_every_s
            uploading = Uploading(place.storage, every_s, place.control, sent)
        keeper = self._keeper = Keeper(
            place,
            accelerator,
            None if found is None else found.pieces,
            global_batch_size,
            _fits(),
            uploading,
            is_automatic=self._wish.is_automatic,
        )
        batches = None
        if is_resumed:
            batches = place.view.epoch_loop.batch_progress.total.processed
        try:
            keeper.begin(batches)
        except Exception as error:  # on every rank
            if not self._wish.is_automatic:
                raise
            self._keeper = None
            _warn(place.control, f"{_NOT_KEPT}: {error}")
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

    @staticmethod
    def _outlasts_fit(recovery: Recovery) -> bool:
        """Return whether kept steps stay when training has ended well, for the launcher to remove.

        Hooks of the end and code behind ``fit`` may still fail. The restart then ends ``fit`` where
        it had ended, and trains nothing anew.
        """
        others = (recovery.job, recovery.folder, recovery.storage)
        return AGENT in os.environ and others == (None, None, None)

    def finish(self) -> None:
        """Remove what is kept, unless the launcher will, as training has ended well; collective."""
        # a training that had ended before the restart begins no steps, and has no keeper
        place = self._place
        if place is not None:
            has_stopped = self._keeper is None or self._keeper.end()
            # all ranks wait here before any removes what others read
            stopped = place.control.gather(float(has_stopped))
            os.environ[_FITS] = str(_fits() + 1)
            if not self._outlasts_fit(place.recovery):
                place.store.remove()
            if place.storage is not None and place.control.rank == 0:
                self._clear(place.storage, [r for r, flag in enumerate(stopped) if not flag])
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


def _look_into_storage(place: Place, url: str | os.PathLike[str]) -> None:
    opened = partial(Storage, os.fspath(url))
    place.storage = place.control.together("opening the storage", opened)
    reading = ReadingBack(place.storage, place.store, place.control)
    place.inventory = reading.look(place.inventory)
    place.sent = reading.steps


def _read(place: Place, pieces: tuple[Piece, ...]) -> _Found:
    store, control = place.store, place.control
    if searches_before_training(place.view):
        raise KeptForAnotherError(_NO_SEARCH)
    assembly = assembled(pieces, place.inventory, store, control)
    kept: Snapshot = assembly.states[0].tree
    facts = kept.facts
    if any(state.tree.facts != facts for state in assembly.states):
        raise RecoveryError(
            f"{store.folder} keeps pieces of different steps, which do not fit together."
            " Remove the folder; training then begins at ckpt_path, or anew."
        )
    if facts.fits != _fits():
        raise KeptForAnotherError(
            f"{store.folder} keeps steps of fit() number {facts.fits + 1} of the script,"
            f" and this is number {_fits() + 1}. A script that is restarted can have one fit()"
            " that keeps steps: give the others CephaloStrategy(recover=False)."
        )
    metrics = assembly.resolved(kept.metrics)
    states = [assembly.resolved(state.tree.random, r) for r, state in enumerate(assembly.states)]
    own = states[control.rank] if len(pieces) == control.world_size else None
    return _Found(pieces, facts, _checkpoint(assembly, kept.checkpoint), metrics, own)


def _warn(control: ControlGroup, message: str) -> None:
    if control.rank == 0:
        warnings.warn(message, stacklevel=4)


def _fits() -> int:
    return int(os.environ.get(_FITS, "0"))


def rows_of_model(view: TrainerView, module: LightningModule) -> dict[str, Any]:
    """Return a model's state with the rows of this rank; nothing is gathered."""
    found: dict[int, Any] = {}
    # hooks that save may write to their tensors, as where all is gathered
    is_copied = _saves(view, module)

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


def _saves(view: TrainerView, module: LightningModule) -> bool:
    """Return whether a hook of the user's gets what is saved."""
    owners = [module, *view.callbacks]
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
