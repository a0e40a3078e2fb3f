"""Keeps a part of the optimizers' state in host memory, where a given plan says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.optim import Optimizer

from lightning_cephalo.accelerator.host_room import taken_bytes
from lightning_cephalo.adapters.held_state import held_by_unit
from lightning_cephalo.adapters.moved_state import MovedState
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan, PlanError, RankPlan
from lightning_cephalo.plan.state_homes import StateHome, host_bytes, state_homes
from lightning_cephalo.preparation.limits import HostMemory
from lightning_cephalo.profiling.state_rates import trained_sizes
from lightning_cephalo.sharding.discovery import UnitKind


def check_homes(plan: Plan, stays: str, scales_loss: bool) -> None:
    """Raise if optimizer state cannot live where a plan says; ``stays``: why it has to stay."""
    if plan.moves_state and stays:
        raise PlanError(
            "The plan keeps optimizer state in host memory (resident_fraction), but it has to"
            f" stay on the devices: {stays}. Leave resident_fraction out of the plan, or"
            " optimizer_offload= out of the strategy."
        )
    if any(rank.host_update_fraction for rank in plan.ranks) and scales_loss:
        raise PlanError(
            "The plan lets the host update parameters (host_update_fraction), which loss"
            " scaling (16-mixed) does not support. Leave host_update_fraction out of the plan,"
            ' or use precision="bf16-mixed".'
        )


class HostState:
    """Where the optimizer state of ranks lives, under one plan after the other."""

    def __init__(self, model: ShardedModel, host: HostMemory, rank: int) -> None:
        self._model, self._host, self._rank = model, host, rank
        self.moved = MovedState(model.units, model.accelerator)

    def check_room(self, own: RankPlan, optimizers: Sequence[Optimizer]) -> None:
        """Raise if this rank's state does not fit into its host's memory."""
        needed = self._taken_bytes(own, optimizers)
        if own.moves_state and optimizers and needed > self._host.capacity_bytes:
            by = self._host.limited_by
            limit = f" The host's memory is limited by {by}." if by else ""
            raise HostMemoryError(
                f"The plan keeps {format_mib(needed)} of optimizer state and boundaries in host"
                f" memory; this rank may use {format_mib(self._host.capacity_bytes)}. Raise"
                " Planner(host_memory_cap=...), or use a plan that keeps more on the devices"
                f" (resident_fraction).{limit}"
            )

    def follow(self, plan: Plan, optimizers: Sequence[Optimizer]) -> None:
        """Move this rank's state to where a plan says; its rows are already the plan's."""
        own = plan.ranks[self._rank]
        for optimizer in optimizers[:1]:  # state of several stays: they optimize manually
            room_bytes = self._host.capacity_bytes - (own.host_bytes or 0.0)
            self.moved.follow(self._homes(own), room_bytes, optimizer)

    def predicted(
        self, plan: Plan, memory: Sequence[RankMemory], optimizers: Sequence[Optimizer]
    ) -> tuple[RankMemory, ...]:
        """Return the predicted memory of every rank, with that of its host."""
        if not plan.moves_state or not optimizers:
            return tuple(memory)
        return tuple(
            replace(kinds, host_bytes=self._taken_bytes(rank, optimizers))
            for rank, kinds in zip(plan.ranks, memory, strict=True)
        )

    def _homes(self, part: RankPlan) -> tuple[StateHome, ...]:
        """Return where the state of each unit lives on a rank."""
        if not (part.moves_state and part.state_fraction):
            return (StateHome.RESIDENT,) * len(self._model.units)
        # rows are cut differently in each unit: shares of them would make other homes
        sizes = trained_sizes(self._model)
        homes = state_homes(sizes, part.resident_fraction, part.host_update_fraction)
        is_block = [unit.kind is UnitKind.BLOCK for unit in self._model.units]
        root, of_blocks = homes[0], iter(homes[1:])
        return tuple(next(of_blocks) if block else root for block in is_block)

    def _taken_bytes(self, part: RankPlan, optimizers: Sequence[Optimizer]) -> float:
        """Return the bytes of the host that a rank's share of the state and boundaries take."""
        needed = [
            host_bytes(part.state_fraction * own.elements, home, *own[1:])
            for home, own in zip(
                self._homes(part), held_by_unit(optimizers, self._model), strict=True
            )
        ]
        pins = self._model.accelerator.pins_host_memory
        return taken_bytes(needed, pins) + (part.host_bytes or 0.0)
