"""Where the optimizer state of each unit lives: on the device, or in host memory.

Shares of a plan become whole units, so that a unit's state moves in one piece. The root unit and
the first units stay on the device before others: nothing hides their update. The others alternate,
so that links and the host's processors are busy at the same time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

# Units whose state is on the device for their update: one arrives, one is updated.
STAGED_UNITS = 2

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
        sizes: By unit, elements of the trained parameters on all ranks together, the root unit
            first. A rank's rows would make other homes where they are cut differently.
        resident: Share of their state that stays on the device, 0 to 1.
        host_updated: Share that the host updates; the rest is streamed.
    """
    total = sum(sizes)
    room = math.floor(total * min(resident * (1.0 + _ROUNDING), 1.0))
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


def host_bytes(elements: float, home: StateHome, state: float, parameter: float = 4.0) -> float:
    """Return the bytes of host memory that a unit's optimizer state takes.

    >>> [host_bytes(20, home, state=8.0) for home in StateHome]
    [0.0, 160.0, 320.0]

    Args:
        elements: Trained parameters of the unit that a rank holds.
        home: Where their state lives.
        state: Bytes of state per element: 8 for Adam in fp32.
        parameter: Bytes of a parameter's element, and of its gradient's.
    """
    own = state + 2 * parameter if home is StateHome.HOST else state
    return 0.0 if home is StateHome.RESIDENT else own * elements
