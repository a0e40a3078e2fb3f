"""Prices optimizer state that lives in host memory: bytes on both sides, and seconds.

A rank's share of the optimizer state is resident, streamed or updated by the host
(:mod:`~lightning_cephalo.plan.state_homes`). Let a share s of P parameters be that of a rank, of
which g are streamed and c are updated by the host. A parameter has ``moment_bytes`` of state and
``element_bytes`` of its own. The rank's links and the host's processors are then busy for::

    link = s (moment_bytes g + element_bytes c) / (the slower direction's rate)
    host = s c / (parameters that the host updates per second)

With updates inside the backward, the first k units of the backward have state that moves, of U. A
backward of one unit takes ``pace``. What no compute hides, makes the step longer by::

    max(0, link - k pace, fetches - f pace, host + last - (U - 2) pace)
      + max(0, last - (U - k - 1) pace) + root

A streamed unit's state starts on its way one unit ahead, so that each of the f streamed units has a
pace of its own to hide behind. ``fetches`` are their ways in one direction, each behind those of a
unit that the host updates, if there are any. Updates come one unit behind the reduce. Where there
are both kinds, their copies wait for each other, and ``link`` has those of the second kind twice.

``last`` is the way of one unit's state there and back: behind the last of them only the backward of
the other units hides it. ``root`` is that of the root unit's, which nothing hides. With updates
behind the backward the pace is 0, and the root unit is one like the others::

    max(link, host) + last

What the device updates takes its time, too (``plan/updates.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_cephalo.plan.exposure import Exposure
from lightning_cephalo.plan.pinned import most_taken
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome, state_homes
from lightning_cephalo.plan.updates import update_exposure
from lightning_cephalo.plan.windows import backward_collectives_s

# A planned share lies between two whole units, so that rows that are cut elsewhere change nothing.
_BETWEEN = 0.25
# Units whose gradients are on the device while they leave for the host inside the backward.
_COPIED_UNITS = 2
# Numbers of units and of parts for the host that a plan chooses among.
_LEVELS, _PARTS = 32, 4


@dataclass(frozen=True)
class MovedState:
    """Which of the model's optimizer state lives in host memory, as shares of a rank's part.

    ::

        moved = moved_state(problem.unit_parameters, rank.resident_fraction, 0.0)
        rank.state_fraction * moved.host_bytes(problem)

    ``sizes`` has the parameters of every unit, the root unit first.
    """

    resident_fraction: float
    host_update_fraction: float
    sizes: tuple[int, ...]
    homes: tuple[StateHome, ...]

    def count(self, home: StateHome) -> int:
        """Return the parameters whose state lives there."""
        return self._counts[home]

    def largest(self, home: StateHome) -> int:
        """Return the parameters of the largest such unit; 0 if there is none."""
        return self._largest[home]

    @functools.cached_property
    def homes_of_units(self) -> list[StateHome]:
        """Homes of the units but the root that have state."""
        return [home for size, home in zip(self.sizes[1:], self.homes[1:], strict=True) if size]

    def is_away(self, unit: int) -> bool:
        """Return whether a unit's state is in host memory."""
        return self.sizes[unit] > 0 and self.homes[unit] is not StateHome.RESIDENT

    def device_bytes(self, problem: Problem) -> float:
        """Return what a rank with all of the state holds more on its device; negative for less.

        Streamed state passes through two buffers. Early updates add gradients that the host needs:
        one is being reduced, one is copied. Late ones hold all.
        """
        away = self.count(StateHome.STREAMED) + self.count(StateHome.HOST)
        staged = STAGED_UNITS * self.largest(StateHome.STREAMED)
        gradients = _COPIED_UNITS * self.largest(StateHome.HOST) if problem.early_update else 0
        return problem.moment_bytes * (staged - away) + problem.element_bytes * gradients

    def host_bytes(self, problem: Problem) -> float:
        """Return what a rank with all of the state takes of host memory, pinned memory at most."""
        on_host = self.count(StateHome.HOST)
        away = self.count(StateHome.STREAMED) + on_host
        needed = problem.moment_bytes * away + 2 * problem.element_bytes * on_host
        if not (problem.pins_host_memory and needed):
            return needed
        largest = max(
            problem.moment_bytes * self.largest(StateHome.STREAMED),
            (problem.moment_bytes + 2 * problem.element_bytes) * self.largest(StateHome.HOST),
        )
        return needed * most_taken(needed / largest)

    @property
    def root_on_host(self) -> int:
        """Parameters of the root unit, if the host updates it."""
        return self.sizes[ROOT] if self.homes and self.homes[ROOT] is StateHome.HOST else 0

    @functools.cached_property
    def _counts(self) -> dict[StateHome, int]:
        return {home: sum(self._of(home)) for home in StateHome}

    @functools.cached_property
    def _largest(self) -> dict[StateHome, int]:
        return {home: max(self._of(home), default=0) for home in StateHome}

    def _of(self, home: StateHome) -> Iterator[int]:
        return (size for size, own in zip(self.sizes, self.homes, strict=True) if own is home)


@functools.lru_cache(maxsize=4096)
def moved_state(
    sizes: tuple[int, ...], resident_fraction: float, host_update_fraction: float
) -> MovedState:
    """Return which units' state is where."""
    homes = state_homes(sizes, resident_fraction, host_update_fraction)
    return MovedState(resident_fraction, host_update_fraction, sizes, homes)


def moved_by(problem: Problem, rank: RankPlan) -> MovedState:
    """Return which units' state is where under a rank's part of a plan."""
    return moved_state(problem.unit_parameters, rank.resident_fraction, rank.host_update_fraction)


def choices(problem: Problem, profile: RankProfile) -> list[MovedState]:
    """Return the ways in which a rank may keep its state, those that move the least first.

    With ``optimizer_offload=True`` all state moves.
    """
    sizes = problem.unit_parameters
    total, found = sum(sizes), []
    can_move = problem.can_move_state and profile.host_capacity_bytes > 0
    if problem.optimizer_offload is not True or not can_move:
        found.append(moved_state(sizes, 1.0, 0.0))
    if not can_move:
        return found
    trained = [unit for unit, size in enumerate(sizes) if size]
    counts: Sequence[int] = range(1, len(trained) + 1)
    if len(counts) > _LEVELS:
        counts = sorted({math.ceil(len(trained) * (n + 1) / _LEVELS) for n in range(_LEVELS)})
    if problem.optimizer_offload is True:
        counts = [len(trained)]
    parts = range(_PARTS + 1) if profile.host_updated_parameters_per_s > 0 else (0,)
    for count in counts:
        away = [sizes[unit] for unit in trained[-count:]]
        between = 0.0 if count == len(trained) else _BETWEEN * min(away)
        resident = (total - sum(away) + between) / total
        known = set()
        for part in parts:
            moved = moved_state(sizes, resident, (1 - resident) * part / _PARTS)
            if moved.homes not in known:
                known.add(moved.homes)
                found.append(moved)
    return found


def exposure(
    problem: Problem,
    profile: RankProfile,
    moved: MovedState,
    backward_s: float,
    least_backward_s: float | None = None,
) -> Exposure:
    """Return the seconds that updates and moves add to a step, as a function of its share."""
    least_s = backward_s if least_backward_s is None else least_backward_s
    found = device_exposure(problem, profile, moved, least_s)
    is_moved = moved.count(StateHome.RESIDENT) < problem.parameters
    return found + moving_exposure(problem, profile, moved, backward_s) if is_moved else found


def device_exposure(
    problem: Problem, profile: RankProfile, moved: MovedState, backward_s: float
) -> Exposure:
    """Return the seconds that the device's updates add to a step (``plan/updates.py``)."""
    root = sum(moved.sizes[:1]) - moved.root_on_host
    units = sum(moved.sizes) - moved.count(StateHome.HOST) - root
    return update_exposure(problem, profile, root, units, backward_s)


def moving_exposure(
    problem: Problem, profile: RankProfile, moved: MovedState, backward_s: float
) -> Exposure:
    """Return the seconds of moves that no compute hides, as a function of the rank's share."""
    backward_s = paced_backward_s(problem, backward_s)
    ways = [
        _way_s(problem, profile, size, home)
        for size, home in zip(moved.sizes, moved.homes, strict=True)
    ]
    is_early = problem.early_update
    streamed, on_host = moved.count(StateHome.STREAMED), moved.count(StateHome.HOST)
    if is_early:  # nothing hides the root unit
        streamed -= moved.sizes[0] * (moved.homes[0] is StateHome.STREAMED)
        on_host -= moved.root_on_host
    rate = min(profile.to_device_bytes_per_s, profile.to_host_bytes_per_s)
    state_s = problem.moment_bytes * streamed / rate
    copies_s = problem.element_bytes * on_host / rate
    host_s = on_host / profile.host_updated_parameters_per_s if on_host else 0.0
    link_s = state_s + (2 if streamed else 1) * copies_s
    last_s = max(ways[1:], default=0.0)
    if not is_early:  # a root unit of another size fits no gap
        longest = ((link_s, 0.0), (host_s, 0.0))
        return Exposure((longest, ((last_s, 0.0),)), ways[0])
    homes = moved.homes_of_units
    pace_s = backward_s * problem.units / max(len(homes), 1)

    def hidden_s(units: int) -> float:
        return units * pace_s if units > 0 else 0.0  # the pace may be infinite

    units, units_streamed = len(homes), homes.count(StateHome.STREAMED)
    away = units - homes.count(StateHome.RESIDENT)
    behind_s = 2 * problem.element_bytes * min(streamed, on_host) / rate
    moving = (
        (link_s, hidden_s(away)),
        (state_s + behind_s, hidden_s(units_streamed)),
        (host_s + last_s * (on_host > 0), hidden_s(units - 2)),
    )
    last = ((last_s, hidden_s(units - away - 1)),)
    return Exposure((moving, last), ways[0])


def paced_backward_s(problem: Problem, backward_s: float) -> float:
    """Return the least seconds between two backwards of units in the middle of a step.

    They have collectives, and an update that takes no rank less than its overhead.
    """
    update_s = problem.unit_update_s * problem.early_update
    return max(backward_collectives_s(problem), backward_s) + update_s


def _way_s(problem: Problem, profile: RankProfile, size: int, home: StateHome) -> float:
    """Return the seconds in which one unit's state goes its way and back, for all of the state."""
    if home is StateHome.RESIDENT or not size:
        return 0.0
    is_streamed = home is StateHome.STREAMED
    nbytes = problem.moment_bytes if is_streamed else problem.element_bytes
    copies_s = nbytes / profile.to_device_bytes_per_s + nbytes / profile.to_host_bytes_per_s
    update_s = 0.0 if is_streamed else 1 / profile.host_updated_parameters_per_s
    return size * (copies_s + update_s)
