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
        one = value[:1] if value.ndim and len(value) == samples else value
        return one.detach().to(device, non_blocking=True).contiguous()

    sent = pytree.tree_map_only(Tensor, of_one_sample, result) if own == first else None
    outline = pytree.tree_map_only(Tensor, partial(torch.empty_like, device="meta"), sent)
    outline = groups.control.broadcast(outline, first)
    if own != first:
        sent = pytree.tree_map_only(Tensor, partial(torch.empty_like, device=device), outline)
    for leaf in filter(torch.is_tensor, pytree.tree_leaves(sent)):
        broadcast(leaf, groups.gather, first)
    if isinstance(sent, dict) and "weight" in sent:
        sent["weight"] = sent["weight"] * 0
    return result if losses[own] else sent
