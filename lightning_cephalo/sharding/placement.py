"""Represents parameters with uneven rows per rank as DTensors.

Optimizers, gradient clipping, checkpoints and parameter groups see every parameter as a DTensor of
its original shape and name. ``Shard(0)`` assumes the layout of ``torch.chunk``. :class:`Rows` is a
``Shard(0)`` that stores the actual rows of each rank. :class:`RowsTensor` is the DTensor: operators
on it come to ``row_operators.py``, and not to torch's rules, which assume even rows.

Private API: torch has no public way to describe uneven shards (pytorch#169320), so the methods
below override ``Shard`` internals. ``tests/distributed/test_placement.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_cephalo.accelerator.torch_versions import computes_by_itself
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.collectives import all_gather_rows, broadcast

WHOLE_MODEL = (
    "To save the model or a part of it, enter `with trainer.strategy.full_parameters():` on every"
    " rank, and take `module.backbone.state_dict()` in it: it holds whole tensors on each rank."
)

Meet = Callable[[str, str], None]
"""Waits until all ranks have come for the same purpose; takes it, and a remedy for messages."""


class Rows(Shard):
    """``Shard(0)`` with an explicit range of rows for every rank.

    DTensor caches redistribution and propagation by placement. Equality and hash therefore include
    the rows: parameters of equal shape but different rows must not share an entry. DTensorSpec also
    requires that a placement on dimension 0 equals plain ``Shard(0)``. The hash still differs, so
    that no cached entry of a plain shard is ever found for uneven rows.

    Args:
        rows: ``(first, one past the last)`` row of every rank in rank order.
        meet: Called before operators communicate; None: they do not wait for other ranks before.
    """

    def __new__(cls, rows: Sequence[tuple[int, int]], meet: Meet | None = None) -> Rows:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, rows: Sequence[tuple[int, int]], meet: Meet | None = None) -> None:
        super().__init__(0)
        self.rows = tuple((int(first), int(end)) for first, end in rows)
        self.meet = meet

    @property
    def sizes(self) -> list[int]:
        """Number of rows of every rank."""
        return [end - first for first, end in self.rows]

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
        return all_gather_on_mesh(local_tensor, self.sizes, mesh)

    def _replicate_to_shard(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: Any
    ) -> torch.Tensor:
        first, end = self.rows[int(shard_index)]
        return local_tensor[first:end].clone()


class Copies(Replicate):
    """``Replicate`` for a parameter without rows: every rank holds a copy of it.

    Args:
        meet: Called before ranks compare what they write to it; None: they do not wait before.
    """

    def __new__(cls, meet: Meet | None = None) -> Copies:
        return super().__new__(cls)

    def __init__(self, meet: Meet | None = None) -> None:
        super().__init__()
        self.meet = meet

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()


@computes_by_itself
class RowsTensor(DTensor):
    """A tensor of which each rank holds some rows, and that computes like the whole one.

    ::

        average.lerp_(parameter, 0.01)      # element-wise: each rank computes its rows
        parameter.abs().max()               # a number of the whole tensor, on every rank
        parameter.T @ parameter             # gathers, and gives a whole plain tensor

    Operators that communicate must run on every rank. [Note: operators on rows] in
    ``row_operators.py`` has the rules. A pickle of it holds the whole tensor, as a plain one.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # the rules need this class: importing them above would be circular
        from lightning_cephalo.sharding.row_operators import compute

        return compute(func, tuple(args), dict(kwargs or {}))

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the whole tensor, on every rank; collective."""
        from lightning_cephalo.sharding.row_operators import meet_for

        if rows_of(self) is not None:
            meet_for("full_tensor()", [self])
        return super().full_tensor(**options)

    def numpy(self, **options: Any) -> Any:
        """Return the whole tensor as an array that cannot be written; collective."""
        return read_only(self.full_tensor().detach().numpy(**options))

    def tolist(self) -> Any:
        """Return the whole tensor as numbers; collective."""
        return self.full_tensor().detach().tolist()

    def __array__(self, *args: Any) -> Any:
        return self.numpy().__array__(*args)

    def __dlpack__(self, **options: Any) -> Any:
        refuse_dlpack(self)

    def untyped_storage(self) -> Any:
        """Refuse: libraries that write files, such as safetensors, read memory through it."""
        raise UnsupportedError(
            f"The memory of a sharded tensor of shape {tuple(self.shape)}: no rank has all of it."
            f" {WHOLE_MODEL} Or write copies of its values, `parameter.full_tensor().detach()`,"
            " which every rank makes."
        )

    storage = untyped_storage  # what safetensors tries next

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with rows of its own, as ``clone()`` does: no rank needs another one."""
        if id(self) not in memo:
            rows = self.detach().clone()
            if isinstance(self, nn.Parameter):
                rows = nn.Parameter(rows, self.requires_grad)
                rows.__dict__.update(self.__dict__)
            memo[id(self)] = rows
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.full_tensor().detach()
        if not isinstance(self, nn.Parameter):
            return plain.__reduce_ex__(protocol)
        return nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)


def read_only(array: Any) -> Any:
    """Return a numpy array that refuses writes: they would not reach the rows of a tensor."""
    array.flags.writeable = False
    return array


def refuse_dlpack(tensor: torch.Tensor) -> NoReturn:
    """Raise where a library asks for the memory of a sharded tensor."""
    raise UnsupportedError(
        f"from_dlpack() of a sharded tensor of shape {tuple(tensor.shape)}: no rank has all of its"
        " memory. Pass a copy of its values, `parameter.full_tensor().detach()`, or"
        " `parameter[0].clone()` for a part, on every rank."
    )


def row_spec(
    mesh: DeviceMesh, placement: Placement, shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Describe a parameter of ``shape``: :class:`Rows`, or :class:`Copies`."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(size, stride, dtype))


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap this rank's rows, without copying and without communication.

    FSDP2 uses the same constructor (``_from_local_no_grad``). The public ``DTensor.from_local``
    runs an autograd function and costs several times as much.
    """
    return RowsTensor(local, spec, requires_grad=False)


def whole_of(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor of one in rows, or the copy that this rank holds; collective."""
    local, rows = local_part(tensor).detach(), rows_of(tensor)
    return local if rows is None else all_gather_on_mesh(local, rows.sizes, tensor.device_mesh)


def all_gather_on_mesh(local: torch.Tensor, sizes: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows of all ranks stacked, on the device of this rank's rows; collective.

    Rows may lie on another device than the one that the ranks communicate with: after
    ``parameter.cpu()``.
    """
    sent = local.to(mesh.device_type) if local.device.type != mesh.device_type else local
    return all_gather_rows(sent, sizes, mesh.get_group()).to(local.device)


def rows_of(tensor: torch.Tensor) -> Rows | None:
    """Return the rows of a sharded tensor; None if every rank holds all of it."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return placement if isinstance(placement, Rows) else None


def meet_of(tensor: torch.Tensor) -> Meet | None:
    """Return what waits for all ranks before they communicate about a tensor; None: nothing."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return placement.meet if isinstance(placement, Rows | Copies) else None


def own_part(whole: torch.Tensor, like: DTensor, rank: int | None = None) -> torch.Tensor:
    """Return a view of the rows of a whole tensor that a rank (None: this one) holds.

    ::

        own_part(torch.zeros(5, 3), parameter)    # shape (4, 3) on a rank that holds four rows

    Args:
        like: The sharded tensor; all of ``whole`` if every rank holds a copy.
    """
    rows = rows_of(like)
    if rows is None:
        return whole
    first, end = rows.rows[like.device_mesh.get_local_rank() if rank is None else rank]
    return whole[first:end]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local_part(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace this rank's rows of a DTensor; nothing is copied."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def set_rows(
    tensor: torch.Tensor,
    local: torch.Tensor,
    placement: Placement,
    mesh: DeviceMesh | None = None,
) -> None:
    """Give a DTensor other rows of the same values: the object stays, nothing is communicated.

    So optimizers and schedulers that hold it need not learn of the change.
    """
    set_local_part(tensor, local)
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh if mesh is None else mesh
    tensor._spec = row_spec(mesh, placement, tensor.shape, tensor.dtype)


def default_mesh(device_type: str, group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """Build the one-dimensional mesh over the ranks of a group; None: over all ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    # `init_device_mesh` would create another group where gloo serves a machine with other devices
    return DeviceMesh.from_group(group, device_type)


def agreed(number: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a number of the whole tensor with the same bits on all ranks; collective.

    Groups of ranks that each hold the whole state cut it in different places. Their sums are thus
    rounded differently, and copies of one row would drift apart: rank 0's number counts. The
    given tensor changes.
    """
    if mesh.size() < dist.get_world_size():
        own = number.to(mesh.device_type)
        broadcast(own, None, source=0)
        number.copy_(own)
    return number
