"""A sharded model: its units, their shards, and the executor that runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.plan.state_groups import members_of
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.across_groups import Across
from lightning_cephalo.sharding.buffers import BufferPool
from lightning_cephalo.sharding.collectives import broadcast
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import UnitKind, UnitMembers, find_units
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.layout import Divider, GroupDivider
from lightning_cephalo.sharding.materialise import initialise_members
from lightning_cephalo.sharding.moving import Column
from lightning_cephalo.sharding.padding import Padding, slot_numel
from lightning_cephalo.sharding.placement import Meet, default_mesh, whole_of
from lightning_cephalo.sharding.staging import HostStage
from lightning_cephalo.sharding.unit import Unit


@dataclass(frozen=True)
class Dtypes:
    """Dtypes other than the parameters' own; None: their own.

    Attributes:
        compute: Of gathered floating-point parameters.
        reduce: That gradients travel in.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


OWN_DTYPES = Dtypes()


@dataclass(frozen=True)
class PaddedBytes:
    """Bytes of the buffers in which padded slices travel, on every rank."""

    gathers: int
    reduces: int

    @property
    def total(self) -> int:
        return self.gathers + self.reduces


class ShardedModel:
    """Shards a model over the ranks and runs its steps, once ``features.install`` has come.

    Args:
        module: The model; every rank gets rank 0's values. Parameters may be on the meta device.
        fractions: Each rank's share of the state; or a function that returns them, given the units.
        dtypes: Those that parameters compute in, and gradients travel in.
        state_groups: Hybrid sharding: the group of every rank; each holds the whole state. Empty:
            all ranks hold it together.

    Attributes:
        members: The ranks of each group; one group of all without hybrid sharding.
        meet: Waits until all ranks have come to communicate outside of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        accelerator: Accelerator,
        fractions: Sequence[float] | Callable[[Sequence[UnitMembers]], Sequence[float]],
        units: Sequence[type[nn.Module] | str] | None = None,
        dtypes: Dtypes = OWN_DTYPES,
        state_groups: Sequence[int] = (),
    ) -> None:
        self.module = module
        self.accelerator = accelerator
        device = accelerator.device
        self.control = groups.control
        self.backend = backend_of(groups.gather)
        self.compute_dtype = dtypes.compute
        self.state_groups = tuple(state_groups)
        self.members = members_of(self.state_groups, groups.control.world_size)
        rows, gather_group, reduce_group, across = None, groups.gather, groups.reduce, None
        if self.state_groups:
            own = groups.of_state(self.members)
            rows, gather_group, reduce_group = own.rows, own.gather, own.reduce
            across = Across(self.members, groups.gather, groups.reduce)
        self._context = context = ShardingContext(
            device,
            default_mesh(device.type, rows),
            gather_group,
            reduce_group,
            dtypes.compute,
            stage=self._made_stage(),
            meet=groups.meeting.meet,
            reduce_dtype=dtypes.reduce,
            across=across,
        )
        self.units: list[Unit] = []
        # code may read the dtype of what is away, which is that of the rows
        with_ends = dtypes.compute is None
        members_of_units = find_units(module, units, with_ends=with_ends)
        self.fractions = tuple(fractions(members_of_units) if callable(fractions) else fractions)
        divider = self._divider(self.fractions)
        # weak: only what holds them already keeps the originals alive
        self._originals: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for members in members_of_units:
            for parameter, owners in members.parameters:
                self._originals[parameter] = owners[0].name
            is_source = groups.control.rank == 0
            members = initialise_members(module, members, materialise=is_source)
            self.units.append(Unit(members, divider, context))
        self._cast_buffers: list[tuple[nn.Module, str, torch.dtype]] = []
        self._move_buffers(dtypes.compute)
        self.meet: Meet = groups.meeting.meet
        self.executor = Executor(self.units, groups.control, accelerator, meet=self.meet)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def place(self) -> int:
        """This rank's number among those that hold the state together."""
        return self._context.rank

    @property
    def padding(self) -> Padding:
        return self._context.padding

    @property
    def stage(self) -> HostStage | None:
        """Moves device tensors over backends that run on the host; None: not needed."""
        return self._context.stage

    def _made_stage(self) -> HostStage | None:
        is_host_memory = self.accelerator.holds(torch.empty(0))
        if self.backend.runs_on_device or is_host_memory:
            return None
        return HostStage(self.accelerator)

    @property
    def summands(self) -> int:
        """The most summands that a reduce receives for a rank's slice; 1 if the backend adds up."""
        if self.backend.runs_on_device:
            return 1
        if not self.state_groups:
            return self.control.world_size
        # of its own group, and the sum of each group
        return max(map(len, self.members)) + len(self.members)

    def _divider(self, fractions: Sequence[float]) -> Divider:
        if not self.state_groups:
            return Divider(fractions)
        shares = [[fractions[rank] for rank in members] for members in self.members]
        rank = self.control.rank
        own = next(n for n, members in enumerate(self.members) if rank in members)
        return GroupDivider(shares, own)

    def _move_buffers(self, compute_dtype: torch.dtype | None) -> None:
        """Move buffers to the device and the compute dtype, with rank 0's values."""
        for inner in self.module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is None:
                    continue
                dtype = compute_dtype if buffer.is_floating_point() and compute_dtype else None
                if dtype is not None and dtype != buffer.dtype:
                    self._cast_buffers.append((inner, name, buffer.dtype))
                inner._buffers[name] = buffer.to(self.device, dtype)
            # metrics hold their state in plain attributes, which only their own `_apply` moves
            if type(inner)._apply is not nn.Module._apply and not list(inner.parameters()):
                inner.to(self.device)
        if dist.get_world_size() == 1:
            return
        for buffer in self.module.buffers():
            if buffer.numel():
                broadcast(buffer, None, 0)

    # -- sizes --------------------------------------------------------------------------------

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def of_kind(self, kind: UnitKind) -> list[Unit]:
        """Return the units of one kind, in the order of their indices."""
        return [unit for unit in self.units if unit.kind is kind]

    @property
    def parameter_count(self) -> int:
        return sum(flat.contents.numel for flat in self.flats)

    @property
    def parameter_pools(self) -> tuple[BufferPool, ...]:
        return tuple({id(f.context.buffers): f.context.buffers for f in self.flats}.values())

    @property
    def gradient_pools(self) -> tuple[BufferPool, ...]:
        pools = [flat.context.gradient_buffers for flat in self.flats]
        return tuple({id(pool): pool for pool in pools}.values())

    @property
    def buffer_pools(self) -> tuple[BufferPool, ...]:
        padded = self.padding.gathers, self.padding.reduces
        return (*self.parameter_pools, *self.gradient_pools, *padded)

    def buffers(self) -> list[Tensor]:
        """Return an empty tensor on the storage of each pooled buffer."""
        return [b.view(0, torch.uint8) for pool in self.buffer_pools for b in pool.buffers]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of full buffers at the peak of a step, on every rank.

        Parameters: the root unit and two others (one in use, one being gathered). Gradients: the
        root unit and two others (one accumulating, one being reduced), and copies for rounding.
        Embeddings are there before heads.
        """
        return self.gathered_parameter_bytes + self.gathered_gradient_bytes

    @property
    def gathered_parameter_bytes(self) -> int:
        """The part of :attr:`gathered_bytes` that holds full parameters."""
        return self._buffers_at_peak()[0]

    def _buffers_at_peak(self) -> tuple[int, int]:
        """Return the bytes of parameters and gradients when both together are the most."""
        root = self.units[ROOT]
        first, last = (
            [sum(u.full_bytes for u in units), sum(u.gradient_bytes for u in units)]
            for units in map(self.of_kind, (UnitKind.EMBEDDING, UnitKind.HEAD))
        )
        blocks = self.of_kind(UnitKind.BLOCK)
        full = sum(sorted((unit.full_bytes for unit in blocks), reverse=True)[:2])
        gradients = sorted((unit.gradient_bytes for unit in blocks), reverse=True)[:2]
        moments = (
            (full + first[0], 0),  # embeddings are gathered
            (full + last[0], last[1]),  # the loss
            (full, last[1] + sum(gradients[:1])),  # the last block's backward
            (full, sum(gradients)),
            (full, sum(gradients) + first[1]),  # the first unit's backward
        )
        most = max(moments, key=sum)
        return root.full_bytes + most[0], root.gradient_bytes + most[1]

    @property
    def unresharded_bytes(self) -> int:
        """Bytes of full parameters in addition, where units stay gathered until the backward."""
        return sum(unit.full_bytes for unit in self.units) - self.gathered_parameter_bytes

    @property
    def gathered_gradient_bytes(self) -> int:
        """The part of :attr:`gathered_bytes` that holds full gradients."""
        pairs = [(unit.sent_gradient_bytes, unit.gradient_bytes) for unit in self.units]
        sent = max(narrow if narrow < whole else 0 for narrow, whole in pairs)
        return self._buffers_at_peak()[1] + sent

    def padded_bytes(self) -> PaddedBytes:
        """Return the bytes of the buffers in which even shares travel padded; 0 if they do not."""
        world_size = len(self.fractions)
        if not self.backend.runs_on_device or world_size == 1:
            return PaddedBytes(0, 0)
        divider = Divider([1.0 / world_size] * world_size)
        gathers, reduces = [], []
        for unit in self.units:
            slots = [_slot(flat, divider) for flat in unit.flats]
            padded = [(flat, slot) for flat, slot in zip(unit.flats, slots, strict=True) if slot]
            gathers.append(
                [world_size * slot * flat.contents.dtype.itemsize for flat, slot in padded]
            )
            reduces.append(
                [
                    (world_size + 1) * slot * flat.contents.sent_dtype.itemsize
                    for flat, slot in padded
                    if flat.trainable
                ]
            )
        # a unit is gathered while another waits for its gather; reduces do not overlap
        return PaddedBytes(_lent_bytes(gathers, at_once=2), _lent_bytes(reduces, at_once=1))

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Hold the parameters of all units in a ``with`` block; collective at its beginning."""
        self.executor.reshard()
        try:
            with self.executor.hooks.keeping_all():
                yield
        finally:
            self.release_buffers()

    # -- shards -------------------------------------------------------------------------------

    def change_fractions(
        self,
        fractions: Sequence[float],
        columns_of: Callable[[Flat], Sequence[Column]] = lambda flat: (),
    ) -> None:
        """Move the shards to other fractions between two steps, in place; collective.

        The sharded parameters stay the same objects; their gradients are forgotten. ``columns_of``
        returns what has the rows of a flat's parameters and moves with them.
        """
        self.release_buffers()
        self.fractions = tuple(fractions)
        divider = self._divider(fractions)
        for flat in self.flats:
            flat.change_layout(divider, columns_of(flat))

    def bytes_to_move(
        self, fractions: Sequence[float], columns_of: Callable[[Flat], Sequence[Column]]
    ) -> int:
        """Return the bytes that this rank needs in addition to move its rows.

        These are what its share grows by, and the copies of one flat, as flats move one by one.
        """
        divider, rank = self._divider(fractions), self.place
        grows, copies = 0, [0]
        for flat in self.flats:
            old, new = flat.cut.layout, flat.contents.layout(divider)
            if old is None or new is None or old.cuts == new.cuts:
                continue
            before, after = old.sizes[rank], new.sizes[rank]
            itemsizes = [column.dtype.itemsize for column in columns_of(flat)]
            grows += (after - before) * (flat.contents.master_dtype.itemsize + sum(itemsizes))
            # a column's slices are joined before they travel
            copies += [after * flat.contents.master_dtype.itemsize]
            copies += [(before + after) * itemsize for itemsize in itemsizes]
        return max(grows, 0) + max(copies)

    def release_buffers(self) -> None:
        """Free gathered parameters and all pooled memory, to make room for full parameters."""
        self.executor.reshard()
        for flat in self.flats:
            flat.gathered.release()
        for pool in self.buffer_pools:
            pool.release()
        if self.stage is not None:
            self.stage.release()

    def restore_full(self) -> None:
        """Remove the hooks and restore plain full parameters on the CPU; collective."""
        self.release_buffers()
        self.executor.hooks.uninstall()
        originals = {name: original for original, name in self._originals.items()}
        for flat in self.flats:
            flat.restore(originals)
        for inner, name, dtype in self._cast_buffers:
            buffer = inner._buffers.get(name)
            if buffer is not None:
                inner._buffers[name] = buffer.to(dtype=dtype)
        self.module.cpu()

    def abandon(self) -> None:
        """Remove the hooks without communicating, after a failure."""
        self.executor.hooks.uninstall()


def _slot(flat: Flat, divider: Divider) -> int | None:
    layout = flat.contents.layout(divider)
    return None if layout is None else slot_numel(layout.sizes)


def _lent_bytes(bytes_of_units: Sequence[Sequence[int]], at_once: int) -> int:
    """Return the bytes of a pool whose buffers have grown to the largest size that is asked for."""
    largest = max((size for unit in bytes_of_units for size in unit), default=0)
    counts = sorted((len(unit) for unit in bytes_of_units), reverse=True)
    return largest * sum(counts[:at_once])


def to_full(value: Tensor, wanted: bool) -> Tensor | None:
    """Return the full tensor of a DTensor on the CPU, if it is ``wanted`` here; collective."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            full = whole_of(value)
        return full.cpu() if wanted else None
    return value.detach().cpu() if wanted else None
