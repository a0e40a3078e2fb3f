"""What each unit's forward and backward hide: the collectives that run beside them.

With U units, a step has 2 U - 1 gathers of units and U reduces: the last unit of the forward is
the first one of the backward, and is still there. G and R are the times of one gather and one
reduce. The first gather and the last reduce hide behind nothing (``Problem.fill_s``). The others
run beside these passes of units::

    forward   units 1 to U - 1    the next unit's gather       G
              unit U              none                         0
    backward  unit U              the next unit's gather       G
              units U - 1 to 2    a reduce and a gather        D
              unit 1              unit 2's reduce              R

Each of these is a window: it takes as long as its compute or as its collectives, whichever is
longer. D is the time of a gather and a reduce that run beside each other: G + R, unless it was
measured (``Problem.gather_and_reduce_s``). Where units stay gathered, the windows of the backward
have no gathers.

Where a head is a unit of its own, its gather follows that of unit U, beside unit U - 1, and its
reduce runs beside the backward of unit U. The first loss may have to wait for that gather
behind one microbatch only, so that unit U's own forward does not count.

With early updates, the update of a unit runs between two backwards, beside the reduce of the unit
before. With u the time of one update, such a window takes ``max(D, B + u, G + u)``, which is
``u + max(D - u, G, B)``. The u is a part of the optimizer's time, so that the window's
collectives count as ``max(D - u, G)``. No update precedes the backwards of units U and U - 1.
Two updates are left for the reduces of unit 1 and of the root unit (``hidden_updates_s``).

Here u is ``Problem.unit_update_s``, the part that all shares of the state take. A rank's share of
the parameters comes in addition, and hides in what is left (``rooms_of_updates``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_cephalo.plan.problem import Problem

Windows = tuple[tuple[float, int], ...]
"""Seconds of collectives beside one unit's pass, and the number of units of which this holds."""


def forward_windows(problem: Problem) -> Windows:
    """Return the windows of the forward of all units."""
    if problem.units == 1:
        return ((0.0, 1),)
    gather_s = problem.gather_s
    return (gather_s, problem.units - 2), (gather_s + problem.last_gather_s, 1), (0.0, 1)


def backward_windows(problem: Problem) -> Windows:
    """Return the windows of the backward of all units.

    ::

        backward_windows(problem)    # four units, G = 2, R = 3: ((2, 1), (5, 1), (5, 1), (3, 1))
    """
    gather_s, reduce_s, both_s, update_s = _times(problem)
    units, first_s = problem.units, gather_s + problem.last_reduce_s
    if units == 1:
        return ((problem.last_reduce_s, 1),)
    if units == 2:
        return (first_s, 1), (reduce_s, 1)
    return (
        (first_s, 1),
        (both_s, 1),
        (backward_collectives_s(problem), units - 3),
        (max(0.0, reduce_s - update_s), 1),
    )


def backward_collectives_s(problem: Problem) -> float:
    """Return the seconds of collectives that the backward of a unit in the middle has to hide."""
    gather_s, _, both_s, update_s = _times(problem)
    return max(gather_s, both_s - update_s)


def hidden_updates_s(problem: Problem) -> float:
    """Return the seconds of early updates that hide behind the last two reduces."""
    _, reduce_s, _, update_s = _times(problem)
    # that of unit 1 hides one only as far as it counts
    behind_last_s = min(reduce_s, problem.fill_s) if problem.units > 1 else 0.0
    return min(update_s, behind_last_s) + min(update_s, problem.root_reduce_s)


def rooms_of_updates(problem: Problem, backward_s: float) -> Windows:
    """Return what hides each unit's update beyond ``Problem.unit_update_s``, the least room first.

    ::

        rooms_of_updates(problem, 1.0)    # ((0, 2), (1.5, 1), (2, 1)) of four units
    """
    gather_s, reduce_s, both_s, update_s = _times(problem)
    rooms = [(problem.root_reduce_s, 1)]
    if problem.units > 1:
        rooms.append((min(reduce_s, problem.fill_s), 1))
    if problem.units > 2:
        rooms.append((reduce_s - backward_s, 1))
        rooms.append((both_s - max(gather_s, backward_s), problem.units - 3))
    return tuple(sorted((max(0.0, room_s - update_s), count) for room_s, count in rooms))


def exposed_last_gather_s(problem: Problem) -> float:
    """Return the seconds in which the gather of a head hides behind nothing."""
    return problem.last_gather_s if problem.units == 1 else 0.0


def pass_s(windows: Windows, own_s: Any) -> Any:
    """Return the seconds of a pass through all units."""
    # exact where compute hides all collectives
    found_s = sum(count for _, count in windows) * own_s
    for floor_s, count in windows:
        found_s = found_s + count * np.maximum(floor_s - own_s, 0.0)
    return found_s


def _times(problem: Problem) -> tuple[float, float, float, float]:
    """Return the seconds of a unit's gather in the backward, its reduce, both, and its update."""
    update_s = problem.unit_update_s * problem.early_update
    if problem.reshard_after_forward is False:
        return 0.0, problem.reduce_s, problem.reduce_s, update_s
    return *problem.collectives_s, update_s
