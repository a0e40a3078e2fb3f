"""Updates rows of parameters on the host, in a thread, while the device computes.

Gradients are copied to the host, torch's kernels for CPUs update a copy of the rows there, and the
new rows are copied to the device. The copy stays from step to step. It is made anew where other
code has written to the device's rows, which their version counter tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.host_room import HostRoom
from lightning_cephalo.accelerator.transfers import Leaving, Told, ToldWorker
from lightning_cephalo.adapters.optimizer import as_state, part_of
from lightning_cephalo.adapters.stepping import shown, step_without_hooks
from lightning_cephalo.sharding.placement import local_part

# Optimizers with a fused kernel for CPUs. That of SGD takes no mixture of new and old state.
_FUSED = (Adagrad, Adam, AdamW)


@dataclass
class _OnHost:
    """A parameter's rows and their gradient in host memory."""

    rows: Tensor
    gradient: Tensor
    version: int | None = None  # that of the device's rows; None: they differ


class _Job(NamedTuple):
    """An update that has begun: of a copy of the optimizer, which finds rows in host memory."""

    part: Optimizer
    showing: ExitStack
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
        self._worker = ToldWorker(accelerator)

    def begin(self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> None:
        """Begin to update parameters of a unit, whose state is in host memory or does not exist."""
        self._leaving.let_go()
        part = part_of(optimizer, chosen, on_host=True)
        for group in part.param_groups if isinstance(part, _FUSED) else ():
            group.update(fused=True, foreach=False)
        # other dicts than those of the optimizer; rows lie in host memory, other tensors may not
        for parameter, entries in part.state.items():
            part.state[parameter] = pytree.tree_map_only(
                Tensor, lambda v: v if isinstance(v, DTensor) else v.cpu(), dict(entries)
            )
        pairs = [
            [(p, self._on_host(unit, p)) for p in group["params"]] for group in part.param_groups
        ]
        parameters = list(chain.from_iterable(pairs))
        copies: list[tuple[Tensor, Tensor]] = []
        for parameter, own in parameters:
            rows = local_part(parameter).detach()
            if own.version != rows._version:
                copies.append((own.rows, rows))
            own.version = None  # until the device has the new rows
            own.rows.grad = own.gradient
            copies.append((own.gradient, local_part(cast(Tensor, parameter.grad))))
        self._leaving.start(copies)
        on_host = [[(p, own.rows) for p, own in each] for each in pairs]
        showing = ExitStack()
        showing.enter_context(shown(part, on_host, as_state))

        def return_rows(after: Sequence[Any]) -> list[Any]:
            rows = [(local_part(parameter).detach(), own.rows) for parameter, own in parameters]
            with torch.no_grad():
                return [self._in.start_all(rows, after)]

        future = self._worker.submit(
            partial(step_without_hooks, part),
            sum(own.rows.numel() for _, own in parameters),
            [self._leaving.last],  # what has left before, such as state, is there by then
            return_rows,
        )
        self.jobs[unit] = _Job(part, showing, parameters, future)

    def finish(self, unit: int, optimizer: Optimizer) -> None:
        """Wait for a unit's update, if one has begun; the device's next work waits for its rows."""
        job = self.jobs.pop(unit, None)
        if job is None:
            return
        for arrival in job.future.result():
            self._in.wait(arrival)
        job.showing.close()
        optimizer.state.update(job.part.state)
        for parameter, own in job.parameters:
            own.rows.grad = None
            own.version = local_part(parameter)._version

    def drop(self) -> None:
        """Forget updates that a failed step has begun, when they are done."""
        for job in self.jobs.values():
            job.future.exception()
            job.showing.close()
        self.jobs = {}
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
