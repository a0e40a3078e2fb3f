"""Measures what optimizer state in host memory would cost: copies and updates.

Ranks of one host share its memory and processors, so all of them copy, and update, at the same
time. The host updates while copies are under way, as in a step. AdamW stands for the user's
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.adapters.scope import MOMENTS
from lightning_cephalo.common.errors import HostMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.sharding.discovery import UnitKind

_REPEATS = 4
_COPIED_BYTES, _LEAST_BYTES = 2**24, 2**16
# Part of the device that may be filled while measuring: a rank may be full of its share.
_PART = 1 / 64
_HOST_ELEMENTS = 2**20

Start: TypeAlias = Callable[[], list[Callable[[], None]]]
"""Starts work, and returns what waits for its parts."""


def has_state_rates(problem: Problem) -> bool:
    """Return whether a problem has the costs of moving state; an older file does not."""
    return any(math.isfinite(rank.to_device_bytes_per_s) for rank in problem.ranks)


def trained_sizes(model: ShardedModel) -> tuple[int, ...]:
    """Return the trained parameters of each block, behind those of all else; as on all ranks."""
    sizes = {id(u): sum(flat.contents.numel for flat in u.trained) for u in model.units}
    blocks = [sizes[id(block)] for block in model.of_kind(UnitKind.BLOCK)]
    return (sum(sizes.values()) - sum(blocks), *blocks)


def with_unit_parameters(problem: Problem, model: ShardedModel) -> Problem:
    """Return a problem with the trained parameters of each unit, and the bytes of Adam's state."""
    sizes = trained_sizes(model)
    flats = [flat.contents for flat in model.flats if flat.trainable]
    # of several dtypes the mean
    count = max(1, sum(own.numel for own in flats))
    element_bytes = sum(own.master_bytes for own in flats) / count
    return replace(
        problem,
        unit_parameters=sizes if len(sizes) > 1 else (*sizes, 0),
        moment_bytes=MOMENTS * element_bytes,
        element_bytes=element_bytes,
    )


def with_state_rates(
    problem: Problem, model: ShardedModel, capacity_bytes: float, *, with_host_updates: bool
) -> Problem:
    """Measure the rates of every rank, and return a problem with them; collective.

    Raises:
        HostMemoryError: If this rank's host does not give the memory for copies.
        RemoteRankError: If that is so on another rank.
    """
    control, accelerator = model.control, model.accelerator
    nbytes = int(min(_COPIED_BYTES, max(_LEAST_BYTES, capacity_bytes * _PART)))
    doing = "allocating host memory to measure copies"
    copy = control.together(doing, partial(_copies, accelerator, nbytes))
    rates = [nbytes / _best_s(model, copy), 0.0]
    if with_host_updates:
        rates[1] = _HOST_ELEMENTS / _best_update_s(model, copy)
    del copy
    accelerator.empty_cache()
    ranks = [
        replace(
            rank,
            host_updated_parameters_per_s=updated,
            to_device_bytes_per_s=copied,
            to_host_bytes_per_s=copied,
        )
        for rank, (copied, updated) in zip(problem.ranks, control.gather(rates), strict=True)
    ]
    return replace(problem, ranks=tuple(merge_equal_ranks(ranks)))


def _copies(accelerator: Accelerator, nbytes: int) -> Start:
    """Return what starts a copy of so many bytes in each direction."""
    try:
        host = [accelerator.allocate_host(nbytes) for _ in range(2)]
    except (MemoryError, RuntimeError) as error:  # torch raises either, by the platform
        raise HostMemoryError(
            f"This rank's host did not give two pieces of {format_mib(nbytes)} to measure copies:"
            f" {error} Free memory there, or use optimizer_offload=False without such a plan."
        ) from error
    device = [torch.zeros_like(own, device=accelerator.device) for own in host]
    there, back = accelerator.copies(), accelerator.copies()

    def start() -> list[Callable[[], None]]:
        arrival = there.start(device[0], host[0])
        other = back.start(host[1], device[1], after=())
        return [partial(there.finish, arrival), partial(back.finish, other)]

    return start


def _best_update_s(model: ShardedModel, copy: Start) -> float:
    """Return the least seconds in which the host updates, while copies are under way."""
    accelerator = model.accelerator
    with accelerator.on_host():
        rows = nn.Parameter(torch.zeros(_HOST_ELEMENTS))
        rows.grad = torch.zeros_like(rows)
        optimizer = torch.optim.AdamW([rows], fused=True)
    worker, copies = accelerator.host_worker(), accelerator.copies()

    def update() -> list[Callable[[], None]]:
        done = worker.submit(optimizer.step, _HOST_ELEMENTS, (), list)
        return [partial(copies.finish, arrival) for arrival in done.result()]

    try:
        return _best_s(model, update, meanwhile=copy)
    finally:
        worker.close()


def _best_s(model: ShardedModel, start: Start, meanwhile: Start = list) -> float:
    """Return the least seconds in which what is started is done; collective."""
    times_s, accelerator = [], model.accelerator
    for _ in range(1 + _REPEATS):
        accelerator.synchronize()
        model.control.barrier()
        others, start_s = meanwhile(), accelerator.now_s()
        for finish in start():
            finish()
        times_s.append(accelerator.now_s() - start_s)
        for finish in others:
            finish()
    return max(1e-9, min(times_s[1:]))  # the first one is not warm
