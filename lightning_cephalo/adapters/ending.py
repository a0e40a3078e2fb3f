"""Decides how a run ends: at the same place on all ranks, or on this rank alone.

A run ends with an error that all ranks raise together, with SIGTERM, with ``trainer.should_stop``,
or with an error of this rank, of which the others must learn. A hook may also end an epoch. Only
ranks that end at the same place may communicate afterwards. Lightning calls hooks after an error in
which callbacks save checkpoints and wait for other ranks; those are refused here where the others
do not come.

[Note: Lightning's progress] A loop counts each batch when it is ready, when it starts, when its
step is done, and when its last hook is; a loop that is left leaves the last count behind.
``_first_loop_iter`` is None from the end of a loop to the next batch, then True, and False from the
second batch on. It is private; tests/lightning/test_one_sided.py fails when it changes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_cephalo.adapters.termination import Termination
from lightning_cephalo.ranks import refusals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_cephalo.ranks.connection import Ranks
    from lightning_cephalo.ranks.loss_watch import LossWatch

_LEAVE_TOGETHER = (
    "A StopIteration in a hook, or a -1 that on_train_batch_start() returns, ends an epoch. Do so"
    " on every rank at the same batch, by the answer of"
    " trainer.strategy.reduce_boolean_decision(leave, all=False)."
)
_STOP_TOGETHER = (
    "If trainer.should_stop depends on a rank's own values, set it to"
    " trainer.strategy.reduce_boolean_decision(stop, all=False) on every rank."
)


class Ending:
    """Finds out whether the ranks of a run can still meet, and lets them end together.

    ``failed_together``: all ranks have raised the error that ends the run, at the same place.
    """

    def __init__(self, is_half_updated: Callable[[], bool]) -> None:
        self._is_half_updated = is_half_updated
        self.termination = Termination()
        self.failed_together = False
        self._has_told = self._is_set_up = False
        self._batches = 0
        self._trainer: Trainer | None = None
        # from connect() until the process ends, or forget()
        self._ranks: Ranks | None = None
        self._abort: Callable[[], None] = _nothing  # a lambda could not be pickled for spawn
        self._watch: LossWatch | None = None

    @property
    def failed_alone(self) -> bool:
        """Whether the run has ended with an error that not all ranks have raised together."""
        return self._has_told and not self.failed_together

    def begin(self, trainer: Trainer) -> None:
        """Begin a run, which no failure has ended yet."""
        self._trainer = trainer
        self.failed_together = self._has_told = self._is_set_up = False
        self._batches = 0

    def connect(
        self, ranks: Ranks, abort: Callable[[], None], watch: LossWatch | None = None
    ) -> None:
        """Note that the ranks are connected, and receive SIGTERM from now on.

        ``abort`` is called when this rank fails alone, so that no other rank waits for it.
        """
        assert self._trainer is not None
        self._ranks, self._abort, self._watch = ranks, abort, watch
        self.termination.begin(self._trainer)

    def end(self) -> None:
        """Note that the run is over: SIGTERM is the system's again, and no loss matters."""
        self.termination.end()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def set_up(self) -> None:
        """Note that training or evaluation can begin; raise if any rank has SIGTERM; collective."""
        assert self._ranks is not None
        self.termination.check(self._ranks.control)
        self._is_set_up = True

    def forget(self) -> None:
        """Drop the connection to the other ranks."""
        self._ranks = None

    def meet(self, purpose: str, remedy: str) -> None:
        """Wait for all ranks; raise UnsupportedError if the others wait elsewhere."""
        if self._ranks is not None:
            self._ranks.groups.meeting.meet(purpose, remedy, is_patient=True)

    def stop_together(self) -> None:
        """Let all ranks meet where this one has stopped or left a loop, as others may go on."""
        trainer = self._trainer
        if trainer is None:
            return
        if trainer.should_stop:
            self.meet("stopping, as trainer.should_stop is set", _STOP_TOGETHER)
        if self._is_set_up and _is_between_loops(trainer):
            self._leave_together(_left_loop(trainer))

    def begin_reading(self) -> None:
        """Let all ranks meet before they read a batch of a stream that begins an epoch."""
        trainer = self._trainer
        if self._is_set_up and trainer is not None and _is_between_loops(trainer):
            self.meet("reading the first batch of an epoch", _LEAVE_TOGETHER)

    def begin_batch(self) -> None:
        """Let all ranks meet before the first batch of an epoch, as one may have left the last."""
        assert self._trainer is not None
        self._batches += 1
        if _begins_epoch(self._trainer):
            self.meet(f"beginning epoch {self._trainer.current_epoch}", _LEAVE_TOGETHER)

    def begin_validation(self) -> None:
        """Let all ranks meet before a validation, as one may have left the epoch instead."""
        self.stop_together()
        self.meet("beginning a validation", _LEAVE_TOGETHER)

    def end_training(self) -> None:
        """Let all ranks meet where this one has left training."""
        assert self._trainer is not None
        self.stop_together()
        self._leave_together(_left_training(self._trainer))

    def _leave_together(self, where: str | None) -> None:
        if where is not None:
            self.meet(where, _LEAVE_TOGETHER)

    def refuse_alone(self, what: str) -> None:
        """Raise this rank's failure again in hooks for it that need ranks which do not share it.

        Others would wait for ranks that are elsewhere, or gone, and nobody would learn why.
        """
        failure = sys.exc_info()[1]  # Lightning calls these hooks where it handles the failure
        trainer = self._trainer
        is_ending = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        if failure is None or not is_ending or not dist.is_initialized():
            return
        self.tell(failure)
        if self.termination.ends_with(failure):
            if self._is_set_up:
                return
            why = "SIGTERM came before training began: there is nothing to save yet"
        elif self._is_half_updated():
            why = "weights are half-updated"
        elif self.failed_together:
            return
        else:
            why = f"the other ranks do not share this failure, and {what} needs all of them"
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


def _nothing() -> None:
    pass


def evaluation_loop(trainer: Trainer) -> Any:
    """Return the loop of the validation, test or prediction that runs."""
    loops = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops.get(trainer.state.fn or TrainerFn.FITTING, trainer.fit_loop.epoch_loop.val_loop)


def _is_between_loops(trainer: Trainer) -> bool:
    """Return whether a loop has ended, and no other has had a batch yet."""
    return trainer._logger_connector._first_loop_iter is None


def _left_loop(trainer: Trainer) -> str | None:
    """Return where the loop that has just ended was left; None: all of its batches are through."""
    if trainer.training:
        batch = trainer.fit_loop.epoch_loop.batch_progress
        left = _left(batch.current, "the epoch")
        next_batch = batch.current.ready
        is_through = (
            batch.is_last_batch
            or next_batch >= trainer.num_training_batches
            or 0 <= trainer.max_steps <= trainer.global_step
            or trainer.should_stop
        )
        # a hook of a validation between two batches may have left the epoch
        return left if left or is_through else f"ending the epoch early, before batch {next_batch}"
    what = "the prediction" if trainer.predicting else "the validation"
    what = "the test" if trainer.testing else what
    return _left(evaluation_loop(trainer).batch_progress.current, what)


def _left_training(trainer: Trainer) -> str | None:
    """Return where training was left at its end; None: its last epoch is through."""
    epoch = trainer.fit_loop.epoch_progress.current
    if epoch.ready == epoch.completed:
        return None
    return f"ending training early, in epoch {epoch.ready - 1}"


def _begins_epoch(trainer: Trainer) -> bool:
    """Return whether the batch that starts is the first of an epoch, or of the rest of one."""
    return trainer._logger_connector._first_loop_iter is True


def _left(batch: Any, what: str) -> str | None:
    if batch.ready == batch.completed:
        return None
    if batch.started < batch.ready:
        where = "before"
    else:
        where = "within" if batch.processed < batch.ready else "behind"
    return f"ending {what} early, {where} batch {batch.ready - 1}"
