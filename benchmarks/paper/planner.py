"""The published planner, reimplemented for comparisons.

Sources: Guo, Anand, Chen, Daudjee, "Cephalo", ICS 2025, and the authors' release
``benson-guo/cephalo`` (``split_workload.py``).

Rank i runs n_i microbatches of one size m_i. In the published model, per unit and with recompute::

    F_i = n_i f_i(m_i)            B_i = F_i + n_i g_i(m_i) + (n_i - 1) * 10 ms
    t_i = max(s_i AG, F_i) + max(s_i (AG + RS), B_i)      T = units * max_i t_i

s_i is 1.25 if m_i does not fit together with an even share of the state, else 1. A rank holds the
peak of m_i and 2 GiB, within 0.75 of its capacity. All ranks together hold these and the state,
within 0.75 of the sum of capacities. For every sum of the ranks' microbatch sizes, a dynamic
program over ranks, batch and that sum finds the least T. The plan is the fastest sum whose total
memory fits.

The release tabulates every combination. Here the table holds only combinations below a bound on T,
and the bound is raised until a plan lies within it. The excluded combinations are slower than that
plan, so the answer, ties included, is that of the whole table.

Two things differ. The release returns its first plan even if that one does not fit; here it raises
InfeasibleError. And the state is shared by free memory, unless ``released_state_split`` asks for
the release's own split.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_cephalo.common.errors import InfeasibleError, PlanError
from lightning_cephalo.common.quantities import GIB, format_gib
from lightning_cephalo.plan import Links
from lightning_cephalo.plan.cost import Mode, host_need, modes, predict, rank_plan
from lightning_cephalo.plan.even import even_batches
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.solve import priced
from lightning_cephalo.plan.solver.state import Room, needed_by, share_state, to_the_byte
from lightning_cephalo.plan.windows import backward_collectives_s
from paper.table import Options, least_seconds, search

# Rounding can push an even share slightly over the capacity of a full rank.
_ROUNDING = 1 + 1e-9
# Successive bounds of the table, as multiples of the least conceivable T.
_REACHES = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, np.inf)


@dataclass(frozen=True)
class PublishedModel:
    """The constants of the published cost model.

    Args:
        memory_share: part of a rank's capacity that a plan may use.
        overhead_bytes: held by every rank in addition to state and compute; replaces the
            problem's ``gathered_bytes``.
        uneven_factor: how much longer collectives take for a rank that needs an uneven share.
        between_microbatches_s: lost between two microbatches of a unit's backward.
    """

    memory_share: float = 0.75
    overhead_bytes: float = 2 * GIB
    uneven_factor: float = 1.25
    between_microbatches_s: float = 0.010

    def step_s(self, problem: Problem, ranks: Sequence[RankPlan]) -> float:
        """Return the seconds of a step of this allocation in the published model.

        That is U * max_i t_i, without tail, optimizer and overhead.

        Raises:
            PlanError: as :func:`~lightning_cephalo.plan.predict`, or the microbatches of a rank
                differ in size, which the model does not cover.
        """
        predict(problem, ranks)
        slowest = 0.0
        for profile, rank in zip(problem.ranks, ranks, strict=True):
            sizes = rank.microbatch_sizes
            if len(set(sizes)) > 1:
                raise PlanError(
                    f"PublishedModel.step_s: expected microbatches of one size on every rank, but "
                    f"got {sizes} on {profile.name!r}. Use predict() for this plan."
                )
            if sizes:
                uneven = sizes[0] > self.fitting_sizes(problem, profile, even_state=True)
                slowest = max(
                    slowest, self.unit_s(problem, profile, sizes[0], len(sizes), uneven=uneven)
                )
        return problem.units * slowest

    def unit_s(
        self, problem: Problem, profile: RankProfile, size: int, count: int, *, uneven: bool
    ) -> float:
        """Return t_i: the seconds of one unit for ``count`` microbatches of ``size``."""
        factor = self.uneven_factor if uneven else 1.0
        even = problem.with_even_shares()
        links = even.links
        seconds = links.gather_s, links.reduce_s, links.both_s
        slowed = replace(even, links=Links(*(factor * each for each in seconds)))
        forward = count * profile.forward_s[size - 1]
        between = (count - 1) * self.between_microbatches_s
        backward = count * profile.backward_s[size - 1] + between
        collectives_s = backward_collectives_s(slowed)
        return max(slowed.links.gather_s, forward) + max(collectives_s, backward)

    def fitting_sizes(
        self, problem: Problem, profile: RankProfile, *, even_state: bool = False
    ) -> int:
        """Return the largest microbatch size up to which all sizes fit; 0 if none fits.

        With ``even_state``, an even share of the state takes its part of the memory.
        """
        room = self.memory_share * profile.capacity_bytes - self.overhead_bytes
        if even_state:
            room -= problem.state.held_bytes / len(problem.ranks)
        fits = np.asarray(profile.compute_bytes) <= room
        return len(fits) if fits.all() else int(np.argmin(fits))


def published(
    problem: Problem,
    model: PublishedModel | None = None,
    *,
    even_batch: bool = False,
    even_state: bool = False,
    accumulate_gradients: bool = True,
    released_state_split: bool = False,
) -> Plan:
    """Return the published program's plan, priced by :func:`~lightning_cephalo.plan.predict`.

    Every rank takes at least one sample, as in the release. Sizes beyond a rank's curves are not
    available.

    Args:
        problem: the problem to plan; activations are recomputed, and offloaded if a rank can.
        model: the published constants; None: as released.
        even_batch: every rank gets the same batch; only state is balanced.
        even_state: every rank holds the same share; only compute is balanced.
        accumulate_gradients: False: one microbatch per rank.
        released_state_split: share the state as the release does. This includes its mistake: it
            uses the *number* of a rank's microbatches in place of their *size*.

    Raises:
        InfeasibleError: the program finds no plan, or the plan exceeds a rank's capacity.
        SolverError: the table would be too large to fill.
    """
    started = time.perf_counter()
    model = model or PublishedModel()
    options = _options(problem, model, even_batch, even_state, accumulate_gradients)
    chosen = _choose(problem, model, options)
    names = ["published program"]
    names += ["even batch"] * even_batch + ["even state"] * even_state
    ranks = [
        _bare(problem, profile, int(own.size[row]), int(own.count[row]))
        for profile, own, row in zip(problem.ranks, options, chosen, strict=True)
    ]
    if even_state:
        fractions: Sequence[float] = [1 / len(ranks)] * len(ranks)
    elif released_state_split:
        fractions = _released_split(problem, model, ranks)
    else:
        pairs = list(zip(problem.ranks, ranks, strict=True))
        room = Room(problem, most_share=np.inf)
        free = [float(room.held_bytes(own, needed_by(problem, own, rank))) for own, rank in pairs]
        fractions = [
            to_the_byte(problem, profile, rank, share)
            for (profile, rank), share in zip(pairs, share_state(free), strict=True)
        ]
        missing = problem.state.most_bytes - sum(free)
        if missing > 0:
            raise InfeasibleError(
                f"{', '.join(names)}: its batches leave {format_gib(missing)} of the state "
                f"without a place. Let solve() choose the batches."
            )
    shared = [
        RankPlan(rank.microbatch_sizes, fraction, recompute=rank.recompute, offload=rank.offload)
        for rank, fraction in zip(ranks, fractions, strict=True)
    ]
    plan = _checked(problem, shared, backend=", ".join(names))
    return replace(plan, solve_s=time.perf_counter() - started)


def _checked(problem: Problem, ranks: Sequence[RankPlan], *, backend: str) -> Plan:
    """Return the plan of this allocation with every prediction filled in."""
    plan = priced(problem, ranks, backend=backend)
    counts = {len(rank.microbatch_sizes) for rank in ranks}
    if problem.single_microbatch and counts != {1}:
        raise InfeasibleError(
            f"{backend}: every rank runs one microbatch (single_microbatch: True), but it chooses "
            f"{sorted(counts)}. Let solve() choose."
        )
    for index, (rank, profile) in enumerate(zip(plan.ranks, problem.ranks, strict=True)):
        for kind, needed, capacity in (
            ("", rank.memory_bytes or 0.0, profile.capacity_bytes),
            ("host ", rank.host_bytes or 0.0, profile.host_capacity_bytes),
        ):
            if needed > capacity * _ROUNDING:
                raise InfeasibleError(
                    f"{backend}: rank {index} ({profile.name!r}) would hold "
                    f"{format_gib(needed)} of {kind}memory, but its capacity is "
                    f"{format_gib(capacity)}. Let solve() choose batches and state."
                )
    return plan


def _options(
    problem: Problem,
    model: PublishedModel,
    even_batch: bool,
    even_state: bool,
    accumulate_gradients: bool,
) -> list[Options]:
    batches = even_batches(problem) if even_batch else [0] * len(problem.ranks)
    known: dict[tuple[RankProfile, int], Options] = {}
    found = []
    for index, (profile, batch) in enumerate(zip(problem.ranks, batches, strict=True)):
        key = (profile, batch)
        if key not in known:
            known[key] = _rank_options(
                problem, model, profile, batch, even_state, accumulate_gradients
            )
        if not len(known[key].size):
            next_to = "an even share of the state and " if even_state else ""
            raise InfeasibleError(
                f"published program: rank {index} ({profile.name!r}) can run no microbatch next to "
                f"{next_to}{format_gib(model.overhead_bytes)} of overhead within "
                f"{model.memory_share:.0%} of its {format_gib(profile.capacity_bytes)}, but "
                f"every rank must take a sample there. Let solve() leave it without samples."
            )
        found.append(known[key])
    return found


def _rank_options(
    problem: Problem,
    model: PublishedModel,
    profile: RankProfile,
    batch: int,
    even_state: bool,
    accumulate_gradients: bool,
) -> Options:
    largest = model.fitting_sizes(problem, profile, even_state=even_state)
    with_even_state = model.fitting_sizes(problem, profile, even_state=True)
    most = batch or problem.global_batch_size
    rows = [
        (size, count)
        for size in range(problem.minimum_microbatch_size, min(largest, most) + 1)
        for count in range(1, most // size + 1)
        if (not batch or size * count == batch) and (accumulate_gradients or count == 1)
    ]
    size, count = np.array(rows, dtype=int).reshape(-1, 2).T
    seconds = [
        model.unit_s(problem, profile, own, copies, uneven=own > with_even_state)
        for own, copies in rows
    ]
    peaks = np.asarray(profile.compute_bytes)[size - 1] + model.overhead_bytes
    return Options(size, count, size * count, np.array(seconds), peaks)


def _choose(problem: Problem, model: PublishedModel, options: Sequence[Options]) -> list[int]:
    """Return the row that the published program chooses from every rank's options."""
    capacity = model.memory_share * sum(profile.capacity_bytes for profile in problem.ranks)
    room = capacity - problem.state.held_bytes
    least = sum(float(own.memory_bytes.min()) for own in options)
    if least >= room:
        raise InfeasibleError(
            f"published program: state and the smallest microbatches need "
            f"{format_gib(least + problem.state.held_bytes)}, but all ranks together may hold "
            f"{format_gib(capacity)}. Lower the model's memory, or add a rank."
        )
    start_s = least_seconds(problem, options)
    for reach in _REACHES:
        # the factor keeps the options whose time is the bound itself, despite rounding
        within = [own.seconds <= start_s * reach * (1 + 1e-12) for own in options]
        chosen = search(problem.global_batch_size, options, within, room)
        if chosen is not None:
            return chosen
    raise InfeasibleError(
        f"published program: no plan found fits {format_gib(capacity)} in all with the state of "
        f"{format_gib(problem.state.held_bytes)}. Lower global_batch_size, or add a rank."
    )


def _bare(problem: Problem, profile: RankProfile, size: int, count: int) -> RankPlan:
    """Return the microbatches of one rank, without state, in the release's mode."""
    # the mode that needs the least memory comes last: recomputed, and offloaded if the rank can
    mode = modes(problem, profile)[-1]
    sizes = (size,) * count
    if host_need(problem, profile, mode).of(sizes) > profile.host_capacity_bytes:
        mode = Mode(mode.recompute)
    return rank_plan(profile, sizes, mode)


def _released_split(
    problem: Problem, model: PublishedModel, ranks: Sequence[RankPlan]
) -> list[float]:
    """Return state fractions as the release shares them.

    Each rank starts with an even share. Bytes that a rank is estimated to have no room for move to
    the other ranks in equal parts, the fullest first.
    """
    even = problem.state.held_bytes / len(ranks)
    room = []
    for profile, rank in zip(problem.ranks, ranks, strict=True):
        # the release's mistake: the number of microbatches in place of their size
        mistaken = min(len(rank.microbatch_sizes), profile.largest_microbatch_size)
        used = profile.compute_bytes[mistaken - 1] + model.overhead_bytes
        room.append(model.memory_share * profile.capacity_bytes - used - even)
    held = [even + min(own, 0.0) for own in room]
    to_move = -sum(min(own, 0.0) for own in room)
    roomy = sorted((own, index) for index, own in enumerate(room) if own > 0)
    filled = 0.0
    for position, (own, _) in enumerate(roomy):
        if to_move <= 0:
            break
        more = min(own - filled, to_move / (len(roomy) - position))
        for _, index in roomy[position:]:
            held[index] += more
        to_move -= more * (len(roomy) - position)
        filled = own
    held = [max(own, 0.0) for own in held]
    total = sum(held)
    return [own / total for own in held] if total else [1 / len(ranks)] * len(ranks)
