"""Represents parameters with uneven rows per rank as DTensors.

Optimizers, gradient clipping, checkpoints and parameter groups see every parameter as a DTensor of
its original shape and name. ``Shard(0)`` assumes the layout of ``torch.chunk``. :class:`Rows` is a
``Shard(0)`` that stores the actual rows of each rank. :class:`RowsTensor` is the DTensor, and
:class:`RowsView` its views: operators on them come to ``row_operators.py``, and not to torch's
rules, which assume even rows.

Private API: torch has no public way to describe uneven shards (pytorch#169320), so a method below
overrides one of ``Shard``, which ``torch.distributed.checkpoint`` calls.
``tests/distributed/test_placement.py`` fails when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_cephalo.accelerator.torch_versions import computes_by_itself
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.collectives import all_gather_rows, broadcast, everyone

WHOLE_MODEL = (
    "To save the model or a part of it, enter `with trainer.strategy.full_parameters():` on every"
    " rank, and take `module.backbone.state_dict()` in it: it holds whole tensors on each rank."
)
_EVERY_RANK = (
    "Each rank holds some rows, so every rank must compute it at the same place: not behind `if"
    f" trainer.is_global_zero` or @rank_zero_only. {WHOLE_MODEL}"
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


class Copies(Replicate):
    """``Replicate`` for a parameter without rows; ranks meet before they compare writes to it."""

    def __new__(cls, meet: Meet | None = None) -> Copies:
        return super().__new__(cls)

    def __init__(self, meet: Meet | None = None) -> None:
        super().__init__()
        self.meet = meet

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()


class _ReadsWhole:
    """What leaves torch as the whole tensor, on every rank."""

    full_tensor: Callable[..., torch.Tensor]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # the rules need these classes: importing them above would be circular
        from lightning_cephalo.sharding.row_operators import compute

        return compute(func, tuple(args), dict(kwargs or {}))

    def numpy(self, **options: Any) -> Any:
        """Return an array that cannot be written: it would not reach the rows; collective."""
        array = self.full_tensor().detach().numpy(**options)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the whole tensor as numbers; collective."""
        return self.full_tensor().detach().tolist()

    def __array__(self, *args: Any) -> Any:
        return self.numpy().__array__(*args)

    def __dlpack__(self, **options: Any) -> Any:
        raise UnsupportedError(
            "from_dlpack() of a sharded tensor: no rank has all of its memory. Pass a copy of its"
            " values, `parameter.full_tensor().detach()`, or `parameter[0].clone()` for a part, on"
            " every rank."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.full_tensor().detach().clone()
        if not isinstance(self, nn.Parameter):
            return plain.__reduce_ex__(protocol)
        return nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)


@computes_by_itself
class RowsTensor(_ReadsWhole, DTensor):  # type: ignore[misc]
    """A tensor of which each rank holds some rows, and that computes like the whole one.

    ::

        average.lerp_(parameter, 0.01)      # element-wise: each rank computes its rows
        parameter.abs().max()               # a number of the whole tensor, on every rank
        parameter.T @ parameter             # gathers, and gives a whole plain tensor

    Operators that communicate must run on every rank. [Note: operators on rows] in
    ``row_operators.py`` has the rules. A pickle of it holds the whole tensor, as a plain one.
    """

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the whole tensor, on every rank; collective."""
        if rows_of(self) is not None:
            meet_for("full_tensor()", [self])
        return cast(torch.Tensor, _Whole.apply(self))

    def redistribute(self, *args: Any, **options: Any) -> Any:
        """Refuse: torch would leave the rows where they are."""
        raise UnsupportedError(
            f"redistribute() of a sharded tensor of shape {tuple(self.shape)}, whose rows follow"
            f" the plan. Call `parameter.full_tensor()` on every rank. {WHOLE_MODEL}"
        )

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
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = like_parameter(rows, self) if is_parameter else rows
        return memo[id(self)]


class RowsView(_ReadsWhole, torch.Tensor):  # type: ignore[misc]
    """A view of a sharded tensor (``p[0]``, ``p.T``): whole values, which cannot be written.

    It is valid until the tensor is written.
    """

    base: DTensor
    _shown: torch.Tensor
    _version_of_base: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, of: DTensor | RowsView, values: torch.Tensor) -> RowsView:
        base = of.base if isinstance(of, RowsView) else of
        # torch insists: a view of a tensor from outside of inference mode is one from outside
        with torch.inference_mode(base.is_inference()):
            view = torch.Tensor._make_wrapper_subclass(
                cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
            )
        view.base, view._shown = base, values
        view._version_of_base = (
            of._version_of_base if isinstance(of, RowsView) else _version_of(base)
        )
        return view

    def full_tensor(self) -> torch.Tensor:
        """Return the values, as a plain tensor."""
        if _version_of(self.base) != self._version_of_base:
            raise UnsupportedError(
                f"A view of a sharded tensor, of shape {tuple(self.shape)}, is used after a write"
                " to the tensor, which it does not show. Take the view again after the write, for"
                " example `parameter.view(-1)`."
            )
        return self._shown


class _Whole(torch.autograd.Function):
    """The whole values; their gradient is whole, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return whole_of(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _version_of(base: DTensor) -> int:
    local = local_part(base)
    return 0 if local.is_inference() else local._version


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


def in_rows(own: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's rows, of any dtype, as a tensor that is sharded like another one."""
    spec, shape = like._spec, like.shape[:1] + own.shape[1:]
    if shape != like.shape or own.dtype != like.dtype:
        spec = row_spec(like.device_mesh, like.placements[0], shape, own.dtype)
    return as_dtensor(own, spec)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values as a plain tensor, not copied if this rank holds them all; collective."""
    if isinstance(tensor, RowsView):
        return tensor.full_tensor()
    local, rows = local_part(tensor).detach(), rows_of(tensor)
    if rows is None:
        return local if isinstance(tensor, DTensor) else tensor
    assert isinstance(tensor, DTensor)
    return all_gather_on_mesh(local, rows.sizes, tensor.device_mesh)


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


def meet_for(doing: str, tensors: Iterable[torch.Tensor]) -> None:
    """Wait until all ranks have come to communicate about sharded tensors, if there are any."""
    meet = next((found for one in tensors if (found := meet_of(one)) is not None), None)
    if meet is not None:
        meet(f"computing {doing} of a sharded tensor", _EVERY_RANK)


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


def set_rows(tensor: torch.Tensor, local: torch.Tensor, placement: Placement) -> None:
    """Give a DTensor other rows of the same values: the object stays, nothing is communicated.

    So optimizers and schedulers that hold it need not learn of the change.
    """
    set_local_part(tensor, local)
    assert isinstance(tensor, DTensor)
    tensor._spec = row_spec(tensor.device_mesh, placement, tensor.shape, tensor.dtype)


def like_parameter(data: torch.Tensor, original: torch.Tensor) -> nn.Parameter:
    """Return a parameter with the flag and the tags of another one."""
    parameter = nn.Parameter(data, requires_grad=original.requires_grad)
    # users tag parameters (`weight._no_weight_decay = True`): the tags must survive
    parameter.__dict__.update(original.__dict__)
    return parameter


def full_parameter(sharded: torch.Tensor) -> nn.Parameter:
    """Return a full copy of a sharded parameter with its tags; collective."""
    with torch.no_grad():
        # a rank that holds all rows may get them without a copy
        return like_parameter(whole_of(sharded).clone(), sharded)


def default_mesh(device_type: str, group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """Build the one-dimensional mesh over the ranks of a group; None: over all ranks."""
    # `init_device_mesh` would create another group where gloo serves a machine with other devices
    return DeviceMesh.from_group(group or everyone(), device_type)


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
