"""Updates rows of parameters on the host, in a thread, while the device computes.

Gradients are copied to the host, torch's kernels for CPUs update a copy of the rows there, and the
new rows are copied to the device. The copy stays from step to step. It is made anew where other
code has written to the device's rows, which their version counter tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host_room import HostRoom
from lightning_cephalo.accelerator.transfers import Leaving, Told, ToldWorker
from lightning_cephalo.adapters.optimizer import as_state, norms_of, part_of
from lightning_cephalo.adapters.stepping import Shown, step_without_hooks
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import SentGradient, mark_sent, sent_gradient

# Optimizers with a fused kernel for CPUs. That of SGD takes no mixture of new and old state.
_FUSED = (Adagrad, Adam, AdamW)


@dataclass
class _OnHost:
    """A parameter's rows and their gradient in host memory."""

    rows: Tensor
    gradient: Tensor
    version: int | None = None  # that of the device's rows; None: they differ


@dataclass(frozen=True)
class _Job:
    """An update that has begun: of a copy of the optimizer, which shows rows in host memory."""

    part: Optimizer
    shown: Shown
    parameters: list[tuple[Tensor, _OnHost]]
    future: Future[list[Any]]


class HostUpdates:
    """Updates units on the host, one after the other."""

    def __init__(
        self, accelerator: Accelerator, to_device: Told, leaving: Leaving, room: HostRoom
    ) -> None:
        self._in, self._leaving, self._room = to_device, leaving, room
        self._held: dict[int, _OnHost] = {}
        self.jobs: dict[int, _Job] = {}
        """By unit, updates that have begun and are not finished."""
        self._sent: list[Tensor] = []  # parameters whose gradients have left
        self._worker = ToldWorker(accelerator)

    def send(self, unit: int, parameters: Sequence[Tensor]) -> list[SentGradient]:
        """Start to copy gradients to the host, which waits for more before it updates."""
        self._leaving.let_go()
        gradients = [local_part(cast(Tensor, parameter.grad)) for parameter in parameters]
        norms = norms_of(gradients)
        targets = [self._on_host(unit, parameter).gradient for parameter in parameters]
        self._leaving.start(list(zip(targets, gradients, strict=True)))
        self._sent += parameters
        return [SentGradient(norm) for norm in norms]

    def begin(self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> None:
        """Begin to update parameters of a unit, whose state is in host memory or does not exist."""
        self._leaving.let_go()
        part = part_of(optimizer, chosen, on_host=True)
        for group in part.param_groups:
            if isinstance(part, _FUSED):
                group.update(fused=True, foreach=False)
        for parameter, entries in part.state.items():
            part.state[parameter] = {name: _number_here(value) for name, value in entries.items()}
        pairs = [
            [(p, self._on_host(unit, p)) for p in each["params"]] for each in part.param_groups
        ]
        parameters = list(chain.from_iterable(pairs))
        copies: list[tuple[Tensor, Tensor]] = []
        factors: list[tuple[Tensor, float]] = []
        for parameter, own in parameters:
            rows = local_part(parameter).detach()
            if own.version != rows._version:
                copies.append((own.rows, rows))
            own.version = None  # until the device has the new rows
            own.rows.grad = own.gradient
            sent = sent_gradient(parameter.grad)
            if sent is None:
                copies.append((own.gradient, local_part(cast(Tensor, parameter.grad))))
            else:
                factors.append((own.gradient, sent.factor))
        self._leaving.start(copies)
        on_host = [[(p, own.rows) for p, own in each] for each in pairs]
        shown = Shown(part, on_host, lambda _, __, value: local_part(value), as_state)
        future = self._worker.submit(
            partial(_step, part, factors),
            sum(own.rows.numel() for _, own in parameters),
            [self._leaving.last],  # what has left before, such as state, is there by then
            partial(self._return, parameters),
        )
        self.jobs[unit] = _Job(part, shown, parameters, future)

    def _return(
        self, parameters: Sequence[tuple[Tensor, _OnHost]], after: Sequence[Any]
    ) -> list[Any]:
        """Start to copy new rows to the device."""
        rows = [(local_part(parameter).detach(), own.rows) for parameter, own in parameters]
        with torch.no_grad():
            return [self._in.start_all(rows, after)]

    def finish(self, unit: int, optimizer: Optimizer) -> None:
        """Wait for a unit's update, if one has begun; the device's next work waits for its rows."""
        job = self.jobs.pop(unit, None)
        if job is None:
            return
        for arrival in job.future.result():
            self._in.wait(arrival)
        job.shown.end()
        optimizer.state.update(job.part.state)
        for parameter, own in job.parameters:
            own.rows.grad = None
            own.version = local_part(parameter)._version

    def drop(self) -> None:
        """Forget updates that a failed step has begun, when they are done, and what has left."""
        for job in self.jobs.values():
            job.future.exception()
        for parameter in self._sent:
            mark_sent(parameter.grad, None)
        self.jobs, self._sent = {}, []
        self._leaving.let_go()

    def close(self) -> None:
        """End the thread, when its updates are done."""
        self._worker.close()

    def _on_host(self, unit: int, parameter: Tensor) -> _OnHost:
        if id(parameter) not in self._held:
            rows = local_part(parameter)
            own, gradient = (
                self._room.take(rows.numel(), rows.dtype, unit).view(rows.shape) for _ in range(2)
            )
            self._held[id(parameter)] = _OnHost(own, gradient)
        return self._held[id(parameter)]


def _step(optimizer: Optimizer, factors: Sequence[tuple[Tensor, float]]) -> None:
    for gradient, factor in factors:
        gradient.mul_(factor)
    step_without_hooks(optimizer)


def _number_here(value: Any) -> Any:
    """Return an entry of state, which lies in host memory if it is a number."""
    is_number = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return value.cpu() if is_number else value
