"""A flat: parameters laid end to end, sharded in slices over the ranks, gathered for use.

[Note: the tensors of a flat]
``shard``       this rank's slice, in full precision, persistent: the master copy.
``sharded``     per parameter a DTensor view of ``shard``, for optimizers and users.
``full``        all parameters in compute dtype; it has memory only while gathered.
``parameters``  per parameter a view of ``full``, always the same object, for the forward.
``grad_full``   this rank's gradient of all parameters; it exists only while armed. Autograd
                accumulates in place into views of it, so nothing is copied in before a reduce.
``grad_shard``  the reduced gradient of this rank's slice; ``sharded[i].grad`` are views of it.

[Note: gradients in place]
A unit that is updated inside the backward needs its reduced gradient for a moment only. It stays
in the memory of ``grad_full`` then, as this rank's part of it. That buffer is given back behind the
update rather than behind the reduce, and before the next unit is armed: no more buffers are needed.
New memory for it would cost page faults on a CPU in each step.

[Note: residence]
:class:`Residence` says where ``full`` has its memory:

- POOLED, the usual case: borrowed from a pool, like the memory of ``grad_full``. Other flats borrow
  the same memory later.
- OWN: a storage of the flat, which shrinks to nothing between forward and backward. A graph that is
  retained from forward to backward points into ``full`` and must find the parameters there again.
  In between their versions are others: torch refuses to compute with what is freed.
- RESIDENT: a storage of the flat, which stays allocated. The flat is gathered from the forward to
  the backward, and hooks may free it in between. All RESIDENT flats are gathered at the same time
  anyway.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_cephalo.sharding.across_groups import Across
from lightning_cephalo.sharding.buffers import Buffer, BufferPool
from lightning_cephalo.sharding.collectives import (
    all_gather_rows,
    all_reduce,
    broadcast,
    gather_slices,
    reduce_slices,
)
from lightning_cephalo.sharding.layout import Divider, FlatLayout
from lightning_cephalo.sharding.moving import Column, moved
from lightning_cephalo.sharding.padding import Padding
from lightning_cephalo.sharding.placement import (
    Copies,
    Meet,
    Rows,
    as_dtensor,
    local_part,
    row_spec,
    set_local_part,
    set_rows,
)
from lightning_cephalo.sharding.routes import Route, Routing
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import spent
from lightning_cephalo.sharding.staging import HostStage
from lightning_cephalo.sharding.transfers import Pending
from lightning_cephalo.sharding.write_guard import (
    GatheredParameter,
    Lock,
    LockedGradient,
    LockedRows,
    point_to,
)

# by how much the versions of freed parameters differ from those that a graph has noted
FREED = 1 << 30


class Residence(Enum):
    """Kinds of memory for the gathered parameters of a flat; see [Note: residence]."""

    POOLED = "pooled"
    OWN = "own"
    RESIDENT = "resident"


@dataclass(frozen=True)
class ShardingContext:
    """The device, process groups and memory pools of flats.

    Attributes:
        mesh: One-dimensional mesh over all ranks.
        reduce_group: Group of the reduces; a separate group lets gathers and reduces overlap.
        compute_dtype: Dtype of gathered floating-point parameters (None: their own).
        padding: Whether nearly equal slices are padded.
        stage: Moves device tensors over backends that run on the host; None: not needed.
        meet: Waits for all ranks before operators on sharded tensors communicate; None: not.
        reduce_dtype: The dtype that wider gradients travel in; None: their own.
        across: With hybrid sharding, the groups of ranks that each hold the whole state. Mesh,
            gather_group and reduce_group are then those of this rank's group.
    """

    device: torch.device
    mesh: DeviceMesh
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    routing: Routing
    compute_dtype: torch.dtype | None = None
    buffers: BufferPool = field(default_factory=BufferPool)
    gradient_buffers: BufferPool = field(default_factory=BufferPool)
    padding: Padding = field(default_factory=Padding)
    stage: HostStage | None = None
    meet: Meet | None = None
    reduce_dtype: torch.dtype | None = None
    across: Across | None = None

    # read for each unit of each step, where torch looks the group up each time
    @cached_property
    def rank(self) -> int:
        """This process's rank among those that hold the state together."""
        return dist.get_rank(self.gather_group)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks that hold the state together."""
        return dist.get_world_size(self.gather_group)

    @cached_property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1 and self.across is None

    @property
    def everyone(self) -> dist.ProcessGroup:
        """A process group of all ranks."""
        return self.gather_group if self.across is None else self.across.gathers


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the persistent copy: at least fp32 for floating-point parameters."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass
class _Views:
    """Views of a piece of memory, made once for all steps."""

    whole: torch.Tensor
    parameters: list[torch.Tensor]
    slices: _Slices | None = None


@dataclass(frozen=True)
class _Slices:
    """Views of a piece of memory by a layout."""

    whole: torch.Tensor
    own: torch.Tensor
    of_ranks: Sequence[torch.Tensor]


class Flat:
    """Parameters of one dtype that are gathered and reduced together.

    Args:
        originals: The parameters; rank 0's values count, those of other ranks are ignored.
        layout: Cuts between the ranks; None keeps a copy on every rank (0-d parameters, which
            have no rows to shard).
    """

    def __init__(
        self, originals: Sequence[nn.Parameter], layout: FlatLayout | None, context: ShardingContext
    ) -> None:
        self.context = context
        dtype = originals[0].dtype
        self.original_dtype = dtype
        self.master_dtype = master_dtype(dtype)
        compute = context.compute_dtype if dtype.is_floating_point else None
        self.dtype = compute or dtype
        self.shapes = [tuple(original.shape) for original in originals]
        self._numels = [original.numel() for original in originals]
        self.numel = sum(self._numels)
        self._set_layout(layout)
        self.locking = Lock()

        master = torch.empty(self.numel, dtype=self.master_dtype, device=context.device)
        if dist.get_rank(context.everyone) == 0:
            for original, part in zip(originals, master.split(self._numels), strict=True):
                part.copy_(original.detach().reshape(-1))
        if not context.is_alone and self.numel:
            broadcast(master, context.everyone, source=0)
        self._take_slice(master, originals)

        own_full = torch.empty(self.numel, dtype=self.dtype, device=context.device)
        # `.data` gives each parameter a version of its own: it rises only when code writes to it
        self.parameters = [
            _like_parameter(part.view(shape).data, original, GatheredParameter)
            for part, shape, original in zip(
                own_full.split(self._numels), self.shapes, originals, strict=True
            )
        ]
        self._own_views = _Views(own_full, [parameter.data for parameter in self.parameters])
        other = torch.float64 if self.dtype != torch.float64 else torch.float32
        self._of_other_dtype = torch.empty(0, dtype=other, device=context.device)
        self._views = self._own_views
        self._read_versions = [parameter._version for parameter in self.parameters]
        self._shown_flags = [parameter.requires_grad for parameter in self.parameters]
        self._has_stand_in = [False] * len(self.parameters)
        # what gathered parameters show between a forward and its backward
        self._held: list[torch.Tensor | None] | None = None
        # whether a gradient has come behind the reduce
        self.has_late = False
        self._landed: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._own_storage = own_full.untyped_storage()
        self._full_bytes = self._own_storage.nbytes()
        self._own_storage.resize_(0)
        self._shift = 0
        self.residence = Residence.OWN
        self._full_buffer: Buffer | None = None
        self._views_in: WeakKeyDictionary[Buffer, _Views] = WeakKeyDictionary()
        self.grad_full: torch.Tensor | None = None
        self._grad_buffer: Buffer | None = None
        self._grad_views: list[torch.Tensor] = []
        self._grad_views_in: WeakKeyDictionary[Buffer, _Views] = WeakKeyDictionary()
        self._armed_versions: list[int] = []
        self.grad_shard: torch.Tensor | None = None
        self._grad_faces: list[DTensor | None] = []
        # the buffer that a reduced gradient stays in, and its faces by buffer
        self._reduced_in: Buffer | None = None
        self._faces_in: WeakKeyDictionary[Buffer, list[DTensor]] = WeakKeyDictionary()
        self._spent_faces: dict[int, DTensor] = {}

    # -- layout -------------------------------------------------------------------------------

    def _set_layout(self, layout: FlatLayout | None) -> None:
        context, rank = self.context, self.context.rank
        self.layout = layout
        self._reduce_route: Route | None = None
        if layout is None:
            self.sizes: tuple[int, ...] = (self.numel,) * context.world_size
            self._start, self._end = 0, self.numel
            placements: list[Placement] = [Copies(context.meet) for _ in self.shapes]
            self._own_shapes = self.shapes
        else:
            self.sizes = layout.sizes
            self._start, self._end = layout.cuts[rank], layout.cuts[rank + 1]
            if context.across is not None:
                inside = context.routing.route
                self._reduce_route = context.across.route(layout.cuts_of_groups, inside)
            rows = [layout.rows(index) for index in range(len(self.shapes))]
            placements = [Rows(each, context.meet) for each in rows]
            owned = [each[rank] for each in rows]
            self._own_shapes = [
                (end - first, *shape[1:])
                for (first, end), shape in zip(owned, self.shapes, strict=True)
            ]
        # gradients get new faces in each step
        self._specs = [
            row_spec(context.mesh, placement, shape, self.master_dtype)
            for placement, shape in zip(placements, self.shapes, strict=True)
        ]

    def _take_slice(self, master: torch.Tensor, like: Sequence[nn.Parameter]) -> None:
        self.shard = master[self._start : self._end].clone()
        self.sharded = [
            _like_parameter(face, original)
            for face, original in zip(self._faces(self.shard), like, strict=True)
        ]
        self._row_versions = [face._version for face in self.sharded]
        # a DTensor has no memory of its own, except after `parameter.data = plain_tensor`
        self._addresses = [face.data_ptr() for face in self.sharded]
        self._locked: list[LockedRows] = []
        self._unlocked: list[torch.Tensor] = []

    def _faces(self, shard: torch.Tensor) -> list[DTensor]:
        """Return one DTensor per parameter, as views of a slice."""
        parts = shard.split([math.prod(shape) for shape in self._own_shapes])
        described = zip(parts, self._own_shapes, self._specs, strict=True)
        return [as_dtensor(part.view(shape), spec) for part, shape, spec in described]

    def master(self) -> torch.Tensor:
        """Gather the master copy of all parameters; blocking and collective."""
        if self.layout is None or self.context.world_size == 1:
            return self.shard.clone()
        return all_gather_rows(self.shard, self.sizes, self.context.gather_group)

    def change_layout(self, layout: FlatLayout | None, columns: Sequence[Column] = ()) -> None:
        """Move every rank's slice to another layout, in place; collective.

        The sharded parameters stay the same objects. Gradients are forgotten unless they move too.
        """
        old = self.layout
        if old is None or layout is None:
            return
        if (old.cuts, old.cuts_of_groups) == (layout.cuts, layout.cuts_of_groups):
            return
        gradients = [sharded.grad for sharded in self.sharded]
        self.forget_gradient()
        # slices, and faces of gradients, have the old shapes
        self._spent_faces, self._faces_in = {}, WeakKeyDictionary()
        for views in (self._own_views, *self._views_in.values(), *self._grad_views_in.values()):
            views.slices = None
        self._locked = []
        group = self.context.gather_group
        with torch.no_grad():
            self.shard = moved(self.shard, old.cuts, layout.cuts, group)
            self._set_layout(layout)
            placements = [spec.placements[0] for spec in self._specs]
            faces = zip(self.sharded, self._faces(self.shard), placements, strict=True)
            for sharded, face, placement in faces:
                set_rows(sharded, local_part(face), placement)
            for column in columns:
                column.move(old, layout, placements, group)
        have_moved = {id(tensor) for column in columns for tensor in column.tensors}
        for sharded, gradient in zip(self.sharded, gradients, strict=True):
            if gradient is not None and id(gradient) in have_moved:
                sharded.grad = gradient

    # -- parameters ---------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient now; users may freeze and unfreeze."""
        # a loop: every visit asks, and the first parameter answers where none is frozen
        for parameter in self.sharded:  # noqa: SIM110
            if parameter.requires_grad:
                return True
        return False

    @property
    def full(self) -> torch.Tensor:
        """All parameters in compute dtype; see [Note: the tensors of a flat]."""
        return self._views.whole

    @property
    def is_lent(self) -> bool:
        """Whether ``full`` uses memory of a pool now."""
        return self._full_buffer is not None

    def gather(self) -> Pending:
        """Allocate or borrow memory for ``full`` and begin to fill it."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.gather()
        # private: each unit comes here twice a step, and a context manager takes ten times as long
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return self._gather()
        finally:
            torch._C._set_grad_enabled(records)

    def _gather(self) -> Pending:
        if self._full_buffer is None and self._own_storage.nbytes() == 0:
            self._find_memory()
        self._shift_versions(0)
        # saved tensors of a retained graph point into `full`; refilling it with equal values is
        # sound
        slices = self._slices_of(self._views)
        slices.own.copy_(self.shard)
        for parameter, sharded in zip(self.parameters, self.sharded, strict=True):
            if parameter.requires_grad != sharded.requires_grad:
                parameter.requires_grad_(sharded.requires_grad)
        if self.layout is None or self.context.world_size == 1:
            return Pending()
        context = self.context
        return gather_slices(
            slices.whole,
            self.sizes,
            context.gather_group,
            context.padding,
            context.stage,
            context.routing.route,
            slices.of_ranks,
        )

    def _find_memory(self) -> None:
        if self.residence is not Residence.POOLED or not self.numel:
            self._own_storage.resize_(self._full_bytes)
            return
        buffers = self.context.buffers
        self._full_buffer = buffer = buffers.take(self._full_bytes, self.context.device)
        views = self._views_in.get(buffer)
        if views is None:
            memory = buffer.view(self.numel, self.dtype)
            views = self._views_in[buffer] = _Views(memory, self._cut(memory))
        self._point_to(views)

    def _cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter."""
        parts = zip(memory.split(self._numels), self.shapes, strict=True)
        return [part.view(shape) for part, shape in parts]

    def _slices_of(self, views: _Views) -> _Slices:
        if views.slices is None:
            whole = views.whole.data
            of_ranks = () if self.layout is None else whole.split(list(self.sizes))
            views.slices = _Slices(whole, whole[self._start : self._end], of_ranks)
        return views.slices

    def _point_to(self, views: _Views) -> None:
        self._views = views
        for parameter, view in zip(self.parameters, views.parameters, strict=True):
            point_to(parameter, view)

    def free(self) -> None:
        """Free the memory of ``full``, except for a RESIDENT flat."""
        if self._full_buffer is None:
            if self.residence is not Residence.RESIDENT:
                self.release()
                self.outdate()
            return
        self.outdate()
        self._point_to(self._own_views)
        buffer, self._full_buffer = self._full_buffer, None
        self.context.buffers.give(buffer)

    def release(self) -> None:
        """Free the flat's own storage of ``full``; ``full`` must not borrow a pool's memory."""
        assert self._full_buffer is None
        self._own_storage.resize_(0)

    def _shift_versions(self, shift: int) -> None:
        """Let graphs raise that need the values while they are freed; see [Note: residence].

        Private API, as in torch's own FSDP: versions cannot be put back otherwise.
        """
        change, self._shift = shift - self._shift, shift
        if change:
            versions = [parameter._version + change for parameter in self.parameters]
            torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters), tuple(versions))

    def outdate(self) -> None:
        """Let graphs raise that still need the gathered values, which are freed."""
        self._shift_versions(FREED)

    def written(self) -> list[bool]:
        """Per gathered parameter, whether code has written to it since the last call."""
        before, self._read_versions = self._read_versions, self.versions
        return _differences(self._read_versions, before)

    def renew_accumulators(self) -> list[Node]:
        """Let graphs from now on add to gradients in place, and not to graphs of before.

        The engine sums what comes to one node of a parameter, in memory of its own, until all of it
        is there. A parameter that gets another dtype for a moment has another node then.

        Returns:
            On a device, the nodes; hold them while the graph is made. A node adds on the stream on
            which it was made: that of this call, which reduces follow, and no stream of the user's.
        """
        for parameter, view in zip(self.parameters, self._views.parameters, strict=True):
            if parameter.requires_grad:
                point_to(parameter, self._of_other_dtype)
                point_to(parameter, view)
        if self._of_other_dtype.is_cpu:
            return []
        return [get_gradient_edge(p).node for p in self.parameters if p.requires_grad]

    # -- steps with several phases ------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """Per gathered parameter, a number that rises whenever its values change."""
        return [parameter._version - self._shift for parameter in self.parameters]

    def rows_written(self) -> list[bool]:
        """Per sharded parameter, whether code has written to it since the last call.

        Raises the versions of their gathered ones, so that graphs that need old values are refused.
        """
        before = self._row_versions
        self._row_versions = [sharded._version for sharded in self.sharded]
        flags = _differences(self._row_versions, before)
        self._raise_versions(flags)
        return flags

    def _raise_versions(self, flags: Sequence[bool]) -> None:
        for index, flag in enumerate(flags):
            if flag:
                torch.autograd.graph.increment_version(self.parameters[index])
                self._read_versions[index] += 1

    def updated(self, parameters: Container[int]) -> None:
        """Refuse retained graphs: an optimizer may have changed these (ids of sharded ones)."""
        self._raise_versions(
            [id(sharded) in parameters and sharded.grad is not None for sharded in self.sharded]
        )

    def show_flags(self, flags: Sequence[bool]) -> None:
        """Set which gathered parameters need gradients, without a change of the sharded ones."""
        for parameter, flag in zip(self.parameters, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        self._shown_flags = list(flags)

    def show_gradients(self, names: Sequence[str]) -> None:
        """Give gathered parameters a stand-in for the gradient that their shards hold.

        Code may set it to None, as ``module.zero_grad()`` does. All other use is refused by name.
        Call it behind a gather and before the code, whose changes :meth:`adopt` finds.
        """
        self._shown_flags = [parameter.requires_grad for parameter in self.parameters]
        for name, parameter, sharded in zip(names, self.parameters, self.sharded, strict=True):
            if sharded.grad is not None:
                parameter.grad = LockedGradient(parameter, name)
        self._has_stand_in = [parameter.grad is not None for parameter in self.parameters]

    def hide_gradients(self) -> None:
        """Remove the stand-ins of :meth:`show_gradients`."""
        for parameter, has_stand_in in zip(self.parameters, self._has_stand_in, strict=True):
            if has_stand_in:
                parameter.grad = None
        self._has_stand_in = [False] * len(self.parameters)

    def adopt(self) -> None:
        """Pass on to the shards what code has done to gathered parameters.

        Code may have changed ``requires_grad``, and set gradients to None.
        """
        for index, (parameter, sharded) in enumerate(
            zip(self.parameters, self.sharded, strict=True)
        ):
            shown = self._shown_flags[index]
            if parameter.requires_grad != shown:
                sharded.requires_grad_(parameter.requires_grad)
            elif sharded.requires_grad != shown:
                parameter.requires_grad_(sharded.requires_grad)
            self._shown_flags[index] = parameter.requires_grad
            if self._has_stand_in[index] and parameter.grad is None:
                sharded.grad = None
                self._has_stand_in[index] = False

    @property
    def own_gradient(self) -> torch.Tensor | None:
        """The reduced gradient, if it has memory of its own; see [Note: gradients in place]."""
        return self.grad_shard if self._reduced_in is None else None

    # -- between a forward and its backward ---------------------------------------------------

    def show_held_gradients(self) -> None:
        """Show on gathered parameters the gradients that their shards hold, as on one device.

        The gradients of the running step, which add up there, stay hidden. Another call passes on
        what code has assigned since then, to either of both.
        """
        before = self._held or [sharded.grad for sharded in self.sharded]
        if self._held is None:
            if self.grad_full is None:  # the loss's backward may have come here already
                self._landed = [parameter.grad for parameter in self.parameters]
            for parameter, held in zip(self.parameters, before, strict=True):
                parameter.grad = held
        for parameter, sharded, held in zip(self.parameters, self.sharded, before, strict=True):
            if parameter.grad is not held:
                sharded.grad = parameter.grad
            elif sharded.grad is not held:
                parameter.grad = sharded.grad
        self._held = [sharded.grad for sharded in self.sharded]

    def hide_held_gradients(self) -> None:
        """Let the gradients of the running step add up again."""
        if self._held is None:
            return
        self.show_held_gradients()
        landed, self._landed = self._landed, [None] * len(self.parameters)
        self._held = None
        for parameter, gradient in zip(self.parameters, landed, strict=True):
            parameter.grad = gradient
        for parameter, view in zip(self.parameters, self._grad_views, strict=False):
            if parameter.requires_grad:
                parameter.grad = view

    def lock(self, names: Sequence[str]) -> None:
        """Refuse all use of the sharded parameters until :meth:`unlock`."""
        self.locking.is_on = True
        self._unlocked = [local_part(face) for face in self.sharded]
        if not self._locked:
            pairs = zip(self._unlocked, names, strict=True)
            self._locked = [LockedRows(rows, name) for rows, name in pairs]
        for face, locked in zip(self.sharded, self._locked, strict=True):
            set_local_part(face, locked)

    def unlock(self) -> None:
        """Allow use of the sharded parameters again."""
        self.locking.is_on = False
        for face, rows in zip(self.sharded, self._unlocked, strict=True):
            set_local_part(face, rows)
        self._unlocked = []

    def assigned(self) -> list[bool]:
        """Per sharded parameter, whether plain values were assigned to its ``data``."""
        return _differences([face.data_ptr() for face in self.sharded], self._addresses)

    def plain_parameters(self) -> list[nn.Parameter]:
        """Return full parameters on the CPU in their original dtype; collective."""
        master = self.master().to("cpu", self.original_dtype)
        return [
            _like_parameter(part.view(shape).clone(), sharded)
            for part, shape, sharded in zip(
                master.split(self._numels), self.shapes, self.sharded, strict=True
            )
        ]

    # -- gradients ----------------------------------------------------------------------------

    def arm(self) -> None:
        """Give autograd zeroed views of ``grad_full`` to accumulate into."""
        dtype = self.master_dtype if self.dtype.is_floating_point else self.dtype
        if self._reduced_in is not None:  # of a step that has failed
            self.forget_gradient()
        if self._grad_buffer is None:
            nbytes = self.numel * dtype.itemsize
            self._grad_buffer = self.context.gradient_buffers.take(nbytes, self.context.device)
        buffer = self._grad_buffer
        views = self._grad_views_in.get(buffer)
        if views is None:
            memory = buffer.view(self.numel, dtype)
            # `.data` gives each view a version counter of its own, which rises only when a
            # gradient lands: this finds unused parameters without a hook
            views = _Views(memory, [part.data for part in self._cut(memory)])
            self._grad_views_in[buffer] = views
        self.grad_full, self._grad_views = views.whole, views.parameters
        self.grad_full.zero_()
        self._armed_versions = [view._version for view in self._grad_views]
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            if parameter.requires_grad:
                if parameter.dtype != view.dtype:
                    parameter.grad_dtype = view.dtype
                parameter.grad = view

    def arm_late(self) -> None:
        """Do as :meth:`arm`, and keep gradients that have landed before."""
        landed = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.arm()
        for view, gradient in zip(self._grad_views, landed, strict=True):
            if gradient is not None:
                view.add_(gradient)

    @property
    def has_landed(self) -> bool:
        """Whether gradients have come to parameters that are not armed."""
        return self.grad_full is None and self._held is None and self._has_landed()

    def _has_landed(self) -> bool:
        # a loop: each step asks several times, and mostly the answer is no
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and not isinstance(gradient, LockedGradient):
                return True
        return False

    def used(self) -> list[bool]:
        """Per parameter, whether a gradient has landed on this rank since :meth:`arm`."""
        return [
            view._version != version
            for view, version in zip(self._grad_views, self._armed_versions, strict=True)
        ]

    def reduce(self, scale: float, *, in_place: bool = False) -> Pending:
        """Begin to sum ``grad_full`` over the ranks, times ``scale``, into ``grad_shard``.

        Adds to gradients that the sharded parameters still hold (accumulation over steps).

        Args:
            in_place: Whether the sum may stay in the memory of ``grad_full``, which is given back
                with it, where there are no such gradients; see [Note: gradients in place].
        """
        assert self.grad_full is not None and self._grad_buffer is not None
        context = self.context
        for parameter in self.parameters:
            parameter.grad = None
        accumulate = any(parameter.grad is not None for parameter in self.sharded)
        if self.grad_shard is None:
            self.grad_shard = self._gradient_memory(in_place and not accumulate)
        if accumulate:
            self._keep_only_held_gradients()
        if context.is_alone:
            pending = Pending()
            self._deliver_local(scale, accumulate)
        elif self.layout is None:
            pending = self._all_reduce(scale, accumulate)
        else:
            sent, slices = self.grad_full, None
            if context.reduce_dtype is None:
                slices = self._slices_of(self._grad_views_in[self._grad_buffer]).of_ranks
            else:
                sent = sent.to(self._sent_dtype_of(sent.dtype))
            pending = reduce_slices(
                sent,
                self.sizes,
                context.reduce_group,
                self.grad_shard,
                scale=scale,
                accumulate=accumulate,
                padding=context.padding,
                stage=context.stage,
                route=self._reduce_route or context.routing.route,
                slices=slices,
            )
        return pending

    def _gradient_memory(self, in_place: bool) -> torch.Tensor:
        """Return memory for the reduced gradient: this rank's part of the full one, or its own."""
        assert self.grad_full is not None and self._grad_buffer is not None
        if not in_place:
            # every element will be written: zeros would cost another pass
            size, device = self._end - self._start, self.context.device
            own = torch.empty(size, dtype=self.grad_full.dtype, device=device)
            self._grad_faces = list(self._faces(own))
            return own
        self._reduced_in = buffer = self._grad_buffer
        part = self.grad_full[self._start : self._end]
        faces = self._faces_in.get(buffer)
        if faces is None:
            faces = self._faces_in[buffer] = self._faces(part)
        self._grad_faces = list(faces)
        return part

    def _deliver_local(self, scale: float, accumulate: bool) -> None:
        assert self.grad_full is not None and self.grad_shard is not None
        if accumulate:
            self.grad_shard.add_(self.grad_full, alpha=scale)
        else:
            torch.mul(self.grad_full, scale, out=self.grad_shard)

    def _all_reduce(self, scale: float, accumulate: bool) -> Pending:
        assert self.grad_full is not None
        across = self.context.across
        group = self.context.reduce_group if across is None else across.reduces
        pending = all_reduce(self.grad_full, group)
        pending.finish = lambda: self._deliver_local(scale, accumulate)
        return pending

    def _keep_only_held_gradients(self) -> None:
        cut_gradients(self.sharded)
        for parameter, face in zip(self.sharded, self._grad_faces, strict=True):
            assert face is not None
            if parameter.grad is None:
                local_part(face).zero_()
            elif parameter.grad is not face:
                local_part(face).copy_(local_part(parameter.grad))

    @property
    def received_bytes(self) -> int:
        """Bytes that a reduce of this rank takes in addition; see ``reduce_slices``."""
        if self.layout is None or self.context.is_alone:
            return 0
        received = self.context.routing.received_numel(
            self.sizes, self.context.rank, self._reduce_route
        )
        nbytes = received * self.sent_dtype.itemsize
        if self.sent_dtype != self.master_dtype:  # what is sent, and the sum
            nbytes += self.numel * self.sent_dtype.itemsize
            nbytes += (self._end - self._start) * self.master_dtype.itemsize
        return nbytes

    @property
    def sent_dtype(self) -> torch.dtype:
        """Dtype in which gradients travel."""
        return self._sent_dtype_of(self.master_dtype)

    def _sent_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a dtype travel: never a wider one."""
        sent = self.context.reduce_dtype
        is_rounded = sent is not None and dtype.is_floating_point and sent.itemsize < dtype.itemsize
        return sent if sent is not None and is_rounded else dtype

    def look_for_late(self) -> None:
        """Note gradients that have come behind the reduce, before :meth:`disarm`."""
        self.has_late = self.has_late or self._has_landed()

    def disarm(self) -> None:
        """Give back the memory of ``grad_full``; call it after the wait for its reduce."""
        self._held = None
        for parameter in self.parameters:
            parameter.grad = None
        self.grad_full, self._grad_views = None, []
        if self._grad_buffer is not None:
            buffer, self._grad_buffer = self._grad_buffer, None
            if buffer is not self._reduced_in:
                self.context.gradient_buffers.give(buffer)

    def forget_gradient(self) -> None:
        """Release ``grad_shard``; the next reduce creates it again."""
        for parameter in self.sharded:
            parameter.grad = None
        self._release_gradient([])

    def _release_gradient(self, faces: list[DTensor | None]) -> None:
        """Give the memory of ``grad_shard`` back, and leave these gradients."""
        self.grad_shard, self._grad_faces = None, faces
        if self._reduced_in is not None:
            buffer, self._reduced_in = self._reduced_in, None
            if buffer is not self._grad_buffer:
                self.context.gradient_buffers.give(buffer)

    def hold_gradient(self) -> None:
        """Make memory for ``grad_shard`` and show it, as a reduce does; its values are ones."""
        if self.grad_shard is None:
            size, dtype = self._end - self._start, self.master_dtype
            own = torch.ones(size, dtype=dtype, device=self.context.device)
            self.grad_shard, self._grad_faces = own, list(self._faces(own))
        self.publish([True] * len(self.sharded))

    def drop_gradient(self) -> None:
        """Release a ``grad_shard`` of which nobody shall see anything."""
        self._release_gradient([None] * len(self.sharded))

    def publish(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank used; leave it for the others.

        Parameters whose gradients were given back stay as they are.
        """
        for parameter, face, is_used in zip(self.sharded, self._grad_faces, used, strict=True):
            if face is not None and is_used and parameter.requires_grad:
                parameter.grad = face

    def landed(self) -> list[bool]:
        """Per parameter, whether the reduced gradient of this rank's rows is not all zero.

        Then some rank has used the parameter. Waits for the device.
        """
        rows = [local_part(face) for face in self._grad_faces if face is not None]
        counts = torch.stack([row.count_nonzero() for row in rows])
        return [count > 0 for count in counts.tolist()]

    def give_back(
        self, updated: Sequence[bool], names: Sequence[str], *, keeps_unused: bool = True
    ) -> None:
        """Release the memory of gradients that have updated their parameters.

        Gradients of other parameters move to memory of their own.

        Args:
            keeps_unused: Whether to keep gradients that are not published yet.
        """
        faces: list[DTensor | None] = []
        for index, parameter in enumerate(self.sharded):
            face = self._grad_faces[index] if self._grad_faces else None
            kept = face
            if updated[index]:
                kept = None
                if face is not None:
                    if index not in self._spent_faces:
                        self._spent_faces[index] = spent(face, names[index])
                    parameter.grad = self._spent_faces[index]
            elif face is not None and (keeps_unused or parameter.grad is face):
                kept = as_dtensor(local_part(face).clone(), face._spec)
                if parameter.grad is face:
                    parameter.grad = kept
            else:
                kept = None
            faces.append(kept)
        self._release_gradient(faces)


def _differences(now: Sequence[int], before: Sequence[int]) -> list[bool]:
    return [one != other for one, other in zip(now, before, strict=True)]


def _like_parameter(
    data: torch.Tensor, original: nn.Parameter, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    parameter = kind(data, requires_grad=original.requires_grad)
    # users tag parameters (`weight._no_weight_decay = True`): the tags must survive
    parameter.__dict__.update(original.__dict__)
    return parameter


def divide_flat(shapes: Sequence[tuple[int, ...]], divider: Divider) -> FlatLayout | None:
    """Return the layout of parameters of these shapes; None for scalars: every rank holds them."""
    if any(len(shape) == 0 for shape in shapes):
        return None
    return divider.divide(shapes)
