"""Updates rows of parameters on the host, in a thread, while the device computes.

Gradients are copied to the host. torch's own kernels update a copy of the rows there: the fused one
where the optimizer has it, which is several times as fast as the others on a CPU, and releases the
interpreter. The new rows are copied to the device.

The copy of the rows stays from step to step. It is made anew where other code has written to the
device's rows, which their version counter tells.

Where the plan says so, an update begins with gradients that have left, before the norm that clips
them is known: see [Note: speculated updates] in ``adapters/speculation.py``.
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
from lightning_cephalo.accelerator.transfers import ToldWorker
from lightning_cephalo.adapters.optimizer import clip_by_value, norms_of
from lightning_cephalo.adapters.speculation import Assumed, Guess, SecondState, WhetherItPays
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.execution.host_room import HostRoom
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import SentGradient, take_sent

# Optimizers with a fused kernel for CPUs.
_FUSED = (Adagrad, Adam, AdamW, SGD)


@dataclass
class _OnHost:
    """A parameter's rows and their gradient in host memory.

    Attributes:
        rows: The rows.
        gradient: Their gradient.
        version: Version of the device's rows that they equal; None: of none.
    """

    rows: Tensor
    gradient: Tensor
    version: int | None = None


@dataclass
class _Job:
    """An update that has begun.

    Attributes:
        future: The copies of new rows to the device, when they have begun.
        optimizer: What updates.
        parameters: The parameters, and what the host has of them.
        sources: Tensors of the device that are copied to the host, with their copies.
        guess: The update, if it has begun before the norm was known.
        again: Makes the update anew, if that fails; None: it has begun with the norm.
    """

    future: Future[list[Any]]
    optimizer: Optimizer
    parameters: list[tuple[Tensor, _OnHost]]
    sources: list[tuple[Tensor, Any]]
    guess: Guess | None = None
    again: Callable[[], None] | None = None


def updates_ahead(optimizer: Optimizer) -> bool:
    """Return whether the host may update before the norm is known: the kernel writes no gradient.

    Args:
        optimizer: One of torch's element-wise optimizers.
    """
    groups = optimizer.param_groups
    return isinstance(optimizer, _FUSED) and all("fused" in group for group in groups)


class HostUpdates:
    """Updates units on the host, one after the other.

    Args:
        accelerator: This rank's device.
        to_device: Copies to the device.
        to_host: Copies to the host.
        room: Host memory for rows and gradients.
        speculated: By unit, whether it may be updated before the norm is known; empty: none may.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        to_device: Copies,
        to_host: Copies,
        room: HostRoom,
        speculated: Sequence[bool] = (),
    ) -> None:
        self._room = room
        self._speculated = frozenset(unit for unit, is_own in enumerate(speculated) if is_own)
        self._guesses: dict[int, _Job] = {}
        self._second: dict[tuple[int, str], Tensor] = {}
        self._pays = WhetherItPays()
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
        """Start to copy gradients to the host, which waits for more before it updates.

        Args:
            unit: Index of the unit.
            parameters: Parameters with gradients.

        Raises:
            HostMemoryError: If the host has no memory for rows and gradients.
        """
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

    def may_guess(self, unit: int, optimizer: Optimizer) -> bool:
        """Return whether a unit may be updated before the norm is known, in this step.

        It may not where the plan does not say so, where the last steps were clipped, and where the
        optimizer's kernel may write to gradients.

        Args:
            unit: Index of the unit.
            optimizer: One of torch's element-wise optimizers.
        """
        return unit in self._speculated and self._pays.now and updates_ahead(optimizer)

    def guess(self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> None:
        """Begin to update by gradients that have left, as if nothing will be clipped.

        Only the host's own copies change.

        Args:
            unit: Index of a unit for which :meth:`may_guess` is true, whose state is on the host.
            optimizer: One of torch's element-wise optimizers.
            chosen: By parameter group, parameters whose gradients have left.
        """
        second = SecondState(partial(self._second_of, unit))
        assumed = Assumed.of(optimizer, chosen)
        try:
            job = self._prepared(unit, optimizer, chosen, second.of)
        except HostMemoryError:  # an optimizer with more state than was planned
            self._speculated = frozenset()
            return
        arrivals = [arrival for _, arrival in job.sources]
        arrivals += [self._sent[id(parameter)][1] for parameter, _ in job.parameters]
        guess = job.guess = Guess(assumed, second, job.optimizer, self._returns(job.parameters))
        step = partial(_step, job.optimizer, ())
        elements = self._elements(job.parameters, second.nbytes)
        work = partial(guess.work, step)
        job.future = guess.future = self._worker.submit(work, elements, arrivals, guess.then)
        self._guesses[unit] = job
        self._pays.begun()

    def confirm(
        self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]
    ) -> set[int]:
        """Let the update hold that has begun before the norm was known, if it is the right one.

        Args:
            unit: Index of the unit.
            optimizer: The optimizer whose step it is.
            chosen: By parameter group, parameters with gradients.

        Returns:
            The ids of the parameters that it updates; empty: none, and there is no such update.
        """
        job = self._guesses.pop(unit, None)
        if job is None:
            return set()
        guess = job.guess
        assert guess is not None
        if guess.has_failed or not guess.assumed.holds(optimizer, chosen):
            self._forget([job])
            self._pays.was_in_vain()
            return set()
        self._pays.learn(False)
        job.future = guess.confirm()
        # whatever has failed then has changed nothing
        job.again = partial(self.begin, unit, optimizer, guess.assumed.members, None)
        self._jobs[unit] = job
        return {id(parameter) for parameter in guess.assumed.parameters}

    def begin(
        self, unit: int, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], clip: Any
    ) -> None:
        """Begin to update parameters of a unit, whose state is in host memory or does not exist.

        Args:
            unit: Index of the unit.
            optimizer: One of torch's element-wise optimizers.
            chosen: By parameter group, parameters with gradients.
            clip: Clamps the gradients' elements before; None: they stay.

        Raises:
            HostMemoryError: If the host has no memory for rows and gradients.
        """
        ahead = self._guesses.pop(unit, None)
        if ahead is not None:  # its rows and gradients are used anew
            self._forget([ahead])
        for job in self._jobs.values():  # what was copied before need not be kept
            for _, arrival in job.sources:
                self._out.wait(arrival)
            job.sources = []
        if clip is not None:
            clip_by_value([parameter for group in chosen for parameter in group], clip)
        self._let_go()
        job = self._prepared(unit, optimizer, chosen, _as_it_is)
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
        self._learn([factor for _, factor in factors])
        step = partial(_step, job.optimizer, factors)
        elements, then = self._elements(job.parameters), self._returns(job.parameters)
        job.future = self._worker.submit(step, elements, arrivals, then)
        self._jobs[unit] = job

    def _prepared(
        self,
        unit: int,
        optimizer: Optimizer,
        chosen: Sequence[Sequence[Tensor]],
        state_of: Callable[[Tensor, dict[str, Any]], dict[str, Any]],
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
                    state[own.rows] = state_of(parameter, entries)
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

    def _elements(self, parameters: Sequence[tuple[Tensor, _OnHost]], second: int = 0) -> int:
        """Return the elements of an update, as many more as copies of old state take longer."""
        elements = sum(own.rows.numel() for _, own in parameters)
        nbytes = sum(own.rows.nbytes for _, own in parameters)
        # see ``HostTraffic`` in ``plan/moving.py``
        return int(elements * (1 + 3 * second / (2 * second + 3 * nbytes))) if nbytes else 0

    def _learn(self, factors: Sequence[float]) -> None:
        """Learn by what gradients were clipped; if they were, what was begun before is in vain."""
        if not factors:
            return
        is_clipped = any(factor != 1.0 for factor in factors)
        self._pays.learn(is_clipped)
        for job in self._guesses.values() if is_clipped else ():
            assert job.guess is not None
            job.guess.forget()

    def finish(self, unit: int) -> list[tuple[Tensor, dict[str, Any]]]:
        """Wait for a unit's update, and let the device's next work wait for its new rows.

        Returns:
            The parameters, with the plain tensors of their state.

        Raises:
            Exception: What the update has raised.
        """
        job = self._jobs.pop(unit)
        if job.again is not None and job.future.exception() is not None:
            self._pays.was_in_vain()
            job.again()
            job = self._jobs.pop(unit)
        arrivals = job.future.result()
        for _, arrival in job.sources:
            self._out.wait(arrival)
        for arrival in arrivals:
            self._in.wait(arrival)
        places: dict[int, Tensor] = {}
        if job.guess is not None:
            places = job.guess.second.change_places()
            for parameter, _ in job.parameters:
                take_sent(parameter.grad)
                self._sent.pop(id(parameter), None)
        found = []
        for parameter, own in job.parameters:
            entries = job.optimizer.state[own.rows].items()
            found.append((parameter, {name: places.get(id(each), each) for name, each in entries}))
            own.rows.grad = None
            own.version = local_part(parameter)._version
        return found

    def _forget(self, jobs: Sequence[_Job]) -> None:
        """Forget updates that have begun before the norm; the host's thread is done with them."""
        for job in jobs:
            assert job.guess is not None
            job.guess.forget()
        for job in jobs:
            assert job.guess is not None
            job.guess.wait()
            for _, arrival in job.sources:
                self._out.wait(arrival)

    def drop(self) -> None:
        """Forget updates that a failed step has begun, when they are done; begin the next one."""
        self._pays.begin_step()
        for job in self._jobs.values():
            job.future.exception()
        self._forget([*self._guesses.values()])
        self._guesses = {}
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

    def _second_of(self, unit: int, parameter: Tensor, name: str, rows: Tensor) -> Tensor:
        key = id(parameter), name
        found = self._second.get(key)
        if found is None or found.shape != rows.shape or found.dtype != rows.dtype:
            found = self._second[key] = self._like(unit, rows)
        return found

    def _like(self, unit: int, rows: Tensor) -> Tensor:
        return self._room.take(rows.numel(), rows.dtype, unit).view(rows.shape)


def _step(optimizer: Optimizer, factors: Sequence[tuple[Tensor, float]]) -> None:
    for gradient, factor in factors:
        gradient.mul_(factor)
    # Private: below the hooks of instances, and torch's own for profilers
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def _as_it_is(parameter: Tensor, entries: dict[str, Any]) -> dict[str, Any]:
    return {name: _here(value) for name, value in entries.items()}


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
