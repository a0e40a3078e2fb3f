"""Seconds that a step takes longer for a rank's share of the optimizer state."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Exposure:
    """Seconds that a step takes longer, as a function of a rank's share of the state.

    ::

        Exposure((((2.0, 1.0),),), always=0.5).of(1.0)    # max(0, 2 - 1) + 0.5

    The seconds are ``sum(max(0, share * slope - hidden))`` over the parts, of each of which the
    worst pair counts, and ``always * share`` in addition.
    """

    parts: tuple[tuple[tuple[float, float], ...], ...] = ()
    always: float = 0.0

    def __add__(self, other: Exposure) -> Exposure:
        return Exposure(self.parts + other.parts, self.always + other.always)

    def of(self, share: float) -> float:
        """Return the seconds of a share."""
        return share * self.always + math.fsum(
            max(0.0, *(share * slope - hidden for slope, hidden in part)) for part in self.parts
        )

    @functools.cached_property
    def lines(self) -> list[tuple[float, float]]:
        """Slopes and hidden seconds, whose largest ``share * slope - hidden`` are the seconds."""
        return [
            (self.always + math.fsum(s for s, _ in pairs), math.fsum(h for _, h in pairs))
            for pairs in itertools.product(*(((0.0, 0.0), *part) for part in self.parts))
        ]
