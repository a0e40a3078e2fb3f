"""Finds losses that are no weighted mean over samples, which microbatches would change.

They compare samples with each other (contrastive), divide by a number of the batch which is not
returned as "weight" (tokens, weights of classes), or have terms about the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.data.cutting import loss_and_weight
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.features.over_batch import was_called
from lightning_cephalo.profiling.isolation import forget_gradients, preserved_state, same_flags

SAMPLES = 4
# Relative: of sums in another order, by the dtype of computing; and of the same sums again.
_ROUNDING, _ROUNDING_IN_HALF, _NOISE = 1e-4, 3e-2, 1e-5
# Relative, with batches of one size: only the last sums have another order.
_LAST_SUMS = 2e-6
# A small term is found if it exceeds what such sums differ by in fact, this many times.
_ABOVE_NOISE = 10.0
_TINY = 1e-12


@dataclass(frozen=True)
class LossOfParts:
    """The loss of a batch, and that of its parts."""

    whole: float
    parts: float
    sizes: tuple[int, ...]
    again: float | None = None
    undefined: bool = False
    evenly: float | None = None
    noise: float = 0.0

    @property
    def is_random(self) -> bool:
        """Whether the loss changes from call to call, so that nothing can be said of it."""
        if self.again is None:
            return False
        return not math.isclose(self.whole, self.again, rel_tol=_NOISE, abs_tol=_TINY)

    def differs(self, in_half: bool = False) -> bool:
        """Whether the loss is no weighted mean, as far as can be said."""
        tolerance = _ROUNDING_IN_HALF if in_half else _ROUNDING
        alike = math.isclose(self.whole, self.parts, rel_tol=tolerance, abs_tol=_TINY)
        if self.undefined:
            return not self.is_random
        if self.is_random or math.isnan(self.parts):
            return False
        return not alike or (not in_half and self._has_small_term)

    @property
    def may_have_small_term(self) -> bool:
        """Whether the difference is smaller than rounding may be, and larger than it often is."""
        alike = math.isclose(self.whole, self.parts, rel_tol=_LAST_SUMS, abs_tol=_TINY)
        return not alike and not math.isnan(self.parts) and not math.isnan(self.whole)

    @property
    def _has_small_term(self) -> bool:
        """Whether batches of one size show that a term is no mean over samples."""
        if self.evenly is None or math.isnan(self.evenly):
            return False
        # what chance adds may be twice as large elsewhere
        chance = abs(self.whole - self.again) if self.again is not None else 0.0
        least = max(_LAST_SUMS * abs(self.whole), _ABOVE_NOISE * max(self.noise, chance), _TINY)
        return min(abs(self.whole - self.evenly), abs(self.whole - self.parts)) > least


def compared(
    model: ShardedModel,
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    batch: Any,
    parts: Sequence[tuple[Any, int]],
    in_half: bool = False,
    repeated: Callable[[Any, int], Any] | None = None,
) -> list[LossOfParts | None]:
    """Return every rank's loss of a batch and of its two parts, None without samples; collective.

    Runs the step without gradients and in evaluation mode, where dropout and batch normalisation
    change nothing, and without ``torch.compile``, which would compile for these sizes. Where losses
    differ on any rank, each batch runs again, as the step may be random. Where they differ little,
    the parts run in batches as large as the whole, made of copies. The kernels are then the same,
    so that rounding is smaller, and how much copies change the loss is its measure.

    Args:
        parts: The same samples in two parts, and how many each has. Empty: this rank has none.
        repeated: Returns a batch of so many copies of a part; None: it cannot be made.

    Raises:
        Exception: On every rank, if the step fails so on any.
    """
    count = sum(size for _, size in parts)
    whole, *pieces = [(batch, count), *parts] if parts else [None] * 3
    with _comparing(model, context) as put_back, torch.no_grad():

        def loss_of(piece: tuple[Any, int] | None) -> tuple[float, float]:
            # each finds buffers and numbers as the first one has found them
            put_back()
            return _loss_of(model, lambda batch: step(own_copy(batch, with_arrays=True)), piece)

        losses = [loss_of(piece) for piece in (whole, *pieces)]
        found = _weighed(losses, tuple(size for _, size in parts)) if parts else None
        rows: list[LossOfParts | None] = model.control.gather(found)
        differs = any(row is not None and row.differs(in_half) for row in rows)
        is_fine = not in_half and repeated is not None and not differs
        if is_fine and any(row is not None and row.may_have_small_term for row in rows):
            copies = _of_one_size(parts, count, repeated) if parts else [None, None]
            if all(model.control.gather(copies is not None)) and copies is not None:
                even = [loss_of(piece) for piece in copies]
                again, _ = loss_of(whole)
                found = found and _evened(replace(found, again=again), losses[1:], even)
                rows = model.control.gather(found)
        elif differs:
            again, _ = loss_of(whole)
            rows = model.control.gather(found and replace(found, again=again))
    return rows


def compared_manually(
    model: ShardedModel,
    manual: PhasedSteps,
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    batch: Any,
    parts: Sequence[tuple[Any, int]],
    in_half: bool = False,
) -> Sequence[Sequence[LossOfParts]]:
    """Return the same of each backward, which calls no hooks and updates nothing; collective."""
    sizes = tuple(size for _, size in parts)
    with same_flags(model.module), _comparing(model, context) as put_back:

        def losses_of(piece: tuple[Any, int]) -> list[float]:
            put_back()
            call = MicrobatchCall(
                lambda: step(own_copy(piece[0], with_arrays=True)),
                lambda _: (torch.zeros(()), 0.0),
                samples=piece[1],
            )
            with manual.measuring(calls_hooks=False):
                manual.run(call)
                found = [float(loss) for loss in manual.losses if loss.numel() == 1]
            forget_gradients(model.module)
            return found

        whole = (batch, sum(sizes))
        is_cut = len(parts) == 2
        losses = [losses_of(piece) for piece in (whole, *(parts if is_cut else [whole, whole]))]
        # code that takes another way with fewer samples is not compared
        found = [
            _weighed(
                [(loss, float(size)) for loss, size in zip(each, (0, *sizes), strict=True)], sizes
            )
            for each in zip(*losses, strict=False)
            if is_cut and len({len(own) for own in losses}) == 1
        ]
        # as tuples: an empty list would count as one of numbers, which travels in another way
        rows: list[Sequence[LossOfParts]] = model.control.gather(tuple(found))
        if any(each.differs(in_half) for row in rows for each in row):
            again = losses_of(whole)
            if len(again) == len(found):
                found = [replace(e, again=a) for e, a in zip(found, again, strict=True)]
            rows = model.control.gather(tuple(found))
    return rows


def warn_if_any_backward_differs(rows: Sequence[Sequence[LossOfParts]], in_half: bool) -> None:
    """Warn of the first backward whose loss is no mean over samples; rows as of the ranks."""
    for row in rows:
        for number, found in enumerate(row, start=1):
            if found.differs(in_half):
                parts = " and ".join(str(size) for size in found.sizes)
                warnings.warn(
                    f"The loss of backward {number} in training_step is {found.whole:.6g} for"
                    f" {sum(found.sizes)} samples, but the mean over parts of {parts} samples is"
                    f" {found.parts:.6g}. Ranks and microbatches have such parts, so that training"
                    " will differ from one device. Losses that compare samples, advantages that are"
                    " normalised over the batch, means over tokens and weights from gradients of"
                    " the batch are of this kind. Compute statistics of the whole batch in"
                    " on_train_batch_start, where every rank may communicate, or use automatic"
                    " optimization with lightning_cephalo.loss_over_batch.",
                    stacklevel=2,
                )
                return


def _of_one_size(
    parts: Sequence[tuple[Any, int]], count: int, repeated: Callable[[Any, int], Any] | None
) -> list[tuple[Any, int] | None] | None:
    """Return copies of each part that have as many samples as the whole; None: there are none."""
    if repeated is None or any(not size or count % size for _, size in parts):
        return None
    try:
        return [(repeated(part, count // size), count) for part, size in parts]
    except Exception:  # objects of the user's that cannot be put together
        return None


def _weighed(losses: Sequence[tuple[float, float]], sizes: tuple[int, ...]) -> LossOfParts:
    (whole, _), *of_parts = losses
    if any(weight < 0 for _, weight in of_parts):
        return LossOfParts(whole, math.nan, sizes)  # the step itself refuses it by name
    weight = sum(weight for _, weight in of_parts)
    total = sum(loss * weight for loss, weight in of_parts if weight)
    mean = total / weight if weight else math.nan
    # a part that is skipped, or asks for all samples, has no weight that is a number
    undefined = math.isfinite(whole) and math.isnan(mean) and weight > 0.0
    return LossOfParts(whole, mean, sizes, undefined=undefined)


def _evened(
    found: LossOfParts,
    of_parts: Sequence[tuple[float, float]],
    even: Sequence[tuple[float, float]],
) -> LossOfParts:
    # the parts' own weights: those of copies count each sample several times
    weight = sum(weight for _, weight in of_parts)
    pairs = list(zip(of_parts, even, strict=True))
    total = sum(loss * weight for (_, weight), (loss, _) in pairs if weight)
    noise = max(abs(loss - copied) for (loss, weight), (copied, _) in pairs if weight)
    # parts whose losses cancel each other leave the rounding of the larger ones
    largest = max(abs(loss) for (loss, weight), _ in pairs if weight)
    noise = max(noise, largest * _LAST_SUMS / _ABOVE_NOISE)
    return replace(found, evenly=total / weight, noise=noise)


def warn_if_any_differs(rows: Sequence[LossOfParts | None], in_half: bool) -> None:
    """Warn of the first rank's loss that is no weighted mean."""
    for found in rows:
        if found is not None and found.differs(in_half):
            warnings.warn(_told(found), stacklevel=2)
            return


def _told(found: LossOfParts) -> str:
    parts = " and ".join(str(size) for size in found.sizes)
    digits = 6 if not math.isclose(found.whole, found.parts, rel_tol=_ROUNDING) else 9
    return (
        f"The loss of {sum(found.sizes)} samples is {found.whole:.{digits}g}, but the weighted mean"
        f" over parts of {parts} samples is {found.parts:.{digits}g}. Microbatches are such parts,"
        " so that training will differ from one device. If the loss is a mean over tokens, or over"
        ' samples with weights, return {"loss": loss, "weight": number of tokens or sum of'
        " weights}. If it compares samples with each other, has a term about the whole batch, or"
        " adds means over several dataloaders, whose batches are not always divided alike, let"
        " lightning_cephalo.loss_over_batch(function, *tensors) compute that."
    )


def _loss_of(
    model: ShardedModel,
    step: Callable[[Any], Any],
    piece: tuple[Any, int] | None,
) -> tuple[float, float]:
    call = None
    if piece is not None:
        batch, samples = piece

        def loss_of_step() -> tuple[float, float]:
            found = loss_and_weight(step(batch), samples)
            # a batch that training_step skips, or a loss that is meant to be over all samples
            if found is None or was_called():
                return math.nan, math.nan
            return float(found[0]), float(found[1])

        # an error in the step is known to all ranks, one behind it would not be
        call = MicrobatchCall(loss_of_step, lambda _: (torch.zeros(()), 0.0), samples=samples)
    outcome = model.executor.evaluate(call, "checking the loss of training_step")
    return outcome.results[0] if outcome.results else (math.nan, math.nan)


@contextmanager
def _comparing(
    model: ShardedModel, context: Callable[[], AbstractContextManager[Any]]
) -> Iterator[Callable[[], None]]:
    """Let steps in a ``with`` block be compared; yields what puts back what modules hold."""
    with (
        _evaluating(model.module),
        torch.compiler.set_stance("force_eager"),
        context(),
        ExitStack() as stack,
    ):
        preserved = preserved_state(model.module, model.accelerator)
        yield model.control.together(
            "copying what modules hold", partial(stack.enter_context, preserved)
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for inner, training in modes:
            inner.training = training
