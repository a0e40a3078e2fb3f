"""Cost model: step time and memory of a given allocation.

Solver, report and simulator all use this one model.

A gather is a rendezvous: every rank waits for the slowest one. So the slowest rank sets the time of
each unit and pass. Forward, backward and tail may each have another slowest rank
(docs/planning.md)::

    T = (U - 1) max(G, F) + F + max(G, B) + (U - 2) max(D, B) + max(R, B)
        + max_i tail_i + root gather + root reduce + fill + max_i update_i + overhead

U is the number of units, two or more. G and R are the times to gather and to reduce one unit. D is
that of both beside each other: G + R, if it was not measured. F is max_i F_i, and B is max_i B_i.
F_i, B_i and tail_i are sums over rank i's microbatches.

The maxima express overlap: while one unit computes, the next one is gathered and the previous one
is reduced (``plan/windows.py``). What shares of the state add is in ``plan/moving.py``.

A rank holds its share of the state, the gathered buffers and the largest peak of its microbatches.
It also holds what each microbatch retains, and one boundary per unit for each sample of its batch.
A rank that does not recompute also retains the activations inside its units.

There are three such sums, and a rank needs the largest one. Up to the first reduce all boundaries
are held, and the peak is often that of the loss. From there on the last unit's boundaries are gone,
and the share of the state is larger, by what reduces receive into. In an early update nothing
computes, but the optimizer makes tensors of its own, and the root unit's gradient is held.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.plan.moving import device_exposure, moved_by, moving_exposure
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.program import UNITS_THAT_STAY
from lightning_cephalo.plan.state_groups import members_of
from lightning_cephalo.plan.windows import (
    backward_windows,
    exposed_last_gather_s,
    forward_windows,
    hidden_updates_s,
    pass_s,
)

# With offload, the device holds the boundaries of the unit in use and of the one being copied, and
# the gradients of one more.
_UNITS_HELD = UNITS_THAT_STAY + 1


@dataclass(frozen=True)
class RankPrediction:
    """Predicted times and memory of one rank in a step.

    Times are sums over the rank's microbatches, in seconds per unit (``tail_s``: per step).
    ``exposed_s`` is what state in host memory adds to the step, and ``update_s`` what the device's
    updates add in addition to their overhead. Memory is the peak on the device and the totals on
    the host, of boundaries and of optimizer state, in bytes.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    memory_bytes: float
    host_bytes: float = 0.0
    state_host_bytes: float = 0.0
    exposed_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True)
class StepPrediction:
    """Predicted seconds of the whole step, and one prediction per rank in rank order."""

    step_s: float
    ranks: tuple[RankPrediction, ...]


@dataclass(frozen=True)
class Mode:
    """How a rank treats activations.

    Args:
        recompute: True: activations inside units are recomputed, and the profile's ``backward_s``
            and ``compute_bytes`` apply. False: they are retained, and those of its ``kept`` apply.
        offload: whether boundary activations move to host memory.
    """

    recompute: bool = True
    offload: bool = False

    @classmethod
    def of(cls, rank: RankPlan) -> Mode:
        """Return the mode of a planned rank.

        A rank plan's ``recompute`` is None if the profile has no choice.
        """
        return cls(rank.recompute is not False, rank.offload)


PLAIN = Mode()


def modes(problem: Problem, profile: RankProfile) -> tuple[Mode, ...]:
    """Return the modes that a rank may choose between; the fastest without offload comes first."""
    found = [Mode(recompute=False)] if profile.kept is not None else []
    found.append(PLAIN)
    has_host = profile.host_capacity_bytes > 0 and problem.offloads_boundaries
    if has_host and problem.boundary_bytes > 0:
        found.append(Mode(offload=True))
    return tuple(found)


def rank_plan(
    profile: RankProfile, microbatch_sizes: Sequence[int], mode: Mode, state_fraction: float = 0.0
) -> RankPlan:
    """Return a rank plan without predictions; ``recompute`` is None if there is no choice."""
    recompute = None if profile.kept is None else mode.recompute
    return RankPlan(
        tuple(microbatch_sizes), state_fraction, recompute=recompute, offload=mode.offload
    )


def as_planned(problem: Problem, plan: Plan) -> Problem:
    """Return the problem with the plan's choices for all ranks applied, else its own first ones.

    Raises:
        PlanError: the problem was measured for other groups that hold the whole state.
    """
    if plan.has_stages:
        raise PlanError("The plan says units, but stages have no prices yet. Leave units out.")
    own = problem.groups
    if members_of(plan.groups, plan.world_size) != members_of(own, len(problem.ranks)):
        raise PlanError(
            f"The plan says groups: {list(plan.groups)}, but the problem was measured"
            f" with {list(own) if own else 'none'}. Measure it with the plan's, or use another"
            " plan."
        )
    if plan.early_update and not problem.early_update:
        problem = problem.with_early_update()
    chosen = plan.reshard_after_forward
    problem = problem.resharding(problem.reshard_choices[0] if chosen is None else chosen)
    travels_evenly = plan.padded is not False or not problem.padded_bytes
    return problem.with_even_shares() if plan.shares_are_even and travels_evenly else problem


@dataclass(frozen=True)
class Need:
    """Amount of one resource that a rank needs in one mode.

    The rank's share of the state is not part of it. The total is::

        fixed + max(peaks[size - 1]) + per_sample * samples + per_microbatch * microbatches

    ``capacity`` is what the rank has, and ``shared`` what all ranks have together.
    """

    state: float
    fixed: float
    peaks: tuple[float, ...]
    per_sample: float
    per_microbatch: float
    capacity: float
    shared: float = math.inf

    def of(self, microbatch_sizes: Sequence[int]) -> float:
        """Return the amount that these microbatches need."""
        peak = max((self.peaks[size - 1] for size in microbatch_sizes), default=0.0)
        return self.total(peak, sum(microbatch_sizes), len(microbatch_sizes))

    def total(self, peak: Any, samples: Any, microbatches: Any) -> Any:
        """Return the amount for this largest peak and these numbers of samples and microbatches.

        The arguments are numbers or arrays of one shape.
        """
        return self.fixed + peak + self.kept(samples, microbatches)

    def kept(self, samples: Any, microbatches: Any) -> Any:
        """Return the part that is retained from the forward to the backward."""
        return self.per_sample * samples + self.per_microbatch * microbatches


def _device_need(moment: int, problem: Problem, profile: RankProfile, mode: Mode = PLAIN) -> Need:
    """Return the bytes needed on the device at a moment: so many units are behind in the backward.

    At 0 everything up to the first reduce counts, at 2 nothing computes.
    """
    curves = profile.curves(recompute=mode.recompute)
    left = boundaries = max(problem.units - moment, 0)
    retained = problem.reducing_retained_bytes
    if not mode.recompute:
        retained = problem.kept_reducing_retained_bytes
    peaks = (0.0,) * profile.largest_microbatch_size
    if moment == 0:
        peaks, retained = curves.compute_bytes, None
        if problem.early_update and problem.reshard_after_forward is False:
            peaks = tuple(peak + problem.unresharded_peak_bytes for peak in peaks)
        if mode.offload:
            boundaries = min(left, _UNITS_HELD)
    elif mode.offload and problem.units > UNITS_THAT_STAY:  # fetches keep up with the backward
        boundaries, retained = min(left, UNITS_THAT_STAY) + 1, None
    if moment == 1 and problem.units > 1:  # behind the reduce of the only unit nothing computes
        peaks = curves.reducing_compute_bytes or curves.compute_bytes
    inside = 0.0 if mode.recompute else problem.kept_bytes * left
    state, fixed = problem.state.totals_bytes[moment], problem.fixed_bytes
    if problem.has_even_state:
        # where groups have different sizes, the smallest one's share is the largest
        state, fixed = 0.0, fixed + state / min(map(len, problem.members))
    return Need(
        state=state,
        fixed=fixed,
        peaks=peaks,
        per_sample=problem.boundary_bytes * boundaries + inside if retained is None else retained,
        per_microbatch=problem.microbatch_bytes,
        capacity=profile.capacity_bytes,
    )


device_need = functools.partial(_device_need, 0)
reducing_need = functools.partial(_device_need, 1)
updating_need = functools.partial(_device_need, 2)
DEVICE_NEEDS = (device_need, reducing_need, updating_need)
"""Functions of what a rank needs on its device at each moment of a step, in bytes: up to the first
reduce, from there on while units compute, and while a unit is updated inside the backward."""


def device_bytes(
    problem: Problem,
    profile: RankProfile,
    microbatch_sizes: Sequence[int],
    mode: Mode = PLAIN,
    state_fraction: float = 0.0,
    moved_bytes: float = 0.0,
) -> float:
    """Return the most bytes that a rank holds on its device at the same time.

    ``moved_bytes`` is what all of the state would add by living in host memory: less than none.
    """
    needs = [need(problem, profile, mode) for need in DEVICE_NEEDS]
    return max(
        state_fraction * (need.state + moved_bytes) + need.of(microbatch_sizes) for need in needs
    )


def idle_bytes(problem: Problem) -> float:
    """Return the most bytes that a rank without samples holds beside a share of the state."""
    return max(device_bytes(problem, profile, ()) for profile in problem.ranks)


def host_need(problem: Problem, profile: RankProfile, mode: Mode = PLAIN) -> Need:
    """Return the bytes of host memory that offloaded boundaries need."""
    return Need(
        state=0.0,
        fixed=0.0,
        peaks=(0.0,) * profile.largest_microbatch_size,
        per_sample=problem.boundary_bytes * problem.units if mode.offload else 0.0,
        per_microbatch=0.0,
        capacity=profile.host_capacity_bytes,
    )


NEEDS = (*DEVICE_NEEDS, host_need)
"""What a rank needs in all, in the order of the solver's ``Columns.needed``."""


def predict(problem: Problem, ranks: Plan | Sequence[RankPlan]) -> StepPrediction:
    """Predict one step of an allocation.

    The batch, capacities and fractions are not checked here.

    Args:
        problem: ranks and work of the step.
        ranks: a plan, or one :class:`RankPlan` per rank of the problem, in rank order. Without a
            plan, units are resharded after the forward if the problem leaves that open, and the
            slices of even shares are padded if that is faster.

    Raises:
        PlanError: the number of ranks differs, a microbatch size was not profiled, a rank's
            profile lacks the mode, or the problem does not say what optimizer state moves.
    """
    given = ranks.ranks if isinstance(ranks, Plan) else ranks
    if len(given) != len(problem.ranks):
        raise PlanError(
            f"Expected one rank plan for each of the problem's {len(problem.ranks)} ranks, "
            f"but got {len(given)}."
        )
    if isinstance(ranks, Plan):
        problem, ranks = as_planned(problem, ranks), ranks.ranks
    elif problem.are_even([rank.state_fraction for rank in ranks]):
        problem = problem.with_even_shares()
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
        if rank.recompute is False and profile.kept is None:
            raise PlanError(
                f"{where}: the plan says recompute: false, but the profile has no kept "
                f"curves. Profile them, or leave recompute out of the plan."
            )
        if rank.moves_state and not sum(problem.unit_parameters):
            raise PlanError(
                f"{where}: the plan keeps optimizer state in host memory (resident_fraction), but "
                f"the problem has no unit_parameters, which say how much that is. Profile it, or "
                f"leave resident_fraction out of the plan."
            )
        if rank.host_update_fraction and not profile.host_updated_parameters_per_s:
            raise PlanError(
                f"{where}: the plan lets the host update (host_update_fraction), but the profile "
                f"has no host_updated_parameters_per_s. Profile it, or leave host_update_fraction "
                f"out of the plan."
            )
        mode, sizes, share = Mode.of(rank), rank.microbatch_sizes, rank.state_fraction
        moved = moved_by(problem, rank)
        moved_bytes = moved.device_bytes(problem)
        predictions.append(
            RankPrediction(
                *rank_work(problem, profile, sizes, mode),
                memory_bytes=device_bytes(problem, profile, sizes, mode, share, moved_bytes),
                host_bytes=host_need(problem, profile, mode).of(sizes),
                state_host_bytes=share * moved.host_bytes(problem),
            )
        )
    slowest = [max(getattr(rank, name) for rank in predictions) for name in _TIMES]
    step_s = step_time(problem, *slowest)
    if problem.shares_take_time or any(rank.moves_state for rank in ranks):
        predictions = [
            replace(found, **_of_share(problem, profile, rank, slowest[1]))
            for profile, rank, found in zip(problem.ranks, ranks, predictions, strict=True)
        ]
        step_s += max(rank.update_s + rank.exposed_s for rank in predictions)
    return StepPrediction(step_s=step_s, ranks=tuple(predictions))


def _of_share(
    problem: Problem, profile: RankProfile, rank: RankPlan, backward_s: float
) -> dict[str, float]:
    """Return the seconds that a rank's share of the state adds to a step."""
    case, share = (problem, profile, moved_by(problem, rank), backward_s), rank.state_fraction
    return {
        "update_s": device_exposure(*case).of(share),
        "exposed_s": moving_exposure(*case).of(share) if rank.moves_state else 0.0,
    }


_TIMES = ("forward_s", "backward_s", "tail_s")


def step_time(problem: Problem, forward_s: float, backward_s: float, tail_s: float) -> float:
    """Return the seconds of a step without what shares of the state add, by the slowest times.

    ``forward_s`` and ``backward_s`` are per unit, ``tail_s`` is per step.
    """
    passes_s = pass_s(forward_windows(problem), forward_s)
    passes_s += pass_s(backward_windows(problem), backward_s)
    return float(passes_s) + tail_s + fixed_time(problem)


def fixed_time(problem: Problem) -> float:
    """Return the seconds of a step that no plan changes, with the overhead of updates."""
    root = problem.root_links.gather_s + problem.root_links.reduce_s
    root += exposed_last_gather_s(problem)
    update_s = problem.update_overhead_s - hidden_updates_s(problem)
    return root + problem.fill_s + update_s + problem.step_overhead_s


def rank_work(
    problem: Problem,
    profile: RankProfile,
    microbatch_sizes: Sequence[int],
    mode: Mode = PLAIN,
) -> tuple[float, float, float]:
    """Return the seconds of a unit's forward, its backward and the tail, over all microbatches.

    Copies of offloaded boundaries run beside forward and backward, which take as long at least.
    """
    forward, backward, tail = (
        # fsum is exact, so the order of the microbatches cannot change the sum.
        math.fsum(curve[size - 1] for size in microbatch_sizes)
        for curve in time_curves(profile, mode)
    )
    copy = copy_time(problem, profile, sum(microbatch_sizes), mode)
    return max(forward, copy), max(backward, copy), tail


def work_s(problem: Problem, forward_s: float, backward_s: float, tail_s: float) -> float:
    """Return the seconds of a rank's own work in a step."""
    return problem.units * (forward_s + backward_s) + tail_s


def time_curves(profile: RankProfile, mode: Mode) -> tuple[tuple[float, ...], ...]:
    """Return the curves of forward, backward and tail in this mode."""
    backward_s = profile.curves(recompute=mode.recompute).backward_s
    return profile.forward_s, backward_s, profile.tail_s


def copy_time(problem: Problem, profile: RankProfile, samples: int, mode: Mode) -> float:
    """Return the seconds to copy one unit's boundaries in one direction; 0 without offload."""
    if not mode.offload:
        return 0.0
    return samples * problem.boundary_bytes / profile.offload_bytes_per_s
