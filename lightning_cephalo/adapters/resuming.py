"""Resumes training in the middle of an epoch at its next sample.

Lightning counts on at the batch of the checkpoint, but begins the loader's epoch anew. Loaders that
are dealt here know their order by a seed and the states of generators, which the checkpoint has
under a name of its own: plain Lightning would refuse states of loaders that it cannot give them to.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.lockstep import is_stateful
from lightning_cephalo.data.passes import Continue, Passes, Position
from lightning_cephalo.data.reading import original_of, rank_batch_sampler
from lightning_cephalo.data.streams import DealtStream

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KEY = "cephalo_data_order"
"""Where a checkpoint has the order of the training samples."""


def saved_order(trainer: Trainer) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of the order of training samples; None if nothing is dealt."""
    loop: Any = trainer.fit_loop
    combined = loop._combined_loader
    dealt = [] if combined is None else [dealt_in(loader) for loader in combined.flattened]
    seed = next((each.seed for each in dealt if each is not None), None)
    if seed is None:
        return None
    progress = loop.epoch_loop.batch_progress
    trained = progress.current.processed
    ended = trained > 0 and (progress.is_last_batch or trained >= loop.max_batches)
    cycles = len(dealt) > 1 and combined._mode == "max_size_cycle"
    positions = [
        None
        if each is None
        else each.position(trained, known_length(loader), cycles=cycles, ahead=steps_ahead(loader))
        for each, loader in zip(dealt, combined.flattened, strict=True)
    ]
    return {
        "seed": seed,
        "steps": trained,
        "ended": bool(ended),
        "loaders": [None if each is None else dict(vars(each)) for each in positions],
    }


class Resumption:
    """Continues the loaders of a training that is resumed; without a seed there is no order."""

    def __init__(self, trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
        saved = checkpoint.get(KEY) or {}
        loop: Any = trainer.fit_loop
        current = loop.epoch_loop.batch_progress.current
        self.seed: int | None = saved.get("seed")
        self._positions: list[Any] = saved.get("loaders", [])
        self._loaders = 0
        self._has_begun = False
        self._continued: list[Passes] = []
        self._marked: list[Any] = []
        # Lightning counts a batch as completed after the hooks in which checkpoints are saved
        if not loop.restarting:
            # before the first step there is no epoch that has ended
            has_trained = current.processed > 0
            self._way = Continue.BEHIND if has_trained else Continue.INSIDE
            self._is_inside = False
        elif saved.get("ended", loop.epoch_loop.batch_progress.is_last_batch):
            is_counted = current.completed == current.processed
            self._way = Continue.AT_END if is_counted else Continue.BEHIND
            self._is_inside = False
        else:
            self._way, self._is_inside = Continue.INSIDE, current.processed > 0
        accumulates = trainer.accumulate_grad_batches
        if self._is_inside and trainer.is_global_zero and current.processed % accumulates:
            warnings.warn(
                f"The checkpoint is of step {current.processed} of an epoch, between two updates of"
                f" accumulate_grad_batches={accumulates}: it does not hold the gradients that were"
                " added up. The next update lacks them.",
                stacklevel=2,
            )

    def epoch_of(self, epoch: int) -> int:
        """Return the epoch of the order in Lightning's ``epoch``."""
        return epoch - self._epochs_ahead

    @property
    def _epochs_ahead(self) -> int:
        return self._continued[0].epochs_ahead if self._continued else 0

    def continue_with(self, loader: Any, warns: bool) -> None:
        """Let a dealt loader begin where the checkpoint was saved.

        Call it for every training dataloader of the Trainer, in their order.
        """
        dealt = dealt_in(loader)
        if self._has_begun:  # reload_dataloaders_every_n_epochs
            if dealt is not None:
                dealt.epochs_ahead = self._epochs_ahead
            return
        index, self._loaders = self._loaders, self._loaders + 1
        why = self._continue(loader, dealt, index)
        if self._is_inside and not is_stateful(loader):
            self._marked.append(loader)
        if self._is_inside and warns and why is not None:
            warnings.warn(
                f"The samples of this epoch begin anew in {_name_of(loader)}, though the"
                f" checkpoint is of the middle of an epoch: {why}.",
                stacklevel=2,
            )

    def _continue(self, loader: Any, dealt: Passes | None, index: int) -> str | None:
        """Continue a loader; return why that cannot be."""
        if dealt is None:
            return "each rank reads samples of its own, so that only its dataset could go on"
        if not self._positions:
            return "it does not hold the order of samples, as those do that this strategy saves"
        saved = self._positions[index] if index < len(self._positions) else None
        if saved is None:
            return "its position there is not known"
        position = Position(**saved)
        if position.items != dealt.items:
            return (
                f"its steps have {position.items} samples or lists, those of this run"
                f" {dealt.items}; give CephaloStrategy(global_batch_size=...)"
            )
        if is_stateful(loader):  # Lightning gives it its own state, which passes over the steps
            position = replace(position, step=0)
        try:
            stay = bool(getattr(loader, "persistent_workers", False))
            dealt.continue_at(position, self._way, undoes_draws=stay)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"the states of its samplers do not fit ({error})"
        self._continued.append(dealt)
        if isinstance(loader, DealtStream) and self._is_inside and position.step:
            rank_zero_info(
                f"Resuming reads the stream {_name_of(loader)} from its beginning to step"
                f" {position.step}."
            )
        return None

    def announce(self) -> None:
        """Begin to train, and let Lightning know of the resumed loaders, which it looks for next.

        Private: Lightning warns of loaders without ``state_dict`` here. What it says would be
        wrong, or said twice.
        """
        self._has_begun = True
        for loader in self._marked:
            object.__setattr__(loader, "state_dict", dict)
            object.__setattr__(loader, "load_state_dict", _load_nothing)

    def end(self) -> None:
        """Take the announcement back: a checkpoint must not hold states of these loaders."""
        for loader in self._marked:
            with suppress(AttributeError):
                object.__delattr__(loader, "state_dict")
                object.__delattr__(loader, "load_state_dict")
        self._marked = []


def _load_nothing(state_dict: dict[str, Any]) -> None:
    """Stand for a method that Lightning looks for, but does not call."""


def dealt_in(loader: Any) -> Passes | None:
    """Return the passes over a rebuilt loader; None if its ranks read samples of their own."""
    sampler = loader if isinstance(loader, DealtStream) else rank_batch_sampler(loader)
    return None if sampler is None else sampler.passes


def steps_ahead(loader: Any) -> int:
    """Return the steps that a loader, and Lightning, may have read ahead of training."""
    workers = getattr(loader, "num_workers", 0)
    return workers * (getattr(loader, "prefetch_factor", None) or 2) + 1


def _name_of(loader: Any) -> str:
    original = original_of(loader)
    return f"{type(original).__name__} of {type(getattr(original, 'dataset', original)).__name__}"
