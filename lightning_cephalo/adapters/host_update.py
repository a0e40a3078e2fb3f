"""Updates rows of parameters on the host, in a thread, while the device computes.

Gradients are copied to the host, torch's kernels for CPUs update a copy of the rows there, and the
new rows are copied to the device. The copy stays from step to step. It is made anew where other
code has written to the device's rows, which their version counter tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import Copies
from lightning_cephalo.accelerator.host_room import HostRoom
from lightning_cephalo.accelerator.transfers import ToldWorker
from lightning_cephalo.adapters.optimizer import as_state, clip_by_value, norms_of, part_of
from lightning_cephalo.adapters.stepping import Shown, step_without_hooks
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import SentGradient, take_sent

# Optimizers with a fused kernel for CPUs.
_FUSED = (Adagrad, Adam, AdamW, SGD)


@dataclass
class _OnHost:
    """A parameter's rows and their gradient in host memory."""

    rows: Tensor
    gradient: Tensor
    version: int | None = None


@dataclass
class _Job:
    """An update that has begun: of a copy of the optimizer, which shows rows in host memory."""

    part: Optimizer
    shown: Shown
    parameters: list[tuple[Tensor, _OnHost]]
    sources: list[tuple[Tensor, Any]]
    future: Future[list[Any]] = field(default_factory=Future)


class HostUpdates:
    """Updates units on the host, one after the other."""

    def __init__(
        self,
        accelerator: Accelerator,
        to_device: Copies,
        to_host: Copies,
        room: HostRoom,
    ) -> None:
        self._room = room
        self._in, self._out = to_device, to_host
        self._held: dict[int, _OnHost] = {}
        self._jobs: dict[int, _Job] = {}
        self._sent: dict[int, tuple[Tensor, Any]] = {}  # a parameter whose gradient left, its copy
        self._leaving: list[tuple[Tensor, Any]] = []
        self._worker = ToldWorker(accelerator)

    def has_begun(self, unit: int) -> bool:
        """Return whether an update of a unit has begun that is not finished."""
        return unit in self._jobs

    def send(self, unit: int, parameters: Sequence[Tensor]) -> list[SentGradient]:
        """Start to copy gradients to the host, which waits for more before it updates."""
        self._let_go()
        gradients = [local_part(cast(Tensor, parameter.grad)) for parameter in parameters]
        norms = norms_of(gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            arrival = self._out.start(self._on_host(unit, parameter).gradient, gradient)
            self._leaving.append((gradient, arrival))
            self._sent[id(parameter)] = parameter, arrival
        return [SentGradient(norm) for norm in norms]

    def _let_go(self) -> None:
        """Give the memory of gradients back that have left, when their copies are done."""
        for _, arrival in self._leaving:
            self._out.wait(arrival)
        self._leaving = []

    def begin(
        self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], clip: Any
    ) -> None:
        """Begin to update parameters of a unit, whose state is in host memory or does not exist."""
        for job in self._jobs.values():  # what was copied before need not be kept
            for _, arrival in job.sources:
                self._out.wait(arrival)
            job.sources = []
        if clip is not None:
            clip_by_value([parameter for group in chosen for parameter in group], clip)
        self._let_go()
        job = self._prepared(unit, optimizer, chosen)
        arrivals: list[Any] = []
        factors: list[tuple[Tensor, float]] = []
        for parameter, own in job.parameters:
            assert parameter.grad is not None
            sent = take_sent(parameter.grad)
            if sent is None:
                gradient = local_part(parameter.grad)
                job.sources.append((gradient, self._out.start(own.gradient, gradient)))
            else:
                _, arrival = self._sent.pop(id(parameter))
                arrivals.append(arrival)
                factors.append((own.gradient, sent.factor))
        arrivals += [arrival for _, arrival in job.sources]
        step = partial(_step, job.part, factors)
        elements = sum(own.rows.numel() for _, own in job.parameters)
        then = self._returns(job.parameters)
        job.future = self._worker.submit(step, elements, arrivals, then)
        self._jobs[unit] = job

    def _prepared(
        self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]
    ) -> _Job:
        """Return an update that has not begun, whose rows are on the host or on their way."""
        part = part_of(optimizer, chosen, on_host=True)
        part.param_groups = list(
            chain.from_iterable(_groups(part, each) for each in part.param_groups)
        )
        for parameter, entries in part.state.items():
            part.state[parameter] = {name: _number_here(value) for name, value in entries.items()}
        parameters: list[tuple[Tensor, _OnHost]] = []
        sources: list[tuple[Tensor, Any]] = []
        pairs = [
            [(p, self._on_host(unit, p)) for p in each["params"]] for each in part.param_groups
        ]
        for parameter, own in chain.from_iterable(pairs):
            rows = local_part(parameter).detach()
            if own.version != rows._version:
                sources.append((rows, self._out.start(own.rows, rows)))
            own.version = None  # until the device has the new rows
            own.rows.grad = own.gradient
            parameters.append((parameter, own))
        on_host = [[(p, own.rows) for p, own in each] for each in pairs]
        shown = Shown(part, on_host, lambda _, __, value: local_part(value), as_state)
        return _Job(part, shown, parameters, sources)

    def _returns(
        self, parameters: Sequence[tuple[Tensor, _OnHost]]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Return what starts the copies of new rows to the device."""

        def to_device(after: Sequence[Any]) -> list[Any]:
            with torch.no_grad():
                return [
                    self._in.start(local_part(parameter).detach(), own.rows, after=after)
                    for parameter, own in parameters
                ]

        return to_device

    def finish(self, unit: int, optimizer: Optimizer) -> None:
        """Wait for a unit's update; the device's next work waits for its new rows."""
        job = self._jobs.pop(unit)
        arrivals = job.future.result()
        for _, arrival in job.sources:
            self._out.wait(arrival)
        for arrival in arrivals:
            self._in.wait(arrival)
        job.shown.end()
        optimizer.state.update(job.part.state)
        for parameter, own in job.parameters:
            own.rows.grad = None
            own.version = local_part(parameter)._version

    def drop(self) -> None:
        """Forget updates that a failed step has begun, when they are done."""
        for job in self._jobs.values():
            job.future.exception()
        for parameter, _ in self._sent.values():
            take_sent(parameter.grad)
        self._jobs, self._sent = {}, {}
        self._let_go()

    def close(self) -> None:
        """End the thread, when its updates are done."""
        self._worker.close()

    def _on_host(self, unit: int, parameter: Tensor) -> _OnHost:
        rows = local_part(parameter)
        found = self._held.get(id(parameter))
        if found is None or found.rows.shape != rows.shape:
            found = _OnHost(self._like(unit, rows), self._like(unit, rows))
            self._held[id(parameter)] = found
        return found

    def _like(self, unit: int, rows: Tensor) -> Tensor:
        return self._room.take(rows.numel(), rows.dtype, unit).view(rows.shape)


def _step(optimizer: Optimizer, factors: Sequence[tuple[Tensor, float]]) -> None:
    for gradient, factor in factors:
        gradient.mul_(factor)
    step_without_hooks(optimizer)


def _number_here(value: Any) -> Any:
    """Return an entry of state, which lies in host memory if it is a number."""
    is_number = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return value.cpu() if is_number else value


def _groups(part: Optimizer, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups of one: torch's fused SGD takes no mixture of new and old state."""
    if isinstance(part, _FUSED) and "fused" in group:
        group = {**group, "fused": True, "foreach": False}
    for has_state in (True, False):
        own = [p for p in group["params"] if (p in part.state) is has_state]
        if own:
            yield {**group, "params": own}
