"""What a rank keeps of a step."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Kind(Enum):
    """Where in the loops a step was kept."""

    BETWEEN = "before the first epoch, or between two epochs"
    INSIDE = "inside an epoch"


class Facts(NamedTuple):
    """Numbers of a kept step."""

    kind: Kind
    steps: int
    batches: int
    global_batch_size: int
    fits: int
    should_stop: bool


class Snapshot(NamedTuple):
    """What a rank keeps of a step."""

    checkpoint: dict[str, Any]
    metrics: dict[str, Tensor]
    random: tuple[Any, ...]
    facts: Facts


def searches_learning_rate(trainer: Trainer) -> bool:
    """Return whether a trial of Lightning's search for a learning rate runs; private names."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def only_searches(trainer: Trainer) -> bool:
    """Return whether ``fit`` is called by Lightning's ``Tuner``, and ends behind its search."""
    return any(finder._early_exit for finder in _finders(trainer))


def searches_before_training(trainer: Trainer) -> bool:
    """Return whether a callback searches before the first epoch, and then loads its own file."""
    searches = LearningRateFinder.on_fit_start
    return any(type(finder).on_fit_start is searches for finder in _finders(trainer))


def _finders(trainer: Trainer) -> list[Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, LearningRateFinder)]
