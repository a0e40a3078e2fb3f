"""Emulates a device of a given speed and memory on the CPU of this process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

# Private, and the only way to read the mode stack of this thread. (A variable here would be wrong
# in other threads, and a context variable in greenlets.) tests/accelerator/emulated fails when it
# changes.
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_cephalo.accelerator.emulated.clock import VirtualClock
from lightning_cephalo.accelerator.emulated.memory_tracker import MemoryTracker
from lightning_cephalo.accelerator.emulated.operators import FlopCounter, Operator, bytes_in
from lightning_cephalo.common.quantities import format_mib


class EmulatedDevice(MemoryTracker):
    """Runs the operators of a ``with`` block at the pace and in the memory of another device.

    ::

        with EmulatedDevice(flops_per_s=5e9, capacity_bytes=2**30, name="small") as device:
            step()
            device.synchronize()

    Results equal those of the CPU, bit for bit; only time passes more slowly. The host runs ahead
    of the device, as with a GPU. It waits for the device before every collective, in
    :meth:`synchronize`, and at the end of the block. Set ``torch.set_num_threads(1)``, and keep
    ``flops_per_s`` well under the real rate of one core: an emulated device cannot be faster than
    the machine.

    Args:
        flops_per_s: Floating-point operations per second. None: as fast as the CPU is.
        bytes_per_s: Memory bandwidth. If given, an operator costs its FLOPs divided by
            ``flops_per_s``, plus the bytes that it reads and writes divided by ``bytes_per_s``.
        capacity_bytes: Bytes of live tensors that fit. None sets no limit.
        link_bytes_per_s: Rate of copies between device and host, in each direction at the same
            time. None: they are work of the device.
        host_updates_per_s: Parameters per second that the host's threads update for this device.
            None: it takes no time.
        name: For messages and tables.
        clock: Makes the device's clock when the block is entered; by default the clock uses the
            time of this machine.

    Raises:
        ValueError: On construction, when a rate or the capacity is not a positive number.
        torch.OutOfMemoryError: Inside the block, in the operator (or the :meth:`track`) whose
            result does not fit. The result is dropped and the block can continue.

    The package's docstring lists what is faithful and what is not.
    """

    def __init__(
        self,
        *,
        flops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        capacity_bytes: int | None = None,
        link_bytes_per_s: float | None = None,
        host_updates_per_s: float | None = None,
        name: str = "emulated",
        clock: Callable[[], VirtualClock] = VirtualClock,
    ) -> None:
        super().__init__()
        for key, value in (
            ("flops_per_s", flops_per_s),
            ("bytes_per_s", bytes_per_s),
            ("capacity_bytes", capacity_bytes),
            ("link_bytes_per_s", link_bytes_per_s),
            ("host_updates_per_s", host_updates_per_s),
        ):
            _check_positive(key, name, value)
        self.name = name
        self.flops_per_s = flops_per_s
        self.bytes_per_s = bytes_per_s
        self.capacity_bytes = capacity_bytes
        self.link_bytes_per_s = link_bytes_per_s
        self.host_updates_per_s = host_updates_per_s
        self._flops = 0
        self._busy_s = 0.0
        self._blocked_s = 0.0
        self._counter = FlopCounter()
        self._make_clock = clock
        self._clock: VirtualClock | None = None

    @property
    def flops(self) -> int:
        """Floating-point operations done so far, over all entries."""
        return self._flops

    @property
    def busy_s(self) -> float:
        """Virtual seconds of work done so far, over all entries; free of noise."""
        return self._busy_s

    def change_capacity(self, capacity_bytes: int | None) -> None:
        """Changes the device's memory, like a per-process limit on a GPU.

        The peak is reset. If more is alive already, the next allocation is rejected.

        Args:
            capacity_bytes: Bytes of live tensors that fit from now on. None sets no limit.

        Raises:
            ValueError: When the capacity is not a positive number.
        """
        _check_positive("capacity_bytes", self.name, capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.reset_peak()

    @property
    def blocked_s(self) -> float:
        """Seconds in which the device was idle while its host was blocked, over all entries.

        This is time spent waiting for other ranks, and communication that no compute hides. Up to
        date after :meth:`synchronize`.
        """
        current_s = 0.0 if self._clock is None else self._clock.blocked_s
        return self._blocked_s + current_s

    @property
    def now_s(self) -> float:
        """Seconds of the host's clock; any thread may read it."""
        return time.perf_counter() if self._clock is None else self._clock.now_s

    @property
    def done_s(self) -> float:
        """The time at which the device is done with its work so far, by :func:`host_now_s`.

        It is in the past if the device is idle, and outside of the ``with`` block.
        """
        return -math.inf if self._clock is None else self._clock.done_s

    def delay_until(self, moment_s: float) -> None:
        """Lets the device start its next work no earlier, as a stream that waits for an event."""
        if self._clock is not None:
            self._clock.delay_until(moment_s)

    def sleep_until(self, moment_s: float) -> None:
        """Blocks the host until a moment of :attr:`now_s`, whatever the device does."""
        if self._clock is not None:
            self._clock.sleep_until(moment_s)

    def synchronize(self, *, keep_credit: bool = False) -> None:
        """Blocks until the device has done its work, as ``torch.cuda.synchronize`` does.

        Between two calls at least the work's virtual time passes, so a measured time is never too
        short: a delay of the host before the first call does not speed up later work.
        Does nothing outside the ``with`` block.

        Args:
            keep_credit: Let the host catch up on its delay so far afterwards (up to 0.25 s). For
                marks inside a run whose total time matters more than its parts.
        """
        if self._clock is not None and self._process == os.getpid():
            self._clock.wait()
            if not keep_credit:
                self._clock.forfeit()

    def __enter__(self) -> EmulatedDevice:
        super().__enter__()
        if self._depth == 1:
            torch.empty(0)  # the first operator under a mode imports torch._dynamo: about a second
            self._clock = self._make_clock()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._depth == 1:
            if not exception or exception[0] is None:
                self.synchronize()
            self._blocked_s = self.blocked_s
            if self._clock is not None:
                self._clock.close()
            self._clock = None
        super().__exit__(*exception)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name={self.name!r}, flops_per_s={self.flops_per_s}, "
            f"bytes_per_s={self.bytes_per_s}, capacity_bytes={self.capacity_bytes})"
        )

    def _before(self, operator: Operator) -> None:
        if self._clock is not None and operator.collective:
            self._clock.wait()

    def _after(
        self, function: Any, operator: Operator, args: Any, kwargs: Any, result: Any
    ) -> None:
        cost_s = 0.0
        if operator.flops is not None and not getattr(args[0], "is_meta", False):
            flops = self._counter.count(function, operator.flops, args, kwargs, result)
            self._flops += flops
            if self.flops_per_s is not None:
                cost_s = flops / self.flops_per_s
        if self.bytes_per_s is not None and operator.moves_data and not operator.collective:
            moved_bytes = bytes_in(args) + bytes_in(tuple(kwargs.values())) + bytes_in(result)
            cost_s += moved_bytes / self.bytes_per_s
        self._busy_s += cost_s
        if self._clock is None:
            return
        self._clock.advance(cost_s)
        if operator.collective or operator.waits:
            self._clock.suspect()

    def _refuse(self, wanted_bytes: int) -> torch.OutOfMemoryError | None:
        if self.capacity_bytes is None or self._current_bytes <= self.capacity_bytes:
            return None
        live_bytes = self._current_bytes - wanted_bytes
        return torch.OutOfMemoryError(
            f"Emulated device {self.name!r} out of memory. Tried to allocate "
            f"{_readable(wanted_bytes)}: {_readable(live_bytes)} are live already and the capacity "
            f"is {_readable(self.capacity_bytes)}."
        )


def active_device() -> EmulatedDevice | None:
    """Returns the innermost emulated device that this thread's operators run on, or None.

    Returns None in another thread, and in a process forked inside the block (a DataLoader worker).
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, EmulatedDevice) and mode._process == os.getpid():
            return mode
    return None


def host_now_s() -> float:
    """Returns the seconds of this thread's clock.

    The clock is that of the active emulated device's host, else ``time.perf_counter``.
    """
    device = active_device()
    return time.perf_counter() if device is None else device.now_s


def _check_positive(key: str, name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(
            f"{key} of device {name!r}: expected a positive number or None, got {value!r}."
        )


def _readable(count_bytes: int) -> str:
    return f"{count_bytes} bytes ({format_mib(count_bytes, digits=2)})"
