"""Links and host threads of an emulated device: lanes with clocks of their own.

A lane does one job after the other, each for its amount divided by the lane's rate. The bytes are
copied, or updated, at once by this process: results are right whatever the lane's time. The job is
done in virtual time, for which the device or the host waits where they need it. So lanes cost this
machine nothing, and overlap with the device's work as those of a real host do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightning_cephalo.accelerator.emulated.device import EmulatedDevice
from lightning_cephalo.common.lanes import Lane as Jobs


class Lane:
    """Does one job at a time, so many units per second.

    A job that waits for other work lets later ones go before it, as on a link that is idle.

    Args:
        rate: Bytes, or elements, per second; None: jobs take no time.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = math.inf if rate is None else rate
        self._jobs = Jobs()

    @property
    def busy_s(self) -> float:
        """Seconds of all jobs."""
        return self._jobs.busy_s

    def issue(self, amount: float, start_s: float, now_s: float = -math.inf) -> float:
        """Return when a job is done that may begin at ``start_s``."""
        self._jobs.forget(now_s)
        return self._jobs.place(start_s, amount / self._rate)


def _start_s(device: EmulatedDevice, after: Sequence[float | None] | None) -> float:
    own = [device.done_s] if after is None else [each for each in after if each is not None]
    return max([device.now_s, *own])


class LaneCopies:
    """Copies of an emulated device over its link, which has a lane for each direction."""

    def __init__(
        self,
        device: EmulatedDevice,
        to_device: Lane,
        to_host: Lane,
        is_on_device: Callable[[Tensor], bool],
    ) -> None:
        self._device, self._is_on_device = device, is_on_device
        self._to_device, self._to_host = to_device, to_host

    def start(
        self, target: Tensor, source: Tensor, after: Sequence[float | None] | None = None
    ) -> float:
        start_s = _start_s(self._device, after)
        with self._device.paused():  # the link works, not the device
            target.copy_(source)
        lane = self._to_device if self._is_on_device(target) else self._to_host
        nbytes = source.numel() * source.element_size()
        return lane.issue(nbytes, start_s, self._device.now_s)

    def wait(self, arrival: float | None) -> None:
        if arrival is not None:
            self._device.delay_until(arrival)

    def finish(self, arrival: float | None) -> None:
        if arrival is not None:
            self._device.sleep_until(arrival)


class LaneWorker:
    """The host's threads of an emulated device."""

    def __init__(self, device: EmulatedDevice, lane: Lane) -> None:
        self._device, self._lane = device, lane

    def submit(
        self,
        work: Callable[[], Any],
        elements: int,
        after: Sequence[Any],
        then: Callable[[Sequence[Any]], list[Any]],
    ) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        try:
            start_s = _start_s(self._device, after)
            with self._device.paused():
                work()
            future.set_result(then([self._lane.issue(elements, start_s, self._device.now_s)]))
        except Exception as failure:
            future.set_exception(failure)
        return future

    def close(self) -> None:
        """Do nothing: there is no thread."""
