"""How much of the state a rank can hold if its share takes time.

The limits are a rank's device, its host's memory, and the seconds that all this may add to a step
(:mod:`~lightning_cephalo.plan.moving`). For each way to keep the state, each limit is a largest
share of the state; the least of them counts, and of all ways the one with the largest share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_cephalo.plan.moving import MovedState, choices, exposure
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.unbeaten import unbeaten

_LEAST_BYTES = 1e-9
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Ways:
    """The ways of a rank to keep its state, those that move the least first."""

    moved: tuple[MovedState, ...]
    needed: np.ndarray
    slopes: np.ndarray
    hidden: np.ndarray

    @classmethod
    def of(cls, problem: Problem, profile: RankProfile, backward_s: tuple[float, float]) -> _Ways:
        """Return the ways of a rank."""
        moved = tuple(choices(problem, profile))
        needed = [
            [*(size + own.device_bytes(problem) for size in problem.state.totals_bytes),
             own.host_bytes(problem)]
            for own in moved
        ]  # fmt: skip
        least_s, most_s = backward_s
        lines = [exposure(problem, profile, own, most_s, least_s).lines for own in moved]
        most = max(map(len, lines))
        padded = np.array([[*own, *[(0.0, 0.0)] * (most - len(own))] for own in lines])
        return cls(moved, np.array(needed), padded[..., 0], padded[..., 1])

    def most_shares(self, exposed_s: float) -> np.ndarray:
        """Return, by way, the largest share that exposes no more than this, 1 at most."""
        steep = self.slopes > 0
        shares = (exposed_s + self.hidden) / np.where(steep, self.slopes, 1.0)
        return np.clip(np.where(steep, shares, 1.0).min(axis=1), 0.0, 1.0)


@dataclass(frozen=True)
class Room:
    """The shares of the state that ranks can hold under some limits."""

    problem: Problem
    exposed_s: float
    backward_s: tuple[float, float]
    most_share: float = 1.0
    _ways: dict[RankProfile, _Ways] = field(default_factory=dict, repr=False)

    def exposing(self, exposed_s: float) -> Room:
        """Return the room if shares may add so many seconds."""
        return replace(self, exposed_s=exposed_s)

    @cached_property
    def _limits(self) -> dict[RankProfile, tuple[np.ndarray, np.ndarray]]:
        return {}

    @cached_property
    def _capacities(self) -> dict[RankProfile, float]:
        return {}

    def most(self, profile: RankProfile, on_device: Sequence[Any], on_host: Any) -> Any:
        """Return the largest share of the state that a rank can hold."""
        needed, most = self._limits_of(profile, is_repeated=np.size(on_host) > 1)
        left = [profile.capacity_bytes - np.asarray(amount) for amount in on_device]
        left.append(profile.host_capacity_bytes - np.asarray(on_host))
        ones = [1] * left[0].ndim
        shares = np.broadcast_to(most.reshape(-1, *ones), (len(most), *left[0].shape))
        for own, room in zip(needed.T, left, strict=True):
            own = own.reshape(-1, *ones)
            # a limit of which a way needs nothing does not count
            limited = (own > 0) & np.isfinite(room)
            by_room = np.where(np.isfinite(room), room, 0.0) / np.where(own > 0, own, 1.0)
            shares = np.where(limited, np.minimum(shares, by_room), shares)
        return np.clip(shares.max(axis=0), 0.0, self.most_share)

    def least_moved(
        self, profile: RankProfile, on_device: Sequence[float], on_host: float, share: float
    ) -> MovedState:
        """Return the way that takes the least host memory for a share that has room."""
        ways = self._ways_of(profile)
        left = [*(profile.capacity_bytes - amount for amount in on_device)]
        left.append(profile.host_capacity_bytes - on_host)
        room = np.array(left) * (1 + _ROUNDING)
        fits = (share * ways.needed <= np.maximum(room, 0.0)).all(axis=1)
        fits &= share <= ways.most_shares(self.exposed_s) * (1 + _ROUNDING) + _ROUNDING**2
        rows = np.flatnonzero(fits)
        if not share or not len(rows):
            return ways.moved[0]
        return ways.moved[int(rows[np.argmin(ways.needed[rows, -1])])]

    def _ways_of(self, profile: RankProfile) -> _Ways:
        if profile not in self._ways:
            self._ways[profile] = _Ways.of(self.problem, profile, self.backward_s)
        return self._ways[profile]

    def _limits_of(self, profile: RankProfile, is_repeated: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes of each limit for all of the state (ways, limits), and shares by time."""
        if profile in self._limits:
            return self._limits[profile]
        ways = self._ways_of(profile)
        needed, most = ways.needed, ways.most_shares(self.exposed_s)
        if is_repeated:  # without ways that another one beats
            costs = np.column_stack([np.maximum(needed, 0.0), 1 - most])
            keep = unbeaten(np.zeros(len(most), dtype=int), costs)
            self._limits[profile] = needed[keep], most[keep]
            return self._limits[profile]
        return needed, most

    def used(self, profile: RankProfile, on_device: Sequence[Any], on_host: Any) -> Any:
        """Return the part of :meth:`capacity` that no state can have."""
        share = self.most(profile, on_device, on_host)
        return np.maximum(self.capacity(profile) - self._whole_bytes * share, 0.0)

    def capacity(self, profile: RankProfile) -> float:
        """Return the bytes of state that a rank without samples could hold."""
        if profile not in self._capacities:
            fixed = [self.problem.fixed_bytes] * len(self.problem.state.totals_bytes)
            share = float(self.most(profile, fixed, 0.0))
            self._capacities[profile] = max(self._whole_bytes * share, _LEAST_BYTES)
        return self._capacities[profile]

    def shared(self, ranks: Sequence[RankProfile]) -> float:
        """Return what is left of all capacities beside the state."""
        return math.fsum(map(self.capacity, ranks)) - self._whole_bytes

    @property
    def _whole_bytes(self) -> float:
        """Bytes of the state; any number if there are none, as shares take time all the same."""
        return self.problem.state.most_bytes or 1.0
