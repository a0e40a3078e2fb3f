"""What a step spends on the optimizer: clipping and updating, as training does both.

The user's optimizer is made for the planned shards, later; AdamW is what most will use, and its
default form is timed. Small tensors cost by their number, large ones by their elements, so that
both are timed: as many tensors as there are, each no larger than what is worth waiting for, and
what one tensor takes more when it is larger.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_cephalo.adapters.optimizer import clip_by_norm, clip_by_value
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.placement import local_part

# Repetitions, and the seconds after which there are no more.
_REPEATS, _LONG_S = 5, 0.25
# Elements of all tensors that stand for a rank's rows, and of the large one in addition to them:
# more than caches hold, and more than launching hides where kernels are launched.
_ROWS_NUMEL, _LARGE_NUMEL, _LAUNCHED_LARGE_NUMEL = 2**18, 2**20, 2**22


def optimizer_time(
    model: ShardedModel,
    clock: Callable[[], float],
    clip: Callable[[Sequence[Tensor]], object] | None,
) -> float:
    """Seconds of clipping and of AdamW over an even share, the slowest rank's; collective.

    Leaves no gradients behind.

    Args:
        model: The sharded model; has run a step.
        clock: Seconds, when all work issued to the device is done.
        clip: Clips the gradients of these parameters, on all ranks together; None where the trainer
            clips none.
    """
    model.executor.reshard()
    flats = [flat for unit in model.units for flat in unit.flats if flat.trainable]
    clip_s = 0.0 if clip is None else _clip_time(model, flats, clock, clip)
    own_s = 0.0
    with contextlib.suppress(torch.OutOfMemoryError):  # a rank that is full already: others tell
        own_s = _adamw_time(model, flats, clock)
    if not own_s:
        gc.collect()  # the frames of the failed step hold its tensors
    return clip_s + model.control.max(own_s)


def clipping(largest: float | None, algorithm: str | None) -> Callable[..., object] | None:
    """What the trainer's ``gradient_clip_val`` and ``gradient_clip_algorithm`` do in a step."""
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
    parameters = [parameter for flat in flats for parameter in flat.sharded]
    for flat in flats:
        if flat.grad_shard is not None:
            flat.publish([True] * len(flat.sharded))
    times: list[float] = []
    while len(times) <= _REPEATS and sum(times) < _LONG_S:
        model.control.barrier()
        start_s = clock()
        clip(parameters)
        # agreed: all ranks stop after the same repetition
        times.append(model.control.max(clock() - start_s))
    for parameter in parameters:
        parameter.grad = None
    return statistics.median(times[1:] or times)


def _adamw_time(model: ShardedModel, flats: Sequence[Flat], clock: Callable[[], float]) -> float:
    rows = [
        local_part(parameter).numel()
        for flat in flats
        for parameter in flat.sharded
        if parameter.requires_grad
    ]
    if not rows:
        return 0.0
    most = max(1, _ROWS_NUMEL // len(rows))
    stand_ins = [min(numel, most) for numel in rows]
    own_s = _update_time(stand_ins, model.device, clock)
    share = sum(flat.numel for flat in flats) / model.control.world_size
    beyond = share - sum(stand_ins)
    if beyond > 0:
        on_host = model.accelerator.computes_on_host
        limit = _LARGE_NUMEL if on_host else _LAUNCHED_LARGE_NUMEL
        large = max(2, min(int(beyond), limit))
        more_s = _update_time([large], model.device, clock) - _update_time([1], model.device, clock)
        own_s += max(0.0, more_s) / (large - 1) * beyond
    return own_s


def _update_time(numels: Sequence[int], device: torch.device, clock: Callable[[], float]) -> float:
    """Median seconds of AdamW over tensors of these sizes."""
    parameters = [nn.Parameter(torch.zeros(numel, device=device)) for numel in numels]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    times: list[float] = []
    while len(times) <= _REPEATS and sum(times) < _LONG_S:
        start_s = clock()
        optimizer.step()
        times.append(clock() - start_s)
    return statistics.median(times[1:] or times)  # the first one makes the state
