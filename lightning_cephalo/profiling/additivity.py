"""Finds losses that are no weighted mean over samples, which microbatches would change.

A step's loss is the weighted mean of its microbatches' losses. That is the loss of one device only
if the loss of a batch is the weighted mean of those of its parts. It is not for losses that compare
samples with each other (contrastive), or that divide by a number of the batch which is not returned
as "weight" (tokens, weights of classes), or for terms about the whole batch (load balancing).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cephalo.data.cutting import loss_and_weight
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.execution.step import MicrobatchCall

SAMPLES = 4
# Relative: of sums in another order, by the dtype of computing.
_ROUNDING, _ROUNDING_IN_HALF = 1e-4, 3e-2


@dataclass(frozen=True)
class LossOfParts:
    """The loss of a batch, and that of its parts.

    Attributes:
        again: The loss of the batch, a second time.
        whole: The loss of the batch.
        parts: The weighted mean of the losses of its parts.
    """

    whole: float
    again: float
    parts: float

    def differs(self, tolerance: float) -> bool:
        """Whether the loss is no weighted mean; False if it is random, which hides that.

        ::

            LossOfParts(whole=1.386, again=1.386, parts=0.693).differs(1e-4)    # True
        """
        scale = max(abs(self.whole), abs(self.parts), 1e-12)
        is_random = abs(self.whole - self.again) > 0.1 * tolerance * scale
        return not is_random and abs(self.whole - self.parts) > tolerance * scale


def warn_unless_additive(
    model: ShardedModel,
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    batch: Any,
    parts: Sequence[tuple[Any, int]],
) -> None:
    """Warn on rank 0 if a batch's loss is not the weighted mean over its parts; collective.

    Runs the step without gradients and in evaluation mode, where dropout and batch normalisation
    change nothing. A step that fails so is not judged.

    Args:
        model: The sharded model.
        step: The user's training step on one batch.
        context: The precision plugin's context of a training step.
        batch: A few samples; equal on all ranks.
        parts: The same samples in parts, and how many each has.
    """
    count = sum(size for _, size in parts)
    try:
        with _evaluating(model.module), context(), torch.no_grad():
            whole, again, *of_parts = (
                _loss_of(model, step, piece, size)
                for piece, size in [(batch, count), (batch, count), *parts]
            )
    except Exception:
        return  # training will tell, if it fails there too
    weight = sum(weight for _, weight in of_parts)
    if not weight:
        return
    mean = sum(loss * weight for loss, weight in of_parts) / weight
    found = LossOfParts(whole[0], again[0], mean)
    in_half = model.compute_dtype is not None or torch.is_autocast_enabled()
    if model.control.rank == 0 and found.differs(_ROUNDING_IN_HALF if in_half else _ROUNDING):
        warnings.warn(_told(found, [size for _, size in parts]), stacklevel=2)


def _told(found: LossOfParts, sizes: Sequence[int]) -> str:
    parts = " and ".join(str(size) for size in sizes)
    return (
        f"The loss of {sum(sizes)} samples is {found.whole:.6g}, but the weighted mean over parts"
        f" of {parts} samples is {found.parts:.6g}. Microbatches are such parts, so that training"
        " will differ from one device. If the loss is a mean over tokens, or over samples with"
        ' weights, return {"loss": loss, "weight": number of tokens or sum of weights}. If a term'
        " is about the whole batch, return a sum over samples instead. If the loss compares"
        ' samples with each other, use strategy="ddp".'
    )


def _loss_of(
    model: ShardedModel, step: Callable[[Any], Any], batch: Any, samples: int
) -> tuple[float, float]:
    call = MicrobatchCall(
        partial(step, batch), partial(loss_and_weight, samples=samples), samples=samples
    )
    outcome = model.executor.evaluate(call, "checking the loss of training_step")
    loss, weight = loss_and_weight(outcome.results[0], samples)
    return float(loss), float(weight)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for inner, training in modes:
            inner.training = training
