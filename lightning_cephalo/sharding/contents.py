"""What a flat consists of, how the ranks cut it, and views of memory that holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lightning_cephalo.sharding.buffers import Buffer
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.layout import Divider, FlatLayout
from lightning_cephalo.sharding.placement import Copies, Rows, as_dtensor, row_spec
from lightning_cephalo.sharding.routes import Route


@dataclass(frozen=True)
class Contents:
    """The parameters of a flat, end to end."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    original_dtype: torch.dtype
    context: ShardingContext
    _memory_in: WeakKeyDictionary[Buffer, Memory] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(self.numels)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of gathered parameters."""
        compute = self.context.compute_dtype
        return compute if compute and self.original_dtype.is_floating_point else self.original_dtype

    @cached_property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the master copy and of gradients: at least fp32 for floating-point ones."""
        narrow = self.original_dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if narrow else self.original_dtype

    @cached_property
    def sent_dtype(self) -> torch.dtype:
        """Dtype in which gradients travel: never a wider one than their own."""
        sent, own = self.context.reduce_dtype, self.master_dtype
        narrower = sent is not None and own.is_floating_point and sent.itemsize < own.itemsize
        return sent if sent is not None and narrower else own

    @property
    def full_bytes(self) -> int:
        """Bytes of gathered parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def master_bytes(self) -> int:
        """Bytes of a master copy, or a gradient, of all parameters."""
        return self.numel * self.master_dtype.itemsize

    def layout(self, divider: Divider) -> FlatLayout | None:
        """Cut them; None for 0-d parameters, which have no rows: every rank holds them."""
        return None if () in self.shapes else divider.divide(self.shapes)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return a view of each parameter in memory that holds all of them."""
        parts = zip(memory.split(self.numels), self.shapes, strict=True)
        return [part.view(shape) for part, shape in parts]

    def memory_in(self, buffer: Buffer, dtype: torch.dtype) -> Memory:
        """Return the views of a buffer, in which a flat has always the same dtype."""
        if buffer not in self._memory_in:
            self._memory_in[buffer] = Memory(self, buffer.view(self.numel, dtype))
        return self._memory_in[buffer]


class Cut:
    """How the ranks cut a flat; without a layout, each of them holds all of it."""

    def __init__(self, contents: Contents, divider: Divider) -> None:
        context, rank = contents.context, contents.context.rank
        self.layout = layout = contents.layout(divider)
        # of reduces over groups of ranks that each hold the whole state
        self.route: Route | None = None
        self.sizes: tuple[int, ...] = (contents.numel,) * context.world_size
        self.own, self._own_shapes = slice(0, contents.numel), contents.shapes
        self.placements: list[Placement] = [Copies(context.meet)] * len(contents.shapes)
        if layout is not None:
            self.sizes, self.own = layout.sizes, slice(*layout.cuts[rank : rank + 2])
            if context.across is not None:
                self.route = context.across.route(layout.cuts_of_groups)
            rows = [Rows(layout.rows(index), context.meet) for index in range(len(layout.slots))]
            pairs = zip(rows, contents.shapes, strict=True)
            self._own_shapes = tuple((each.sizes[rank], *shape[1:]) for each, shape in pairs)
            self.placements = list(rows)
        mesh, dtype = context.mesh, contents.master_dtype
        described = zip(self.placements, contents.shapes, strict=True)
        self._specs = [row_spec(mesh, placement, shape, dtype) for placement, shape in described]

    def faces(self, own: Tensor) -> list[DTensor]:
        """Return a DTensor per parameter, as views of this rank's slice."""
        parts = own.split([math.prod(shape) for shape in self._own_shapes])
        described = zip(parts, self._own_shapes, self._specs, strict=True)
        return [as_dtensor(part.view(shape), spec) for part, shape, spec in described]


class Memory:
    """Views of a piece of memory that holds a flat, made once for all steps."""

    def __init__(self, contents: Contents, whole: Tensor) -> None:
        # `.data` gives each view a version counter of its own, which rises only when it is written:
        # this finds unused parameters without a hook
        self.whole, self.parameters = whole, [part.data for part in contents.views(whole)]
        self._slices: Slices | None = None

    def slices(self, cut: Cut) -> Slices:
        """Return its views by a cut."""
        if self._slices is None or self._slices.cut is not cut:
            self._slices = Slices(cut, self.whole)
        return self._slices


class Slices:
    """Views of a piece of memory by a cut."""

    def __init__(self, cut: Cut, whole: Tensor) -> None:
        self.cut, self.own = cut, whole[cut.own]
        self.of_ranks = () if cut.layout is None else whole.split(list(cut.sizes))

    @cached_property
    def faces(self) -> list[DTensor]:
        """A DTensor per parameter, as views of this rank's slice."""
        return self.cut.faces(self.own)
