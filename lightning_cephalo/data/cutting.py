"""Cuts a rank's batch into microbatches and joins their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import BatchSplitError, CephaloError
from lightning_cephalo.common.weighted_mean import weighted_mean
from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples
from lightning_cephalo.data.containers import children_of, rebuild
from lightning_cephalo.data.shares import deal, split_sizes


class StepResultError(CephaloError, TypeError, MisconfigurationException):
    """``training_step`` has returned no loss; Lightning's own strategies raise the same error."""


@dataclass(frozen=True)
class BatchCutter:
    """Cuts the batches of the training loaders into microbatches.

    ``spec`` nests several loaders' batches, and is None for a single one. With ``leaves_whole``
    nothing is ever cut, so batches may be anything.
    """

    layouts: tuple[BatchLayout, ...]
    spec: Any
    microbatch_sizes: tuple[int, ...]
    leaves_whole: bool = False

    def shown(self, batch: Any) -> tuple[Any, tuple[bool, ...]]:
        """Return what hooks see of a batch, and for each loader whether it counts nowhere."""
        if self.spec is None or batch is None:
            return shown(batch)
        parts = [shown(part) for part in self.spec.flatten_up_to(batch)]
        seen = pytree.tree_unflatten([part for part, _ in parts], self.spec)
        return seen, tuple(flags[0] for _, flags in parts)

    def cut(self, batch: Any, lacks: Sequence[bool] = ()) -> list[tuple[Any, int]]:
        """Return the microbatches and their numbers of samples; none without samples.

        ``lacks`` marks loaders of which this rank has no samples; empty: it has of all. The
        number is the sum over all loaders, whose parts of some microbatches may have no rows.
        """
        if self.leaves_whole:
            return [(batch, evaluation_samples(batch))]
        if all(lacks) and lacks:
            return []
        if self.spec is None:
            return self._cut_one(batch, self.layouts[0])
        flags = lacks or [False] * len(self.layouts)
        found = zip(self.spec.flatten_up_to(batch), self.layouts, flags, strict=True)
        parts = [
            None if part is None else (part, layout, 0 if lacking else layout.batch_size(part))
            for part, layout, lacking in found
        ]
        present = [part for part in parts if part is not None]
        leading, layout, _ = max(present, key=lambda part: part[2])  # the first of the longest
        shares = [count for _, count in self._cut_one(leading, layout)]
        columns = [
            [(None, 0)] * len(shares) if part is None else _cut_alike(*part, shares)
            for part in parts
        ]
        return [
            (
                pytree.tree_unflatten([piece for piece, _ in pieces], self.spec),
                sum(count for _, count in pieces),
            )
            for pieces in zip(*columns, strict=True)
        ]

    def _cut_one(self, batch: Any, layout: BatchLayout) -> list[tuple[Any, int]]:
        count = layout.batch_size(batch)
        if count == 0:
            return []
        sizes: tuple[int, ...] = (count,)
        if self.microbatch_sizes:
            sizes = split_sizes(count, self.microbatch_sizes)
        if len(sizes) == 1:
            return [(batch, count)]
        return list(zip(layout.split(batch, sizes), sizes, strict=True))


def shown(batch: Any) -> tuple[Any, tuple[bool, ...]]:
    """Return what hooks see of a batch, and whether it counts nowhere; of several loaders, each."""
    if isinstance(batch, NoSamples):
        return batch.shown, (True,)
    children = children_of(batch)
    if not children or not any(isinstance(child, NoSamples) for _, child in children):
        return batch, (False,)
    parts = [child.shown if isinstance(child, NoSamples) else child for _, child in children]
    flags = tuple(child is None or isinstance(child, NoSamples) for _, child in children)
    return rebuild(batch, parts), flags


def _cut_alike(
    batch: Any, layout: BatchLayout, rows: int, shares: Sequence[int]
) -> list[tuple[Any, int]]:
    """Cut a loader's batch into one piece for each of ``shares``; pieces may have no rows."""
    if not rows:
        return [(layout.take(batch, 0, 0), 0)] * len(shares)
    sizes = deal(rows, shares)
    if len(sizes) == 1:
        return [(batch, rows)]
    return list(zip(layout.split(batch, sizes), sizes, strict=True))


def loss_and_weight(result: Any, samples: int) -> tuple[Tensor, float | Tensor]:
    """Return the loss and the weight from the result of ``training_step`` for one microbatch.

    A weight on the device remains a tensor: reading it would wait for the device. Raises
    StepResultError or TypeError if there is no scalar loss.
    """
    loss, weight = result, float(samples)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise StepResultError(
                "In automatic optimization the 'loss' key needs to be present in a dict that"
                f" training_step returns; got keys {sorted(map(str, result))}. Return a tensor, or"
                " a dict with 'loss' and, if losses are not means over samples, 'weight'."
            )
        loss = result["loss"]
        if "weight" in result:
            weight = result["weight"]
            if not isinstance(weight, Tensor) or weight.is_cpu or weight.numel() != 1:
                weight = float(weight)
    if not isinstance(loss, Tensor):
        raise StepResultError(
            f"training_step returned {type(loss).__name__}, but it must return a Tensor, or a dict"
            " with the key 'loss'. None would skip samples, which Lightning allows on one device"
            " only. If they shall not count, return {'loss': loss, 'weight': 0.0}."
        )
    if loss.numel() != 1:
        raise TypeError(
            f"training_step returned a loss of shape {tuple(loss.shape)}, expected a scalar."
            " Return the mean over the samples of the batch it was given."
        )
    return loss.reshape(()), weight


def evaluation_samples(batch: Any) -> int:
    """Return the number of samples in an evaluation batch; 1 if it is unknown."""
    try:
        return BatchLayout().batch_size(batch)
    except BatchSplitError:
        is_own = children_of(batch) is None and hasattr(batch, "__len__")
        return (len(batch) or 1) if is_own else 1


def evaluation_weight(result: Any, samples: int) -> float:
    """Return an evaluation step's weight in logged means: its ``"weight"``, or its samples."""
    if isinstance(result, Mapping) and "weight" in result:
        return float(result["weight"])
    return float(samples)


def empty_like(result: Any, samples: int) -> Any:
    """Return an evaluation step's result without rows; None if it lacks one row per sample."""
    layout = BatchLayout()
    try:
        if layout.batch_size(result) != samples:
            return None
        empty = layout.take(result, 0, 0)
    except BatchSplitError:
        return None
    # a view would keep the whole result alive
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, empty
    )


class EmptyPredictions:
    """Predictions without rows, in the structure of this rank's first result of the dataloader."""

    def __init__(self) -> None:
        self._empty: dict[Any, Any] = {}

    def of_step(self, result: Any, samples: int, dataloader: Any) -> Any:
        """Return a prediction step's result, or an empty one without samples."""
        if samples and dataloader not in self._empty:
            self._empty[dataloader] = empty_like(result, samples)
        return result if samples else self._empty.get(dataloader)


def joined_result(
    results: Sequence[Any],
    weights: Sequence[float],
    counts: Sequence[int],
) -> Any:
    """Join the results of a step's microbatches into one detached result; None without any.

    The loss and other scalars become weighted means, and a tensor ``"weight"`` becomes the sum.
    Tensors with one row per sample are concatenated. Anything else is the last microbatch's.
    """
    if not results:
        return None
    if not isinstance(results[0], Mapping):
        return _mean(results, weights)
    joined = dict(results[-1])
    for key in joined:
        values = [result.get(key) for result in results]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        if key == "weight":
            joined[key] = torch.stack([value.detach().sum() for value in values]).sum()
        elif all(v.numel() == 1 and v.ndim <= (key == "loss") for v in values):
            joined[key] = _mean(values, weights)
        elif _have_rows(values, counts):
            joined[key] = torch.cat([value.detach() for value in values])
        else:
            joined[key] = joined[key].detach()
    return joined


def _have_rows(values: Sequence[Tensor], counts: Sequence[int]) -> bool:
    """Whether tensors have one row for each sample."""
    return len({v.shape[1:] for v in values}) == 1 and all(
        v.ndim and len(v) == n for v, n in zip(values, counts, strict=True)
    )


def detached(result: Any) -> Any:
    """Return a result of ``training_step`` without graphs."""
    if isinstance(result, Mapping):
        return {key: detached(value) for key, value in result.items()}
    return result.detach() if isinstance(result, Tensor) else result


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Tensor:
    losses = [value["loss"] if isinstance(value, Mapping) else value for value in values]
    return weighted_mean([loss.reshape(()) for loss in losses], weights)
