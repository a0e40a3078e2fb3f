"""What a rank keeps of a step."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor

from lightning_cephalo.adapters.view import TrainerView


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


def searches_learning_rate(view: TrainerView) -> bool:
    """Return whether a trial of Lightning's search for a learning rate runs; private names."""
    return any(isinstance(callback, _LRCallback) for callback in view.callbacks)


def only_searches(view: TrainerView) -> bool:
    """Return whether ``fit`` is called by Lightning's ``Tuner``, and ends behind its search."""
    return any(finder._early_exit for finder in _finders(view))


def searches_before_training(view: TrainerView) -> bool:
    """Return whether a callback searches before the first epoch, and then loads its own file."""
    searches = LearningRateFinder.on_fit_start
    return any(type(finder).on_fit_start is searches for finder in _finders(view))


def _finders(view: TrainerView) -> list[Any]:
    callbacks = view.callbacks
    return [each for each in callbacks if isinstance(each, LearningRateFinder)]
