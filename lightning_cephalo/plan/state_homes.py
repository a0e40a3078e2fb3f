"""Where the optimizer state of each unit lives: on the device, or in host memory.

A plan says which share of a rank's state stays on the device, and which share the host updates.
This file makes whole units of these shares, so that a unit's state moves in one piece.

The update of what the backward finishes last has no compute to hide behind: the root unit's, and
that of the first units. So these stay on the device first. The others alternate, so that links and
the host's processors are busy at the same time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

_ROUNDING = 1e-9


class StateHome(str, enum.Enum):
    """Where the optimizer state of a unit lives, and what updates it."""

    RESIDENT = "resident"  # on the device, which updates it
    STREAMED = "streamed"  # on the host; copied to the device for its update, and back
    HOST = "host"  # on the host, which updates it; gradients leave and parameters come back


def state_homes(
    sizes: Sequence[int], resident: float, host_updated: float = 0.0
) -> tuple[StateHome, ...]:
    """Return where the optimizer state of each unit lives.

    No more of it is on the device than planned; what does not come out even is in host memory.

    >>> [home.value for home in state_homes([4, 3, 3, 3, 3], resident=0.5, host_updated=0.25)]
    ['resident', 'resident', 'streamed', 'host', 'streamed']

    Args:
        sizes: By unit, elements of the parameters that this rank trains; the root unit first, the
            others in the order of the forward.
        resident: Share of their state that stays on the device, 0 to 1.
        host_updated: Share that the host updates; the rest is streamed.
    """
    total = sum(sizes)
    room = math.floor(total * min(resident + _ROUNDING, 1.0))
    homes = [StateHome.RESIDENT] * len(sizes)
    away: list[int] = []
    for unit, size in enumerate(sizes):
        if size <= room:
            room -= size
        else:
            away.append(unit)
    left = 1.0 - resident
    part = min(1.0, host_updated / left) if left > _ROUNDING else 0.0
    seen = on_host = 0.0
    for unit in reversed(away):  # in the order of the backward
        seen += sizes[unit]
        # on the host if that brings the shares closer to the planned ones
        is_host = seen * part - on_host > sizes[unit] / 2
        homes[unit] = StateHome.HOST if is_host else StateHome.STREAMED
        on_host += sizes[unit] * is_host
    return tuple(homes)
