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
    """Return whether the loop that runs is a trial of Lightning's search for a learning rate.

    Private: nothing else tells its steps from those of training.
    """
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def only_searches(trainer: Trainer) -> bool:
    """Return whether ``fit`` is called by Lightning's ``Tuner``, and ends behind its search.

    Private: the tuner marks its callback so, and nothing else tells it from one in a training.
    """
    return any(finder._early_exit for finder in _finders(trainer))


def searches_before_training(trainer: Trainer) -> bool:
    """Return whether a callback searches for a learning rate before the first epoch.

    The search loads a file of its own, and so drops what training would go on from.
    """
    searches = LearningRateFinder.on_fit_start
    return any(type(finder).on_fit_start is searches for finder in _finders(trainer))


def _finders(trainer: Trainer) -> list[Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, LearningRateFinder)]
