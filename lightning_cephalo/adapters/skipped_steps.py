"""Steps whose ``training_step`` returns None.

On one device Lightning skips the backward of such a batch, and warns once. With several ranks it
raises, because other ranks would wait. Here all ranks agree: they train on the microbatches that
have a loss, and skip the step together if none has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning_cephalo.execution.step import ForwardOutcome


class SkippedSteps:
    """Warns once, on every rank, of steps that train on a part of their microbatches."""

    def __init__(self) -> None:
        self._has_warned = False

    def learn(self, outcome: ForwardOutcome) -> None:
        """Warn if a part of the microbatches of all ranks has no loss, for the first time."""
        if not outcome.skipped or outcome.is_skipped or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"`training_step` returned `None` for {outcome.skipped} of"
            f" {outcome.skipped + sum(outcome.losses)} microbatches of a step, which trains on the"
            " others. On one device the step is skipped as a whole. If this was on purpose, ignore"
            " this warning.",
            stacklevel=2,
        )


def without_loss(
    results: Sequence[Any], weights: Sequence[float], counts: Sequence[int]
) -> tuple[tuple[float, ...], int]:
    """Return the weights of microbatches in logged means, and the samples of those with a loss.

    In logged means, the weight of a microbatch whose result is None is its samples.
    """
    of_log, trained = list(weights), sum(counts)
    for index, result in enumerate(results):
        if result is None:
            of_log[index] = float(counts[index])
            trained -= counts[index]
    return tuple(of_log), trained


class _NoLoss:
    """A loss that is None after Lightning has divided it by ``accumulate_grad_batches``."""

    def __truediv__(self, divisor: float) -> None:
        return None


def no_loss() -> dict[str, Any]:
    """Return what makes Lightning skip a step on several ranks, where it refuses None.

    It divides the loss of a dict, and skips the backward if the result is None.
    """
    return {"loss": _NoLoss()}
