"""Plans anew for a rank that ran out of memory. Pure.

A rank that runs out needs more than its profile says, by an unknown amount. So it is planned with
four fifths of what it held, or of what its plan predicted if that is less. Batches that are loaded
already keep their sizes, and get other microbatches, shares and modes (:func:`plan_for_batches`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_cephalo.plan.cost import (
    DEVICE_NEEDS,
    Mode,
    as_planned,
    host_need,
    modes,
    predict,
    rank_plan,
    rank_work,
    work_s,
)
from lightning_cephalo.plan.even import even_split
from lightning_cephalo.plan.plan import Plan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.room import Room
from lightning_cephalo.plan.solver.solve import priced
from lightning_cephalo.plan.solver.state import filled_up

_ROOM = 0.8
# shares are rounded; a plan may fill a device to the last byte
_ROUNDING = 1e-9


def lower_capacity(planned_bytes: float, capacity_bytes: float) -> float:
    """Return the bytes that a rank may use in another plan, as that of before has not sufficed."""
    return _ROOM * min(planned_bytes, capacity_bytes)


def with_less_memory(problem: Problem, plan: Plan, held_bytes: Sequence[float | None]) -> Problem:
    """Return a problem in which ranks that ran out of memory may use less.

    ``held_bytes`` has what each of them held at most, infinite if unknown; None for the others.
    """
    predicted = predict(problem, plan).ranks
    ranks = []
    for profile, rank, held in zip(problem.ranks, predicted, held_bytes, strict=True):
        if held is not None:
            held = lower_capacity(min(held, rank.memory_bytes), profile.capacity_bytes)
            profile = replace(profile, capacity_bytes=held)
        ranks.append(profile)
    return replace(problem, ranks=tuple(ranks))


def plan_for_batches(problem: Problem, plan: Plan, batch_sizes: Sequence[int]) -> Plan | None:
    """Return a plan like another one, for other batches; None if they do not fit.

    Shares stay as near to the plan's as memory allows. Each rank then takes the fastest
    microbatches and modes that fit.
    """
    if [rank.batch_size for rank in plan.ranks] == list(batch_sizes):
        return plan
    chosen = as_planned(problem, plan).reshard_after_forward is not False
    for reshard in dict.fromkeys((chosen, *map(bool, problem.reshard_choices))):
        found = _plan_by(problem.resharding(reshard), plan, batch_sizes)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _Run:
    """A way of a rank to run its batch."""

    sizes: tuple[int, ...]
    mode: Mode
    rooms: tuple[tuple[float, float], ...]
    host_bytes: float
    busy_s: float
    most_moving: float | None = None

    @property
    def most_share(self) -> float:
        """The largest share of the state that it leaves room for."""
        if self.most_moving is not None:
            return self.most_moving
        return min(left / state if state else math.inf for left, state in self.rooms)

    def fits(self, share: float, rounding_bytes: float) -> bool:
        """Return whether it leaves room for a share of the state."""
        if self.most_moving is not None:
            return share <= self.most_moving * (1 + _ROUNDING)
        return all(share * state <= left + rounding_bytes for left, state in self.rooms)


def _plan_by(problem: Problem, plan: Plan, batch_sizes: Sequence[int]) -> Plan | None:
    # how long moves take does not matter: the step has to fit
    room = Room(problem, math.inf, (0.0, math.inf)) if problem.can_move_state else None
    ways = [
        list(_runs(problem, profile, batch, room))
        for profile, batch in zip(problem.ranks, batch_sizes, strict=True)
    ]
    if problem.single_microbatch:
        ways = [[run for run in own if len(run.sizes) == 1] for own in ways]
    return _best(problem, plan, ways, room)


def _runs(problem: Problem, profile: RankProfile, batch: int, room: Room | None) -> Iterator[_Run]:
    """Yield the ways of a rank to run a batch in microbatches that are as equal as can be."""
    least = problem.minimum_microbatch_size
    for mode in modes(problem, profile):
        needs = [need(problem, profile, mode) for need in DEVICE_NEEDS]
        host = host_need(problem, profile, mode)
        for count in range(1, max(batch // least, 1) + 1) if batch else (0,):
            sizes = even_split(batch, count) if count else ()
            if sizes and sizes[0] > profile.largest_microbatch_size:
                continue
            rooms = tuple((need.capacity - need.of(sizes), need.state) for need in needs)
            if min(rooms)[0] >= 0.0 and host.of(sizes) <= host.capacity:
                own_s = work_s(problem, *rank_work(problem, profile, sizes, mode))
                own, most = host.of(sizes), None
                if room is not None:
                    on_device = [need.of(sizes) for need in needs]
                    most = float(room.most(profile, on_device, own))
                yield _Run(sizes, mode, rooms, own, own_s, most)


def _best(
    problem: Problem, plan: Plan, ways: Sequence[Sequence[_Run]], room: Room | None
) -> Plan | None:
    if not all(ways):
        return None
    most = [max(run.most_share for run in own) for own in ways]
    shares = [0.0] * len(most)
    for members in problem.groups:
        wanted = [plan.ranks[member].state_fraction for member in members]
        found = _shares(wanted, [most[member] for member in members])
        if found is None:
            return None
        for member, own_share in zip(members, found, strict=True):
            shares[member] = own_share
    ranks = []
    for profile, own, share in zip(problem.ranks, ways, shares, strict=True):
        rounding = profile.capacity_bytes * _ROUNDING
        run = min((run for run in own if run.fits(share, rounding)), key=lambda run: run.busy_s)
        rank = rank_plan(profile, run.sizes, run.mode, share)
        if room is not None:
            on_device = [profile.capacity_bytes - left for left, _ in run.rooms]
            moved = room.least_moved(profile, on_device, run.host_bytes, share)
            rank = replace(
                rank,
                resident_fraction=moved.resident_fraction,
                host_update_fraction=moved.host_update_fraction,
            )
        ranks.append(rank)
    # even shares are not padded, which would take memory that is not counted here
    return priced(problem, ranks, backend=plan.backend or "", padded=False)


def _shares(wanted: Sequence[float], most: Sequence[float]) -> list[float] | None:
    """Return shares near the wanted ones, and nowhere above the most; None if there are none."""
    if math.fsum(min(limit, 1.0) for limit in most) < 1.0:
        return None
    return filled_up(list(map(min, wanted, most)), [min(limit, 1.0) for limit in most])
