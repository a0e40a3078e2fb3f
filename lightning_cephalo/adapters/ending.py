"""Decides how a run ends: at the same place on all ranks, or on this rank alone.

A run, or an epoch, ends with an error that all ranks raise together, with SIGTERM, by a hook, or
with an error of this rank, of which the others must learn. Only ranks that end at the same place
may communicate afterwards, so they meet there first. After an error callbacks save checkpoints and
wait for other ranks; that is refused here where the others do not come.

[Note: Lightning's loops] ``_first_loop_iter`` is None from the end of a loop to the next batch,
True in its first batch, and then False. It is private; tests/lightning/test_one_sided.py fails when
it changes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_cephalo.adapters.termination import Termination
from lightning_cephalo.ranks import refusals

if TYPE_CHECKING:
    from lightning_cephalo.adapters.view import TrainerView
    from lightning_cephalo.ranks.connection import Ranks
    from lightning_cephalo.ranks.loss_watch import LossWatch

_LEAVE_TOGETHER = (
    "A StopIteration in a hook, a -1 that on_train_batch_start() returns, or should_stop = True"
    " ends an epoch. Use them on every rank at the same batch, by the answer of"
    " strategy.reduce_boolean_decision(leave, all=False)."
)


class Ending:
    """Finds out whether the ranks of a run can still meet, and lets them end together.

    ``abort`` is called when this rank fails alone, so that no other rank waits for it.
    ``failed_together``: all ranks have raised the error that ends the run, at the same place.
    """

    failed_together = _has_told = _is_in_loop = False
    _batches = 0
    _view: TrainerView | None = None
    # from connect() until the process ends, or forget()
    _ranks: Ranks | None = None
    _watch: LossWatch | None = None

    def __init__(self, is_half_updated: Callable[[], bool], abort: Callable[[], None]) -> None:
        self._is_half_updated, self._abort = is_half_updated, abort
        self.termination = Termination()

    @property
    def failed_alone(self) -> bool:
        """Whether the run has ended with an error that not all ranks have raised together."""
        return self._has_told and not self.failed_together

    def begin(self, view: TrainerView) -> None:
        """Begin a run, which no failure has ended yet."""
        self._view, self._batches = view, 0
        self.failed_together = self._has_told = self._is_in_loop = False
        self.termination.begin(view)

    def connect(self, ranks: Ranks, watch: LossWatch | None) -> None:
        """Note that the ranks are connected."""
        self._ranks, self._watch = ranks, watch

    def end(self) -> None:
        """Note that the run is over: SIGTERM is the system's again, and no loss matters."""
        self.termination.end()
        if self._watch is not None:
            self._watch.end()
        self._watch = None

    def forget(self) -> None:
        """Drop the connection to the other ranks."""
        self._ranks = None

    def meet(self, purpose: str, remedy: str = _LEAVE_TOGETHER) -> None:
        """Wait for all ranks, or raise UnsupportedError."""
        if self._ranks is not None:
            self._ranks.groups.meeting.meet(purpose, remedy, is_patient=True)

    def begin_batch(self, view: TrainerView, *, trains: bool) -> None:
        """Begin a batch; before the first of a training epoch all ranks meet."""
        if trains:  # the Trainer's stage stays "validating" if a hook has ended a validation
            self._batches += 1
            if view.connector("logger")._first_loop_iter:
                self.meet("beginning an epoch")
        self._is_in_loop = True

    def leave_loop(self, purpose: str = "") -> None:
        """Let all ranks meet once behind each loop, as one may have left it alone."""
        view, is_in_loop = self._view, self._is_in_loop
        if view is None or not is_in_loop or view.connector("logger")._first_loop_iter is not None:
            return
        self._is_in_loop = False
        behind = f"an epoch behind batch {view.batches_ready - 1}"
        self.meet(purpose or f"ending {behind if view.is_training else 'an evaluation'}")

    def refuse_alone(self, what: str) -> None:
        """Raise this rank's failure again in hooks for it that need ranks which do not share it."""
        failure = sys.exc_info()[1]  # Lightning calls these hooks where it handles the failure
        is_ending = self._view is not None and self._view.is_interrupted
        if failure is None or not is_ending or not dist.is_initialized():
            return
        self.tell(failure)
        if self.termination.ends_with(failure):
            return
        why = f"the other ranks do not share this failure, and {what} needs all of them"
        if self._is_half_updated():
            why = "weights are half-updated"
        elif self.failed_together:
            return
        self.end()  # Lightning ends here, without teardown
        warnings.warn(
            f"Rank {dist.get_rank()} ends with {type(failure).__name__}; {what} in on_exception()"
            f" is refused: {why}. Checkpoints that were saved before are whole.",
            stacklevel=3,
        )
        raise failure

    def tell(self, failure: BaseException) -> None:
        """Tell the other ranks of the error that ends the run, once, unless they share it."""
        if self._ranks is None or self._has_told or self.termination.ends_with(failure):
            return
        if self._watch is not None:
            self._watch.stand_down()
        crash_report, control = self._ranks.crash_report, self._ranks.control
        crash_report.on_exception(failure)
        self._has_told = True
        is_alone = control.world_size == 1
        is_common = is_alone or crash_report.is_common(failure)
        self.failed_together = is_common or crash_report.all_fail(failure)
        if not self.failed_together:
            self._abort()
            return
        is_refusal = self._batches < 2 and refusals.is_refusal(failure)
        if not is_common:
            is_refusal = control.all(is_refusal)
        elif not is_alone:
            is_refusal = is_refusal and control.raised is failure and control.is_of_all
        if is_refusal:
            refusals.note(failure)
