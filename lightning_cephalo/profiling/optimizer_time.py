"""Times the optimizer part of a step: clipping and updating, as training does both.

The user's optimizer is created later, for the planned shards. AdamW is timed in its default form,
since most users will use it. Small tensors cost by their number and large ones by their elements,
so both are timed. First, as many tensors as the rank has, each cut to a size that is quick to
update. Second, one large tensor, whose extra time stands for the elements that were cut off.
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

# Repetitions, and the seconds after which they stop.
_REPEATS, _LONG_S = 5, 0.25
# Elements of all tensors that stand in for a rank's rows, and of the additional large tensor: more
# than caches hold and, where kernels are launched, more than launching hides.
_ROWS_NUMEL, _LARGE_NUMEL, _LAUNCHED_LARGE_NUMEL = 2**18, 2**20, 2**22


def optimizer_time(
    model: ShardedModel,
    clock: Callable[[], float],
    clip: Callable[[Sequence[Tensor]], object] | None,
) -> float:
    """Return the slowest rank's seconds of clipping and of AdamW over an even share; collective.

    Leaves no gradients behind.

    Args:
        model: The sharded model; has run a step.
        clock: Returns seconds once all work issued to the device is done.
        clip: Clips the gradients of the given parameters, on all ranks together; None if the
            trainer does not clip.
    """
    model.executor.reshard()
    flats = [flat for unit in model.units for flat in unit.flats if flat.trainable]
    clip_s = 0.0 if clip is None else _clip_time(model, flats, clock, clip)
    own_s = 0.0
    # the times of the other ranks count for a rank that is already full
    with contextlib.suppress(torch.OutOfMemoryError):
        own_s = _adamw_time(model, flats, clock)
    if not own_s:
        gc.collect()  # the frames of the failed step hold its tensors
    return clip_s + model.control.max(own_s)


def clipping(largest: float | None, algorithm: str | None) -> Callable[..., object] | None:
    """Return the trainer's clipping as a function; None if it does not clip.

    Args:
        largest: The trainer's ``gradient_clip_val``.
        algorithm: The trainer's ``gradient_clip_algorithm``.
    """
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
        flat.forget_gradient()
    if not times:
        return 0.0
    # what is left out takes as long for each element
    share = sum(flat.numel for flat in held) / sum(flat.numel for flat in flats)
    return statistics.median(times[1:] or times) / share


def _with_gradients(model: ShardedModel, flats: Sequence[Flat]) -> Sequence[Flat]:
    """Return those of the flats whose gradients all ranks have memory for; they hold them."""
    count = 0
    with contextlib.suppress(torch.OutOfMemoryError):
        for flat in flats:
            flat.hold_gradient()
            count += 1
    common = min(int(each) for (each,) in model.control.gather([float(count)]))
    for flat in flats[common:]:
        flat.forget_gradient()
    return flats[:common]


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
    own_s = update_time(stand_ins, model.device, clock)
    share = sum(flat.numel for flat in flats) / model.control.world_size
    beyond = share - sum(stand_ins)
    if beyond > 0:
        on_host = model.accelerator.computes_on_host
        limit = _LARGE_NUMEL if on_host else _LAUNCHED_LARGE_NUMEL
        large = max(2, min(int(beyond), limit))
        more_s = update_time([large], model.device, clock) - update_time([1], model.device, clock)
        own_s += max(0.0, more_s) / (large - 1) * beyond
    return own_s


def update_time(numels: Sequence[int], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the median seconds of AdamW over tensors of these sizes."""
    parameters = [nn.Parameter(torch.zeros(numel, device=device)) for numel in numels]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    times: list[float] = []
    while len(times) <= _REPEATS and sum(times) < _LONG_S:
        start_s = clock()
        optimizer.step()
        times.append(clock() - start_s)
    return statistics.median(times[1:] or times)  # the first repetition creates the state
