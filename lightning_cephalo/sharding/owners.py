"""Brings whole parameters to one rank each, and their rows back to all ranks.

Some updates need a whole matrix, or the whole model. Each parameter then has an *owner*: one rank
that gets all of its rows for the update. Owners follow the shares of the state: the largest
parameters are given away first, each to the rank that holds least for its share. A rank without a
share owns nothing.

Rows travel in one exchange between all ranks for each bucket of parameters. So a rank holds whole
what it owns, and one bucket more.

Considered: a gather for each parameter. Its number of messages grows with the number of parameters,
most of which are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.sharding.collectives import communicates
from lightning_cephalo.sharding.placement import (
    Rows,
    as_dtensor,
    local_part,
    meet_of,
    own_part,
    row_spec,
    rows_of,
)

# Bytes of the parameters that travel in one exchange.
_BUCKET_BYTES = 2**26


class Owners:
    """Gives every parameter an owner, and moves rows to the owners and back.

    ::

        owners = Owners([0.75, 0.25], rank)
        owners.assign(parameters)                        # the same on every rank
        owners.collect(rows, whole)                      # whole[i] is filled on the owner of i

    Args:
        single: Whether the rank with the largest share owns everything.
    """

    def __init__(self, fractions: Sequence[float], rank: int, single: bool = False) -> None:
        self._fractions = tuple(fractions)
        self._numels = [0] * len(fractions)
        self._owner: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._single = single
        self.rank = rank
        self.largest = max(range(len(fractions)), key=lambda rank: fractions[rank])

    def assign(self, parameters: Sequence[Tensor]) -> None:
        """Give an owner to all parameters that have none; equal on every rank."""
        new = [parameter for parameter in parameters if parameter not in self._owner]
        shares = [rank for rank, fraction in enumerate(self._fractions) if fraction > 0.0]
        for parameter in sorted(new, key=lambda parameter: -parameter.numel()):
            numel = parameter.numel()

            def load(rank: int, numel: int = numel) -> float:
                return (self._numels[rank] + numel) / self._fractions[rank]

            owner = self.largest if self._single else min(shares, key=load)
            self._owner[parameter] = owner
            self._numels[owner] += numel

    def of(self, parameter: Tensor) -> int:
        """Return the owner of a parameter."""
        return cast(int, self._owner[parameter])

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank owns a parameter."""
        return self.of(parameter) == self.rank

    # -- moving rows --------------------------------------------------------------------------

    def collect(
        self,
        parameters: Sequence[DTensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor | None],
    ) -> None:
        """Fill whole tensors on their owners with the rows of all ranks; collective and blocking.

        Args:
            rows: This rank's rows of each.
            whole: A tensor of the parameter's shape where this rank owns it, else None.
        """
        for bucket in _buckets(parameters):
            sends, receives = self._slots(), self._slots()
            for index in bucket:
                parameter = parameters[index]
                owner, cut = self.of(parameter), rows_of(parameter) is not None
                if cut or owner == self.rank:  # every rank has a copy of what is not cut
                    sends[owner].append(rows[index])
                if owner == self.rank:
                    for other in range(len(receives)):
                        if cut or other == self.rank:
                            receives[other].append(_part(whole[index], parameter, other))
            _exchange(sends, receives, rows[bucket[0]], parameters[bucket[0]])

    def spread(
        self,
        parameters: Sequence[DTensor],
        whole: Sequence[Tensor | None],
        rows: Sequence[Tensor],
    ) -> None:
        """Fill every rank's rows from the owners' whole tensors; collective and blocking."""
        for bucket in _buckets(parameters):
            sends, receives = self._slots(), self._slots()
            for index in bucket:
                owner = self.of(parameters[index])
                receives[owner].append(rows[index])
                if owner == self.rank:
                    for other in range(len(sends)):
                        sends[other].append(_part(whole[index], parameters[index], other))
            _exchange(sends, receives, rows[bucket[0]], parameters[bucket[0]])

    def _slots(self) -> list[list[Tensor]]:
        return [[] for _ in self._fractions]


def on_owner(value: Tensor | None, owner: int, like: DTensor, meta: Tensor) -> DTensor:
    """Return a DTensor whose rows all lie on one rank; no communication.

    It stands for optimizer state on every rank, so that ``full_tensor()`` and checkpoints work. As
    those of its parameter do, its operators wait until all ranks have come to communicate.

    Args:
        value: The tensor, of one dimension or more; None on ranks other than the owner.
        like: A parameter with the mesh, the device and the meetings of the result.
    """
    count = len(meta)
    rows = (
        [(0, 0)] * owner + [(0, count)] + [(count, count)] * (like.device_mesh.size() - 1 - owner)
    )
    if value is None:
        value = torch.empty((0, *meta.shape[1:]), dtype=meta.dtype, device=local_part(like).device)
    placement = Rows(rows, meet_of(like))
    return as_dtensor(value, row_spec(like.device_mesh, placement, meta.shape, meta.dtype))


def _part(whole: Tensor | None, parameter: DTensor, rank: int) -> Tensor:
    assert whole is not None
    return own_part(whole, parameter, rank)


def _buckets(parameters: Sequence[DTensor]) -> Iterator[list[int]]:
    """Yield the indices of parameters that travel together; equal on every rank."""
    bucket: list[int] = []
    size = 0
    for index, parameter in enumerate(parameters):
        new = parameter.numel() * parameter.element_size()
        if bucket and (
            size + new > _BUCKET_BYTES or parameter.dtype != parameters[bucket[0]].dtype
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(index)
        size += new
    if bucket:
        yield bucket


def _exchange(
    sends: Sequence[Sequence[Tensor]],
    receives: Sequence[Sequence[Tensor]],
    like: Tensor,
    parameter: DTensor,
) -> None:
    """Send tensors to every rank by number, and fill those that come."""
    group = parameter.device_mesh.get_group()
    device = like.device if communicates(like, group) else torch.device("cpu")
    send_sizes, receive_sizes = (
        [sum(tensor.numel() for tensor in tensors) for tensors in side]
        for side in (sends, receives)
    )
    flat = [tensor.reshape(-1) for tensors in sends for tensor in tensors]
    sent = (torch.cat(flat) if flat else like.new_empty(0)).to(device)
    received = torch.empty(sum(receive_sizes), dtype=like.dtype, device=device)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    targets = [tensor for tensors in receives for tensor in tensors]
    for target, part in zip(
        targets, received.split([target.numel() for target in targets]), strict=True
    ):
        target.copy_(part.view(target.shape))
