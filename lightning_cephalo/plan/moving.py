"""Prices what a rank's share of the optimizer state takes: its updates, and its ways to the host.

A rank updates its own rows. Of P trained parameters a share s takes ``W = s P / r``, with r the
rate of its device (``updated_parameters_per_s``). That comes in addition to
``Problem.update_overhead_s``, which every rank takes. A step ends with the slowest rank's update::

    late     max_i W_i
    early    max_i (W_i - U u_i + sum over the units of max(0, u_i - room))

With early updates, u_i is one unit's part of W_i. It hides in the room that the unit's window
leaves (``windows.rooms_of_updates``). What remains is the root unit's part. What the host updates
takes the device no time; of the other units, those with the least room count.

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

torch rounds pinned memory up to powers of two. ``accelerator/host_room.py`` puts pieces into chunks
of such sizes, the largest first, each into the first chunk with room. It tries every power of two
as the size of a chunk, and takes the best. Let the largest piece be 1, all pieces be T, and a chunk
be c. A chunk is left behind only when a piece does not fit, so that all chunks but the last hold
more than c - 1. The last one is rounded up to less than the double of what it holds. So q full
chunks and the last take at most ``q c + min(c, 2 (T - q (c - 1)))``, most where the last is
half-full: ``c (T + c / 2 - 1) / (c - 1)``. Where c lies between two powers of two is not known: the
worst place is where c is as good as 2 c, which is ``c = 3/4 + sqrt(T - 7/16)``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.state_groups import even_shares
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome, host_bytes, state_homes
from lightning_cephalo.plan.windows import backward_collectives_s, early_update_s, rooms_of_updates

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

    def sizes_of(self, home: StateHome) -> list[int]:
        """Return the parameters of each unit whose state lives there."""
        return [size for size, own in zip(self.sizes, self.homes, strict=True) if own is home]

    def is_away(self, unit: int) -> bool:
        """Return whether a unit's state is in host memory."""
        return self.sizes[unit] > 0 and self.homes[unit] is not StateHome.RESIDENT

    def device_bytes(self, problem: Problem) -> float:
        """Return what a rank with all of the state holds more on its device; negative for less.

        Streamed state passes through two buffers. Early updates add gradients that the host needs:
        one is being reduced, one is copied. Late ones hold all.
        """
        streamed, on_host = self.sizes_of(StateHome.STREAMED), self.sizes_of(StateHome.HOST)
        staged = STAGED_UNITS * max(streamed, default=0)
        gradients = _COPIED_UNITS * max(on_host, default=0) if problem.early_update else 0
        moments = staged - sum(streamed) - sum(on_host)
        return problem.moment_bytes * moments + problem.element_bytes * gradients

    def host_bytes(self, problem: Problem) -> float:
        """Return what a rank with all of the state takes of host memory, pinned memory at most."""
        each = problem.moment_bytes, problem.element_bytes
        pairs = zip(self.sizes, self.homes, strict=True)
        pieces = [host_bytes(size, home, *each) for size, home in pairs]
        needed = sum(pieces)
        is_pinned = problem.pins_host_memory and needed > 0
        return needed * most_taken(needed / max(pieces)) if is_pinned else needed


def most_taken(total: float) -> float:
    """Return by how much pinned pieces may exceed what they need, 1 to 2.

    >>> most_taken(1.0), round(most_taken(8.0), 2), round(most_taken(32.0), 2)
    (2.0, 1.53, 1.27)

    Args:
        total: All pieces, in units of the largest one.
    """
    chunk = 0.75 + math.sqrt(max(total, 1.0) - 0.4375)
    return min(2.0, chunk * (total + chunk / 2 - 1) / (chunk - 1) / total)


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


@dataclass(frozen=True)
class Exposure:
    """Seconds that a step takes longer, as a function of a rank's share of the optimizer state.

    ::

        Exposure(((0.0, 0.0), (2.0, 1.0))).of(0.75)    # max(0, 0.75 * 2 - 1)

    ``lines`` are slopes and hidden seconds: the largest ``share * slope - hidden`` counts.
    """

    lines: tuple[tuple[float, float], ...]

    def __add__(self, other: Exposure) -> Exposure:
        pairs = itertools.product(self.lines, other.lines)
        return Exposure(tuple((own[0] + more[0], own[1] + more[1]) for own, more in pairs))

    def of(self, share: float) -> float:
        """Return the seconds of a share."""
        return max(share * slope - hidden for slope, hidden in self.lines)


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
    is_moved = sum(moved.sizes_of(StateHome.RESIDENT)) < problem.parameters
    return found + moving_exposure(problem, profile, moved, backward_s) if is_moved else found


def device_exposure(
    problem: Problem, profile: RankProfile, moved: MovedState, backward_s: float
) -> Exposure:
    """Return the seconds that the device's updates add to a step, as a function of its share."""
    rate = profile.updated_parameters_per_s
    pairs = zip(moved.sizes, moved.homes, strict=True)
    own = [size * (home is not StateHome.HOST) for size, home in pairs]
    if not problem.early_update:
        return Exposure(((sum(own) / rate, 0.0),))
    slope, hidden = sum(own[:1]) / rate, 0.0
    lines = [(slope, hidden)]
    each = problem.parameters * problem.unit_part
    left = sum(own[1:]) / each if each else 0.0
    # units have equal updates: one that exceeds a room exceeds all smaller ones
    for room_s, count in rooms_of_updates(problem, backward_s):
        units = min(float(count), left)
        slope, hidden, left = slope + units * each / rate, hidden + units * room_s, left - units
        lines.append((slope, hidden))
    return Exposure(tuple(lines))


def moving_exposure(
    problem: Problem, profile: RankProfile, moved: MovedState, backward_s: float
) -> Exposure:
    """Return the seconds of moves that no compute hides, as a function of the rank's share."""
    to_device, to_host = profile.to_device_bytes_per_s, profile.to_host_bytes_per_s
    host_rate = profile.host_updated_parameters_per_s or math.inf  # 0: the host updates nothing
    way_s = {
        StateHome.RESIDENT: 0.0,
        StateHome.STREAMED: problem.moment_bytes * (1 / to_device + 1 / to_host),
        StateHome.HOST: problem.element_bytes * (1 / to_device + 1 / to_host) + 1 / host_rate,
    }
    pairs = [*zip(moved.sizes, moved.homes, strict=True)]
    root_s, *ways_s = (size * way_s[home] for size, home in pairs)
    last_s = max(ways_s, default=0.0)
    is_early = problem.early_update
    # nothing hides the root unit: it comes last, or a root of another size fits no gap
    streamed, on_host = (
        sum(size for size, own in pairs[is_early:] if own is home)
        for home in (StateHome.STREAMED, StateHome.HOST)
    )
    rate = min(to_device, to_host)
    state_s = problem.moment_bytes * streamed / rate
    copies_s = problem.element_bytes * on_host / rate
    behind_s = 2 * problem.element_bytes * min(streamed, on_host) / rate
    homes = [home for size, home in pairs[1:] if size]
    units, away = len(homes), len(homes) - homes.count(StateHome.RESIDENT)
    # the least between two backwards of units: their collectives, and an update's overhead
    pace_s = max(backward_collectives_s(problem), backward_s) + early_update_s(problem)
    pace_s *= problem.units / max(units, 1)

    def hidden_s(units: int) -> float:
        return units * pace_s if is_early and units > 0 else 0.0  # the pace may be infinite

    moving = (
        (state_s + (2 if streamed else 1) * copies_s, hidden_s(away)),
        (state_s + behind_s, hidden_s(homes.count(StateHome.STREAMED))),
        (on_host / host_rate + last_s * (is_early and on_host > 0), hidden_s(units - 2)),
    )
    last = Exposure(((root_s, 0.0), (root_s + last_s, hidden_s(units - away - 1))))
    return last + Exposure(((0.0, 0.0), *moving))


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
    rates = [rank.updated_parameters_per_s for rank in problem.ranks]
    if problem.has_even_state:
        shares = even_shares(problem.groups, len(problem.ranks))
        return max(s * problem.parameters / r for r, s in zip(rates, shares, strict=True))
    return max(problem.parameters / sum(rates[rank] for rank in own) for own in problem.members)
