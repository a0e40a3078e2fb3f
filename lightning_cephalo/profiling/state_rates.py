"""Measures what optimizer state in host memory would cost: copies and updates.

Ranks of one host share its memory and processors, so all of them copy, and update, at the same
time. The host updates while copies are under way, as in a step. AdamW stands for the user's
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

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
# Parameters of an update by the host, and copies in each direction that are under way with it.
_HOST_ELEMENTS, _COPIES_MEANWHILE = 2**20, 4
# Hosts of equal ranks whose rates differ by a larger factor are not alike.
_ALIKE = 2.0


@dataclass(frozen=True)
class StateRates:
    """Rates of one rank's host, in parameters and bytes per second; infinite: it takes no time."""

    host_updated_parameters_per_s: float = 0.0
    to_device_bytes_per_s: float = math.inf
    to_host_bytes_per_s: float = math.inf

    @property
    def seconds(self) -> float:
        """Seconds of a copy of one byte in each direction, and of one update by the host."""
        return math.fsum(1 / rate if rate else 0.0 for rate in astuple(self))

    def is_like(self, other: StateRates) -> bool:
        """Return whether another rank's host differs by no more than noise."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(
            one == two or max(one, two) <= _ALIKE * min(one, two) < math.inf for one, two in pairs
        )


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
    copies = model.control.together(
        "allocating host memory to measure copies", partial(_Copies, model, room // 256 * 256)
    )
    to_device, to_host = copies.rates()
    updated = _updates_per_s(model, copies) if with_host_updates else 0.0
    del copies
    model.accelerator.empty_cache()
    return [
        StateRates(*row)
        for row in model.control.gather(astuple(StateRates(updated, to_device, to_host)))
    ]


def with_state_rates(problem: Problem, rates: Sequence[StateRates]) -> Problem:
    """Return a problem with these rates; of equal ranks, those with like hosts share the lowest."""
    ranks = list(problem.ranks)
    slowest: list[tuple[RankProfile, StateRates]] = []
    for rank in sorted(range(len(ranks)), key=lambda rank: rates[rank].seconds, reverse=True):
        own = ranks[rank], rates[rank]
        like = [found for bare, found in slowest if bare == own[0] and found.is_like(own[1])]
        slowest += [] if like else [own]
        ranks[rank] = replace(own[0], **vars(like[0] if like else own[1]))
    return replace(problem, ranks=tuple(ranks))


def without_host_updates(problem: Problem) -> Problem:
    """Return a problem whose plans let no host update: its last bits differ from a device's."""
    ranks = [replace(rank, host_updated_parameters_per_s=0.0) for rank in problem.ranks]
    return replace(problem, ranks=tuple(ranks))


class _Copies:
    """Copies in both directions at the same time."""

    def __init__(self, model: ShardedModel, nbytes: int) -> None:
        accelerator = model.accelerator
        try:
            self._host = [accelerator.allocate_host(nbytes) for _ in range(2)]
        except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
            raise HostMemoryError(
                f"This rank's host did not give two pieces of {format_mib(nbytes)} to measure"
                f" copies of optimizer state: {error} Free memory on that host, or use"
                " optimizer_offload=False, and a plan without resident_fraction."
            ) from error
        self._device = [torch.zeros_like(own, device=model.device) for own in self._host]
        self._ways = accelerator.copies(), accelerator.copies()
        self._model, self._nbytes = model, nbytes

    def start(self) -> list[Callable[[], None]]:
        """Start a copy to the device and one to the host; return what waits for each."""
        (to_device, to_host), device, host = self._ways, self._device, self._host
        arrival = to_device.start(device[0], host[0])
        other = to_host.start(host[1], device[1], after=())
        return [partial(to_device.finish, arrival), partial(to_host.finish, other)]

    def rates(self) -> tuple[float, ...]:
        """Return the bytes per second to the device and to the host."""
        accelerator, best_s = self._model.accelerator, [math.inf, math.inf]
        for repeat in range(1 + _REPEATS):
            accelerator.synchronize()
            self._model.control.barrier()
            start_s = accelerator.now_s()
            waits = list(enumerate(self.start()))
            # the wait for the first hides how long the second took, if it is done before
            for way, finish in waits if repeat % 2 else reversed(waits):
                finish()
                if repeat:  # the first one is not warm
                    best_s[way] = min(best_s[way], accelerator.now_s() - start_s)
        return tuple(_per_s(self._nbytes, seconds) for seconds in best_s)


def _updates_per_s(model: ShardedModel, copies: _Copies) -> float:
    """Return the parameters that the host updates per second, while copies are under way."""
    accelerator, best_s = model.accelerator, math.inf
    with accelerator.on_host():
        rows = nn.Parameter(torch.zeros(_HOST_ELEMENTS))
        rows.grad = torch.zeros_like(rows)
        optimizer = torch.optim.AdamW([rows], fused=True)
    worker, arrivals = accelerator.host_worker(), accelerator.copies()
    try:
        for repeat in range(1 + _REPEATS):
            accelerator.synchronize()
            model.control.barrier()
            under_way = [finish for _ in range(_COPIES_MEANWHILE) for finish in copies.start()]
            start_s = accelerator.now_s()
            for arrival in worker.submit(optimizer.step, _HOST_ELEMENTS, (), list).result():
                arrivals.finish(arrival)
            if repeat:
                best_s = min(best_s, accelerator.now_s() - start_s)
            for finish in under_way:
                finish()
    finally:
        worker.close()
    return min(_per_s(_HOST_ELEMENTS, best_s), 1e15)


def _per_s(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 1e-12 else math.inf
