"""Gives a rank without samples the outputs of a training step that another rank has.

A callback that reads ``outputs["accuracy"]`` would fail on that rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.collectives import broadcast


def outputs_everywhere(
    result: Any, samples: int, losses: Sequence[int], groups: Groups, device: torch.device
) -> Any:
    """Return a step's outputs; on a rank without losses those of the first rank with some.

    ``losses`` has their number on every rank. Of tensors with one row for each sample the first
    row is sent, as hooks see one sample there. A ``"weight"`` is 0. The host waits for no device.
    """
    if all(losses):
        return result
    own, first = groups.control.rank, next(rank for rank, count in enumerate(losses) if count)

    def of_one_sample(value: Tensor) -> Tensor:
        return (value[:1] if value.ndim and len(value) == samples else value).detach()

    sent = pytree.tree_map_only(Tensor, of_one_sample, result) if own == first else None
    if isinstance(sent, dict) and "weight" in sent:
        sent["weight"] = sent["weight"] * 0
    outline = pytree.tree_map_only(Tensor, partial(torch.empty_like, device="meta"), sent)
    leaves, spec = pytree.tree_flatten(groups.control.broadcast(outline, first))
    given = pytree.tree_leaves(sent) if own == first else leaves
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            there = given[index] if own == first else torch.empty_like(leaf, device=device)
            leaves[index] = there.to(device, non_blocking=True).contiguous()
            broadcast(leaves[index], groups.gather, first)
    return result if losses[own] else pytree.tree_unflatten(leaves, spec)
