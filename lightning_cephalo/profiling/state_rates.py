"""Measures what optimizer state in host memory would cost: copies and updates.

Ranks of one host share its memory and processors. So all ranks copy at the same time, in both
directions, and then all let their host update. AdamW stands for the user's optimizer, which is made
later. This takes some hundredths of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.profiling.optimizer_time import update_time

_REPEATS = 4
_COPIED_BYTES, _LEAST_BYTES = 2**24, 2**16
# Part of the device that may be filled while measuring: a rank may be full of its share.
_PART = 1 / 64
# Moments of Adam, and the bytes of an element in a state of fp32.
MOMENTS = 2
_UPDATE_BYTES = 16
_HOST_ELEMENTS = 2**20


@dataclass(frozen=True)
class StateRates:
    """Rates of one rank, in parameters and in bytes per second; infinite: it takes no time.

    Attributes:
        updated_parameters_per_s: Of its device.
        host_updated_parameters_per_s: Of its host's processors.
        to_device_bytes_per_s: Of copies to its device.
        to_host_bytes_per_s: Of copies to its host.
    """

    updated_parameters_per_s: float = math.inf
    host_updated_parameters_per_s: float = 0.0
    to_device_bytes_per_s: float = math.inf
    to_host_bytes_per_s: float = math.inf


def has_state_rates(problem: Problem) -> bool:
    """Return whether a problem knows what moving state costs; an older file does not."""
    return any(
        math.isfinite(rank.to_device_bytes_per_s) or rank.host_updated_parameters_per_s
        for rank in problem.ranks
    )


def trained_sizes(model: ShardedModel) -> tuple[int, ...]:
    """Return the trained parameters of each unit, the root unit first; the same on all ranks."""
    return tuple(sum(flat.numel for flat in unit.flats if flat.trainable) for unit in model.units)


def with_unit_parameters(problem: Problem, model: ShardedModel) -> Problem:
    """Return a problem that says how much optimizer state each unit has."""
    flats = [flat for flat in model.flats if flat.trainable]
    count = sum(flat.numel for flat in flats)
    # of several dtypes the mean: a larger one would count more state than there is
    held = sum(flat.numel * flat.master_dtype.itemsize for flat in flats)
    element = held / count if count else 4.0
    sizes = trained_sizes(model)
    return replace(
        problem,
        unit_parameters=sizes if len(sizes) > 1 else (*sizes, 0),
        moment_bytes=MOMENTS * element,
        element_bytes=element,
    )


def measure_state_rates(
    model: ShardedModel, capacity_bytes: float, *, with_host_updates: bool
) -> list[StateRates]:
    """Return the rates of every rank; collective.

    Args:
        model: The sharded model.
        capacity_bytes: Bytes that this rank may hold on its device.
        with_host_updates: Whether the host may update.
    """
    room = min(_COPIED_BYTES, max(_LEAST_BYTES, int(min(capacity_bytes, 2.0**62) * _PART)))
    nbytes = room // 256 * 256
    own = (*_copy_rates(model, nbytes), _update_rate(model, nbytes // _UPDATE_BYTES))
    model.control.barrier()
    on_host = _host_update_rate(model) if with_host_updates else 0.0
    model.accelerator.empty_cache()
    to_device, to_host, on_device = own
    rates = StateRates(on_device, on_host, to_device, to_host)
    return [StateRates(*row) for row in model.control.gather(astuple(rates))]


def with_state_rates(problem: Problem, rates: Sequence[StateRates]) -> Problem:
    """Return a problem with these rates; ranks that are alike get the slowest of theirs."""
    found = []
    for profile in problem.ranks:
        group = [own for rank, own in zip(problem.ranks, rates, strict=True) if rank == profile]
        slowest = {name: min(getattr(own, name) for own in group) for name in vars(StateRates())}
        found.append(replace(profile, **slowest))
    return replace(problem, ranks=tuple[RankProfile, ...](found))


def without_host_updates(problem: Problem) -> Problem:
    """Return a problem whose plans let no host update: its last bits differ from a device's."""
    ranks = (replace(rank, host_updated_parameters_per_s=0.0) for rank in problem.ranks)
    return replace(problem, ranks=tuple[RankProfile, ...](ranks))


def _copy_rates(model: ShardedModel, nbytes: int) -> tuple[float, float]:
    accelerator = model.accelerator
    host = [accelerator.allocate_host(nbytes) for _ in range(2)]
    device = [torch.zeros(nbytes, dtype=torch.uint8, device=model.device) for _ in range(2)]
    to_device, to_host = accelerator.copies(), accelerator.copies()
    best = [math.inf, math.inf]
    for repeat in range(1 + _REPEATS):
        accelerator.synchronize()
        model.control.barrier()
        start_s = accelerator.now_s()
        arrivals = [
            (0, to_device, to_device.start(device[0], host[0])),
            (1, to_host, to_host.start(host[1], device[1], after=())),
        ]
        # the wait for the first hides how long the second took, if it is done before
        for way, copies, arrival in arrivals if repeat % 2 else reversed(arrivals):
            copies.finish(arrival)
            took_s = accelerator.now_s() - start_s
            if repeat:  # the first one is not warm
                best[way] = min(best[way], took_s)
    in_s, out_s = best
    return _rate(nbytes, in_s), _rate(nbytes, out_s)


def _update_rate(model: ShardedModel, elements: int) -> float:
    clock: Callable[[], float] = model.accelerator.clock
    try:
        seconds = update_time([elements], model.device, clock)
        seconds -= update_time([1], model.device, clock)
    except torch.OutOfMemoryError:
        return math.inf  # ``Problem.optimizer_s`` stands for it
    return _rate(elements, seconds)


def _host_update_rate(model: ShardedModel) -> float:
    accelerator = model.accelerator
    with accelerator.on_host():
        rows = nn.Parameter(torch.zeros(_HOST_ELEMENTS))
        rows.grad = torch.zeros_like(rows)
        optimizer = torch.optim.AdamW([rows], fused=True)
    worker, copies, best_s = accelerator.host_worker(), accelerator.copies(), math.inf
    try:
        for repeat in range(1 + _REPEATS):
            model.control.barrier()
            start_s = accelerator.now_s()
            arrivals = worker.submit(optimizer.step, _HOST_ELEMENTS, (), list).result()
            for arrival in arrivals:
                copies.finish(arrival)
            if repeat:
                best_s = min(best_s, accelerator.now_s() - start_s)
    finally:
        worker.close()
    return min(_rate(_HOST_ELEMENTS, best_s), 1e15)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 1e-12 else math.inf
