"""Times the optimizer part of a step: clipping and updating, as training does both.

A copy of the user's optimizer updates other tensors; of one that is not element-wise, AdamW stands
for it. Small tensors cost by their number and large ones by their elements, so both are timed:
first as many small tensors as the rank has, then one large one, whose extra time gives the rate.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import clip_by_norm
from lightning_cephalo.adapters.scope import is_elementwise
from lightning_cephalo.adapters.stepping import copy_of, step_without_hooks
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.placement import local_part

# Repetitions, and the seconds after which they stop.
_REPEATS, _LONG_S = 5, 0.25
# A shorter difference is noise of the clock.
_LEAST_S = 1e-9
# Elements of all tensors that stand in for a rank's rows, and of the additional large tensor: more
# than caches hold and, where kernels are launched, more than launching hides.
_ROWS_NUMEL, _LARGE_NUMEL, _LAUNCHED_LARGE_NUMEL = 2**18, 2**20, 2**22


class OptimizerTime(NamedTuple):
    """A step of n rows takes ``overhead_s + n / parameters_per_s``."""

    overhead_s: float  # the most of all ranks
    parameters_per_s: float


def optimizer_time(
    model: ShardedModel,
    clock: Callable[[], float],
    optimizers: Sequence[Optimizer] = (),
    clip_value: float | None = None,
    clips_by_value: bool = False,
) -> OptimizerTime:
    """Return this rank's times of clipping and updating, on tensors of their own; collective."""
    optimizer = next(filter(is_elementwise, optimizers), None)
    clip = nn.utils.clip_grad_value_ if clips_by_value else clip_by_norm

    def update_s(numels: Sequence[int]) -> float:
        """Return the median seconds of an update of tensors of these sizes."""
        parameters = [nn.Parameter(torch.zeros(numel, device=model.device)) for numel in numels]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        update = copy_of(optimizer or torch.optim.AdamW(parameters), [parameters])
        times: list[float] = []
        while len(times) <= _REPEATS and sum(times) < _LONG_S:
            start_s = clock()
            if clip_value is not None:
                clip(parameters, clip_value)
            step_without_hooks(update)
            times.append(clock() - start_s)
        return statistics.median(times[1:] or times)  # the first repetition creates the state

    flats = [flat for flat in model.flats if flat.trainable]
    rows = [local_part(p).numel() for flat in flats for p in flat.sharded if p.requires_grad]
    # no larger than an even share, which the rank has room for; small shares are mostly calls
    share = sum(flat.contents.numel for flat in flats) // model.control.world_size
    stand_ins = [min(numel, max(1, _ROWS_NUMEL // len(rows))) for numel in rows]
    on_host = model.accelerator.computes_on_host
    limit = _LARGE_NUMEL if on_host else _LAUNCHED_LARGE_NUMEL
    large = max(2, min(share - sum(stand_ins), limit), min(share, _ROWS_NUMEL))
    overhead_s, rate = 0.0, math.inf
    model.control.barrier()
    try:
        if share:
            own_s = update_s(stand_ins) if rows else 0.0
            more_s = update_s([large]) - update_s([1])
            rate = (large - 1) / more_s if more_s > _LEAST_S else math.inf
            overhead_s = max(0.0, own_s - sum(stand_ins) / rate)
    except torch.OutOfMemoryError:
        rate = 0.0  # the times of the other ranks count for a rank that is already full
    gc.collect()  # the frames of a failed update hold its tensors
    overheads, rates = zip(*model.control.gather([overhead_s, rate]), strict=True)
    return OptimizerTime(max(overheads), rate or min(filter(None, rates), default=math.inf))
