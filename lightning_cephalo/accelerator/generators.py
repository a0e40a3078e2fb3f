"""States of the global random generators of a process, and of those of its device.

[Note: the bytes of generators]
numpy and Python copy the state of a Mersenne Twister number by number, in 65 us together. Few steps
draw from them, so :class:`GeneratorsOfSteps` first compares the memory that holds the states, in 2
us. The memory is compared as a whole, so its layout does not matter; it is never written to. In
CPython ``id`` is the address of an object, and ``__basicsize__`` the bytes of its own fields. numpy
documents ``BitGenerator.ctypes``. Where a draw goes unseen, tests/accelerator/test_generators.py
fails.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import numpy as np

from lightning_cephalo.accelerator.base import Accelerator

_HEAD_BYTES = object.__basicsize__  # the count of references changes by itself
# 624 numbers of 32 bits and a position
_TWISTER_BYTES = 625 * 4


def read_generators(accelerator: Accelerator) -> tuple[Any, ...]:
    """Return the states of torch's generators, numpy's and Python's; they can be pickled.

    ::

        states = read_generators(accelerator)
        step()
        write_generators(accelerator, states)      # the same numbers come again
    """
    return accelerator.random_states(), np.random.get_state(legacy=False), random.getstate()


def write_generators(accelerator: Accelerator, states: tuple[Any, ...]) -> None:
    """Set the states that :func:`read_generators` has read."""
    accelerator.restore_random_states(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class GeneratorsOfSteps:
    """Reads states before every step; those of numpy and Python only where they have changed."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._python: tuple[Any, Any] = (None, None)
        self._numpy: tuple[Any, Any] = (None, None)

    def read(self) -> tuple[Any, ...]:
        """Return what :func:`read_generators` returns."""
        held = _python_bytes()
        if held is None or held != self._python[0]:
            self._python = held, random.getstate()
        held = _numpy_bytes()
        if held is None or held != self._numpy[0]:
            self._numpy = held, np.random.get_state(legacy=False)
        return self._accelerator.random_states(), self._numpy[1], self._python[1]


def _python_bytes() -> Any:
    """Return what differs where Python's global generator differs; None: that is not known."""
    generator: Any = getattr(random.random, "__self__", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    # the second number of a pair of normal ones lies in the instance's dict
    return _fields_of(generator), vars(generator)["gauss_next"]


def _numpy_bytes() -> Any:
    """Return what differs where numpy's global generator differs; None: that is not known."""
    generator: Any = getattr(np.random.random_sample, "__self__", None)
    if type(generator) is not np.random.RandomState or sys.implementation.name != "cpython":
        return None
    current = getattr(np.random, "get_bit_generator", None)  # of numpy 1.24
    bits = None if current is None else current()
    if type(bits) is not np.random.MT19937:  # others keep their state behind a pointer
        return None
    # a second number of a pair of normal ones waits in the fields
    return ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES), _fields_of(generator)


def _fields_of(value: Any) -> bytes:
    return ctypes.string_at(id(value) + _HEAD_BYTES, type(value).__basicsize__ - _HEAD_BYTES)
