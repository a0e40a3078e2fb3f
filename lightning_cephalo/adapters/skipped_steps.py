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


def weights_of_log(
    results: Sequence[Any], weights: Sequence[float], counts: Sequence[int]
) -> list[float]:
    """Return the weights of microbatches in logged means: those of skipped ones are their samples.

    Args:
        results: What ``training_step`` has returned for each microbatch.
        weights: Weights of their losses.
        counts: Samples of each microbatch.
    """
    return [
        float(count) if result is None else weight
        for result, weight, count in zip(results, weights, counts, strict=True)
    ]


class _NoLoss:
    """A loss that is None after Lightning has divided it by ``accumulate_grad_batches``."""

    def __truediv__(self, divisor: float) -> None:
        return None


def no_loss() -> dict[str, Any]:
    """Return what makes Lightning skip a step on several ranks, where it refuses None.

    It takes the loss of a dict and divides it, and skips the backward if the result is None
    (``ClosureResult.from_training_step_output``). Hooks get empty outputs, as for None.
    """
    return {"loss": _NoLoss()}
