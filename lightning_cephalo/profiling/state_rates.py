"""Measures what optimizer state in host memory would cost: copies and updates.

Ranks of one host share its memory and processors. So all copy at the same time, then all let their
host update, then both: what takes longer than each alone waits for the host's memory. AdamW stands
for the user's optimizer. Every figure is the best of a few repetitions, of unbounded time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.plan.state_homes import StateHome
from lightning_cephalo.sharding.discovery import UnitKind

_REPEATS = 4
_COPIED_BYTES, _LEAST_BYTES = 2**24, 2**16
# Part of the device that may be filled while measuring: a rank may be full of its share.
_PART = 1 / 64
# Moments of Adam.
MOMENTS = 2
_HOST_ELEMENTS = 2**20
# Of host memory that AdamW in fp32 reads and writes for one parameter.
_UPDATED_BYTES = 28
# Copies in each direction beside one update by the host, at most.
_MOST_COPIES = 64
# Work at once that takes less than this much longer than the longest alone does not wait.
_NOISE = 1.1
# Hosts of equal ranks whose rates differ by a larger factor are not alike.
_ALIKE = 2.0


@dataclass(frozen=True)
class StateRates:
    """Rates of one rank, in parameters and in bytes per second; infinite: it takes no time."""

    host_updated_parameters_per_s: float = 0.0
    to_device_bytes_per_s: float = math.inf
    to_host_bytes_per_s: float = math.inf
    host_memory_bytes_per_s: float = math.inf

    @property
    def seconds(self) -> float:
        """Seconds of a copy of one byte in each direction, and of one update by the host."""
        return math.fsum(1 / rate if rate else 0.0 for rate in self._of_host)

    def is_like(self, other: StateRates) -> bool:
        """Return whether another rank's host differs by no more than noise."""
        pairs = zip(self._of_host, other._of_host, strict=True)
        return all(
            one == two or max(one, two) <= _ALIKE * min(one, two) < math.inf for one, two in pairs
        )

    @property
    def _of_host(self) -> tuple[float, float, float]:
        # not that of memory, which is infinite where a single measurement found no waiting
        copies = self.to_device_bytes_per_s, self.to_host_bytes_per_s
        return *copies, self.host_updated_parameters_per_s


RATES = tuple(vars(StateRates()))
"""Names of the rates, which are those of a :class:`RankProfile`, too."""


def has_state_rates(problem: Problem) -> bool:
    """Return whether a problem knows what moving state costs; an older file does not."""
    return any(
        math.isfinite(rank.to_device_bytes_per_s) or rank.host_updated_parameters_per_s
        for rank in problem.ranks
    )


def trained_sizes(model: ShardedModel) -> tuple[int, ...]:
    """Return the trained parameters of each block, behind those of all else; as on all ranks."""
    sizes = [0]
    for unit in model.units:
        size = sum(flat.contents.numel for flat in unit.trained)
        if unit.kind is UnitKind.BLOCK:
            sizes.append(size)
        else:
            sizes[ROOT] += size
    return tuple(sizes)


def homes_of_units(model: ShardedModel, homes: Sequence[StateHome]) -> tuple[StateHome, ...]:
    """Return where each unit's state lives, by homes in the order of :func:`trained_sizes`."""
    root, *others = homes
    of_blocks = iter(others)
    return tuple(next(of_blocks) if unit.kind is UnitKind.BLOCK else root for unit in model.units)


def planned_state_bytes(model: ShardedModel) -> float:
    """Return the bytes of optimizer state for each trained parameter that plans count on."""
    return MOMENTS * _element_bytes(model)


def _element_bytes(model: ShardedModel) -> float:
    """Return the bytes of a trained parameter: of several dtypes the mean."""
    flats = [flat for flat in model.flats if flat.trainable]
    count = sum(flat.contents.numel for flat in flats)
    held = sum(flat.contents.master_bytes for flat in flats)
    return held / count if count else 4.0


def with_unit_parameters(problem: Problem, model: ShardedModel) -> Problem:
    """Return a problem that says how much optimizer state each unit has."""
    element, sizes = _element_bytes(model), trained_sizes(model)
    return replace(
        problem,
        unit_parameters=sizes if len(sizes) > 1 else (*sizes, 0),
        moment_bytes=planned_state_bytes(model),
        element_bytes=element,
    )


def measure_state_rates(
    model: ShardedModel, capacity_bytes: float, *, with_host_updates: bool
) -> list[StateRates]:
    """Return the rates of every rank; collective.

    Raises:
        HostMemoryError: If this rank's host does not give the memory for copies.
        RemoteRankError: If that is so on another rank.
    """
    room = min(_COPIED_BYTES, max(_LEAST_BYTES, int(min(capacity_bytes, 2.0**62) * _PART)))
    nbytes = room // 256 * 256
    copies = model.control.together(
        "allocating host memory to measure copies", partial(_Copies, model, nbytes)
    )
    to_device, to_host = copies.rates()
    on_host, memory = 0.0, math.inf
    if with_host_updates:
        updates = _HostUpdates(model)
        try:
            on_host = updates.rate()
            memory = _memory_rate(copies, updates, min(to_device, to_host), on_host)
        finally:
            updates.close()
    del copies
    model.accelerator.empty_cache()
    rates = StateRates(on_host, to_device, to_host, memory)
    return [StateRates(*row) for row in model.control.gather(astuple(rates))]


def with_state_rates(problem: Problem, rates: Sequence[StateRates]) -> Problem:
    """Return a problem with these rates; ranks that are alike get the slowest of theirs."""
    found = list(problem.ranks)
    left = sorted(range(len(found)), key=lambda rank: rates[rank].seconds, reverse=True)
    while left:
        first = left[0]
        group = [
            rank
            for rank in left
            if problem.ranks[rank] == problem.ranks[first] and rates[rank].is_like(rates[first])
        ]
        slowest: dict[str, Any] = {
            name: min(getattr(rates[r], name) for r in group) for name in RATES
        }
        for rank in group:
            found[rank] = replace(problem.ranks[rank], **slowest)
        left = [rank for rank in left if rank not in group]
    return replace(problem, ranks=tuple[RankProfile, ...](found))


def without_host_updates(problem: Problem) -> Problem:
    """Return a problem whose plans let no host update: its last bits differ from a device's."""
    ranks = (replace(rank, host_updated_parameters_per_s=0.0) for rank in problem.ranks)
    return replace(problem, ranks=tuple[RankProfile, ...](ranks))


class _Copies:
    """Copies in both directions at once, of as many bytes each."""

    def __init__(self, model: ShardedModel, nbytes: int) -> None:
        accelerator = model.accelerator
        self.model, self.nbytes = model, nbytes
        try:
            self._host = [accelerator.allocate_host(nbytes) for _ in range(2)]
        except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
            raise HostMemoryError(
                f"This rank's host did not give two pieces of {format_mib(nbytes)} to measure"
                f" copies of optimizer state: {error} Free memory on that host, or use"
                " optimizer_offload=False, and a plan without resident_fraction."
            ) from error
        self._device = [
            torch.zeros(nbytes, dtype=torch.uint8, device=model.device) for _ in range(2)
        ]
        self._ways = accelerator.copies(), accelerator.copies()

    def start(self) -> list[Any]:
        """Start one copy in each direction, that to the device first."""
        (to_device, to_host), device, host = self._ways, self._device, self._host
        return [
            to_device.start(device[0], host[0]),
            to_host.start(host[1], device[1], after=()),
        ]

    def finish(self, way: int, arrival: Any) -> None:
        """Wait for a copy in a direction: 0 is to the device."""
        self._ways[way].finish(arrival)

    def rates(self) -> tuple[float, float]:
        """Return the bytes per second to the device and to the host."""
        accelerator = self.model.accelerator
        best = [math.inf, math.inf]
        for repeat in range(1 + _REPEATS):
            accelerator.synchronize()
            self.model.control.barrier()
            start_s = accelerator.now_s()
            arrivals = list(enumerate(self.start()))
            # the wait for the first hides how long the second took, if it is done before
            for way, arrival in arrivals if repeat % 2 else reversed(arrivals):
                self.finish(way, arrival)
                took_s = accelerator.now_s() - start_s
                if repeat:  # the first one is not warm
                    best[way] = min(best[way], took_s)
        in_s, out_s = best
        return _rate(self.nbytes, in_s), _rate(self.nbytes, out_s)


class _HostUpdates:
    """Updates by the host, in its own thread."""

    def __init__(self, model: ShardedModel) -> None:
        accelerator = model.accelerator
        with accelerator.on_host():
            rows = nn.Parameter(torch.zeros(_HOST_ELEMENTS))
            rows.grad = torch.zeros_like(rows)
            self._optimizer = torch.optim.AdamW([rows], fused=True)
        self.model, self._copies = model, accelerator.copies()
        self._worker = accelerator.host_worker()

    def start(self) -> Future[list[Any]]:
        """Start one update."""
        return self._worker.submit(self._optimizer.step, _HOST_ELEMENTS, (), list)

    def finish(self, update: Future[list[Any]]) -> None:
        """Wait for an update."""
        for arrival in update.result():
            self._copies.finish(arrival)

    def rate(self) -> float:
        """Return the parameters per second."""
        best_s, accelerator = math.inf, self.model.accelerator
        for repeat in range(1 + _REPEATS):
            self.model.control.barrier()
            start_s = accelerator.now_s()
            self.finish(self.start())
            if repeat:
                best_s = min(best_s, accelerator.now_s() - start_s)
        return min(_rate(_HOST_ELEMENTS, best_s), 1e15)

    def close(self) -> None:
        """End the thread."""
        self._worker.close()


def _memory_rate(
    copies: _Copies, updates: _HostUpdates, copied_bytes_per_s: float, updated_per_s: float
) -> float:
    """Return the host memory's bytes per second; infinite: nothing waits for it."""
    accelerator, control = copies.model.accelerator, copies.model.control
    update_s = _HOST_ELEMENTS / updated_per_s
    copy_s = copies.nbytes / copied_bytes_per_s
    count = max(1, min(_MOST_COPIES, round(update_s / copy_s))) if copy_s else 1
    best_s = math.inf
    for _ in range(_REPEATS):
        accelerator.synchronize()
        control.barrier()
        start_s = accelerator.now_s()
        update = updates.start()
        arrivals = [copies.start() for _ in range(count)]
        for way, arrival in enumerate(arrivals[-1]):  # those of one direction queue
            copies.finish(way, arrival)
        updates.finish(update)
        best_s = min(best_s, accelerator.now_s() - start_s)
    is_shared = best_s > _NOISE * max(update_s, count * copy_s)
    if not (is_shared and accelerator.host_is_apart):
        return math.inf
    return _rate(2 * count * copies.nbytes + _HOST_ELEMENTS * _UPDATED_BYTES, best_s)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 1e-12 else math.inf
