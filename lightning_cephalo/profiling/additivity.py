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

_WAYS_OUT = (
    "If the loss is a mean over tokens, or over samples with weights, return"
    ' {"loss": loss, "weight": number of tokens or sum of weights}. If it compares samples with'
    " each other, has a term about the whole batch, or adds means over several dataloaders, whose"
    " batches are not always divided alike, let lightning_cephalo.loss_over_batch(function,"
    " *tensors) compute that."
)
_MANUAL_WAYS_OUT = (
    "Losses that compare samples, advantages that are normalised over the batch, means over tokens"
    " and weights from gradients of the batch are of this kind. Compute statistics of the whole"
    " batch in on_train_batch_start, where every rank may communicate, or use automatic"
    " optimization with lightning_cephalo.loss_over_batch."
)

Piece = tuple[Any, int]
"""A batch, and its number of samples."""
Loss = tuple[float, float]
"""A loss, and its weight."""


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
    whole: Piece | None,
    parts: Sequence[Piece],
    in_half: bool = False,
    repeated: Callable[[Any, int], Any] | None = None,
    manual: PhasedSteps | None = None,
) -> list[tuple[LossOfParts, ...]]:
    """Return every rank's losses of a batch and of its two parts, one a backward; collective.

    Runs the step in evaluation mode, where dropout and batch normalisation change nothing, and
    without ``torch.compile``, which would compile for these sizes. Only manual steps have
    gradients; they call no hooks and update nothing. Where losses differ on any rank, each batch
    runs again, as the step may be random. Where they differ little, the parts run in batches as
    large as the whole, made of copies. The kernels are then the same, so that rounding is smaller,
    and how much copies change the loss is its measure.

    Args:
        whole: A batch, and its number of samples; None: this rank has none.
        parts: The same samples in two parts. Empty: this rank compares nothing.
        repeated: Returns a batch of so many copies of a part; None: it cannot be made.
        manual: Runs steps that call their backwards themselves; None: the executor evaluates them.

    Raises:
        Exception: On every rank, if the step fails so on any.
    """
    with _losses(model, step, context, manual) as losses_of:
        losses = [losses_of(piece) for piece in (whole, *(parts or (whole, whole)))]
        found = _weighed(losses, parts)
        rows: list[tuple[LossOfParts, ...]] = model.control.gather(found)
        every = [each for row in rows for each in row]
        if any(each.differs(in_half) for each in every):
            rows = model.control.gather(_repeated(found, losses_of(whole)))
        elif not in_half and repeated and any(each.may_have_small_term for each in every):
            copies = _of_one_size(parts, repeated)
            if all(model.control.gather(copies is not None)) and copies is not None:
                even = [losses_of(piece) for piece in copies]
                found = _repeated(found, losses_of(whole))
                by_backward = zip(found, *losses[1:], *even, strict=True)
                evened = (_evened(own, each[:2], each[2:]) for own, *each in by_backward)
                rows = model.control.gather(tuple(evened))
    return rows


@contextmanager
def _losses(
    model: ShardedModel,
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    manual: PhasedSteps | None,
) -> Iterator[Callable[[Piece | None], list[Loss]]]:
    """Yield what runs a step, and returns the losses of a piece; collective."""
    gradients = torch.no_grad() if manual is None else same_flags(model.module)
    with (
        _evaluating(model.module),
        torch.compiler.set_stance("force_eager"),
        context(),
        gradients,
        ExitStack() as stack,
    ):
        preserved = preserved_state(model.module, model.accelerator)
        put_back = model.control.together(
            "copying what modules hold", partial(stack.enter_context, preserved)
        )

        def losses_of(piece: Piece | None) -> list[Loss]:
            put_back()  # each finds buffers and numbers as the first one has found them
            if manual is None or piece is None:
                return _evaluated(model, step, piece)
            return _run(model, manual, step, piece)

        yield losses_of


def _evaluated(model: ShardedModel, step: Callable[[Any], Any], piece: Piece | None) -> list[Loss]:
    """Return the loss of a step without gradients; a rank without a piece takes part."""
    call = None
    if piece is not None:
        batch, samples = piece

        def loss_of_step() -> Loss:
            found = loss_and_weight(step(own_copy(batch, with_arrays=True)), samples)
            # a batch that training_step skips, or a loss that is meant to be over all samples
            if found is None or was_called():
                return math.nan, math.nan
            return float(found[0]), float(found[1])

        # an error in the step is known to all ranks, one behind it would not be
        call = MicrobatchCall(loss_of_step, lambda _: (torch.zeros(()), 0.0), samples=samples)
    return list(model.executor.evaluate(call, "checking the loss of training_step").results)


def _run(
    model: ShardedModel, manual: PhasedSteps, step: Callable[[Any], Any], piece: Piece
) -> list[Loss]:
    """Return the loss of each backward of a manual step."""
    batch, samples = piece
    call = MicrobatchCall(
        lambda: step(own_copy(batch, with_arrays=True)),
        lambda _: (torch.zeros(()), 0.0),
        samples=samples,
    )
    with manual.measuring(calls_hooks=False):
        manual.run(call)
        found = [(float(loss), float(samples)) for loss in manual.losses if loss.numel() == 1]
    forget_gradients(model.module)
    return found


def _of_one_size(
    parts: Sequence[Piece], repeated: Callable[[Any, int], Any]
) -> Sequence[Piece | None] | None:
    """Return copies of each part that have as many samples as the whole; None: there are none."""
    count = sum(size for _, size in parts)
    if any(not size or count % size for _, size in parts):
        return None
    try:
        return [(repeated(part, count // size), count) for part, size in parts] or [None, None]
    except Exception:  # objects of the user's that cannot be put together
        return None


def _weighed(losses: Sequence[Sequence[Loss]], parts: Sequence[Piece]) -> tuple[LossOfParts, ...]:
    # code that takes another way with fewer samples is not compared
    if not parts or len({len(own) for own in losses}) > 1:
        return ()
    sizes = tuple(size for _, size in parts)
    return tuple(_mean_of(*each, sizes=sizes) for each in zip(*losses, strict=True))


def _mean_of(whole: Loss, *of_parts: Loss, sizes: tuple[int, ...]) -> LossOfParts:
    if any(weight < 0 for _, weight in of_parts):
        return LossOfParts(whole[0], math.nan, sizes)  # the step itself refuses it by name
    weight = sum(weight for _, weight in of_parts)
    total = sum(loss * weight for loss, weight in of_parts if weight)
    mean = total / weight if weight else math.nan
    # a part that is skipped, or asks for all samples, has no weight that is a number
    undefined = math.isfinite(whole[0]) and math.isnan(mean) and weight > 0.0
    return LossOfParts(whole[0], mean, sizes, undefined=undefined)


def _repeated(found: tuple[LossOfParts, ...], again: Sequence[Loss]) -> tuple[LossOfParts, ...]:
    if len(again) != len(found):
        return found
    return tuple(replace(own, again=loss) for own, (loss, _) in zip(found, again, strict=True))


def _evened(
    found: LossOfParts,
    of_parts: Sequence[Loss],
    even: Sequence[Loss],
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


def warn_if_any_differs(
    rows: Sequence[Sequence[LossOfParts]], in_half: bool, is_manual: bool = False
) -> None:
    """Warn of the first backward whose loss is no weighted mean; rows as of the ranks."""
    for row in rows:
        for number, found in enumerate(row, start=1):
            if found.differs(in_half):
                warnings.warn(_told(found, number if is_manual else None), stacklevel=2)
                return


def _told(found: LossOfParts, backward: int | None) -> str:
    parts = " and ".join(str(size) for size in found.sizes)
    digits = 6 if not math.isclose(found.whole, found.parts, rel_tol=_ROUNDING) else 9
    what, ways_out = "The loss of", _WAYS_OUT
    if backward is not None:
        what = f"The loss of backward {backward} in training_step for"
        ways_out = _MANUAL_WAYS_OUT
    return (
        f"{what} {sum(found.sizes)} samples is {found.whole:.{digits}g}, but the weighted mean"
        f" over parts of {parts} samples is {found.parts:.{digits}g}. Microbatches are such parts,"
        f" so that training will differ from one device. {ways_out}"
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
