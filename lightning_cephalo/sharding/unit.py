"""A unit: modules whose parameters are gathered together, used, and freed together."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from lightning_cephalo.sharding.buffers import BufferPool
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import UnitKind, UnitMembers
from lightning_cephalo.sharding.flat import Flat, divide_flat
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.moving import Column
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
    """The flats of one unit and the module attributes that refer to their parameters.

    While sharded, the modules hold the DTensor parameters; while gathered, the full ones. Names and
    shapes are always those of the user's model.

    Args:
        divider: Cuts the flats; carries rounding errors from unit to unit.
    """

    def __init__(self, members: UnitMembers, divider: Divider, context: ShardingContext) -> None:
        self.name, self.module, self.kind = members.name, members.module, members.kind
        self.state = UnitState.SHARDED
        if self.kind is not UnitKind.BLOCK:  # which share memory, as they are of one size
            # what an embedding or a head holds goes back when it is freed
            gradients = BufferPool(keeps=self.kind is UnitKind.ROOT)
            context = replace(context, buffers=BufferPool(), gradient_buffers=gradients)
        groups: dict[tuple[bool, torch.dtype, bool], list[int]] = {}
        for index, (parameter, _) in enumerate(members.parameters):
            key = (parameter.requires_grad, parameter.dtype, parameter.ndim == 0)
            groups.setdefault(key, []).append(index)
        self._owners = []
        self.flats: list[Flat] = []
        for indices in groups.values():
            # odd sizes go last, so that the other parameters stay aligned for fast kernels
            indices.sort(
                key=lambda index: members.parameters[index][0].numel() % _ALIGNED_NUMEL > 0
            )
            chosen = [members.parameters[index] for index in indices]
            layout = divide_flat([tuple(parameter.shape) for parameter, _ in chosen], divider)
            names = [owners[0].name for _, owners in chosen]
            originals = [parameter for parameter, _ in chosen]
            self.flats.append(Flat(originals, names, layout, context))
            self._owners.append([owners for _, owners in chosen])
        self._gathers: list[Pending] = []
        self._reduces: list[Pending] = []
        self._shown: Sequence[Sequence[nn.Parameter]] = ()
        self._replaced: list[str] = []
        self._show([flat.sharded for flat in self.flats])

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
        return sum(flat.contents.sent_bytes for flat in self.trained)

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
        """Return the modules that hold any of its parameters directly, once for each."""
        return [o.module for owners_of in self._owners for owners in owners_of for o in owners]

    def _show(self, parameters_of: Sequence[Sequence[nn.Parameter]]) -> None:
        before_of = self._shown or parameters_of
        for owners_of, parameters, before in zip(
            self._owners, parameters_of, before_of, strict=True
        ):
            for owners, parameter, shown in zip(owners_of, parameters, before, strict=True):
                for owner in owners:
                    held = owner.module._parameters
                    if held.get(owner.attribute) is not shown and self._shown:
                        self._replaced.append(owner.name)
                    held[owner.attribute] = parameter
                    if isinstance(owner.module, nn.RNNBase):
                        show_to_recurrent(owner.module, owner.attribute, parameter)
        self._shown = parameters_of

    def renew_accumulators(self) -> list[Node]:
        """Let graphs from now on add to gradients in place; see ``Gathered.renew_accumulators``."""
        return [node for flat in self.flats for node in flat.gathered.renew_accumulators()]

    # -- steps with several phases ------------------------------------------------------------

    @property
    def flags(self) -> tuple[bool, ...]:
        """Which parameters need gradients now."""
        return tuple(p.requires_grad for flat in self.flats for p in flat.sharded)

    @property
    def versions(self) -> tuple[int, ...]:
        """Per parameter, a number that rises whenever its values change."""
        return tuple(version for flat in self.flats for version in flat.gathered.versions)

    def updated(self, parameters: Container[int]) -> None:
        """Note that an optimizer may have changed parameters, given by the ids of their shards."""
        for flat in self.flats:
            flat.gathered.raise_versions(
                [id(own) in parameters and own.grad is not None for own in flat.sharded]
            )

    def show_flags(self, flags: Sequence[bool]) -> None:
        """Set which gathered parameters need gradients; flags as in :attr:`flags`."""
        for flat, own in _parts_of(flags, self.flats):
            flat.gathered.show_flags(own)

    def show_gradients(self) -> None:
        """Show on gathered parameters what their shards hold, until the backward begins."""
        for flat in self.flats:
            flat.gradient.show()

    def hide_gradients(self) -> None:
        """Undo :meth:`show_gradients`, and keep what code has assigned in between."""
        for flat in self.flats:
            flat.gradient.hide()

    def adopt(self) -> None:
        """Pass on to the shards what code has done to gathered parameters."""
        for flat in self.flats:
            flat.gathered.adopt_flags()
            flat.gradient.pass_on()

    # -- writes of the user's code ------------------------------------------------------------

    def assigned(self) -> list[str]:
        """Return the sharded parameters to whose ``data`` plain values were assigned."""
        return self._where([flat.guard.assigned() for flat in self.flats])

    def written(self) -> list[str]:
        """Return the gathered parameters that code wrote to or replaced since the last call."""
        replaced, self._replaced = self._replaced, []
        return self._where([flat.gathered.written() for flat in self.flats]) + replaced

    def rows_written(self) -> list[str]:
        """Return the sharded parameters that code wrote to since the last call."""
        return self._where([flat.rows_written() for flat in self.flats])

    def _where(self, flags_of: Sequence[Sequence[bool]]) -> list[str]:
        return [
            name
            for flat, flags in zip(self.flats, flags_of, strict=True)
            for name, flag in zip(flat.contents.names, flags, strict=True)
            if flag
        ]

    # -- gathering ----------------------------------------------------------------------------

    def start_gather(self) -> list[Any]:
        """Begin to gather if nothing has begun; return what is waited for."""
        if self.state is UnitState.SHARDED:
            # resumes where a call without enough memory stopped: nothing is communicated twice
            for flat in self.flats[len(self._gathers) :]:
                self._gathers.append(flat.gather())
            self.state = UnitState.GATHERING
        return [work for pending in self._gathers for work in pending.works]

    def wait_gather(self, wait: Wait = wait_for) -> None:
        """Gather if needed, wait, and give the modules the full parameters."""
        self.start_gather()
        if self.state is UnitState.GATHERING:
            self._wait_gathers(wait)
            self.state = UnitState.GATHERED
            self._show([flat.gathered.parameters for flat in self.flats])

    def free(self, wait: Wait = wait_for) -> None:
        """Free the full parameters and give the modules the sharded ones."""
        if self.state is UnitState.SHARDED:
            return
        self._wait_gathers(wait)
        self.state = UnitState.SHARDED
        self._show([flat.sharded for flat in self.flats])
        for flat in self.flats:
            flat.gathered.free()

    def _wait_gathers(self, wait: Wait) -> None:
        for pending in self._gathers:
            pending.wait(wait)
        self._gathers = []

    def change_fractions(
        self, divider: Divider, columns_of: Callable[[Flat], Sequence[Column]] = lambda flat: ()
    ) -> None:
        """Move the shards to other fractions, in place; collective.

        Args:
            columns_of: Returns what has the rows of a flat's parameters and moves with them.
        """
        assert self.state is UnitState.SHARDED, self
        for flat in self.flats:
            flat.change_layout(divide_flat(flat.contents.shapes, divider), columns_of(flat))

    def restore_full(self, originals: Mapping[str, nn.Parameter] = MappingProxyType({})) -> None:
        """Give the modules plain full parameters on the CPU; collective. Ends the unit's use.

        Args:
            originals: By name, parameters that the modules had before, and that are still held.
                They get the values, and are given back: an optimizer may be used in the next run.
        """
        assert self.state is UnitState.SHARDED, self
        shown = [
            [
                _with_values(originals.get(name), parameter)
                for name, parameter in zip(
                    flat.contents.names, flat.plain_parameters(), strict=True
                )
            ]
            for flat in self.flats
        ]
        self._show(shown)

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
            self._reduces.append(flat.reduce(scale, in_place=in_place))
        return [work for pending in self._reduces for work in pending.works]

    def wait_reduce(self, wait: Wait = wait_for) -> None:
        """Wait for this rank's slice of the summed gradients and free the full gradients."""
        for pending in self._reduces:
            pending.wait(wait)
        self._reduces = []
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


def _parts_of(flags: Sequence[bool], flats: Sequence[Flat]) -> list[tuple[Flat, list[bool]]]:
    """Return each flat with its part of the flags of their parameters."""
    rest = iter(flags)
    return [(flat, list(islice(rest, len(flat.sharded)))) for flat in flats]


def show_to_recurrent(module: nn.RNNBase, attribute: str, parameter: nn.Parameter) -> None:
    """Update the list of parameters with which LSTM, GRU and RNN compute."""
    if attribute in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(attribute)] = parameter


def _with_values(original: nn.Parameter | None, plain: nn.Parameter) -> nn.Parameter:
    """Return the original with a plain parameter's values; the plain one where it cannot be."""
    if original is None or original.is_meta:
        return plain
    original.data, original.grad = plain.data, None
    original.requires_grad_(plain.requires_grad)
    original.__dict__.update(plain.__dict__)
    return original
