"""Gives a rank without samples the outputs of a training step that another rank has.

A callback that reads ``outputs["accuracy"]`` would fail on that rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.logging import ValuesOfRanks


def outputs_everywhere(
    result: Any, samples: int, losses: Sequence[int], ranks: ValuesOfRanks
) -> Any:
    """Return a step's outputs; on a rank without losses those of the first rank with some.

    ``losses`` has their number on every rank. Of tensors with one row for each sample the first
    row is sent, as hooks see one sample there. A ``"weight"`` is 0.
    """
    if all(losses):
        return result
    own, first = ranks.control.rank, next(rank for rank, count in enumerate(losses) if count)

    def of_one_sample(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value[:1] if value.ndim and len(value) == samples else value).detach()

    sent = pytree.tree_map(of_one_sample, result) if own == first else None
    if isinstance(sent, dict) and "weight" in sent:
        sent["weight"] = sent["weight"] * 0
    sent = ranks.broadcast(sent, first)
    return result if losses[own] else sent
