"""Resumes training in the middle of an epoch at its next sample.

Lightning counts on at the batch of the checkpoint, but begins the loader's epoch anew. The order of
dealt loaders follows from a seed and the states of generators, which the checkpoint has under a
name of its own: plain Lightning would refuse states of loaders that it cannot give them to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.adapters.dealt_loaders import DealtLoaders, passes_of, steps_ahead
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.data.loaders import original_of
from lightning_cephalo.data.passes import Continue, Position

KEY = "cephalo_data_order"
"""Where a checkpoint has the order of the training samples."""


def saved_order(view: TrainerView) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of the order of training samples; None if nothing is dealt."""
    loaders, progress = DealtLoaders(view), view.epoch_loop.batch_progress
    if not loaders.dealt:
        return None
    trained = progress.current.processed
    ended = trained > 0 and (progress.is_last_batch or trained >= view.fit_loop.max_batches)
    positions: list[dict[str, Any] | None] = []
    for loader, passes in loaders.all:
        found, length, ahead = None, sized_len(loader), steps_ahead(loader)
        if passes is not None:
            found = passes.position(trained, length, cycles=loaders.cycle, ahead=ahead)
        positions.append(None if found is None else dict(vars(found)))
    seed = loaders.dealt[0].seed
    return {"seed": seed, "steps": trained, "ended": bool(ended), "loaders": positions}


class Resumption:
    """Continues the loaders of a training that is resumed; without a seed there is no order."""

    def __init__(self, view: TrainerView, checkpoint: Mapping[str, Any]) -> None:
        saved, loop = checkpoint.get(KEY) or {}, view.fit_loop
        progress = loop.epoch_loop.batch_progress
        trained = progress.current.processed
        self.seed: int | None = saved.get("seed")
        self._positions: Iterator[Any] = iter(saved.get("loaders", []))
        self._has_begun = False
        self._quiet = ExitStack()
        self._way = Continue.INSIDE
        # before the first step no epoch has ended
        if not loop.restarting and trained:
            self._way = Continue.BEHIND
        elif loop.restarting and saved.get("ended", progress.is_last_batch):
            # Lightning counts a batch as completed after the hooks in which checkpoints are saved
            is_counted = progress.current.completed == trained
            self._way = Continue.AT_END if is_counted else Continue.BEHIND
        self._is_inside = self._way is Continue.INSIDE and trained > 0
        if self._is_inside and trained % view.accumulates:
            rank_zero_warn(
                f"The checkpoint is of step {trained} of an epoch, between two updates of"
                f" accumulate_grad_batches={view.accumulates}: it does not hold the gradients that"
                " were added up. The next update lacks them."
            )

    def continue_with(self, loader: Any) -> None:
        """Let the next of the training dataloaders begin where the checkpoint was saved."""
        if self._has_begun:  # reload_dataloaders_every_n_epochs
            return
        why = self._continue(loader, next(self._positions, None))
        if self._is_inside and why:
            own = original_of(loader)
            name = f"{type(own).__name__} of {type(getattr(own, 'dataset', own)).__name__}"
            rank_zero_warn(
                f"The samples of this epoch begin anew in {name}, though the checkpoint is of the"
                f" middle of an epoch: {why}."
            )

    def _continue(self, loader: Any, saved: Mapping[str, Any] | None) -> str:
        """Continue a loader; return why that cannot be."""
        passes = passes_of(loader)
        if passes is None:
            return "each rank reads samples of its own, so that only its dataset could go on"
        if saved is None:
            return "it does not hold the place in the order of samples"
        position = Position(**saved)
        if position.items != passes.items:
            return (
                f"its steps have {position.items} samples or lists, those of this run"
                f" {passes.items}; give CephaloStrategy(global_batch_size=...)"
            )
        try:
            stay = bool(getattr(loader, "persistent_workers", False))
            passes.continue_at(position, self._way, undoes_draws=stay)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"the states of its samplers do not fit ({error})"
        return ""

    def announce(self) -> None:
        """Begin to train, and hide Lightning's warning, which is wrong here, or told already."""
        self._has_begun = True
        if self._is_inside:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")

    def end(self) -> None:
        """Show warnings as before."""
        self._quiet.close()
