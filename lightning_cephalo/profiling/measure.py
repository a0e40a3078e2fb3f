"""Measures every rank on the real, sharded model, and returns a Problem."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Device
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.data.reading import sample_batches
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.chunked_cross_entropy import largest_call
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.program import Visit
from lightning_cephalo.plan.updates import least_update_s, with_updates
from lightning_cephalo.profiling.isolation import (
    expect_samples,
    isolated,
    moved_to_device,
    state_on_host,
)
from lightning_cephalo.profiling.lost_rank import lost_rank_explained
from lightning_cephalo.profiling.memory_model import (
    RetainedBytes,
    compute_curve,
    reducing_state_bytes,
    resting_bytes,
    state_bytes,
    unresharded_peak_bytes,
    updating_state_bytes,
)
from lightning_cephalo.profiling.network import NetworkTimes, measure_network
from lightning_cephalo.profiling.no_recompute import measure_no_recompute, with_no_recompute
from lightning_cephalo.profiling.optimizer_time import OptimizerTime, clipping, optimizer_time
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.profiling.save_curves import remember
from lightning_cephalo.profiling.state_rates import RATES, with_unit_parameters
from lightning_cephalo.profiling.sweep import (
    Measured,
    Prober,
    Sweep,
    ladder,
    measure_memory,
    measure_times,
)
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.discovery import UnitKind

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Part of the budget that timing may use; the rest is for memory and the network.
_TIMING_SHARE = 0.7
# Ranks with the same device name whose times differ by less count as equal.
_ALIKE = 0.10


@dataclass(frozen=True)
class ProfileOptions:
    """The settings of profiling.

    Attributes:
        budget_s: Seconds that profiling may take, approximately; the smallest size always runs.
        minimum_microbatch_size: Smaller ones are not tried (batch normalisation).
        ready_samples: Samples of the first ready batch, on the rank with the fewest: microbatches
            are cut from it. None: loaders give single samples.
        single_microbatch: Whether every rank runs one in every step, which may communicate.
    """

    budget_s: float
    minimum_microbatch_size: int = 1
    ready_samples: int | None = None
    single_microbatch: bool = False
    choose_recompute: bool = False
    verbose: bool = True


def measure(
    *,
    model: ShardedModel,
    trainer: Trainer,
    device: Device,
    loader: Any,
    step: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    pause: Callable[[], None],
    global_batch_size: int,
    options: ProfileOptions,
    manual: PhasedSteps | None = None,
    layouts: Sequence[BatchLayout] = (),
) -> Problem:
    """Run the user's step on growing microbatches of real samples; collective.

    Returns the same problem on every rank, and leaves model, generators, loggers and loader as they
    were; see :mod:`~lightning_cephalo.profiling.isolation`.

    Args:
        loader: The user's DataLoader, or all of them as
            :class:`~lightning_cephalo.preparation.prepare.Loaders`.
        pause: Called between measurements, on all ranks; it may communicate, and raise everywhere.
        manual: Runs steps that call their backwards themselves; None: the executor runs both.
        layouts: How the batches of each loader are cut, if they are ready.

    Raises:
        ProfilingError: On every rank, if any rank fails, dies, gets a loss that is not finite, or
            if none has memory for the smallest microbatch.
    """
    control, clock = model.control, model.accelerator.clock
    started_s = model.accelerator.now_s()
    most = min(global_batch_size, options.ready_samples or global_batch_size)
    smallest = min(options.minimum_microbatch_size, most)
    progress = Progress(options.verbose and control.rank == 0)
    batches = _Batches(loader, layouts, partial(moved_to_device, trainer, model.module))

    def counted_batch(size: int) -> Any:
        expect_samples(trainer, size)
        return batches(size)

    def report(sizes: Sequence[int]) -> None:
        pause()
        progress.timing(sizes)

    with (
        lost_rank_explained(control.rank, "profiling"),
        progress,
        isolated(trainer, model.module, model.accelerator),
        state_on_host(trainer.optimizers, model.accelerator),
        model.executor.updates.dropping(),  # beside an optimizer there may be no room for them
    ):
        prober = Prober(model, clock, counted_batch, step, context, manual)
        sweep = Sweep(
            ladder(smallest, most),
            global_batch_size,
            options.budget_s * _TIMING_SHARE,
            control.gather(device.name),
            options.single_microbatch,
            report,
        )
        no_recompute = None
        measured = measure_times(prober, sweep)
        pause()
        progress.say("profiling: memory")
        own_kept = measure_memory(prober, measured, sweep)
        if options.choose_recompute:
            pause()
            progress.say("profiling: without recomputation")
            no_recompute = measure_no_recompute(prober, measured, sweep)
        pause()
        progress.say("profiling: network")
        # a backend allocates when it first communicates, and cannot use memory that torch caches
        model.accelerator.empty_cache()
        clip = clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        updates = optimizer_time(model, clock, clip, trainer.optimizers)
        network = measure_network(model, clock, device.capacity_bytes)
        own_resting = float(resting_bytes(model))

    for unit in model.units:
        for flat in unit.flats:
            flat.gradient.forget()  # moving the shards may need this memory
    model.accelerator.empty_cache()
    visits = _visits_of_blocks(model)
    units = max(1, sum(visit.differentiable for visit in visits))
    own_inside = RetainedBytes(0.0, 0.0) if no_recompute is None else no_recompute.kept
    per_microbatch = max(own_kept.microbatch_bytes, own_inside.microbatch_bytes)
    rows = control.gather(
        [
            own_kept.sample_bytes,
            own_inside.sample_bytes,
            per_microbatch,
            own_resting,
            own_kept.reducing_sample_bytes,
            own_inside.reducing_sample_bytes,
        ]
    )
    per_sample, inside_too, per_microbatch, resting, reducing, reducing_inside = (
        max(column) for column in zip(*rows, strict=True)
    )
    kept = RetainedBytes(per_sample, per_microbatch, reducing)
    gathered_bytes = float(model.gathered_bytes)
    own = _profile(device, measured, units, gathered_bytes, kept)
    if no_recompute is not None:
        all_kept = RetainedBytes(max(inside_too, per_sample), per_microbatch, reducing_inside)
        own = with_no_recompute(own, no_recompute, all_kept, units, gathered_bytes)
    profiles = merge_equal_ranks(_exchanged(control, own))
    alone = Problem(
        ranks=tuple(profiles),
        units=units,
        state_bytes=float(state_bytes(model)),
        reducing_retained_bytes=kept.reducing_sample_bytes,
        kept_reducing_retained_bytes=None if no_recompute is None else reducing_inside,
        global_batch_size=global_batch_size,
        boundary_bytes=kept.sample_bytes / units,
        kept_bytes=max(0.0, inside_too - per_sample) / units,
        microbatch_bytes=kept.microbatch_bytes,
        minimum_microbatch_size=smallest,
        single_microbatch=options.single_microbatch,
        unresharded_bytes=float(model.unresharded_bytes),
        unresharded_peak_bytes=float(unresharded_peak_bytes(model)),
    )
    problem = _in_this_world(alone, model, network, updates, resting)
    # curves are kept for models with any head: with chunks of logits they lack memory that others
    # need
    if control.rank == 0 and device.speed_lasts and not largest_call.tokens:
        lost = remember(
            problem,
            model=type(model.module).__name__,
            parameters=model.parameter_count,
            dtype=model.compute_dtype,
            recompute=model.executor.recompute,
            batch=batches.held,
        )
        if lost is not None:
            progress.warn(f"The measured times were not kept for later: {lost}")
    largest = [profile.largest_microbatch_size for profile in profiles]
    seconds = model.accelerator.now_s() - started_s
    progress.done(largest, seconds, seconds / balanced_step_s(problem))
    return problem


def _in_this_world(
    alone: Problem,
    model: ShardedModel,
    network: NetworkTimes,
    updates: OptimizerTime,
    resting: float,
) -> Problem:
    """Return a problem with what depends on all ranks together."""
    visits = _visits_of_blocks(model)
    reduced = len({visit.unit for visit in visits if model.units[visit.unit].trainable})
    share = reduced / alone.units

    def of_reduces(seconds: float | None, gather_s: float = 0.0) -> float | None:
        """Return the mean over all units of what only reduced ones take beyond a gather."""
        return None if seconds is None else gather_s + share * (seconds - gather_s)

    gather_s = network.gather_s if visits else 0.0
    even_gather_s = network.gather_s if network.even_gather_s is None else network.even_gather_s
    problem = with_unit_parameters(alone, model)
    return replace(
        updates.in_problem(problem, problem.unit_part),
        # what a reduce receives into grows with the number of ranks
        state_bytes=float(state_bytes(model)),
        early_state_bytes=float(state_bytes(model, early=True)),
        early_reducing_state_bytes=float(reducing_state_bytes(model)),
        early_updating_state_bytes=float(updating_state_bytes(model)),
        gather_s=gather_s,
        reduce_s=network.reduce_s * share,
        gather_and_reduce_s=of_reduces(network.gather_and_reduce_s, gather_s),
        gathered_bytes=model.gathered_bytes + resting,
        step_overhead_s=network.step_overhead_s,
        even_gather_s=network.even_gather_s if visits else None,
        even_reduce_s=of_reduces(network.even_reduce_s),
        even_gather_and_reduce_s=of_reduces(network.even_gather_and_reduce_s, even_gather_s),
        padded_bytes=network.padded_bytes,
        root_gather_s=network.root_gather_s,
        root_reduce_s=network.root_reduce_s,
        last_gather_s=network.last_gather_s,
        last_reduce_s=network.last_reduce_s,
        fill_s=network.fill_s,
        hybrid_sharding=bool(model.state_groups),
        state_groups=model.state_groups,
    )


def _visits_of_blocks(model: ShardedModel) -> list[Visit]:
    """Return the visits of a step whose times a problem has as those of units."""
    return [
        visit
        for visit in model.executor.visits
        if not visit.is_meeting and model.units[visit.unit].kind is UnitKind.BLOCK
    ]


def balanced_step_s(problem: Problem) -> float:
    """Return the seconds of a step in which every rank computes from its beginning to its end."""
    problem = with_updates(problem, least_update_s(problem))
    samples_per_s = sum(
        rank.largest_microbatch_size
        / (problem.units * (rank.forward_s[-1] + rank.backward_s[-1]) + rank.tail_s[-1])
        for rank in problem.ranks
        if rank.forward_s
    )
    return problem.global_batch_size / samples_per_s + fixed_time(problem)


def _exchanged(control: ControlGroup, profile: RankProfile) -> list[RankProfile]:
    return [RankProfile.from_dict(data) for data in control.gather(profile.to_dict())]


def _profile(
    device: Device, measured: Measured, units: int, gathered_bytes: float, kept: RetainedBytes
) -> RankProfile:
    """Return dense curves from the measured sizes; per unit where the problem wants it."""
    sizes = sorted(measured.times)
    largest = measured.largest
    every = np.arange(1, largest + 1)

    def dense(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(np.interp(every, sizes, values).tolist()) if sizes else ()

    times = [measured.times[size] for size in sizes]
    held = sorted(measured.held)
    peaks, reducing_peaks = (
        [getattr(measured.held[size], name) for size in held]
        for name in ("peak_bytes", "reducing_peak_bytes")
    )
    compute = compute_curve(held, peaks, largest, gathered_bytes, kept)
    reducing = compute_curve(held, reducing_peaks, largest, gathered_bytes, kept.reducing)
    return RankProfile(
        name=device.name,
        forward_s=dense([entry.forward_s / units for entry in times]),
        backward_s=dense([entry.backward_s / units for entry in times]),
        tail_s=dense([entry.tail_s for entry in times]),
        compute_bytes=tuple(compute),
        capacity_bytes=device.capacity_bytes,
        reducing_compute_bytes=tuple(reducing),
    )


def merge_equal_ranks(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    """Give ranks that differ only by noise the same profile, or equal devices get unequal plans.

    They are equal with the same name, and capacities and times within 10%. They get median times,
    the largest memory figures, and the smallest capacity, but keep what their hosts take.
    """
    found = list(profiles)
    for name in {profile.name for profile in profiles}:
        members = [index for index, profile in enumerate(profiles) if profile.name == name]
        group = [profiles[index] for index in members]
        length = min(profile.largest_microbatch_size for profile in group)
        capacities = [profile.capacity_bytes for profile in group]
        if len(group) < 2 or not length or min(capacities) < (1.0 - _ALIKE) * max(capacities):
            continue
        curves = {
            curve: [statistics.median(getattr(profile, curve)[at] for profile in group)
                    for at in range(length)]
            for curve in ("forward_s", "backward_s", "tail_s")
        }  # fmt: skip
        totals = [sum(parts) for parts in zip(*curves.values(), strict=True)]
        if any(
            abs(profile.forward_s[at] + profile.backward_s[at] + profile.tail_s[at] - totals[at])
            > _ALIKE * totals[at]
            for profile in group
            for at in range(length)
        ):
            continue
        kept_backward, kept_peaks, kept_reducing = _kept_curves(group, length)
        reducing = [profile.reducing_compute_bytes for profile in group]
        shared = replace(
            group[0],
            forward_s=tuple(curves["forward_s"]),
            backward_s=tuple(curves["backward_s"]),
            tail_s=tuple(curves["tail_s"]),
            compute_bytes=_highest([profile.compute_bytes for profile in group], length),
            capacity_bytes=min(capacities),
            updated_parameters_per_s=min(profile.updated_parameters_per_s for profile in group),
            kept_backward_s=kept_backward,
            kept_compute_bytes=kept_peaks,
            reducing_compute_bytes=_highest(reducing, length) if all(reducing) else (),
            kept_reducing_compute_bytes=kept_reducing,
        )
        for index in members:
            own = {name: getattr(profiles[index], name) for name in RATES}
            found[index] = replace(shared, **own)
    return found


def _highest(curves: Sequence[Sequence[float]], length: int) -> tuple[float, ...]:
    return tuple(max(curve[at] for curve in curves) for at in range(length))


def _kept_curves(
    group: Sequence[RankProfile], length: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the common ``kept_*`` curves of equal ranks; none if any cannot retain activations."""
    if not all(profile.kept_backward_s for profile in group):
        return (), (), ()
    backward = [
        statistics.median(profile.kept_backward_s[at] for profile in group) for at in range(length)
    ]
    peaks = _highest([profile.kept_compute_bytes for profile in group], length)
    reducing = [profile.kept_reducing_compute_bytes for profile in group]
    return tuple(backward), peaks, _highest(reducing, length) if all(reducing) else ()


class _Batches:
    """Batches of the first samples on the device, never shared: steps may change what they get."""

    def __init__(
        self, loader: Any, layouts: Sequence[BatchLayout], move: Callable[[Any], Any]
    ) -> None:
        self._loader = loader
        self._layouts = layouts
        self._move = move
        self._held: tuple[int, Any] = (0, None)
        self._versions: list[int] = []
        self._are_written = False

    def __call__(self, size: int) -> Any:
        is_written = _versions_of(self._held[1]) != self._versions
        self._are_written = self._are_written or is_written
        if self._held[0] != size or is_written:
            self._held = (0, None)  # frees the last batch before the next one is moved
            self._held = (size, self._move(read_batch(self._loader, size, self._layouts)))
            self._versions = _versions_of(self._held[1])
        return own_copy(self._held[1], with_arrays=self._are_written)

    @property
    def held(self) -> Any:
        """The last batch that was requested."""
        return self._held[1]


def _versions_of(batch: Any) -> list[int]:
    """Return how often the tensors of a batch have been written."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [leaf._version for leaf in leaves if not leaf.is_inference()]


def read_batch(loader: Any, size: int, layouts: Sequence[BatchLayout] = ()) -> Any:
    """Return a batch of the first samples as loaders collate it; ``size``: of the first loader."""
    spec = getattr(loader, "spec", None)
    if spec is None:
        return sample_batches(loader, (size,), layouts[0] if layouts else None)[0]
    batch_sizes = [getattr(each, "batch_size", None) for each in loader.flat]
    first = batch_sizes[0] or 1
    counts = [max(1, round(size * (other or first) / first)) for other in batch_sizes]
    parts = [
        sample_batches(each, (count,), layout)[0]
        for each, count, layout in zip(
            loader.flat, counts, layouts or (None,) * len(counts), strict=True
        )
    ]
    return pytree.tree_unflatten(parts, spec)
