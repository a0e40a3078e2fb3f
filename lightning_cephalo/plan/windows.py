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

from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from lightning_cephalo.plan.problem import Problem
from lightning_cephalo.plan.program import ROOT, Ends, Operation, Visit, compile_step

Windows = tuple[tuple[float, int], ...]
"""Seconds of collectives beside one unit's pass, and the number of units of which this holds."""

_Window = frozenset[str]
"""Such as "gather", "reduce head", "reduce root", "update"."""


@cache
def _windows(units: int, has_head: bool) -> tuple[Counter[_Window], ...]:
    """Return what a step issues between passes: in the forward, the backward, and behind it."""
    kinds = {ROOT: " root", units + 1: " head"}
    program = compile_step(
        [Visit(unit) for unit in range(1, units + 1 + has_head)],
        1,
        [True] * (units + 2),
        updates_early=True,
        ends=Ends(heads=frozenset([units + 1] * has_head)),
    )
    found: list[set[str]] = [set()]
    for each in (*program.forward, *program.backward):
        if each.operation is Operation.REDUCE and "update" in found[-1]:
            found.append(set())  # behind the last pass
        if each.operation in (Operation.GATHER, Operation.REDUCE, Operation.UPDATE):
            found[-1].add(each.operation.value + kinds.get(each.unit, ""))
        elif each.operation in (Operation.FORWARD, Operation.BACKWARD):
            found.append(set())
    windows = [frozenset(window) for window in found[1:]]  # without the root unit's forward
    parts = windows[:units], windows[units : 2 * units], windows[2 * units :]
    return tuple(map(Counter, parts))


def _parts(problem: Problem) -> tuple[Counter[_Window], ...]:
    return _windows(problem.units, problem.has_last_layers)


def _in_backward(problem: Problem, window: _Window) -> _Window:
    return window - {"gather"} if problem.reshard_after_forward is False else window


def _seconds(problem: Problem, window: _Window) -> tuple[float, float]:
    """Return the seconds of a window's gathers, and of all its collectives."""
    links, of_head = problem.links, problem.last_links
    gather_s = links.gather_s * ("gather" in window)
    both_s = gather_s + links.reduce_s * ("reduce" in window)
    if {"gather", "reduce"} <= window:
        both_s = links.both_s
    head_s = of_head.gather_s * ("gather head" in window)
    head_s += of_head.reduce_s * ("reduce head" in window)
    return gather_s + head_s, both_s + head_s


def _window_s(problem: Problem, window: _Window) -> float:
    gather_s, both_s = _seconds(problem, window)
    return max(gather_s, both_s - early_update_s(problem) * ("update" in window))


def early_update_s(problem: Problem) -> float:
    """Return the part of a unit's early update that all ranks take; 0 for late updates."""
    return problem.unit_update_s * problem.early_update


def forward_windows(problem: Problem) -> Windows:
    """Return the windows of the forward of all units."""
    return tuple((_window_s(problem, own), count) for own, count in _parts(problem)[0].items())


def backward_windows(problem: Problem) -> Windows:
    """Return the windows of the backward of all units.

    ::

        backward_windows(problem)    # four units, G = 2, R = 3: ((2, 1), (5, 1), (5, 1), (3, 1))
    """
    windows = _parts(problem)[1].items()
    return tuple((_window_s(problem, _in_backward(problem, own)), count) for own, count in windows)


def backward_collectives_s(problem: Problem) -> float:
    """Return the seconds of collectives that the backward of a unit in the middle has to hide."""
    middle = frozenset(("gather", "reduce", "update"))
    return _window_s(problem, _in_backward(problem, middle))


def hidden_updates_s(problem: Problem) -> float:
    """Return the seconds of early updates that hide behind the last two reduces."""
    return sum(min(early_update_s(problem), room_s) for room_s in _behind_backward(problem))


def _behind_backward(problem: Problem) -> list[float]:
    # unit 1's reduce hides an update only as far as it counts
    last_s, root_s = min(problem.links.reduce_s, problem.fill_s), problem.root_links.reduce_s
    windows = [window for window in _parts(problem)[2] if "update" in window]
    return [root_s if "reduce root" in window else last_s for window in windows]


def rooms_of_updates(problem: Problem, backward_s: float) -> Windows:
    """Return what hides each unit's update beyond ``Problem.unit_update_s``, the least room first.

    ::

        rooms_of_updates(problem, 1.0)    # ((0, 2), (1.5, 1), (2, 1)) of four units
    """
    rooms = [(room_s, 1) for room_s in _behind_backward(problem)]
    for window, count in _parts(problem)[1].items():
        gather_s, both_s = _seconds(problem, _in_backward(problem, window))
        if "update" in window:
            rooms.append((both_s - max(gather_s, backward_s), count))
    update_s = early_update_s(problem)
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
