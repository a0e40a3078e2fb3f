"""Gives a rank without samples the outputs of a training step that another rank has.

A callback that reads ``outputs["accuracy"]`` would fail on that rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.ranks.control import ControlGroup


def outputs_everywhere(
    result: Any, samples: int, losses: Sequence[int], control: ControlGroup, device: torch.device
) -> Any:
    """Return a step's outputs; on a rank without losses those of the first rank with some.

    ``losses`` has their number on every rank. Of tensors with one row for each sample the first
    row is sent, as hooks see one sample there. A ``"weight"`` is 0.
    """
    if all(losses):
        return result
    first = next(rank for rank, count in enumerate(losses) if count)

    def of_one_sample(value: Tensor) -> Tensor:
        own = value[:1] if value.ndim and len(value) == samples else value
        return own.detach().to("cpu", copy=True)

    sent = pytree.tree_map_only(Tensor, of_one_sample, result) if control.rank == first else None
    given = control.broadcast(sent, first)
    if losses[control.rank]:
        return result
    if isinstance(given, dict) and "weight" in given:
        given["weight"] *= 0
    return pytree.tree_map_only(Tensor, lambda value: value.to(device), given)
