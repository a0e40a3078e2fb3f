"""The interface of all devices.

:class:`Accelerator` is the whole interface. Each difference between devices that matters to other
folders is a documented attribute or method here. No other folder checks the type of a device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.accelerator.backends import Backend
from lightning_cephalo.accelerator.marks import Marks


@dataclass(frozen=True)
class Device:
    """Facts about one rank's device that planning needs.

    Attributes:
        name: For tables. Ranks with equal names and times get the same plan.
        capacity_bytes: Memory that a plan may fill.
        total_bytes: All memory of the device. For a CPU: this rank's part of the host's memory.
        cap_bytes: The user's limit; ``capacity_bytes`` does not exceed it.
        speed_lasts: Whether measured times are still valid after a restart.
        limited_by: What allows less than the host has, where its memory is the host's.
    """

    name: str
    capacity_bytes: float
    total_bytes: float = math.inf
    cap_bytes: float = math.inf
    speed_lasts: bool = True
    limited_by: str = ""


class MemoryFigures(Protocol):
    """Bytes that a device holds."""

    @property
    def current_bytes(self) -> int:
        """Bytes held now."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at the same time since the last :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new peak from the bytes held now."""

    def untrack(self, *tensors: Tensor) -> None:
        """Exclude tensors from :attr:`current_bytes`."""

    def track(self, *tensors: Tensor) -> None:
        """Include the tensors again."""


class EndOfWork(Protocol):
    """The end of the work submitted to a device so far."""

    def synchronize(self) -> None:
        """Block the host until the device has reached this point."""


class Copies(Protocol):
    """Copies between a device and host memory that run while the device computes."""

    def start(self, target: Tensor, source: Tensor, after: Sequence[Any] | None = None) -> Any:
        """Start a copy that runs after the work already submitted; the host does not wait.

        Both tensors must keep their memory until :meth:`wait` was called for the copy.

        Args:
            after: Copies that it runs after, also of another object; it then waits for no other
                work that was submitted before.

        Returns:
            The argument for :meth:`wait`; None if the copy is already done.
        """

    def wait(self, arrival: Any) -> None:
        """Make all work submitted from now on run after the copy; do nothing for None."""

    def finish(self, arrival: Any) -> None:
        """Block the calling thread until the copy is done; return at once for None."""


class TransferListener(Protocol):
    """Is told of copies between device and host, and of updates by the host."""

    def device_s(self) -> float:
        """Return when work begins that is submitted now, in seconds of the host's clock."""

    def copied(self, nbytes: int, to_host: bool | None, start_s: float, end_s: float) -> None:
        """Learn of a copy."""

    def running(self) -> Any:
        """Return what runs now, for :meth:`updated`."""

    def updated(self, by: Any, start_s: float, end_s: float) -> None:
        """Learn of an update by the host; may be called in another thread."""


class HostWorker(Protocol):
    """A thread of the host that updates parameters."""

    def submit(
        self,
        work: Callable[[], Any],
        elements: int,
        after: Sequence[Any],
        then: Callable[[Sequence[Any]], list[Any]],
    ) -> Future[list[Any]]:
        """Do some work behind all that was submitted before; the caller does not wait."""

    def close(self) -> None:
        """End the thread, when its work is done."""


class ThreadWorker:
    """A thread of this process, begun with its first work."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._pool: ThreadPoolExecutor | None = None

    def submit(
        self,
        work: Callable[[], Any],
        elements: int,
        after: Sequence[Any],
        then: Callable[[Sequence[Any]], list[Any]],
    ) -> Future[list[Any]]:
        def run() -> list[Any]:
            for arrival in after:
                self._copies.finish(arrival)
            work()
            return then(())

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="cephalo-host-update")
        return self._pool.submit(run)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Readback(Protocol):
    """Numbers on their way from the device to the host."""

    def add(self, number: Tensor) -> None:
        """Start to copy a tensor of one element; the host does not wait."""

    def finish(self) -> list[float]:
        """Wait until the copies are done, not for later work, and return the numbers in order."""


class Accelerator(ABC):
    """One rank's device: its clock, memory, queue of work, and copies to the host.

    ::

        accelerator = accelerator_of(torch.device("cuda", 0))
        start_s = accelerator.clock()
        step()
        print(accelerator.name, accelerator.clock() - start_s)

    :func:`~lightning_cephalo.accelerator.accelerator_of` makes one for each rank. Code that needs
    it gets it as an argument. Each kind of device is one subclass, in one file.

    Attributes:
        computes_on_host: Whether the host itself runs the kernels, so that its clock shows when
            they are done. Otherwise the host queues kernels and runs ahead: waiting for the device
            in every step would cost time.
        host_is_apart: Whether host memory and device memory are separate, so that moving a tensor
            to the host frees device memory.
        pins_host_memory: Whether :meth:`allocate_host` pins. torch rounds pinned allocations up to
            the next power of two and does not return freed ones to the system (pytorch#95823).
    """

    computes_on_host: ClassVar[bool]
    host_is_apart: ClassVar[bool]
    pins_host_memory: ClassVar[bool]

    listener: TransferListener | None = None
    """Told of copies and of updates by the host; see ``transfers.py``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {str(self.device)!r})"

    # -- description --------------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The device's name for tables and messages."""

    @abstractmethod
    def describe(self, processes_on_host: int) -> Device:
        """Return the facts that planning needs."""

    @property
    def default_backend(self) -> str:
        """The process-group backend that torch prefers for this device."""
        return dist.get_default_backend_for_device(self.device)

    @property
    def autocast_types(self) -> tuple[str, ...]:
        """Device types whose autocast modes may be set while a model runs."""
        return tuple({"cpu", self.device.type})

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor uses this device's memory."""
        return tensor.device.type == self.device.type

    # -- time ---------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Return the host's monotonic time in seconds. The device may still have work to do."""
        # by its own name: tests of callbacks replace `time.perf_counter` by the times they expect
        return perf_counter()

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device has done all submitted work."""

    def clock(self) -> float:
        """Wait until the device has done all submitted work, then return the host's time."""
        self.synchronize()
        return self.now_s()

    @abstractmethod
    def marks(self, backend: Backend) -> Marks:
        """Return an object that marks points in the device's work."""

    @abstractmethod
    def end_of_work(self) -> EndOfWork | None:
        """Return the end of the work submitted so far; None if the host never runs ahead.

        Waiting for it makes the host sleep, not spin, if the device's runtime supports that.
        """

    # -- memory -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def allocator(self) -> MemoryFigures | None:
        """Figures of the device's own allocator, which counts every allocation.

        None if tensors must be counted from outside.
        """

    @property
    def memory(self) -> MemoryFigures | None:
        """Figures that need no extra tracking: the allocator's, or the emulated device's."""
        return self.allocator

    @abstractmethod
    def empty_cache(self) -> None:
        """Release the allocator's cache, for libraries that allocate without it."""

    def limit_memory(self, limit_bytes: float) -> Callable[[], None]:
        """Make the device reject allocations above a limit, if it can do so exactly.

        An allocator that limits *reserved* memory cannot: it reserves more than tensors use, so it
        would reject a plan that fills the limit.

        Args:
            limit_bytes: Bytes of live tensors; infinite for no limit.

        Returns:
            A function that lifts the limit; a second call does nothing.
        """
        return _nothing

    # -- host memory --------------------------------------------------------------------------

    @abstractmethod
    def allocate_host(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` bytes of host memory, 1-d uint8; pinned if copies need that.

        Raises:
            RuntimeError: Or MemoryError, depending on the platform, if the host lacks the memory.
        """

    @abstractmethod
    def on_host(self) -> AbstractContextManager[None]:
        """Return a context in which CPU tensors do not count as an emulated device's memory."""

    @abstractmethod
    def copies(self) -> Copies:
        """Return an object that copies between device and host memory in its own queue."""

    def host_worker(self) -> HostWorker:
        """Return a thread of the host that updates parameters while the device computes."""
        return ThreadWorker(self.copies())

    def own_queue(self) -> AbstractContextManager[Any]:
        """Return a context for one thread whose work runs in a queue of its own."""
        return nullcontext()

    @abstractmethod
    def readback(self) -> Readback:
        """Return an object that copies single numbers to the host."""

    # -- random numbers -----------------------------------------------------------------------

    @abstractmethod
    def random_states(self) -> tuple[Tensor, ...]:
        """Return the states of the generators that a model may use: the CPU's and the device's."""

    @abstractmethod
    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        """Set the generators to earlier states."""


def _nothing() -> None:
    """Do nothing: there is no limit to lift."""
