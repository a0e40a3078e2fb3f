"""Cuts a rank's batch into microbatches and joins their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import BatchSplitError, CephaloError
from lightning_cephalo.common.weighted_mean import weighted_mean
from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples, is_sized_object, own_copy
from lightning_cephalo.data.shares import deal, split_sizes


class StepResultError(CephaloError, TypeError, MisconfigurationException):
    """``training_step`` has returned no loss; Lightning's own strategies raise the same error."""


@dataclass(frozen=True)
class BatchCutter:
    """Cuts the batches of the training loaders into microbatches."""

    layouts: tuple[BatchLayout, ...]
    spec: Any  # the tree of the loaders' batches
    microbatch_sizes: tuple[int, ...]

    def cut(self, batch: Any, lacks: Sequence[bool] = ()) -> list[tuple[Any, int]]:
        """Return the microbatches with their samples of all loaders; some parts have no rows.

        ``lacks`` marks loaders of which this rank has no samples; empty: it has of all.
        """
        parts = self.spec.flatten_up_to(batch)
        lacks = lacks or [False] * len(parts)
        counts = [
            0 if lacking or part is None else layout.batch_size(part)
            for part, layout, lacking in zip(parts, self.layouts, lacks, strict=True)
        ]
        most = max(counts)
        if not most:
            return []
        shares = split_sizes(most, self.microbatch_sizes) if self.microbatch_sizes else (most,)
        sizes = [deal(count, shares) for count in counts]
        columns = map(_pieces, parts, self.layouts, sizes)
        whole = [self.spec.unflatten(own) for own in zip(*columns, strict=True)]
        return list(zip(whole, map(sum, zip(*sizes, strict=True)), strict=True))


def _pieces(batch: Any, layout: BatchLayout, sizes: Sequence[int]) -> list[Any]:
    """Cut a loader's batch into pieces of ``sizes`` samples, which may have no rows."""
    if not sum(sizes):
        return [None if batch is None else layout.take(batch, 0, 0)] * len(sizes)
    return [batch] if len(sizes) == 1 else layout.split(batch, sizes)


def shown(batch: Any, spec: Any = None) -> tuple[Any, tuple[bool, ...]]:
    """Return what hooks see of a batch, and whether it counts nowhere; of several loaders, each."""
    if spec is None:  # several loaders of an evaluation yield a tree, too
        parts, tree = pytree.tree_flatten(batch, lambda node: isinstance(node, NoSamples))
    else:
        parts, tree = spec.flatten_up_to(batch), spec
    if not any(isinstance(part, NoSamples) for part in parts):
        return batch, (False,) * (1 if spec is None else len(parts))
    seen = [part.shown if isinstance(part, NoSamples) else part for part in parts]
    lacks = tuple(part is None or isinstance(part, NoSamples) for part in parts)
    return pytree.tree_unflatten(seen, tree), lacks


def loss_and_weight(result: Any, samples: int) -> tuple[Tensor, float | Tensor]:
    """Return a microbatch's loss and weight; StepResultError or TypeError without a scalar loss.

    A weight on the device remains a tensor: reading it would wait for the device.
    """
    loss, weight = result, float(samples)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise StepResultError(
                "In automatic optimization the 'loss' key needs to be present in a dict that"
                f" training_step returns; got keys {sorted(map(str, result))}. Return a tensor, or"
                " a dict with 'loss' and, if losses are not means over samples, 'weight'."
            )
        loss, weight = result["loss"], result.get("weight", weight)
        if not isinstance(weight, Tensor) or weight.is_cpu or weight.numel() != 1:
            weight = float(weight)
    if not isinstance(loss, Tensor):
        raise StepResultError(
            f"training_step returned {type(loss).__name__}, but it must return a Tensor, or a dict"
            " with the key 'loss'. Where samples shall not count, it holds 'weight': 0.0."
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
        return (len(batch) or 1) if is_sized_object(batch) else 1


def evaluation_weight(result: Any, samples: int) -> float:
    """Return an evaluation step's weight in logged means: its ``"weight"``, or its samples."""
    has_weight = isinstance(result, Mapping) and "weight" in result
    return float(result["weight"] if has_weight else samples)


class EmptyPredictions:
    """Predictions without rows, in the structure of this rank's first result of the dataloader."""

    def __init__(self) -> None:
        self._empty: dict[Any, Any] = {}

    def of_step(self, result: Any, samples: int, dataloader: Any) -> Any:
        """Return a prediction step's result, or an empty one without samples."""
        if not samples:
            return self._empty.get(dataloader)
        if dataloader not in self._empty:
            layout, self._empty[dataloader] = BatchLayout(), None
            with suppress(BatchSplitError):
                if layout.batch_size(result) == samples:
                    # a view would keep the whole result alive
                    self._empty[dataloader] = own_copy(layout.take(result, 0, 0), with_arrays=True)
        return result


def joined_result(results: Sequence[Any], weights: Sequence[float], counts: Sequence[int]) -> Any:
    """Join the results of a step's microbatches into one detached result; None without any.

    Scalars become weighted means, but a tensor ``"weight"`` the sum. Rows of samples are joined.
    Anything else is the last microbatch's.
    """
    if not results:
        return None
    if not isinstance(results[0], Mapping):
        return weighted_mean([result.reshape(()) for result in results], weights)
    joined = dict(results[-1])
    for key in joined:
        values = [result.get(key) for result in results]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        values = [value.detach() for value in values]
        pairs = zip(values, counts, strict=True)
        if key == "weight":
            joined[key] = torch.stack([value.sum() for value in values]).sum()
        elif all(value.numel() == 1 and value.ndim <= (key == "loss") for value in values):
            joined[key] = weighted_mean([value.reshape(()) for value in values], weights)
        elif len({value.shape[1:] for value in values}) == 1 and all(
            value.ndim and len(value) == count for value, count in pairs
        ):
            joined[key] = torch.cat(values)
        else:
            joined[key] = values[-1]
    return joined
