"""Brings whole parameters to one rank each, and their rows back to all ranks.

Some updates need a whole matrix. Each parameter then has an *owner*: one rank that gets all of its
rows for the update. The largest parameters are given away first, each to the rank that holds least
for its share of the model. A rank without a share owns nothing.

Rows travel in one exchange between all ranks for each bucket of parameters. So a rank holds whole
what it owns, and one bucket more.

Considered: a gather for each parameter. Its number of messages grows with the number of parameters,
most of which are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.sharding.collectives import all_to_all
from lightning_cephalo.sharding.placement import (
    Rows,
    as_dtensor,
    local_part,
    meet_of,
    own_part,
    row_spec,
)

# Bytes of the parameters that travel in one exchange.
_BUCKET_BYTES = 2**26


class Owners:
    """Gives every parameter an owner, and moves rows to the owners and back.

    ::

        owners = Owners([0.75, 0.25], rank)
        owners.assign(parameters)                        # the same on every rank
        owners.collect(rows, whole)                      # whole[i] is filled on the owner of i
    """

    def __init__(self, fractions: Sequence[float], rank: int) -> None:
        self._numels = [0] * len(fractions)
        self._owner: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.rank = rank
        self._fractions = list(fractions)

    def assign(self, parameters: Sequence[Tensor]) -> None:
        """Give an owner to all parameters that have none; equal on every rank."""
        new = [parameter for parameter in parameters if parameter not in self._owner]
        shares = [rank for rank, fraction in enumerate(self._fractions) if fraction > 0.0]
        for parameter in sorted(new, key=lambda parameter: -parameter.numel()):
            numel = parameter.numel()

            def load(rank: int, numel: int = numel) -> float:
                return (self._numels[rank] + numel) / self._fractions[rank]

            owner = min(shares, key=load)
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
            held, owned = self._sides(bucket, parameters, rows, whole)
            _exchange(held, owned, parameters[bucket[0]])

    def spread(
        self,
        parameters: Sequence[DTensor],
        whole: Sequence[Tensor | None],
        rows: Sequence[Tensor],
    ) -> None:
        """Fill every rank's rows from the owners' whole tensors; collective and blocking."""
        for bucket in _buckets(parameters):
            held, owned = self._sides(bucket, parameters, rows, whole)
            _exchange(owned, held, parameters[bucket[0]])

    def _sides(
        self,
        bucket: Sequence[int],
        parameters: Sequence[DTensor],
        rows: Sequence[Tensor],
        whole: Sequence[Tensor | None],
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return this rank's rows by their owner, and what it owns by the rank that holds it."""
        held: list[list[Tensor]] = [[] for _ in self._fractions]
        owned: list[list[Tensor]] = [[] for _ in self._fractions]
        for index in bucket:
            parameter, values = parameters[index], whole[index]
            held[self.of(parameter)].append(rows[index])
            if self.owns(parameter):
                assert values is not None
                for rank, parts in enumerate(owned):
                    parts.append(own_part(values, parameter, rank))
        return held, owned


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
    parameter: DTensor,
) -> None:
    """Send tensors to every rank by number, and fill those that come."""
    send_sizes, receive_sizes = (
        [sum(tensor.numel() for tensor in tensors) for tensors in side]
        for side in (sends, receives)
    )
    sources, targets = (list(chain.from_iterable(side)) for side in (sends, receives))
    nothing = local_part(parameter).new_empty(0)
    sent = torch.cat([nothing, *(source.reshape(-1) for source in sources)])
    received = all_to_all(sent, send_sizes, receive_sizes, parameter.device_mesh.get_group())
    parts = received.split([target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.shape))
