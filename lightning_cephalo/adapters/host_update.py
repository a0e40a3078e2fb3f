"""Updates rows of parameters on the host, in a thread, while the device computes.

Gradients are copied to the host, torch's kernels for CPUs update a copy of the rows there, and the
new rows are copied to the device. The copy stays from step to step. It is made anew where other
code has written to the device's rows, which their version counter tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import Copies
from lightning_cephalo.accelerator.host_room import HostRoom
from lightning_cephalo.accelerator.transfers import ToldWorker
from lightning_cephalo.adapters.optimizer import clip_by_value, norms_of, step_without_hooks
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
    """An update that has begun."""

    future: Future[list[Any]]
    optimizer: Optimizer
    parameters: list[tuple[Tensor, _OnHost]]
    sources: list[tuple[Tensor, Any]]


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
        step = partial(_step, job.optimizer, factors)
        elements = sum(own.rows.numel() for _, own in job.parameters)
        then = self._returns(job.parameters)
        job.future = self._worker.submit(step, elements, arrivals, then)
        self._jobs[unit] = job

    def _prepared(
        self,
        unit: int,
        optimizer: Optimizer,
        chosen: Sequence[Sequence[Tensor]],
    ) -> _Job:
        """Return an update that has not begun, whose rows are on the host or on their way."""
        parameters: list[tuple[Tensor, _OnHost]] = []
        sources: list[tuple[Tensor, Any]] = []
        groups: list[dict[str, Any]] = []
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for options, members in zip(optimizer.param_groups, chosen, strict=True):
            held = [self._on_host(unit, parameter) for parameter in members]
            for parameter, own in zip(members, held, strict=True):
                entries = optimizer.state.get(parameter, {})
                if entries:
                    state[own.rows] = {name: _here(value) for name, value in entries.items()}
                rows = local_part(parameter).detach()
                if own.version != rows._version:
                    sources.append((rows, self._out.start(own.rows, rows)))
                own.version = None  # until the device has the new rows
                own.rows.grad = own.gradient
            parameters += zip(members, held, strict=True)
            for has_state in (True, False):  # torch's fused SGD takes no mixture of them
                rows_of = [own.rows for own in held if (own.rows in state) is has_state]
                if rows_of:
                    groups.append(_options(optimizer, options, rows_of))
        return _Job(Future(), _twin(optimizer, groups, state), parameters, sources)

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

    def finish(self, unit: int) -> list[tuple[Tensor, dict[str, Any]]]:
        """Wait for a unit's update, and let the device's next work wait for its new rows."""
        job = self._jobs.pop(unit)
        arrivals = job.future.result()
        for _, arrival in job.sources:
            self._out.wait(arrival)
        for arrival in arrivals:
            self._in.wait(arrival)
        found = []
        for parameter, own in job.parameters:
            found.append((parameter, dict(job.optimizer.state[own.rows])))
            own.rows.grad = None
            own.version = local_part(parameter)._version
        return found

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


def _here(value: Any) -> Any:
    """Return an entry of state in host memory."""
    return local_part(value).cpu() if isinstance(value, Tensor) else value


def _options(
    optimizer: Optimizer, options: dict[str, Any], rows: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the options of a group for rows in host memory."""
    own = {name: _here(value) for name, value in options.items() if name != "params"}
    if "capturable" in own:
        own["capturable"] = False
    if isinstance(optimizer, _FUSED) and "fused" in own:
        own["fused"], own["foreach"] = True, False
    return {"params": list(rows), **own}


def _twin(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: defaultdict[Tensor, dict[str, Any]]
) -> Optimizer:
    """Return an optimizer of the same kind that another thread may use."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)
    twin.param_groups, twin.state = groups, state
    found: Optimizer = twin
    return found
