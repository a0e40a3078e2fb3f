"""Finds out whether this rank has left a loop of Lightning's before its batches were through.

A ``StopIteration`` in a hook ends an epoch, perhaps on one rank alone, for which the others wait.

[Note: Lightning's progress] A loop counts each batch when it is ready, when it starts, when its
step is done, and when its last hook is; a loop that is left leaves the last count behind.
``_first_loop_iter`` is None from the end of a loop to the next batch, then True, and False from the
second batch on. It is private; tests/lightning/test_one_sided.py fails when it changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

REMEDY = (
    "A StopIteration in a hook, or a -1 that on_train_batch_start() returns, ends an epoch. Do so"
    " on every rank at the same batch, by the answer of"
    " trainer.strategy.reduce_boolean_decision(leave, all=False)."
)


def evaluation_loop(trainer: Trainer) -> Any:
    """Return the loop of the validation, test or prediction that runs."""
    loops = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops.get(trainer.state.fn or TrainerFn.FITTING, trainer.fit_loop.epoch_loop.val_loop)


def is_between_loops(trainer: Trainer) -> bool:
    """Return whether a loop has ended, and no other has had a batch yet."""
    return trainer._logger_connector._first_loop_iter is None


def left_loop(trainer: Trainer) -> str | None:
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


def left_training(trainer: Trainer) -> str | None:
    """Return where training was left at its end; None: its last epoch is through."""
    epoch = trainer.fit_loop.epoch_progress.current
    if epoch.ready == epoch.completed:
        return None
    return f"ending training early, in epoch {epoch.ready - 1}"


def begins_epoch(trainer: Trainer) -> bool:
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
