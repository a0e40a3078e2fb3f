"""Gives ``SparseAdam`` gradients in its own form.

SparseAdam updates the rows of an embedding that the batch has used, and their moments; all others
stay as they are. On one device the sparse gradient says which rows these are. Here gradients are
dense. So each rank notes the rows that its own samples have used, and the ranks put these notes
together before the update. Each rank then updates its own rows with a sparse gradient of those that
any sample of the global batch has used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import Rows
from lightning_cephalo.sharding.touched_rows import TouchedRows


def takes_sparse_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer refuses dense gradients."""
    return type(optimizer) is torch.optim.SparseAdam


class SparseGradients:
    """The sparse gradients of an optimizer's parameters.

    Args:
        optimizer: The optimizer.
        model: The sharded model, whose parameters it holds.
    """

    def __init__(self, optimizer: Optimizer, model: ShardedModel) -> None:
        self._optimizer, self._model = optimizer, model
        self._touched: dict[int, TouchedRows] = {}
        self._followed: set[int] = set()
        self.follow()

    def follow(self) -> None:
        """Note from now on which rows are used of all parameters that the optimizer holds."""
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if held != self._followed:
            self._touched, self._followed = self._model.touched_rows(held), held

    def show(self, parameters: Iterable[Tensor], rows: Iterable[Tensor]) -> None:
        """Put sparse gradients in place of dense ones; collective.

        A parameter that has had a dense gradient keeps it, on every rank: the optimizer refuses it.

        Args:
            parameters: The sharded parameters.
            rows: This rank's rows of each, with their dense gradients.
        """
        held = [
            (cast(DTensor, parameter), own, self._touched[id(parameter)].flags)
            for parameter, own in zip(parameters, rows, strict=True)
            if own.grad is not None and id(parameter) in self._touched
        ]
        if not held:
            return
        flags = torch.cat([flags for *_, flags in held])
        mesh = held[0][0].device_mesh
        all_reduce(flags, None, dist.ReduceOp.MAX).wait()  # the samples of all ranks use rows
        rank = mesh.get_local_rank()
        parts: Sequence[Tensor] = flags.split([len(flags) for *_, flags in held])
        for (parameter, own, _), part in zip(held, parts, strict=True):
            if not part[-1]:
                first, end = cast(Rows, parameter.placements[0]).rows[rank]
                own.grad = _sparse(cast(Tensor, own.grad), part[first:end].bool())

    def mark_used(self) -> None:
        """Let the next backward forget the rows, which are updated."""
        for touched in self._touched.values():
            touched.is_used = True


def _sparse(gradient: Tensor, touched: Tensor) -> Tensor:
    """Return the sparse form of a gradient, which has the rows that were touched.

    Rows with a gradient are among them: after a step without ``zero_grad()`` only that shows them.
    """
    landed = gradient.ne(0)
    used = touched | (landed.flatten(1).any(1) if landed.ndim > 1 else landed)
    indices = used.nonzero()
    return torch.sparse_coo_tensor(
        indices.T,
        gradient[indices[:, 0]],
        gradient.shape,
        check_invariants=False,
        is_coalesced=True,
    )
