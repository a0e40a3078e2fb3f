"""Represents parameters with uneven rows per rank as DTensors.

Optimizers, gradient clipping, checkpoints and parameter groups see every parameter as a DTensor of
its original shape and name. ``Shard(0)`` assumes the layout of ``torch.chunk``. :class:`Rows` is a
``Shard(0)`` that stores the actual rows of each rank.

Private API: torch has no public way to describe uneven shards (pytorch#169320), so the methods
below override ``Shard`` internals. ``tests/distributed/test_placement.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_cephalo.sharding.collectives import all_gather_rows


class Rows(Shard):
    """``Shard(0)`` with an explicit range of rows for every rank.

    DTensor caches redistribution and propagation by placement. Equality and hash therefore include
    the rows: parameters of equal shape but different rows must not share an entry. DTensorSpec also
    requires that a placement on dimension 0 equals plain ``Shard(0)``. The hash still differs, so
    that no cached entry of a plain shard is ever found for uneven rows.

    Args:
        rows: ``(first, one past the last)`` row of every rank in rank order.
    """

    def __new__(cls, rows: Sequence[tuple[int, int]]) -> Rows:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        super().__init__(0)
        self.rows = tuple((int(first), int(end)) for first, end in rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            return other.rows == self.rows
        return isinstance(other, Shard) and other.dim == 0

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return f"Rows({list(self.rows)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.rows,)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        first, end = self.rows[int(rank)]
        return end - first, first

    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *args: Any
    ) -> torch.Tensor:
        sizes = [end - first for first, end in self.rows]
        return all_gather_rows(local_tensor, sizes, mesh.get_group(mesh_dim))

    def _replicate_to_shard(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: Any
    ) -> torch.Tensor:
        first, end = self.rows[int(shard_index)]
        return local_tensor[first:end].clone()


def row_spec(
    mesh: DeviceMesh,
    rows: Sequence[tuple[int, int]] | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Describe a parameter of ``shape`` with these rows per rank (None: a copy on every rank)."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    placement = Replicate() if rows is None else Rows(rows)
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(size, stride, dtype))


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap this rank's rows, without copying and without communication.

    FSDP2 uses the same constructor (``_from_local_no_grad``). The public ``DTensor.from_local``
    runs an autograd function and costs several times as much.
    """
    return DTensor(local, spec, requires_grad=False)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local_part(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace this rank's rows of a DTensor; nothing is copied."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def with_rows_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return optimizer state with the rows of its parameter.

    Tensors that DTensor derives (``grad + decay * p``, which SGD stores as its momentum) hold the
    right rows but have the placement ``Shard(0)``. Their ``full_tensor()`` would be wrong.
    """
    if (
        isinstance(value, DTensor)
        and isinstance(parameter, DTensor)
        and value.shape == parameter.shape
        and value._local_tensor.shape == parameter._local_tensor.shape
        and value.placements[0].is_shard(0)
        and not isinstance(value.placements[0], Rows)
    ):
        rows = parameter.placements[0]
        if isinstance(rows, Rows):
            spec = row_spec(parameter.device_mesh, rows.rows, value.shape, value.dtype)
            return as_dtensor(value._local_tensor, spec)
    return value


def default_mesh(device_type: str) -> DeviceMesh:
    """Build the one-dimensional mesh over all ranks."""
    assert dist.group.WORLD is not None
    # `init_device_mesh` would create another group where gloo serves a machine with other devices
    return DeviceMesh.from_group(dist.group.WORLD, device_type)
