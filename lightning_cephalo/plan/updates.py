"""Prices the updates of devices, as a function of a rank's share of the state.

A rank updates its own rows. Of P trained parameters a share s takes ``W = s P / r``, with r the
rate of its device (``updated_parameters_per_s``). That comes in addition to
``Problem.update_overhead_s``, which every rank takes. A step ends with the slowest rank's update::

    late     max_i W_i
    early    max_i (W_i - U u_i + sum over the units of max(0, u_i - room))

With early updates, u_i is one unit's part of W_i. It hides in the room that the unit's window
leaves (``windows.rooms_of_updates``). What remains is the root unit's part. What the host updates
takes the device no time; of the other units, those with the least room count.

In :func:`least_update_s`, all ranks take equally long, as far as their memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_cephalo.plan.exposure import Exposure
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.state_groups import even_shares
from lightning_cephalo.plan.windows import rooms_of_updates


def update_exposure(
    problem: Problem, profile: RankProfile, root: float, units: float, backward_s: float
) -> Exposure:
    """Return what a rank's updates add to a step, as a function of its share of the state."""
    rate = profile.updated_parameters_per_s
    if not problem.early_update:
        return Exposure(always=(root + units) / rate)
    each = problem.parameters * problem.unit_part
    left = units / each if each else 0.0
    slope = hidden = 0.0
    pairs = []
    # units have equal updates: one that exceeds a room exceeds all smaller ones
    for room_s, count in rooms_of_updates(problem, backward_s):
        own = min(float(count), left)
        slope, hidden, left = slope + own * each / rate, hidden + own * room_s, left - own
        pairs.append((slope, hidden))
    return Exposure((tuple(pairs),), always=root / rate)


def with_updates(problem: Problem, update_s: float) -> Problem:
    """Return a problem in which all shares take as long to update, behind the overhead."""
    ranks = [replace(rank, updated_parameters_per_s=math.inf) for rank in problem.ranks]
    return replace(
        problem,
        ranks=tuple(ranks),
        update_overhead_s=problem.update_overhead_s + update_s,
        unit_update_s=problem.unit_update_s + update_s * problem.unit_part,
    )


def least_update_s(problem: Problem) -> float:
    """Return a lower bound of the slowest rank's updates, where all state is on the devices."""
    if not problem.shares_take_time:
        return 0.0
    if problem.has_even_state:
        shares = even_shares(problem.groups, len(problem.ranks))
        pairs = zip(problem.ranks, shares, strict=True)
        return max(s * problem.parameters / r.updated_parameters_per_s for r, s in pairs)
    idle = problem.fixed_bytes
    rooms = [room_for_state(problem, idle, rank.capacity_bytes) for rank in problem.ranks]
    return max(
        shortest_update_s(problem, own, [rooms[rank] for rank in own]) for own in problem.members
    )


def room_for_state(problem: Problem, used: float, capacity: float) -> float:
    """Return the largest share of the state that a rank can hold, 1 at most."""
    full = problem.state.most_bytes
    if not full or math.isinf(capacity):
        return 1.0
    return min(1.0, max(0.0, (capacity - used) / full))


def shortest_update_s(problem: Problem, members: Sequence[int], rooms: Sequence[float]) -> float:
    """Return the least slowest update of ranks that hold the state together."""
    rates = [problem.ranks[rank].updated_parameters_per_s / problem.parameters for rank in members]
    # ranks that are full hold no more, however long updates take
    full_s = sorted((room / rate, room, rate) for room, rate in zip(rooms, rates, strict=True))
    held, growing = 0.0, math.fsum(rate for _, _, rate in full_s if math.isfinite(rate))
    last_s = 0.0
    for at_s, room, rate in full_s:
        if not math.isfinite(rate):
            held += room
            continue
        if held + growing * at_s >= 1:
            return max(0.0, (1 - held) / growing)
        held, growing, last_s = held + room, growing - rate, at_s
    return last_s
