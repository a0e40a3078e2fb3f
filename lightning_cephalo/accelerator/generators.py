"""States of the global random generators of a process, and of those of its device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from lightning_cephalo.accelerator.base import Accelerator


def read_generators(accelerator: Accelerator) -> tuple[Any, ...]:
    """Return the states of torch's generators, numpy's and Python's; they can be pickled.

    ::

        states = read_generators(accelerator)
        step()
        write_generators(accelerator, states)      # the same numbers come again

    Args:
        accelerator: This rank's device.
    """
    return accelerator.random_states(), np.random.get_state(), random.getstate()


def write_generators(accelerator: Accelerator, states: tuple[Any, ...]) -> None:
    """Set the states that :func:`read_generators` has read.

    Args:
        accelerator: This rank's device, of the same kind.
        states: The states.
    """
    accelerator.restore_random_states(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
