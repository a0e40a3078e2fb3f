"""How much of the training state a rank can hold, and how ranks share it.

The limits are a rank's device, its host's memory, and the seconds that its share may add to a step
(``plan/moving.py``). Each way to keep the state has a largest share by each limit. The least of
these counts, and of all ways the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_cephalo.plan.cost import DEVICE_NEEDS, NEEDS, Mode, device_bytes
from lightning_cephalo.plan.moving import MovedState, choices, exposure
from lightning_cephalo.plan.plan import RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile

_ROUNDING = 1e-9


def needed_by(problem: Problem, profile: RankProfile, run: RankPlan) -> np.ndarray:
    """Return the amount of each of ``NEEDS`` for a rank's microbatches."""
    sizes, mode = run.microbatch_sizes, Mode.of(run)
    return np.array([need(problem, profile, mode).of(sizes) for need in NEEDS])


@dataclass(frozen=True)
class _Ways:
    """The ways of a rank to keep its state, those that move the least first.

    All of the state takes ``taken`` (ways, limits), and a share of it exposes
    ``share * slopes - hidden`` seconds (ways, lines).
    """

    moved: tuple[MovedState, ...]
    capacities: np.ndarray
    taken: np.ndarray
    slopes: np.ndarray
    hidden: np.ndarray

    @classmethod
    def of(cls, problem: Problem, profile: RankProfile, backward_s: tuple[float, float]) -> _Ways:
        moved = tuple(choices(problem, profile))
        states = [need(problem, profile).state for need in DEVICE_NEEDS]
        capacities = [*[profile.capacity_bytes] * len(states), profile.host_capacity_bytes]
        taken = [
            [*(state + own.device_bytes(problem) for state in states), own.host_bytes(problem)]
            for own in moved
        ]
        least_s, most_s = backward_s
        lines = [exposure(problem, profile, own, most_s, least_s).lines for own in moved]
        most = max(map(len, lines))
        padded = np.array([[*own, *[(0.0, 0.0)] * (most - len(own))] for own in lines])
        return cls(moved, np.array(capacities), np.array(taken), padded[..., 0], padded[..., 1])

    def most_shares(self, exposed_s: float) -> np.ndarray:
        """Return, by way, the largest share that exposes no more than this."""
        steep = self.slopes > 0
        shares = (exposed_s + self.hidden) / np.where(steep, self.slopes, 1.0)
        return np.maximum(np.where(steep, shares, math.inf).min(axis=1), 0.0)


@dataclass(frozen=True)
class Room:
    """The state that ranks can hold if that adds up to ``exposed_s`` to a step.

    A unit's backward takes between the two ``backward_s``, whatever suits the state.
    """

    problem: Problem
    exposed_s: float = math.inf
    backward_s: tuple[float, float] = (0.0, math.inf)
    most_share: float = 1.0
    _ways: dict[RankProfile, _Ways] = field(default_factory=dict, repr=False)

    def exposing(self, exposed_s: float) -> Room:
        """Return the room if shares may add so many seconds."""
        return replace(self, exposed_s=exposed_s)

    @property
    def whole_bytes(self) -> float:
        """Bytes of the state; any number if there are none, as shares take time all the same."""
        return self.problem.state.most_bytes or 1.0

    def held_bytes(self, profile: RankProfile, needed: np.ndarray) -> np.ndarray:
        """Return the bytes of the state that a rank can hold beside these amounts of ``NEEDS``."""
        ways, whole = self._ways_of(profile), self.whole_bytes
        ones = (1,) * (needed.ndim - 1)
        most = (whole * ways.most_shares(self.exposed_s)).reshape(-1, *ones)
        held = np.broadcast_to(most, (len(most), *needed.shape[:-1]))
        for limit, capacity in enumerate(ways.capacities):
            own = ways.taken[:, limit].reshape(-1, *ones)
            left = np.maximum(capacity - needed[..., limit], 0.0)
            # exact where all of the state counts
            by_limit = left * (whole / np.where(own > 0, own, whole))
            # a limit of which a way needs nothing does not count
            held = np.where(own > 0, np.minimum(held, by_limit), held)
        return np.minimum(held.max(axis=0), self.most_share * whole)

    def least_moved(self, profile: RankProfile, needed: np.ndarray, share: float) -> MovedState:
        """Return the way that takes the least host memory for a share that has room."""
        ways = self._ways_of(profile)
        left = np.maximum(ways.capacities - needed[: len(ways.capacities)], 0.0)
        fits = (share * ways.taken <= left * (1 + _ROUNDING)).all(axis=1)
        fits &= share <= ways.most_shares(self.exposed_s) * (1 + _ROUNDING) + _ROUNDING**2
        rows = np.flatnonzero(fits)
        if not share or not len(rows):
            return ways.moved[0]
        return ways.moved[int(rows[np.argmin(ways.taken[rows, -1])])]

    def _ways_of(self, profile: RankProfile) -> _Ways:
        if profile not in self._ways:
            self._ways[profile] = _Ways.of(self.problem, profile, self.backward_s)
        return self._ways[profile]


def share_state(free_bytes: Sequence[float]) -> list[float]:
    """Return the state fraction of each rank, from the bytes of state that it could hold.

    Every rank gives the same part of its free memory to state: headroom shrinks equally, and a
    small state still spreads over all ranks. (If ranks filled to one level, the one with the most
    room would hold it all, and every gather would be a broadcast.) Ranks without a limit share all
    of the state evenly.
    """
    if math.inf in free_bytes:
        free_bytes = [float(math.isinf(free)) for free in free_bytes]
    total = math.fsum(free_bytes)
    return [free / total if total else 1 / len(free_bytes) for free in free_bytes]


def filled_up(shares: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return shares that sum to 1: ranks get what is missing by the room that they have left."""
    left = [max(limit - share, 0.0) for share, limit in zip(shares, limits, strict=True)]
    missing, total = 1.0 - math.fsum(shares), math.fsum(left)
    part = min(1.0, missing / total) if missing > 0 and total > 0 else 0.0
    return [share + part * room for share, room in zip(shares, left, strict=True)]


def to_the_byte(
    problem: Problem, profile: RankProfile, run: RankPlan, share: float, moved_bytes: float = 0.0
) -> float:
    """Return a share of the state, less what rounding has added to it."""
    sizes, mode = run.microbatch_sizes, Mode.of(run)
    for _ in range(64):
        used = device_bytes(problem, profile, sizes, mode, share, moved_bytes)
        excess = used - profile.capacity_bytes
        if excess <= 0 or not share:
            break
        share = max(0.0, min(math.nextafter(share, 0.0), share - excess / problem.state.most_bytes))
    return share
