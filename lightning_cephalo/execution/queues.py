"""Refuses buffers that training_step fills with one row per sample, such as queues of keys.

On one device such a buffer holds the rows of the whole batch. Here each microbatch would write its
own rows, and their mean over microbatches and ranks means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError


def refuse_queue(name: str, before: Tensor, values: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Raise if each microbatch has changed one row, or column, per sample of a buffer."""
    if before.ndim < 2:
        return
    if all(_has_new_rows(now, before, n) for now, n in zip(values, sizes, strict=True)):
        raise UnitUseError(
            f"training_step writes {sum(sizes)} rows, one for each sample, into the buffer"
            f" {name!r} of shape {tuple(before.shape)}. On one device it holds"
            " those of the whole batch; here microbatches and ranks would hold different"
            " ones. Return the rows from training_step, and write them in"
            " on_train_batch_end(outputs), where they are those of this rank's whole"
            " batch; get those of other ranks by torch.distributed.all_gather_object()."
        )


def _has_new_rows(now: Tensor, before: Tensor, samples: int) -> bool:
    """Return whether along some dimension exactly one row per sample differs."""
    differs = now != before
    return samples > 0 and any(
        int(differs.movedim(dim, 0).flatten(1).any(1).sum()) == samples
        for dim in range(now.ndim)
        if now.shape[dim] > samples
    )
