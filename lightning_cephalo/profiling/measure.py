"""Measures every rank on the real, sharded model, and returns a Problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from lightning_cephalo.accelerator import Device
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.profiling.isolation import isolated, moved_to_device
from lightning_cephalo.profiling.memory_model import (
    RetainedBytes,
    reducing_state_bytes,
    resting_bytes,
    state_bytes,
    updating_state_bytes,
)
from lightning_cephalo.profiling.network import measure_network
from lightning_cephalo.profiling.optimizer_time import clipping, optimizer_time
from lightning_cephalo.profiling.probe import Prober, ProfiledStep
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.profiling.rank_curves import (
    merge_equal_ranks,
    profile_of,
    remember,
    without_recompute,
)
from lightning_cephalo.profiling.state_rates import with_unit_parameters
from lightning_cephalo.profiling.sweep import (
    Measured,
    ProfileOptions,
    measure_memory,
    measure_times,
    measure_without_recompute,
)
from lightning_cephalo.sharding.discovery import UnitKind


@dataclass(frozen=True)
class _Own:
    """What a rank has measured."""

    device: Device
    measured: Measured
    retaining: Measured | None
    updated_parameters_per_s: float
    resting_bytes: float


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
    progress = Progress(options.verbose and control.rank == 0)
    of_size, batch = 0, None

    def batch_of(size: int) -> Any:
        nonlocal of_size, batch
        if of_size != size:
            with accelerator.on_host():
                of_size, batch = size, read_batch(size)
        # a step may change what it gets
        return moved_to_device(view, own_copy(batch, with_arrays=True))

    def report(sizes: Sequence[int]) -> None:
        by_rank = ", ".join(str(size) if size else "-" for size in sizes)
        progress.say(f"profiling: microbatches of {by_rank} samples (by rank)")

    with (
        progress,
        isolated(view, accelerator),
        model.executor.updates.dropping(),  # beside an optimizer there may be no room for them
    ):
        prober = Prober(
            model, clock, batch_of, step, options.smallest if options.single_microbatch else 0
        )
        measured, retaining = measure_times(prober, options, device.name, report), None
        progress.say("profiling: memory")
        measure_memory(prober, measured, options)
        if options.choose_recompute:
            progress.say("profiling: without recomputation")
            retaining = measure_without_recompute(prober, measured, options)
        progress.say("profiling: network")
        # a backend allocates when it first communicates, and cannot use memory that torch caches
        accelerator.empty_cache()
        clip = clipping(view.clip_value, view.clips_by_value)
        updates = optimizer_time(model, clock, view.optimizers, clip)
        network = measure_network(model, clock, device.capacity_bytes)
        own_resting = float(resting_bytes(model, view.optimizers))

    for flat in model.flats:
        flat.gradient.forget()  # moving the shards may need this memory
    accelerator.empty_cache()
    blocks = [
        visit
        for visit in model.executor.visits
        if not visit.is_meeting and model.units[visit.unit].kind is UnitKind.BLOCK
    ]
    units = max(1, sum(visit.differentiable for visit in blocks))
    reduced = len({visit.unit for visit in blocks if model.units[visit.unit].trainable})
    own = _Own(device, measured, retaining, updates.parameters_per_s, own_resting)
    problem = _problem_of(model, options, own, units)
    problem = network.in_problem(with_unit_parameters(problem, model), reduced / units)
    # clipping waits for the other ranks' norms
    update_s = updates.overhead_s + (0.0 if clip is None else network.exchange_s)
    unit_update_s = update_s * problem.unit_part
    problem = replace(problem, update_overhead_s=update_s, unit_update_s=unit_update_s)
    if control.rank == 0 and device.speed_lasts:
        lost = remember(problem, model, batch)
        if lost is not None:
            progress.warn(f"The measured times were not kept for later: {lost}")
    seconds = accelerator.now_s() - started_s
    sizes = ", ".join(str(profile.largest_microbatch_size) for profile in problem.ranks)
    progress.warn(f"Profiled microbatches of up to {sizes} samples (by rank) in {seconds:.1f} s.")
    return problem


def _problem_of(model: ShardedModel, options: ProfileOptions, own: _Own, units: int) -> Problem:
    """Return what all ranks have measured of compute and memory; collective."""
    kept, inside = own.measured.kept, own.retaining.kept if own.retaining else RetainedBytes()
    rows = model.control.gather([*astuple(kept), *astuple(inside), own.resting_bytes])
    *figures, resting_bytes = map(max, zip(*rows, strict=True))
    kept, inside = RetainedBytes(*figures[:3]), RetainedBytes(*figures[3:])
    per_microbatch = max(kept.microbatch_bytes, inside.microbatch_bytes)
    per_sample = max(kept.sample_bytes, inside.sample_bytes)
    kept = replace(kept, microbatch_bytes=per_microbatch)
    inside = replace(inside, sample_bytes=per_sample, microbatch_bytes=per_microbatch)
    gathered_bytes = float(model.gathered_bytes)
    profile = profile_of(own.device, own.measured, kept, units, gathered_bytes)
    profile = replace(profile, updated_parameters_per_s=own.updated_parameters_per_s)
    if own.retaining is not None:
        profile = without_recompute(profile, own.retaining, inside, units, gathered_bytes)
    return Problem(
        ranks=tuple(merge_equal_ranks(model.control.gather(profile))),
        units=units,
        global_batch_size=options.global_batch_size,
        minimum_microbatch_size=options.smallest,
        single_microbatch=options.single_microbatch,
        reducing_retained_bytes=kept.reducing_sample_bytes,
        kept_reducing_retained_bytes=inside.reducing_sample_bytes if own.retaining else None,
        boundary_bytes=kept.sample_bytes / units,
        kept_bytes=(per_sample - kept.sample_bytes) / units,
        microbatch_bytes=per_microbatch,
        unresharded_bytes=float(model.unresharded_bytes),
        # the forward's peak may lack a free unit buffer
        unresharded_peak_bytes=float(max((u.full_bytes for u in model.units[1:]), default=0)),
        # what a reduce receives into grows with the number of ranks
        state_bytes=float(state_bytes(model)),
        early_state_bytes=float(state_bytes(model, early=True)),
        early_reducing_state_bytes=float(reducing_state_bytes(model)),
        early_updating_state_bytes=float(updating_state_bytes(model)),
        gathered_bytes=gathered_bytes + resting_bytes,
        hybrid_sharding=bool(model.state_groups),
        state_groups=model.state_groups,
    )
