"""One batch of a rank, cut into microbatches, and their results put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.data import BatchLayout, MicrobatchList, deal, split_sizes


@dataclass(frozen=True)
class BatchCutter:
    """Cuts what the training loaders yield.

    Attributes:
        layouts: One for each of the training dataloaders, in the order of their tree.
        spec: How several loaders' batches are nested (None for a single loader).
        microbatch_sizes: This rank's planned sizes.
    """

    layouts: tuple[BatchLayout, ...]
    spec: Any
    microbatch_sizes: tuple[int, ...]

    def cut(self, batch: Any) -> list[tuple[Any, int]]:
        """Return the microbatches and their numbers of samples; none for an empty batch."""
        if self.spec is None:
            return self._cut_one(batch, self.layouts[0], None)
        parts = self.spec.flatten_up_to(batch)
        first = next(index for index, part in enumerate(parts) if part is not None)
        leading = self._cut_one(parts[first], self.layouts[first], None)
        counts = [count for _, count in leading]
        columns = []
        for index, (part, layout) in enumerate(zip(parts, self.layouts, strict=True)):
            if part is None:
                columns.append([None] * len(leading))
            elif index == first:
                columns.append([piece for piece, _ in leading])
            else:
                columns.append([piece for piece, _ in self._cut_one(part, layout, counts)])
        return [
            (pytree.tree_unflatten(list(pieces), self.spec), count)
            for pieces, count in zip(zip(*columns, strict=True), counts, strict=True)
        ]

    def _cut_one(
        self, batch: Any, layout: BatchLayout, shares: Sequence[int] | None
    ) -> list[tuple[Any, int]]:
        if isinstance(batch, MicrobatchList):
            counts = batch.sizes or [layout.batch_size(piece) for piece in batch]
            return [(b, n) for b, n in zip(batch, counts, strict=True) if n > 0]
        count = layout.batch_size(batch)
        if count == 0:
            return []
        if shares is not None:
            sizes: tuple[int, ...] = deal(count, shares)
        elif self.microbatch_sizes:
            sizes = split_sizes(count, self.microbatch_sizes)
        else:
            sizes = (count,)
        if len(sizes) == 1:
            return [(batch, count)]
        return list(zip(layout.split(batch, sizes), sizes, strict=True))


def loss_and_weight(result: Any, samples: int) -> tuple[Tensor, float]:
    """Read what ``training_step`` returned for one microbatch.

    Raises:
        TypeError: If there is no loss in it.
    """
    loss, weight = result, float(samples)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise TypeError(
                "training_step returned a dict without the key 'loss'; got keys"
                f" {sorted(map(str, result))}. Return a tensor, or a dict with 'loss' and,"
                " if losses are not means over samples, 'weight'."
            )
        loss = result["loss"]
        if "weight" in result:
            weight = float(result["weight"])
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(loss).__name__}, expected a tensor or a dict with"
            " 'loss'. Skipping a step by returning None is not possible when other ranks train."
        )
    if loss.numel() != 1:
        raise TypeError(
            f"training_step returned a loss of shape {tuple(loss.shape)}, expected a scalar."
            " Return the mean over the samples of the batch it was given."
        )
    if not weight >= 0.0:
        raise TypeError(f"training_step returned the weight {weight}, expected 0 or more.")
    return loss.reshape(()), weight


def joined_result(
    results: Sequence[Any],
    weights: Sequence[float],
    counts: Sequence[int],
    empty_loss: Callable[[], Tensor],
) -> Any:
    """Make one result of a step from those of its microbatches, detached.

    The loss is the weighted mean; other scalars too; tensors with one row per sample are
    concatenated; of anything else the last microbatch's is kept.
    """
    if not results:
        return empty_loss()
    if not isinstance(results[0], Mapping):
        return _weighted_mean(results, weights)
    joined = dict(results[-1])
    for key in joined:
        values = [result.get(key) for result in results]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        if key == "weight":
            joined[key] = torch.stack([value.detach().sum() for value in values]).sum()
        elif (
            values[0].numel() == 1 and values[0].ndim <= 1 and (key == "loss" or not values[0].ndim)
        ):
            joined[key] = _weighted_mean(values, weights)
        elif all(v.ndim and len(v) == n for v, n in zip(values, counts, strict=True)):
            joined[key] = torch.cat([value.detach() for value in values])
        else:
            joined[key] = joined[key].detach()
    return joined


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Tensor:
    losses = [value["loss"] if isinstance(value, Mapping) else value for value in values]
    total = sum(weights)
    if not total:
        return losses[-1].detach().reshape(())
    stacked = torch.stack([loss.detach().reshape(()).float() for loss in losses])
    share = torch.tensor(weights, dtype=torch.float32, device=stacked.device) / total
    return (stacked * share).sum().to(losses[0].dtype)
