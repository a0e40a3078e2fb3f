"""Step time and memory of a given allocation: the one source of truth for solver, report and
simulator.

A gather is a rendezvous: every rank waits there for the slowest. So per unit and pass the slowest
rank counts, and forward, backward and tail each have their own slowest (docs/planning.md)::

    T = U * (max(G, max_i F_i) + max(G + R, max_i B_i)) + max_i tail_i
        + root gather + root reduce + fill + optimizer + overhead

with F_i, B_i, tail_i the sums over rank i's microbatches. The maxima are the overlap: the next unit
is gathered, and the last one reduced, while this one computes. G and R are those of uneven shards,
or of even ones where all ranks hold equal shares. Where units stay gathered from the forward to the
backward (FSDP's ``reshard_after_forward=False``), the backward has R alone to hide.

A rank holds its share of the state, the gathered buffers, the peak of its largest microbatch, what
every microbatch keeps, and one boundary per unit for every sample of its batch, or of three units
where it offloads them: the values of the one in use and of the one on its way, and the gradients
that go from unit to unit. Copies run beside the compute, so a rank that offloads needs at least the
time of its copies. Where activations inside the units are kept, boundaries are held by them:
nothing is offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.program import UNITS_THAT_STAY

# Offloaded boundaries: of these units the values are on the device, and of one the gradients.
_UNITS_HELD = UNITS_THAT_STAY + 1
_EVEN = 1e-9


@dataclass(frozen=True)
class RankPrediction:
    """What one rank does in a step: seconds per unit (tail: per step) over its microbatches, its
    peak bytes, and its bytes of host memory.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    memory_bytes: float
    host_bytes: float = 0.0


@dataclass(frozen=True)
class StepPrediction:
    """The whole step in seconds, and every rank's part in rank order."""

    step_s: float
    ranks: tuple[RankPrediction, ...]


@dataclass(frozen=True)
class Mode:
    """How a rank treats activations.

    Args:
        recompute: False: activations inside units are kept, and the profile's ``kept_backward_s``
            and ``kept_compute_bytes`` count. True: its ``backward_s`` and ``compute_bytes`` count.
        offload: whether boundary activations move to host memory.
    """

    recompute: bool = True
    offload: bool = False

    @classmethod
    def of(cls, rank: RankPlan) -> Mode:
        """The mode of a planned rank; where its profile leaves no choice, the plan has None."""
        return cls(rank.recompute is not False, rank.offload)


PLAIN = Mode()


def modes(problem: Problem, profile: RankProfile) -> tuple[Mode, ...]:
    """The modes that a rank may choose between; the fastest on the device comes first."""
    found = [Mode(recompute=False)] if chooses_recompute(profile) else []
    found.append(PLAIN)
    if profile.host_capacity_bytes > 0 and problem.boundary_bytes > 0:
        found.append(Mode(offload=True))
    return tuple(found)


def chooses_recompute(profile: RankProfile) -> bool:
    """Whether the profile leaves recomputation to the plan."""
    return bool(profile.kept_backward_s)


def rank_plan(
    profile: RankProfile, microbatch_sizes: Sequence[int], mode: Mode, state_fraction: float = 0.0
) -> RankPlan:
    """A planned rank without predictions; ``recompute`` is None where the profile has no choice."""
    recompute = mode.recompute if chooses_recompute(profile) else None
    return RankPlan(
        tuple(microbatch_sizes), state_fraction, recompute=recompute, offload=mode.offload
    )


def as_planned(problem: Problem, plan: Plan) -> Problem:
    """The problem with nothing left open that the plan says of all ranks.

    A plan that says nothing of resharding takes the first of the problem's choices.
    """
    chosen = plan.reshard_after_forward
    return problem.resharding(problem.reshard_choices[0] if chosen is None else chosen)


@dataclass(frozen=True)
class Need:
    """What a rank in one mode takes of one resource.

    ``fixed + peaks[size - 1] of its largest peak + per_sample * samples
    + per_microbatch * microbatches``.

    Args:
        fixed: whatever the samples, of an idle rank too.
        peaks: by microbatch size minus one, while that microbatch runs.
        per_sample: kept for every sample of the rank's batch.
        per_microbatch: kept for every microbatch.
        capacity: what the rank may take in all, besides its share of what all ranks share.
    """

    fixed: float
    peaks: tuple[float, ...]
    per_sample: float
    per_microbatch: float
    capacity: float

    def of(self, microbatch_sizes: Sequence[int]) -> float:
        """What these microbatches take."""
        peak = max((self.peaks[size - 1] for size in microbatch_sizes), default=0.0)
        return self.total(peak, sum(microbatch_sizes), len(microbatch_sizes))

    def total(self, peak: Any, samples: Any, microbatches: Any) -> Any:
        """What this many samples take beside this largest peak; numbers or arrays of one shape."""
        return self.fixed + peak + self.kept(samples, microbatches)

    def kept(self, samples: Any, microbatches: Any) -> Any:
        """The part that is held from the forward to the backward."""
        return self.per_sample * samples + self.per_microbatch * microbatches


def device_need(problem: Problem, profile: RankProfile, mode: Mode = PLAIN) -> Need:
    """Bytes on the device beside the share of the state."""
    units = min(problem.units, _UNITS_HELD) if mode.offload else problem.units
    inside = 0.0 if mode.recompute else problem.kept_bytes * problem.units
    return Need(
        fixed=problem.fixed_bytes,
        peaks=peak_curve(profile, mode),
        per_sample=problem.boundary_bytes * units + inside,
        per_microbatch=problem.microbatch_bytes,
        capacity=profile.capacity_bytes,
    )


def host_need(problem: Problem, profile: RankProfile, mode: Mode = PLAIN) -> Need:
    """Bytes of host memory, which offloaded boundaries take."""
    return Need(
        fixed=0.0,
        peaks=(0.0,) * profile.largest_microbatch_size,
        per_sample=problem.boundary_bytes * problem.units if mode.offload else 0.0,
        per_microbatch=0.0,
        capacity=profile.host_capacity_bytes,
    )


def predict(problem: Problem, ranks: Plan | Sequence[RankPlan]) -> StepPrediction:
    """Predict one step of an allocation. Batch, capacity and fractions are not judged here, only
    priced.

    Args:
        problem: what there is.
        ranks: a plan; or one :class:`RankPlan` per rank of the problem, in rank order, whose units
            are given back after the forward where the problem leaves that open.

    Raises:
        PlanError: another number of ranks, a microbatch size that was not profiled, or a mode that
            the rank's profile does not know.
    """
    if isinstance(ranks, Plan):
        problem, ranks = as_planned(problem, ranks), ranks.ranks
    if len(ranks) != len(problem.ranks):
        raise PlanError(
            f"Expected one rank plan for each of the problem's {len(problem.ranks)} ranks, "
            f"but got {len(ranks)}."
        )
    predictions = []
    for index, (profile, rank) in enumerate(zip(problem.ranks, ranks, strict=True)):
        where = f"rank {index} ({profile.name!r})"
        for size in rank.microbatch_sizes:
            if size > profile.largest_microbatch_size:
                raise PlanError(
                    f"{where}: microbatch size {size} was not profiled, "
                    f"the largest is {profile.largest_microbatch_size}. "
                    f"Use smaller microbatches or profile larger ones."
                )
        if rank.recompute is False and not profile.kept_backward_s:
            raise PlanError(
                f"{where}: the plan says recompute: false, but the profile has no "
                f"kept_backward_s. Profile it, or leave recompute out of the plan."
            )
        mode = Mode.of(rank)
        work = rank_work(problem, profile, rank.microbatch_sizes, mode)
        held = rank.state_fraction * problem.state_bytes
        memory = held + device_need(problem, profile, mode).of(rank.microbatch_sizes)
        host = host_need(problem, profile, mode).of(rank.microbatch_sizes)
        predictions.append(RankPrediction(*work, memory_bytes=memory, host_bytes=host))
    step_s = step_time(
        problem,
        max(rank.forward_s for rank in predictions),
        max(rank.backward_s for rank in predictions),
        max(rank.tail_s for rank in predictions),
        even=shares_are_even([rank.state_fraction for rank in ranks]),
    )
    return StepPrediction(step_s=step_s, ranks=tuple(predictions))


def step_time(
    problem: Problem, forward_s: float, backward_s: float, tail_s: float, *, even: bool = False
) -> float:
    """Seconds of a step whose slowest rank needs ``forward_s`` and ``backward_s`` per unit and
    ``tail_s`` once; ``even`` where all ranks hold equal shares of the state.
    """
    gather_s, reduce_s = collective_times(problem, even=even)
    forward = max(gather_s, forward_s)
    backward = max(backward_collectives_s(problem, gather_s, reduce_s), backward_s)
    return problem.units * (forward + backward) + tail_s + fixed_time(problem)


def fixed_time(problem: Problem) -> float:
    """Seconds of a step that no plan changes."""
    root = problem.root_gather_s + problem.root_reduce_s
    return root + problem.fill_s + problem.optimizer_s + problem.step_overhead_s


def collective_times(problem: Problem, *, even: bool) -> tuple[float, float]:
    """Seconds of gathering and of reducing one unit."""
    if not even:
        return problem.gather_s, problem.reduce_s
    # What moves uneven shares moves even ones as well: these never cost more.
    gather_s, reduce_s = (
        uneven_s if even_s is None else min(even_s, uneven_s)
        for even_s, uneven_s in (
            (problem.even_gather_s, problem.gather_s),
            (problem.even_reduce_s, problem.reduce_s),
        )
    )
    return gather_s, reduce_s


def backward_collectives_s(problem: Problem, gather_s: float, reduce_s: float) -> float:
    """Seconds of what one unit's backward has to hide."""
    return reduce_s if problem.reshard_after_forward is False else gather_s + reduce_s


def shares_are_even(state_fractions: Sequence[float]) -> bool:
    """Whether all ranks hold equal shares of the state."""
    return max(state_fractions) - min(state_fractions) <= _EVEN


def rank_work(
    problem: Problem,
    profile: RankProfile,
    microbatch_sizes: Sequence[int],
    mode: Mode = PLAIN,
) -> tuple[float, float, float]:
    """Seconds of one unit's forward and backward, and of the tail, over all microbatches."""
    forward, backward, tail = (
        # fsum is exact, so that the order of the microbatches cannot change a figure.
        math.fsum(curve[size - 1] for size in microbatch_sizes)
        for curve in time_curves(profile, mode)
    )
    copy = copy_time(problem, profile, sum(microbatch_sizes), mode)
    return max(forward, copy), max(backward, copy), tail


def time_curves(profile: RankProfile, mode: Mode) -> tuple[tuple[float, ...], ...]:
    """The curves of forward, backward and tail in this mode."""
    backward = profile.backward_s if mode.recompute else profile.kept_backward_s
    return profile.forward_s, backward, profile.tail_s


def peak_curve(profile: RankProfile, mode: Mode) -> tuple[float, ...]:
    """The curve of the bytes beside the state in this mode."""
    return profile.compute_bytes if mode.recompute else profile.kept_compute_bytes


def copy_time(problem: Problem, profile: RankProfile, samples: int, mode: Mode) -> float:
    """Seconds of copying one unit's boundaries in one direction; 0 where they stay."""
    if not mode.offload:
        return 0.0
    return samples * problem.boundary_bytes / profile.offload_bytes_per_s
