"""Updates units of an optimizer whose state may live in host memory, and moves that state.

[Note: state in host memory] in ``execution/updates.py`` has the order. Between steps
``optimizer.state`` has DTensors as always, whose rows lie in host memory. Only state with the rows
of its parameter moves; step counts and other numbers stay where the optimizer has made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host_room import HostRoom, aligned_bytes
from lightning_cephalo.accelerator.transfers import Leaving, Told
from lightning_cephalo.adapters.checkpoint import rows_like
from lightning_cephalo.adapters.host_update import HostUpdates
from lightning_cephalo.adapters.optimizer import as_state, has_rows, update_rows
from lightning_cephalo.adapters.scope import state_bytes_per_element
from lightning_cephalo.adapters.stepping import parameters_of
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import is_spent
from lightning_cephalo.sharding.unit import Unit


@dataclass
class _Staging:
    """A buffer on the device, with the state of a unit on its way there; free behind a copy."""

    memory: Tensor
    pairs: Sequence[tuple[Tensor, Tensor]] = ()  # on the device, on the host
    arrival: Any = None
    free_after: Any = None


class MovedState:
    """Updates one unit at a time, wherever the optimizer state of this rank lives."""

    def __init__(self, units: Sequence[Unit], accelerator: Accelerator) -> None:
        self._parameters = [[parameter for _, parameter in unit.named_sharded()] for unit in units]
        self._accelerator = accelerator
        self._in, self._out = Told(accelerator, to_host=False), Told(accelerator, to_host=True)
        self._leaving = Leaving(self._out)
        self.unit_of = {id(p): unit for unit, own in enumerate(self._parameters) for p in own}
        self._optimizer: Optimizer  # of the step; the first step or plan sets it
        self._take_room((), 0.0)

    def _take_room(self, homes: Sequence[StateHome], capacity_bytes: float) -> None:
        self.homes = tuple(homes)  # by unit; empty: all state is on the device
        self._room = HostRoom(self._accelerator, capacity_bytes)
        self._host = HostUpdates(self._accelerator, self._in, self._leaving, self._room)
        # by unit, and in it by a parameter's id and the name of an entry of its state
        self._rows: list[dict[tuple[int, str], Tensor]] = [{} for _ in self._parameters]
        device = self._accelerator.device
        empty = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(STAGED_UNITS)]
        self._staging = [_Staging(memory) for memory in empty if homes]
        self._forget_step()

    def _forget_step(self) -> None:
        self._fetched: dict[int, _Staging] = {}
        self._staged: dict[tuple[int, str], Tensor] = {}  # what stands for these on the device
        self.updated: set[int] = set()  # ids of parameters

    @property
    def host_bytes(self) -> int:
        return self._room.held_bytes

    @property
    def staging_bytes(self) -> int:
        return sum(staging.memory.numel() for staging in self._staging)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor is state in host memory that is apart from the device."""
        return self._accelerator.host_is_apart and self._room.holds(tensor)

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step of an optimizer; what a failed step has left is dropped."""
        groups = enumerate(optimizer.param_groups)
        self._groups = {id(p): index for index, group in groups for p in group["params"]}
        self._optimizer, self._states = optimizer, len(optimizer.state)
        self._host.drop()
        self._forget_step()

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer updates this sharded parameter."""
        return id(parameter) in self._groups

    def fetch(self, unit: int) -> None:
        """Start to copy a unit's state to the device; nothing happens before it exists."""
        self._settle(unit)
        rows = {k: own for k, own in self._rows[unit].items() if k[0] not in self.updated}
        sizes = [aligned_bytes(own.nbytes) for own in rows.values()]
        if not rows:
            return
        staging = self._free_staging(sum(sizes))
        pieces = staging.memory[: sum(sizes)].split(sizes)
        pairs = []
        for (key, own), piece in zip(rows.items(), pieces, strict=True):
            self._staged[key] = piece[: own.nbytes].view(own.dtype).view(own.shape)
            pairs.append((self._staged[key], own))
        after = [staging.free_after, self._leaving.last]
        staging.pairs, staging.arrival = pairs, self._in.start_all(pairs, after)
        self._fetched[unit] = staging

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool) -> list[bool]:
        """Update parameters of a unit by their gradients, and return for each whether it was."""
        chosen = self._with_gradients(parameters)
        held = list(chain.from_iterable(chosen))
        if not held:
            return [False] * len(parameters)
        ids, unit = set(map(id, held)), self.unit_of[id(held[0])]
        if on_host:
            self._settle(unit)
            self._host.begin(unit, self._optimizer, chosen)
        else:
            if unit in self._fetched:
                self._in.wait(self._fetched[unit].arrival)
            update_rows(self._optimizer, chosen, self._staged)
        self.updated |= ids
        return [id(parameter) in ids for parameter in parameters]

    def store(self, unit: int) -> None:
        """Start to copy a unit's state back, or take what the host has updated."""
        self._leaving.let_go(but=1)  # else the device waits for a copy that has only just begun
        self._host.finish(unit, self._optimizer)
        fetched = self._fetched.pop(unit, None)
        if fetched is not None:
            back = [(own, piece) for piece, own in fetched.pairs]
            fetched.free_after = self._out.start_all(back)
        for key in self._rows[unit]:
            self._staged.pop(key, None)
        self._settle(unit)

    def left(self) -> list[int]:
        """Return units whose state is away that hold gradients still, in the backward's order."""
        return [u for u in self._away() if any(self._with_gradients(self._parameters[u]))]

    def on_host(self) -> list[int]:
        """Return the units that the host updates now."""
        return list(self._host.jobs)

    def finish(self) -> None:
        """End a step: all state is in its place, in the order of the groups."""
        for staging in self._staging:  # what reads the state next finds it
            self._out.finish(staging.free_after)
            staging.free_after = None
        self._leaving.finish()
        self._host.drop()
        state = self._optimizer.state
        if len(state) != self._states:  # in one order on all ranks, in which checkpoints gather it
            for parameter in filter(state.__contains__, parameters_of(self._optimizer)):
                state[parameter] = state.pop(parameter)
        self._forget_step()

    def follow(
        self, homes: Sequence[StateHome], capacity_bytes: float, optimizer: Optimizer
    ) -> None:
        """Let state live elsewhere from now on, or where rows have moved."""
        if not self.homes and all(home is StateHome.RESIDENT for home in homes):
            return
        self._host.drop()
        self.close()
        before = self._room
        self._take_room(homes, capacity_bytes)
        self._room.reserve(self._needed_bytes(optimizer))
        self.settle(optimizer)
        for unit, home in enumerate(homes):
            if home is not StateHome.HOST:
                self._bring_back(unit, before)
        self.finish()

    def _needed_bytes(self, optimizer: Optimizer) -> list[int]:
        """Return the bytes of host memory that each unit needs."""
        needed, each = [0] * len(self.homes), state_bytes_per_element(optimizer)
        for unit in self._away():
            # a piece for each entry of state; the host updates a copy of the rows
            copies = 2 * (self.homes[unit] is StateHome.HOST)
            for parameter in self._parameters[unit]:
                if parameter.requires_grad and id(parameter) in each:
                    rows = local_part(parameter)
                    pieces = -(-each[id(parameter)] // rows.element_size()) + copies
                    needed[unit] += pieces * aligned_bytes(rows.nbytes)
        return needed

    def _bring_back(self, unit: int, before: HostRoom) -> None:
        """Put state on the device that stays there, and numbers that kernels need there."""
        device, is_resident = self._accelerator.device, self.homes[unit] is StateHome.RESIDENT
        for parameter, entries, name, rows in self._tensors(unit):
            if not has_rows(name, parameter, rows):
                group = self._optimizer.param_groups[self._groups[id(parameter)]]
                if group.get("fused"):
                    entries[name] = entries[name].to(device)
            elif is_resident and (before.holds(rows) or not self._accelerator.holds(rows)):
                on_device = torch.empty_like(rows, device=device).copy_(rows)
                entries[name] = as_state(name, parameter, on_device)

    def settle(self, optimizer: Optimizer) -> None:
        """Move state to host memory that belongs there and lies elsewhere."""
        self.begin(optimizer)
        for unit in self._away():
            self._settle(unit)
            self._leaving.let_go()

    def placed(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return this rank's rows of a full tensor of state, where the state of its unit lives."""
        unit = self.unit_of.get(id(parameter))
        if unit is None or not self.homes or self.homes[unit] is StateHome.RESIDENT:
            return rows_like(parameter, value)
        with self._accelerator.on_host():
            return rows_like(parameter, value, torch.device("cpu"))

    def close(self) -> None:
        """End the thread that updates on the host."""
        self._host.close()

    def _away(self) -> list[int]:
        homes = enumerate(self.homes)
        return [unit for unit, home in homes if home is not StateHome.RESIDENT][::-1]

    def _with_gradients(self, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        """Return, by group, parameters with gradients that have not updated them."""
        chosen: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for parameter in parameters:
            group, gradient = self._groups.get(id(parameter)), parameter.grad
            updated = id(parameter) in self.updated or is_spent(gradient)
            if group is not None and gradient is not None and not updated:
                chosen[group].append(parameter)
        return chosen

    def _settle(self, unit: int) -> None:
        """Put a unit's state into its host memory where it is not, such as new or loaded state."""
        homes, pairs = self._rows[unit], []
        for parameter, entries, name, rows in self._tensors(unit):
            key = id(parameter), name
            if not has_rows(name, parameter, rows):
                continue
            if key not in homes:
                own = self._room.take(rows.numel(), rows.dtype, unit).view(rows.shape)
                # with a version of its own, not that of all that lies in the same memory
                homes[key] = own.data
            if homes[key] is not rows:
                pairs.append((homes[key], rows))
                entries[name] = as_state(name, parameter, homes[key])
        self._leaving.start(pairs)

    def _tensors(self, unit: int) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
        """Yield this rank's tensors of a unit's state: parameter, entries, name, and rows."""
        for parameter in filter(self.holds, self._parameters[unit]):
            entries = self._optimizer.state.get(parameter, {})
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    yield parameter, entries, name, local_part(value)

    def _free_staging(self, nbytes: int) -> _Staging:
        staging = self._staging.pop(0)
        self._staging.append(staging)
        if staging.memory.numel() < nbytes:
            self._out.finish(staging.free_after)
            self._accelerator.synchronize()  # earlier work may still use the memory
            staging.memory = staging.memory.new_empty(0)  # before the new one takes its own
            staging.memory = staging.memory.new_empty(nbytes)
        return staging
