"""Where the optimizer state of each unit lives: on the device, or in host memory.

Shares of a plan become whole units, so that a unit's state moves in one piece. The root unit and
the first units stay on the device before others: nothing hides their update. The others alternate,
so that links and the host's processors are busy at the same time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class HomeBytes:
    """Bytes of a rank's optimizer state."""

    device: float
    host: float


def home_bytes(
    sizes: Sequence[float],
    homes: Sequence[StateHome],
    state: float,
    parameter: float = 4.0,
) -> HomeBytes:
    """Return the bytes that a rank's optimizer state takes on the device and on the host.

    >>> home_bytes([10, 20, 20], [StateHome.RESIDENT, StateHome.HOST, StateHome.STREAMED], 8.0)
    HomeBytes(device=400.0, host=480.0)

    Args:
        sizes: By unit, elements of the trained parameters that the rank holds.
        homes: Where the state of each unit lives.
        state: Bytes of state per element: 8 for Adam in fp32.
        parameter: Bytes of a parameter's element, and of its gradient's.
    """
    held = dict.fromkeys(StateHome, 0.0)
    largest = 0.0
    for size, home in zip(sizes, homes, strict=True):
        held[home] += size
        largest = max(largest, size if home is StateHome.STREAMED else 0.0)
    away = held[StateHome.STREAMED] + held[StateHome.HOST]
    return HomeBytes(
        device=state * (held[StateHome.RESIDENT] + STAGED_UNITS * largest),
        host=state * away + 2 * parameter * held[StateHome.HOST],
    )
