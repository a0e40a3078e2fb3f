"""Measures every rank on the real, sharded model, and returns a Problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_cephalo.accelerator import Device
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.texts import printable
from lightning_cephalo.data.batch_layout import own_copy
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.profiling.isolation import isolated, moved_to_device
from lightning_cephalo.profiling.memory_model import RetainedBytes, resting_bytes, state_of
from lightning_cephalo.profiling.network import with_network_times
from lightning_cephalo.profiling.optimizer_time import OptimizerTime, optimizer_time
from lightning_cephalo.profiling.probe import Prober, ProfiledStep
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks, profile_of, remember
from lightning_cephalo.profiling.state_rates import with_unit_parameters
from lightning_cephalo.profiling.sweep import (
    Measured,
    ProfileOptions,
    measure_memory,
    measure_times,
    measure_without_recompute,
)
from lightning_cephalo.sharding.discovery import UnitKind


def measure(
    *,
    model: ShardedModel,
    view: TrainerView,
    device: Device,
    read_batch: Callable[[int], Any],
    step: ProfiledStep,
    options: ProfileOptions,
) -> Problem:
    """Run the user's step on growing microbatches of real samples; collective.

    Returns the same problem on every rank, and leaves model, generators, loggers and loader as they
    were; see :mod:`~lightning_cephalo.profiling.isolation`.

    Args:
        read_batch: Returns a batch of the first samples, of a given number.

    Raises:
        ProfilingError: On every rank, if any rank fails, or if none has memory for the smallest
            microbatch.
    """
    control, accelerator = model.control, model.accelerator
    started_s, clock = accelerator.now_s(), accelerator.clock
    of_size, batch = 0, None

    def batch_of(size: int) -> Any:
        nonlocal of_size, batch
        if of_size != size:
            with accelerator.on_host():
                of_size, batch = size, read_batch(size)
        # a step may change what it gets
        return moved_to_device(view, own_copy(batch, with_arrays=True))

    # reduced gradients are dropped: beside an optimizer there may be no room for them
    with isolated(view, accelerator), model.executor.updates.dropping():
        idle = options.smallest if options.single_microbatch else 0
        prober = Prober(model, clock, batch_of, step, idle)
        measured, retaining = measure_times(prober, options, device.name), None
        measure_memory(prober, measured, options)
        if options.choose_recompute:
            retaining = measure_without_recompute(prober, measured, options)
        # a backend allocates when it first communicates, and cannot use memory that torch caches
        accelerator.empty_cache()
        clip = view.clip_value, view.clips_by_value
        updates = optimizer_time(model, clock, view.optimizers, *clip)
        blocks = [
            visit
            for visit in model.executor.visits
            if not visit.is_meeting and model.units[visit.unit].kind is UnitKind.BLOCK
        ]
        units = max(1, sum(visit.differentiable for visit in blocks))
        reduced = len({visit.unit for visit in blocks if model.units[visit.unit].trainable})
        resting = control.max(resting_bytes(model, view.optimizers))
        problem = _problem_of(model, options, device, measured, retaining, updates, units)
        problem = replace(problem, gathered_bytes=problem.gathered_bytes + resting)
        capacity = device.capacity_bytes
        problem = with_network_times(problem, model, clock, capacity, reduced / units)
        # clipping waits for the other ranks' norms
        update_s = updates.overhead_s + (
            0.0 if view.clip_value is None else problem.step_overhead_s / 2
        )
        unit_update_s = update_s * problem.unit_part
        problem = replace(problem, update_overhead_s=update_s, unit_update_s=unit_update_s)

    for flat in model.flats:
        flat.gradient.forget()  # moving the shards may need this memory
    accelerator.empty_cache()
    shows = options.verbose and control.rank == 0
    if control.rank == 0 and device.speed_lasts:
        lost = remember(problem, model, batch)
        if lost is not None and shows:
            print(printable(f"The measured times were not kept for later: {lost}"), flush=True)
    if shows:
        sizes = ", ".join(str(profile.largest_microbatch_size) for profile in problem.ranks)
        seconds = f"{accelerator.now_s() - started_s:.1f} s"
        print(f"Profiled microbatches of up to {sizes} samples (by rank) in {seconds}.", flush=True)
    return problem


def _problem_of(
    model: ShardedModel,
    options: ProfileOptions,
    device: Device,
    measured: Measured,
    retaining: Measured | None,
    updates: OptimizerTime,
    units: int,
) -> Problem:
    """Return what all ranks have measured of compute and memory; collective."""
    kept, inside = measured.kept, retaining.kept if retaining else RetainedBytes()
    per_microbatch = max(kept.microbatch_bytes, inside.microbatch_bytes)
    per_sample = max(kept.sample_bytes, inside.sample_bytes)
    measured.kept = kept._replace(microbatch_bytes=per_microbatch)
    if retaining is not None:
        retaining.kept = inside._replace(sample_bytes=per_sample, microbatch_bytes=per_microbatch)
    gathered_bytes = float(model.gathered_bytes)
    profile = profile_of(device, measured, retaining, units, gathered_bytes)
    profile = replace(profile, updated_parameters_per_s=updates.parameters_per_s)
    state, early_state = state_of(model)
    problem = Problem(
        ranks=tuple(merge_equal_ranks(model.control.gather(profile))),
        units=units,
        global_batch_size=options.global_batch_size,
        minimum_microbatch_size=options.smallest,
        single_microbatch=options.single_microbatch,
        reducing_retained_bytes=kept.reducing_sample_bytes,
        kept_reducing_retained_bytes=inside.reducing_sample_bytes if retaining else None,
        boundary_bytes=kept.sample_bytes / units,
        kept_bytes=(per_sample - kept.sample_bytes) / units,
        microbatch_bytes=per_microbatch,
        unresharded_bytes=float(model.unresharded_bytes),
        # the forward's peak may lack a free unit buffer
        unresharded_peak_bytes=float(max((u.full_bytes for u in model.units[1:]), default=0)),
        state=state,
        early_state=early_state,
        gathered_bytes=gathered_bytes,
        groups=model.state_groups,
    )
    return with_unit_parameters(problem, model)
