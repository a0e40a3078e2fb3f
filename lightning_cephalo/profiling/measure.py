"""Measures every rank on the real, sharded model, and returns a Problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Device
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.chunked_cross_entropy import largest_call
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.program import Visit
from lightning_cephalo.plan.updates import least_update_s, with_updates
from lightning_cephalo.profiling.isolation import isolated, moved_to_device, state_on_host
from lightning_cephalo.profiling.lost_rank import lost_rank_explained
from lightning_cephalo.profiling.memory_model import (
    RetainedBytes,
    reducing_state_bytes,
    resting_bytes,
    state_bytes,
    unresharded_peak_bytes,
    updating_state_bytes,
)
from lightning_cephalo.profiling.network import measure_network
from lightning_cephalo.profiling.optimizer_time import clipping, optimizer_time
from lightning_cephalo.profiling.probe import ProfiledStep
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.profiling.rank_curves import (
    merge_equal_ranks,
    profile_of,
    without_recompute,
)
from lightning_cephalo.profiling.save_curves import remember
from lightning_cephalo.profiling.state_rates import with_unit_parameters
from lightning_cephalo.profiling.sweep import (
    Prober,
    Sweep,
    ladder,
    measure_memory,
    measure_times,
    measure_without_recompute,
)
from lightning_cephalo.sharding.discovery import UnitKind

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Part of the budget that timing may use; the rest is for memory and the network.
_TIMING_SHARE = 0.7


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
    read_batch: Callable[[int], Any],
    step: ProfiledStep,
    pause: Callable[[], None],
    global_batch_size: int,
    options: ProfileOptions,
) -> Problem:
    """Run the user's step on growing microbatches of real samples; collective.

    Returns the same problem on every rank, and leaves model, generators, loggers and loader as they
    were; see :mod:`~lightning_cephalo.profiling.isolation`.

    Args:
        read_batch: Returns a batch of the first samples, of a given number.
        pause: Called between measurements, on all ranks; it may communicate, and raise everywhere.

    Raises:
        ProfilingError: On every rank, if any rank fails, dies, gets a loss that is not finite, or
            if none has memory for the smallest microbatch.
    """
    control, clock = model.control, model.accelerator.clock
    started_s = model.accelerator.now_s()
    most = min(global_batch_size, options.ready_samples or global_batch_size)
    smallest = min(options.minimum_microbatch_size, most)
    progress = Progress(options.verbose and control.rank == 0)
    view = TrainerView(trainer)
    batches = _Batches(read_batch, partial(moved_to_device, view))

    def report(sizes: Sequence[int]) -> None:
        pause()
        progress.timing(sizes)

    with (
        lost_rank_explained(control.rank, "profiling"),
        progress,
        isolated(view, model.accelerator),
        state_on_host(trainer.optimizers, model.accelerator),
        model.executor.updates.dropping(),  # beside an optimizer there may be no room for them
    ):
        prober = Prober(model, clock, batches, step)
        sweep = Sweep(
            ladder(smallest, most),
            global_batch_size,
            options.budget_s * _TIMING_SHARE,
            control.gather(device.name),
            options.single_microbatch,
            report,
        )
        measured, retaining = measure_times(prober, sweep), None
        pause()
        progress.say("profiling: memory")
        measure_memory(prober, measured, sweep)
        if options.choose_recompute:
            pause()
            progress.say("profiling: without recomputation")
            retaining = measure_without_recompute(prober, measured, sweep)
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
    inside = RetainedBytes() if retaining is None else retaining.kept
    rows = control.gather([*astuple(measured.kept), *astuple(inside), own_resting])
    *figures, resting = map(max, zip(*rows, strict=True))
    kept, inside = RetainedBytes(*figures[:3]), RetainedBytes(*figures[3:])
    per_microbatch = max(kept.microbatch_bytes, inside.microbatch_bytes)
    per_sample = max(kept.sample_bytes, inside.sample_bytes)
    kept = replace(kept, microbatch_bytes=per_microbatch)
    inside = replace(inside, sample_bytes=per_sample, microbatch_bytes=per_microbatch)
    gathered_bytes = float(model.gathered_bytes)
    own = profile_of(device, measured, kept, units, gathered_bytes)
    if retaining is not None:
        own = without_recompute(own, retaining, inside, units, gathered_bytes)
    profiles = [RankProfile.from_dict(data) for data in control.gather(own.to_dict())]
    problem = Problem(
        ranks=tuple(merge_equal_ranks(profiles)),
        units=units,
        reducing_retained_bytes=kept.reducing_sample_bytes,
        kept_reducing_retained_bytes=None if retaining is None else inside.reducing_sample_bytes,
        global_batch_size=global_batch_size,
        boundary_bytes=kept.sample_bytes / units,
        kept_bytes=(per_sample - kept.sample_bytes) / units,
        microbatch_bytes=per_microbatch,
        minimum_microbatch_size=smallest,
        single_microbatch=options.single_microbatch,
        unresharded_bytes=float(model.unresharded_bytes),
        unresharded_peak_bytes=float(unresharded_peak_bytes(model)),
        # what a reduce receives into grows with the number of ranks
        state_bytes=float(state_bytes(model)),
        early_state_bytes=float(state_bytes(model, early=True)),
        early_reducing_state_bytes=float(reducing_state_bytes(model)),
        early_updating_state_bytes=float(updating_state_bytes(model)),
        gathered_bytes=gathered_bytes + resting,
        hybrid_sharding=bool(model.state_groups),
        state_groups=model.state_groups,
    )
    reduced = len({visit.unit for visit in visits if model.units[visit.unit].trainable})
    problem = network.in_problem(with_unit_parameters(problem, model), len(visits), reduced / units)
    problem = updates.in_problem(problem, problem.unit_part)
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
    largest = [profile.largest_microbatch_size for profile in problem.ranks]
    seconds = model.accelerator.now_s() - started_s
    progress.done(largest, seconds, seconds / balanced_step_s(problem))
    return problem


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


class _Batches:
    """Batches of the first samples on the device, never shared: steps may change what they get."""

    def __init__(self, read: Callable[[int], Any], move: Callable[[Any], Any]) -> None:
        self._read, self._move = read, move
        self._held: tuple[int, Any] = (0, None)
        self._versions: list[int] = []
        self._are_written = False

    def __call__(self, size: int) -> Any:
        is_written = _versions_of(self._held[1]) != self._versions
        self._are_written = self._are_written or is_written
        if self._held[0] != size or is_written:
            self._held = (0, None)  # frees the last batch before the next one is moved
            self._held = (size, self._move(self._read(size)))
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
