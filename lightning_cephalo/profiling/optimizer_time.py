"""Times the optimizer part of a step: clipping and updating, as training does both.

A copy of the user's optimizer updates other tensors; of one that is not element-wise, AdamW stands
for it. Small tensors cost by their number and large ones by their elements, so both are timed:
first as many small tensors as the rank has, then one large one, whose extra time gives the rate.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import clip_by_norm, clip_by_value
from lightning_cephalo.adapters.scope import Scope, is_listed, known_scope, twin_of
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.placement import local_part

# Repetitions, and the seconds after which they stop.
_REPEATS, _LONG_S = 5, 0.25
# A shorter difference is noise of the clock.
_LEAST_S = 1e-9
# Elements of all tensors that stand in for a rank's rows, and of the additional large tensor: more
# than caches hold and, where kernels are launched, more than launching hides.
_ROWS_NUMEL, _LARGE_NUMEL, _LAUNCHED_LARGE_NUMEL = 2**18, 2**20, 2**22


@dataclass(frozen=True)
class OptimizerTime:
    """A step of n rows takes ``overhead_s + n / parameters_per_s[rank]``."""

    overhead_s: float
    parameters_per_s: tuple[float, ...]

    def in_problem(self, problem: Problem, unit_part: float) -> Problem:
        """Return a problem with these times; equal ranks get the slowest of their rates."""
        bare = [replace(rank, updated_parameters_per_s=math.inf) for rank in problem.ranks]
        found = list(zip(bare, self.parameters_per_s, strict=True))
        ranks = [
            replace(own, updated_parameters_per_s=min(rate for rank, rate in found if rank == own))
            for own in bare
        ]
        return replace(
            problem,
            ranks=tuple(ranks),
            update_overhead_s=self.overhead_s,
            unit_update_s=self.overhead_s * unit_part,
        )


def optimizer_time(
    model: ShardedModel,
    clock: Callable[[], float],
    clip: Callable[[Sequence[Tensor]], object] | None,
    optimizers: Sequence[Optimizer] = (),
) -> OptimizerTime:
    """Return the times of clipping and of updates; leaves no gradients behind; collective."""
    model.executor.reshard()
    flats = [flat for unit in model.units for flat in unit.flats if flat.trainable]
    clip_s = 0.0 if clip is None else _clip_time(model, flats, clock, clip)
    own: tuple[float, float] | None = None
    model.control.barrier()
    # the times of the other ranks count for a rank that is already full
    with contextlib.suppress(torch.OutOfMemoryError):
        own = _rate(model, flats, clock, next(filter(_is_element_wise, optimizers), None))
    if own is None:
        gc.collect()  # the frames of the failed step hold its tensors
    rows = model.control.gather((0.0, 0.0) if own is None else own)
    slowest = min((rate for _, rate in rows if rate), default=math.inf)
    rates = tuple(rate or slowest for _, rate in rows)
    return OptimizerTime(clip_s + max(overhead_s for overhead_s, _ in rows), rates)


def clipping(largest: float | None, algorithm: str | None) -> Callable[..., object] | None:
    """Return the trainer's clipping as a function; None if it does not clip."""
    if not largest:
        return None
    clip = clip_by_value if algorithm == "value" else clip_by_norm
    return lambda parameters: clip(parameters, largest)


def _clip_time(
    model: ShardedModel,
    flats: Sequence[Flat],
    clock: Callable[[], float],
    clip: Callable[[Sequence[Tensor]], object],
) -> float:
    held = _with_gradients(model, flats)
    parameters = [parameter for flat in held for parameter in flat.sharded]
    times: list[float] = []
    while held and len(times) <= _REPEATS and sum(times) < _LONG_S:
        model.control.barrier()
        start_s = clock()
        clip(parameters)
        # the maximum over ranks, so that all ranks stop after the same repetition
        times.append(model.control.max(clock() - start_s))
    for flat in held:
        flat.gradient.forget()
    if not times:
        return 0.0
    # what is left out takes as long for each element
    share = sum(flat.contents.numel for flat in held) / sum(flat.contents.numel for flat in flats)
    return statistics.median(times[1:] or times) / share


def _with_gradients(model: ShardedModel, flats: Sequence[Flat]) -> Sequence[Flat]:
    """Return those of the flats whose gradients all ranks have memory for; they hold them."""
    count = 0
    with contextlib.suppress(torch.OutOfMemoryError):
        for flat in flats:
            _give_gradients(flat)
            count += 1
    common = min(int(each) for (each,) in model.control.gather([float(count)]))
    for flat in flats[common:]:
        flat.gradient.forget()
    return flats[:common]


def _give_gradients(flat: Flat) -> None:
    for parameter in flat.sharded:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def _is_element_wise(optimizer: Optimizer) -> bool:
    return known_scope(optimizer) is Scope.ELEMENT or is_listed(optimizer)


def _rate(
    model: ShardedModel,
    flats: Sequence[Flat],
    clock: Callable[[], float],
    optimizer: Optimizer | None,
) -> tuple[float, float]:
    """Return this rank's seconds of overhead, and the parameters that it updates per second."""
    rows = [
        local_part(parameter).numel()
        for flat in flats
        for parameter in flat.sharded
        if parameter.requires_grad
    ]
    trained = sum(flat.contents.numel for flat in flats)
    if not trained:
        return 0.0, math.inf
    most = max(1, _ROWS_NUMEL // max(len(rows), 1))
    stand_ins = [min(numel, most) for numel in rows]
    update_time = partial(_update_time, device=model.device, clock=clock, optimizer=optimizer)
    own_s = update_time(stand_ins) if rows else 0.0
    on_host = model.accelerator.computes_on_host
    limit = _LARGE_NUMEL if on_host else _LAUNCHED_LARGE_NUMEL
    # no larger than an even share, which the rank has room for; small shares are mostly calls
    share = trained // model.control.world_size
    large = max(2, min(share - sum(stand_ins), limit), min(share, _ROWS_NUMEL))
    one_s = update_time([1])
    more_s = update_time([large]) - one_s
    rate = (large - 1) / more_s if more_s > _LEAST_S else math.inf
    return max(0.0, own_s - sum(stand_ins) / rate), rate


def _update_time(
    numels: Sequence[int],
    device: torch.device,
    clock: Callable[[], float],
    optimizer: Optimizer | None,
) -> float:
    """Return the median seconds of an update of tensors of these sizes."""
    parameters = [nn.Parameter(torch.zeros(numel, device=device)) for numel in numels]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update = twin_of(optimizer or torch.optim.AdamW(parameters), parameters)
    times: list[float] = []
    while len(times) <= _REPEATS and sum(times) < _LONG_S:
        start_s = clock()
        update()
        times.append(clock() - start_s)
    return statistics.median(times[1:] or times)  # the first repetition creates the state
