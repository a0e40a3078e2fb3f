"""Keeps optimizer state in host memory, and moves it for updates.

[Note: state in host memory] in ``execution/updates.py`` has the order. Between steps
``optimizer.state`` has DTensors as always, whose rows lie in host memory. Only state with the rows
of its parameter moves; step counts and other numbers stay where the optimizer has made them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host_room import HostRoom, aligned_bytes
from lightning_cephalo.accelerator.transfers import Told
from lightning_cephalo.adapters.host_update import HostUpdates
from lightning_cephalo.adapters.optimizer import (
    as_state,
    has_rows,
    put_in_order,
    update_rows,
)
from lightning_cephalo.adapters.scope import not_element_wise, state_bytes_per_element
from lightning_cephalo.adapters.stepping import step_is_replaced
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import SentGradient, is_spent, sent_gradient
from lightning_cephalo.sharding.unit import Unit

Key = tuple[int, str]
"""A parameter's id, and the name of an entry of its state."""


@dataclass
class _Shelf:
    """State of some of a unit's parameters in host memory, of one dtype, in one piece."""

    memory: Tensor
    rows: dict[Key, Tensor] = field(default_factory=dict)


@dataclass
class _Staging:
    """A buffer on the device for the state of one unit."""

    memory: Tensor
    free_after: list[Any] = field(default_factory=list)


@dataclass
class _Fetched:
    """State of a unit on its way to the device, or there."""

    staging: _Staging
    parts: list[tuple[_Shelf, Tensor]]
    arrivals: list[Any]


def needs_device(view: TrainerView, optimizers: Sequence[Optimizer]) -> str:
    """Return why optimizer state cannot live in host memory, in a few words; empty: it can."""
    if not view.module.automatic_optimization:
        return "manual optimization"
    for optimizer in optimizers:
        name, why = type(optimizer).__name__, not_element_wise(optimizer)
        if why:
            return why
        if step_is_replaced(optimizer):
            return f"{name}.step is replaced"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return f"{name}(differentiable=True)"
    return ""


class MovedState:
    """The optimizer state of a rank that lives in host memory."""

    def __init__(
        self,
        units: Sequence[Unit],
        accelerator: Accelerator,
        capacity_bytes: float,
        homes: Sequence[StateHome],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._units, self._accelerator = list(units), accelerator
        self._in, self._out = Told(accelerator, to_host=False), Told(accelerator, to_host=True)
        self._capacity_bytes = capacity_bytes
        self._unit_of = units_of(units)
        self._leaving: list[tuple[Tensor, Any]] = []
        self._optimizer, self._groups = optimizers[0], groups_of(optimizers[0])
        self._states = 0
        self._live_in(homes, optimizers)
        for optimizer in optimizers:
            self.settle(optimizer)

    def _live_in(self, homes: Sequence[StateHome], optimizers: Sequence[Optimizer]) -> None:
        """Take the host memory that state will need; HostMemoryError if there is less."""
        self._homes = tuple(homes)
        self._room = HostRoom(self._accelerator, self._capacity_bytes)
        self._host = HostUpdates(self._accelerator, self._in, self._out, self._room)
        self._shelves: list[list[_Shelf]] = [[] for _ in self._units]
        self._staging: list[_Staging] = []
        self._next = 0
        self._forget_step()
        needed = [0] * len(self._units)
        for optimizer in optimizers:
            groups, each = groups_of(optimizer), state_bytes_per_element(optimizer)
            for unit, parameters in self._away():
                for parameter in parameters:
                    group = groups.get(id(parameter))
                    if group is None or not parameter.requires_grad:
                        continue
                    rows = local_part(parameter)
                    # parameters that are used later have pieces of their own
                    needed[unit] += aligned_bytes(rows.numel() * each[group])
                    if self._homes[unit] is StateHome.HOST:
                        needed[unit] += 2 * aligned_bytes(rows.nbytes)
        self._room.reserve(needed)

    def _forget_step(self) -> None:
        self._fetched: dict[int, _Fetched] = {}
        self._updated: set[int] = set()
        # what stands for rows of state on the device
        self.staged: dict[Key, Tensor] = {}

    # -- sizes --------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory taken."""
        return self._room.held_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that state passes through."""
        return sum(staging.memory.numel() for staging in self._staging)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor is state in host memory that is apart from the device."""
        return self._accelerator.host_is_apart and self._room.holds(tensor)

    # -- a step -------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step of an optimizer; what a failed step has left is dropped."""
        self._optimizer, self._groups = optimizer, groups_of(optimizer)
        self._states = len(optimizer.state)
        self._host.drop()
        self._forget_step()

    def fetch(self, unit: int) -> None:
        """Start to copy a unit's state to the device; nothing happens before it exists."""
        self._settle(unit)
        shelves = self._shelves[unit]
        sizes = [aligned_bytes(shelf.memory.nbytes) for shelf in shelves]
        if not sizes:
            return
        staging = self._free_staging(sum(sizes))
        after = [*staging.free_after, *(arrival for _, arrival in self._leaving)]
        parts, arrivals, start = [], [], 0
        for shelf, size in zip(shelves, sizes, strict=True):
            piece = staging.memory[start : start + shelf.memory.nbytes].view(shelf.memory.dtype)
            arrivals.append(self._in.start(piece, shelf.memory, after=after))
            for key, rows in shelf.rows.items():
                first = rows.storage_offset() - shelf.memory.storage_offset()
                self.staged[key] = piece[first : first + rows.numel()].view(rows.shape)
            parts.append((shelf, piece))
            start += size
        self._fetched[unit] = _Fetched(staging, parts, arrivals)

    def update_chosen(
        self, chosen: Sequence[Sequence[Tensor]], clip: Any = None, on_host: bool = False
    ) -> None:
        """Update some parameters of a unit by their gradients."""
        if not any(chosen):
            return
        unit = self._unit_of[id(next(chain.from_iterable(chosen)))]
        if on_host:
            self._settle(unit)
            for _, arrival in self._leaving:  # the host's thread reads them at once
                self._out.finish(arrival)
            self._host.begin(unit, self._optimizer, chosen, clip)
            return
        fetched = self._fetched.get(unit)
        for arrival in () if fetched is None else fetched.arrivals:
            self._in.wait(arrival)
        update_rows(self._optimizer, chosen, clip, self.staged)

    def update(self, unit: int, on_host: bool) -> None:
        """Update a unit's parameters by the gradients that they hold."""
        chosen = self._with_gradients(self._parameters(unit))
        self.update_chosen(chosen, on_host=on_host)
        self._updated.update(id(parameter) for group in chosen for parameter in group)

    def send_gradients(self, parameters: Sequence[nn.Parameter]) -> list[SentGradient | None]:
        """Start to copy gradients to the host, which will use them; None: there is none."""
        chosen = [p for group in self._with_gradients(parameters) for p in group]
        if not chosen:
            return [None] * len(parameters)
        unit = self._unit_of[id(chosen[0])]
        sent = self._host.send(unit, chosen)
        found = dict(zip(map(id, chosen), sent, strict=True))
        return [found.get(id(parameter)) for parameter in parameters]

    def forget_sent(self) -> None:
        """Forget gradients that have left, in a step that is repeated."""
        self._host.drop()

    def store(self, unit: int) -> None:
        """Start to copy a unit's state back, or take what the host has updated."""
        self._let_go()
        if self._host.has_begun(unit):
            self._host.finish(unit, self._optimizer)
            self._settle(unit)
            return
        fetched = self._fetched.pop(unit, None)
        if fetched is not None:
            fetched.staging.free_after = [
                self._out.start(shelf.memory, piece) for shelf, piece in fetched.parts
            ]
            for shelf, _ in fetched.parts:
                for key in shelf.rows:
                    self.staged.pop(key, None)
        self._settle(unit)

    def update_left(self) -> Container[int]:
        """Update what the program has left out; return the ids of all updated parameters.

        Their use was known late, or their gradients are older than this step.
        """
        for unit, parameters in list(self._away()):
            left = [p for p in parameters if id(p) not in self._updated]
            chosen = self._with_gradients(left)
            if not any(chosen):
                continue
            on_host = self._homes[unit] is StateHome.HOST
            if on_host:  # one update at a time
                self.store(unit)
            elif any(local_part(parameter).numel() for group in chosen for parameter in group):
                self.fetch(unit)
            else:  # a rank without samples cannot know whether others used what it has no rows of
                self._stage_nothing(unit)
            self.update_chosen(chosen, on_host=on_host)
            self.store(unit)
            self._updated.update(id(parameter) for group in chosen for parameter in group)
        return self._updated

    def finish(self) -> None:
        """End a step: all state is in its place, in the order of the groups."""
        for staging in self._staging:  # what reads the state next finds it
            for arrival in staging.free_after:
                self._out.finish(arrival)
            staging.free_after = []
        for _, arrival in self._leaving:
            self._out.finish(arrival)
        self._leaving = []
        put_in_order(self._optimizer, self._states)
        self._updated = set()

    # -- changes of plan, and loading -----------------------------------------------------------

    def follow(self, homes: Sequence[StateHome], optimizers: Sequence[Optimizer]) -> None:
        """Let state live elsewhere from now on, or where rows have moved."""
        self._host.drop()
        self._host.close()
        before = self._room
        self._live_in(homes, optimizers)
        for optimizer in optimizers:
            self.settle(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    entries = optimizer.state.get(parameter, {})
                    self._bring_back(entries, group, parameter, before)
        self.finish()

    def _bring_back(
        self, entries: dict[str, Any], group: dict[str, Any], parameter: Tensor, before: HostRoom
    ) -> None:
        """Put state on the device that stays there, and numbers as torch does in loaded state."""
        device = self._accelerator.device
        home = self._homes[self._unit_of[id(parameter)]]
        is_resident = home is StateHome.RESIDENT
        for name, value in list(entries.items()) if home is not StateHome.HOST else ():
            rows = local_part(value) if isinstance(value, Tensor) else None
            if rows is None:
                continue
            if not has_rows(name, parameter, rows):
                if group.get("fused") or group.get("capturable"):
                    entries[name] = value.to(device)
            elif is_resident and (before.holds(rows) or not self._accelerator.holds(rows)):
                on_device = torch.empty_like(rows, device=device).copy_(rows)
                entries[name] = as_state(name, parameter, on_device)

    def settle(self, optimizer: Optimizer) -> None:
        """Move state to host memory that belongs there and lies elsewhere."""
        self._optimizer, self._states = optimizer, len(optimizer.state)
        for unit, _ in self._away():
            self._settle(unit)
            self._let_go(but=0)

    def close(self) -> None:
        """End the thread that updates on the host."""
        self._host.close()

    # -- inside -------------------------------------------------------------------------------

    def _away(self) -> Iterator[tuple[int, list[nn.Parameter]]]:
        # in the order of the backward
        for unit in reversed(range(len(self._units))):
            if self._homes[unit] is not StateHome.RESIDENT:
                yield unit, self._parameters(unit)

    def _parameters(self, unit: int) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._units[unit].named_sharded()]

    def _with_gradients(self, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        chosen: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for parameter in parameters:
            group = self._groups.get(id(parameter))
            if group is None or parameter.grad is None:
                continue
            if not is_spent(parameter.grad) or sent_gradient(parameter.grad) is not None:
                chosen[group].append(parameter)
        return chosen

    def _stage_nothing(self, unit: int) -> None:
        """Let state without rows stand on the device, which takes no copy."""
        for shelf in self._shelves[unit]:
            for key, rows in shelf.rows.items():
                if not rows.numel():
                    self.staged[key] = torch.empty_like(rows, device=self._accelerator.device)

    def _settle(self, unit: int) -> None:
        """Put a unit's state onto shelves where it is not, such as new or loaded state."""
        state, strangers = self._optimizer.state, []
        homes = {key: rows for shelf in self._shelves[unit] for key, rows in shelf.rows.items()}
        for parameter in self._parameters(unit):
            for name, value in state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                rows = local_part(value)
                if not has_rows(name, parameter, rows):
                    continue
                home = homes.get((id(parameter), name))
                if home is None:
                    strangers.append((parameter, name, rows))
                elif home is not rows:
                    self._carry(parameter, name, rows, home)
        for dtype in dict.fromkeys(rows.dtype for _, _, rows in strangers):
            self._shelve(unit, [each for each in strangers if each[2].dtype == dtype], dtype)

    def _shelve(
        self, unit: int, strangers: Sequence[tuple[nn.Parameter, str, Tensor]], dtype: torch.dtype
    ) -> None:
        memory = self._room.take(sum(rows.numel() for _, _, rows in strangers), dtype, unit)
        shelf, start = _Shelf(memory), 0
        for parameter, name, rows in strangers:
            # with a version of its own, not that of all that lies in the same memory
            home = memory[start : start + rows.numel()].view(rows.shape).data
            shelf.rows[id(parameter), name] = home
            self._carry(parameter, name, rows, home)
            start += rows.numel()
        self._shelves[unit].append(shelf)

    def _carry(self, parameter: nn.Parameter, name: str, rows: Tensor, home: Tensor) -> None:
        if self._accelerator.holds(rows):
            self._leaving.append((rows, self._out.start(home, rows)))
        else:
            home.copy_(rows)
        self._optimizer.state[parameter][name] = as_state(name, parameter, home)

    def _free_staging(self, nbytes: int) -> _Staging:
        index, self._next = self._next, (self._next + 1) % STAGED_UNITS
        if index == len(self._staging) or self._staging[index].memory.numel() < nbytes:
            most = max(nbytes, self._largest_bytes())
            made = _Staging(torch.empty(most, dtype=torch.uint8, device=self._accelerator.device))
            self._accelerator.synchronize()  # earlier work may still use the memory
            for held in self._staging[index : index + 1]:
                for arrival in held.free_after:
                    self._out.finish(arrival)
            self._staging[index : index + 1] = [made]
        return self._staging[index]

    def _largest_bytes(self) -> int:
        return max(
            sum(aligned_bytes(shelf.memory.nbytes) for shelf in shelves)
            for shelves, home in zip(self._shelves, self._homes, strict=True)
            if home is StateHome.STREAMED
        )

    def _let_go(self, but: int = 1) -> None:
        # all but the last: else the device would wait for a copy that has only just begun
        while len(self._leaving) > but:
            _, arrival = self._leaving.pop(0)
            self._out.wait(arrival)


def units_of(units: Sequence[Unit]) -> dict[int, int]:
    """Return the index of each parameter's unit, by the parameter's id."""
    pairs = enumerate(units)
    return {id(parameter): i for i, unit in pairs for _, parameter in unit.named_sharded()}


def groups_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the index of each parameter's group, by the parameter's id."""
    groups = enumerate(optimizer.param_groups)
    return {id(p): index for index, group in groups for p in group["params"]}
