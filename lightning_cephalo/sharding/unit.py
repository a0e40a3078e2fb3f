"""A unit: modules whose parameters are gathered together, used, and freed together."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from lightning_cephalo.sharding.buffers import BufferPool
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import Member, UnitKind, UnitMembers
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.transfers import Pending, Wait, wait_for

# 16 bytes in the narrowest dtype, which has one byte
_ALIGNED_NUMEL = 16
# Of a unit's parameters, a part whose gradients may stay to the end of a backward: to look whether
# other ranks have used them would let each step wait for the device.
_LITTLE = 1 / 16


class UnitState(enum.Enum):
    """State of the parameters of a unit.

    SHARDED -> (gather) -> GATHERING -> (wait) -> GATHERED -> (free) -> SHARDED.

    Freeing GATHERING parameters waits for their gather first.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """The flats of one unit.

    While sharded, the modules hold the DTensor parameters; while gathered, the full ones. Names and
    shapes are always those of the user's model.
    """

    def __init__(self, members: UnitMembers, divider: Divider, context: ShardingContext) -> None:
        self.name, self.module, self.kind = members.name, members.module, members.kind
        self.state = UnitState.SHARDED
        if self.kind is not UnitKind.BLOCK:  # which share memory, as they are of one size
            # what an embedding or a head holds goes back when it is freed
            gradients = BufferPool(keeps=self.kind is UnitKind.ROOT)
            context = replace(context, buffers=BufferPool(), gradient_buffers=gradients)
        groups: dict[tuple[bool, torch.dtype, bool], list[Member]] = {}
        # odd sizes go last, so that the other parameters stay aligned for fast kernels
        for member in sorted(members.parameters, key=lambda m: m[0].numel() % _ALIGNED_NUMEL > 0):
            parameter, _ = member
            key = (parameter.requires_grad, parameter.dtype, parameter.ndim == 0)
            groups.setdefault(key, []).append(member)
        self.flats = [Flat(group, divider, context) for group in groups.values()]
        self._gathers: list[Pending] = []
        self._reduces: list[Pending] = []

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {self.state.value})"

    # -- sizes --------------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient now."""
        return any(flat.trainable for flat in self.flats)

    @property
    def trained(self) -> list[Flat]:
        """The flats that need gradients now."""
        return [flat for flat in self.flats if flat.trainable]

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(flat.contents.full_bytes for flat in self.flats)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the full gradients during a backward."""
        return sum(flat.contents.master_bytes for flat in self.trained)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of the full gradients as they travel."""
        contents = [flat.contents for flat in self.trained]
        return sum(each.numel * each.sent_dtype.itemsize for each in contents)

    @property
    def receiving_bytes(self) -> int:
        """Bytes that a reduce takes which is under way, in addition to gradients."""
        return sum(pending.nbytes for pending in self._reduces)

    # -- parameters ---------------------------------------------------------------------------

    def named_sharded(self) -> list[tuple[str, nn.Parameter]]:
        """Return name and DTensor of every parameter (once, under its first name)."""
        return [
            (name, parameter)
            for flat in self.flats
            for name, parameter in zip(flat.contents.names, flat.sharded, strict=True)
        ]

    def parameter_pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the sharded and the gathered object of every parameter."""
        return [
            pair
            for flat in self.flats
            for pair in zip(flat.sharded, flat.gathered.parameters, strict=True)
        ]

    def owning_modules(self) -> list[nn.Module]:
        """Return the modules that hold its parameters directly, one for each place."""
        return [each.module for flat in self.flats for owners in flat.owners for each in owners]

    def renew_accumulators(self) -> list[Node]:
        """Let graphs from now on add to gradients in place; see ``Gathered.renew_accumulators``."""
        return [node for flat in self.flats for node in flat.gathered.renew_accumulators()]

    # -- between a forward and its backward ---------------------------------------------------

    def show_gradients(self) -> None:
        """Show on gathered parameters what their shards hold, until the backward begins."""
        for flat in self.flats:
            flat.gradient.show()

    def hide_gradients(self) -> None:
        """Undo :meth:`show_gradients`, and keep what code has assigned in between."""
        for flat in self.flats:
            flat.gradient.hide()

    # -- writes of the user's code ------------------------------------------------------------

    def assigned(self) -> list[str]:
        """Return the sharded parameters to whose ``data`` plain values were assigned."""
        return [name for flat in self.flats for name in flat.guard.assigned()]

    def written(self) -> list[str]:
        """Return the gathered parameters that code wrote to or replaced since the last call."""
        return [name for flat in self.flats for name in flat.written()]

    # -- gathering ----------------------------------------------------------------------------

    def start_gather(self) -> list[Any]:
        """Begin to gather if nothing has begun; return what is waited for."""
        if self.state is UnitState.SHARDED:
            # resumes where a call without enough memory stopped: nothing is communicated twice
            for flat in self.flats[len(self._gathers) :]:
                self._gathers.append(flat.gathered.gather(flat.shard, flat.cut))
            self.state = UnitState.GATHERING
        return [work for pending in self._gathers for work in pending.works]

    def wait_gather(self, wait: Wait = wait_for) -> None:
        """Gather if needed, wait, and give the modules the full parameters."""
        self.start_gather()
        if self.state is UnitState.GATHERING:
            _finish(self._gathers, wait)
            self.state = UnitState.GATHERED
            for flat in self.flats:
                flat.show(flat.gathered.parameters)

    def free(self, wait: Wait = wait_for) -> None:
        """Free the full parameters and give the modules the sharded ones."""
        if self.state is UnitState.SHARDED:
            return
        _finish(self._gathers, wait)
        self.state = UnitState.SHARDED
        for flat in self.flats:
            flat.show(flat.sharded)
            flat.gathered.free()

    def choose_residence(self, residence: Residence) -> None:
        """Choose the memory of the full parameters; see [Note: residence] in ``gathered.py``."""
        if self.kind in (UnitKind.EMBEDDING, UnitKind.HEAD):
            residence = Residence.OWN  # their graphs are kept, and they share no memory
        for flat in self.flats:
            flat.gathered.residence = residence
            if residence is not Residence.RESIDENT and self.state is UnitState.SHARDED:
                flat.gathered.release()

    # -- gradients ----------------------------------------------------------------------------

    def arm(self) -> None:
        """Prepare zeroed gradients of the trainable parameters for accumulation."""
        for flat in self.trained:
            flat.gradient.arm()

    def used(self) -> list[bool]:
        """Per trainable flat and parameter, whether a gradient has landed on this rank."""
        return [used for flat in self.trained for used in flat.gradient.used()]

    def start_reduce(self, scale: float, *, in_place: bool = False) -> list[Any]:
        """Begin to sum the gradients over the ranks, times ``scale``; see ``Gradient.reduce``."""
        for flat in self.trained[len(self._reduces) :]:  # as in start_gather
            self._reduces.append(flat.gradient.reduce(flat.cut, scale, in_place=in_place))
        return [work for pending in self._reduces for work in pending.works]

    def wait_reduce(self, wait: Wait = wait_for) -> None:
        """Wait for this rank's slice of the summed gradients and free the full gradients."""
        _finish(self._reduces, wait)
        for flat in self.flats:
            flat.gradient.disarm()

    @property
    def has_landed(self) -> bool:
        """Whether gradients have come to parameters that are not armed."""
        return any(flat.gradient.has_landed for flat in self.flats)

    def drop_gradients(self) -> None:
        """Release the summed gradients, which nobody shall see."""
        for flat in self.flats:
            flat.gradient.drop()

    def publish(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` where any rank used the parameter; flags in the order of :meth:`used`."""
        for flat, own in _parts_of(used, self.trained):
            flat.gradient.publish(own)

    def reduced_parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters, in the order of :meth:`used`."""
        return [parameter for flat in self.trained for parameter in flat.sharded]

    def surely_used(self, own: Sequence[bool], has_samples: bool) -> Sequence[bool]:
        """Per parameter, whether some rank has surely used it; flags in the order of :meth:`used`.

        Call it when the reduce is done. Waits for the device, and looks at the summed gradients, if
        this rank's own uses leave much open: a rank without samples, or samples that visit other
        layers than those of other ranks.
        """
        sizes = [p.numel() if p.requires_grad else 0 for p in self.reduced_parameters()]
        unknown = sum(size for size, is_used in zip(sizes, own, strict=True) if not is_used)
        if has_samples and unknown <= _LITTLE * sum(sizes):
            return own
        landed = [landed for flat in self.trained for landed in flat.gradient.landed()]
        return [a or b for a, b in zip(own, landed, strict=True)] if has_samples else landed

    def give_back(self, updated: Sequence[bool], *, keeps_unused: bool = True) -> None:
        """Release gradients of updated parameters; flags in the order of :meth:`used`."""
        for flat, own in _parts_of(updated, self.trained):
            flat.gradient.give_back(own, keeps_unused=keeps_unused)


def _finish(pending: list[Pending], wait: Wait) -> None:
    for each in pending:
        each.wait(wait)
    pending.clear()


def _parts_of(flags: Sequence[bool], flats: Sequence[Flat]) -> list[tuple[Flat, list[bool]]]:
    """Return each flat with its part of the flags of their parameters."""
    rest = iter(flags)
    return [(flat, list(islice(rest, len(flat.sharded)))) for flat in flats]
