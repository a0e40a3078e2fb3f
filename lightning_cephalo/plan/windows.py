"""What each unit's forward and backward hide: the collectives that run beside them.

Each pass of a unit has a window: what the program issues since the pass before runs beside it, and
the window takes as long as its compute or as its collectives, whichever is longer. Windows are read
from the compiled program of a step. With G and R the times of a unit's gather and reduce, and D
that of both beside each other, those of U units are::

    forward   units 1 to U - 1    the next unit's gather       G
              unit U              none                         0
    backward  unit U              the next unit's gather       G
              units U - 1 to 2    a reduce and a gather        D
              unit 1              unit 2's reduce              R

The first gather and the last reduce hide behind nothing (``Problem.fill_s``). The gather of a head
that is a unit of its own is beside unit U - 1: the first loss may have to wait for it behind one
microbatch only. Its reduce is beside the backward of unit U.

An early update of u seconds runs between two backwards, beside the reduce of the unit before. Its
window takes ``max(D, B + u, G + u)``, which is ``u + max(D - u, G, B)``. The u is a part of the
optimizer's time, so that the collectives count as ``max(D - u, G)``. Two updates are left for the
reduces of unit 1 and of the root unit. Here u is ``Problem.unit_update_s``, the part that all
shares of the state take. A rank's share of the parameters comes in addition, and hides in what is
left (``rooms_of_updates``).
"""

from __future__ import annotations

from functools import cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.program import ROOT, Ends, Instruction, Operation, Visit, compile_step

Windows = tuple[tuple[float, int], ...]
"""Seconds of collectives beside one unit's pass, and the number of units of which this holds."""

_PASSES = (Operation.FORWARD, Operation.BACKWARD)
_ISSUED = (Operation.GATHER, Operation.REDUCE)
_Window = frozenset[str]
"""Such as "gather", "reduce head", "reduce root", "update"."""
_Groups = tuple[tuple[_Window, int], ...]
"""Windows in their order, and how many equal ones follow each other."""


@cache
def _windows(units: int, has_head: bool, reshards: bool) -> tuple[_Groups, ...]:
    """Return the windows of the root unit's forward, all forwards and backwards, and behind."""
    # what differs with resharding has windows of its own without it, too
    pairs = [*zip(_walk(units, has_head, reshards), _walk(units, has_head, True), strict=True)]
    ends = (0, 1, units + 1, 2 * units + 1, len(pairs))
    return tuple(
        tuple((own, len([*equal])) for (own, _), equal in groupby(pairs[start:end]))
        for start, end in pairwise(ends)
    )


def _walk(units: int, has_head: bool, reshards: bool) -> list[_Window]:
    """Return what a step issues since the last compute, but for the collectives of its own unit."""
    kinds = {ROOT: " root", units + 1: " head"}
    visits = [Visit(unit) for unit in range(1, units + 1 + has_head)]
    program = compile_step(
        visits,
        1,
        [True] * (units + 2),
        reshard_after_forward=reshards,
        updates_early=True,
        ends=Ends(heads=frozenset([units + 1] * has_head)),
    )
    found: list[list[Instruction]] = [[]]
    before = None
    for each in (*program.forward, *program.backward):
        is_update = each.operation is Operation.UPDATE and each.unit <= units
        if is_update or each.operation in (*_ISSUED, *_PASSES):
            is_behind_update = before is Operation.UPDATE and each.operation in _ISSUED
            if before in _PASSES or is_behind_update:
                found.append([])
            found[-1].append(each)
            before = each.operation
    windows = []
    for window in found:
        own = {each.unit for each in window if each.operation not in _ISSUED}
        issued = [i for i in window if i.operation in _ISSUED and i.unit not in own]
        updates = [i for i in window if i.operation is Operation.UPDATE]
        words = {each.operation.value + kinds.get(each.unit, "") for each in issued}
        windows.append(frozenset(words | {each.operation.value for each in updates}))
    return windows


def _parts(problem: Problem) -> tuple[_Groups, ...]:
    reshards = problem.reshard_after_forward is not False
    return _windows(problem.units, problem.has_last_layers, reshards)


def _seconds(problem: Problem, window: _Window) -> tuple[float, float]:
    """Return the seconds of a window's gathers, and of all its collectives."""
    gather_s = problem.links.gather_s if "gather" in window else 0.0
    both_s = gather_s + problem.links.reduce_s if "reduce" in window else gather_s
    if {"gather", "reduce"} <= window:
        both_s = problem.links.both_s
    head_s = problem.last_links.gather_s * ("gather head" in window)
    head_s += problem.last_links.reduce_s * ("reduce head" in window)
    return gather_s + head_s, both_s + head_s


def _priced(problem: Problem, groups: _Groups) -> Windows:
    update_s = problem.unit_update_s * problem.early_update
    found = []
    for window, count in groups:
        gather_s, both_s = _seconds(problem, window)
        found.append((max(gather_s, both_s - update_s * ("update" in window)), count))
    return tuple(found)


def forward_windows(problem: Problem) -> Windows:
    """Return the windows of the forward of all units."""
    return _priced(problem, _parts(problem)[1])


def backward_windows(problem: Problem) -> Windows:
    """Return the windows of the backward of all units.

    ::

        backward_windows(problem)    # four units, G = 2, R = 3: ((2, 1), (5, 1), (5, 1), (3, 1))
    """
    return _priced(problem, _parts(problem)[2])


def backward_collectives_s(problem: Problem) -> float:
    """Return the seconds of collectives that the backward of a unit in the middle has to hide."""
    of_four = _windows(4, False, problem.reshard_after_forward is not False)
    return _priced(problem, of_four[2][2:3])[0][0]


def hidden_updates_s(problem: Problem) -> float:
    """Return the seconds of early updates that hide behind the last two reduces."""
    update_s = problem.unit_update_s * problem.early_update
    return sum(min(update_s, room_s) for room_s, _ in _behind_backward(problem))


def _behind_backward(problem: Problem) -> Windows:
    # unit 1's reduce hides an update only as far as it counts
    last_s = min(problem.links.reduce_s, problem.fill_s)
    windows = [window for window, _ in _parts(problem)[3] if "update" in window]
    root_s = problem.root_links.reduce_s
    return tuple((root_s if "reduce root" in window else last_s, 1) for window in windows)


def rooms_of_updates(problem: Problem, backward_s: float) -> Windows:
    """Return what hides each unit's update beyond ``Problem.unit_update_s``, the least room first.

    ::

        rooms_of_updates(problem, 1.0)    # ((0, 2), (1.5, 1), (2, 1)) of four units
    """
    update_s = problem.unit_update_s * problem.early_update
    rooms = [*_behind_backward(problem)]
    for window, count in _parts(problem)[2]:
        gather_s, both_s = _seconds(problem, window)
        if "update" in window:
            rooms.append((both_s - max(gather_s, backward_s), count))
    return tuple(sorted((max(0.0, room_s - update_s), count) for room_s, count in rooms))


def exposed_last_gather_s(problem: Problem) -> float:
    """Return the seconds in which the gather of a head hides behind nothing."""
    return problem.last_links.gather_s if problem.units == 1 else 0.0


def pass_s(windows: Windows, own_s: Any) -> Any:
    """Return the seconds of a pass through all units."""
    # exact where compute hides all collectives
    found_s = sum(count for _, count in windows) * own_s
    for floor_s, count in windows:
        found_s = found_s + count * np.maximum(floor_s - own_s, 0.0)
    return found_s
