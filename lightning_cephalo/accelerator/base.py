"""What the package may ask of a device, whatever the device is.

:class:`Accelerator` is the whole interface. A difference between devices that other rooms must know
has a name here and says what it means; no other room asks for the type of a device.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.accelerator.backends import Backend
from lightning_cephalo.accelerator.marks import Marks


@dataclass(frozen=True)
class Device:
    """What planning has to know of one rank's device.

    Attributes:
        name: For tables; ranks with equal names and times are planned alike.
        capacity_bytes: What a plan may fill.
        total_bytes: All of its memory; of a CPU the part of the host's that is this rank's.
        cap_bytes: What the user allows; ``capacity_bytes`` is no more.
        speed_lasts: Whether times that are measured on it hold for another start.
    """

    name: str
    capacity_bytes: float
    total_bytes: float = math.inf
    cap_bytes: float = math.inf
    speed_lasts: bool = True


class MemoryFigures(Protocol):
    """Bytes that a device holds."""

    @property
    def current_bytes(self) -> int:
        """Held now."""

    @property
    def peak_bytes(self) -> int:
        """Most that was held since the last :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak with what is held now."""

    def untrack(self, *tensors: Tensor) -> None:
        """Leave tensors out of :attr:`current_bytes`."""

    def track(self, *tensors: Tensor) -> None:
        """Count them again."""


class EndOfWork(Protocol):
    """The end of the work that a device was given."""

    def synchronize(self) -> None:
        """Block the host until the device has come so far."""


class Copies(Protocol):
    """Copies between a device and host memory, which run while the device computes."""

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy when the device has done the work that it has; the host does not wait.

        Both tensors must keep their memory until the copy has been waited for.

        Returns:
            The arrival to :meth:`wait` for; None if the copy is done already.
        """

    def wait(self, arrival: Any) -> None:
        """Have the work that the device is given from now on run after the copy; None: nothing."""


class Accelerator(ABC):
    """One rank's device: its clock, its memory, its queue of work, its way to the host.

    ::

        accelerator = accelerator_of(torch.device("cuda", 0))
        start_s = accelerator.clock()
        step()
        print(accelerator.name, accelerator.clock() - start_s)

    :func:`~lightning_cephalo.accelerator.accelerator_of` makes one for each rank, which is handed
    down to whatever needs it. A device of another kind is another subclass, in one file.

    Args:
        device: The device of torch that it stands for.

    Attributes:
        device: The same.
        computes_on_host: Whether the host itself runs the kernels, so that its clock tells when
            they are done. Else the host queues kernels and runs ahead: to wait for the device in
            every step would cost time.
        host_is_apart: Whether host memory is other memory than the device's, so that moving a
            tensor there frees something.
        pins_host_memory: Whether :meth:`allocate_host` pins. torch rounds what it pins up to the
            next power of two and keeps what is given back (pytorch#95823).
    """

    computes_on_host: ClassVar[bool]
    host_is_apart: ClassVar[bool]
    pins_host_memory: ClassVar[bool]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {str(self.device)!r})"

    # -- what it is ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The device's name for tables and messages."""

    @abstractmethod
    def describe(self, processes_on_host: int) -> Device:
        """Read what planning has to know.

        Args:
            processes_on_host: Ranks that share this host's memory.
        """

    @property
    def default_backend(self) -> str:
        """The process-group backend that torch prefers for it."""
        return dist.get_default_backend_for_device(self.device)

    @property
    def autocast_types(self) -> tuple[str, ...]:
        """Device types whose autocast modes may be set while a model runs."""
        return tuple({"cpu", self.device.type})

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor takes this device's memory."""
        return tensor.device.type == self.device.type

    # -- time ---------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds of the host's clock, monotonic. The device may still have work to do."""
        return time.perf_counter()

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device has done all work that it was given."""

    def clock(self) -> float:
        """Seconds of the host's clock, when the device has done all work that it was given."""
        self.synchronize()
        return self.now_s()

    @abstractmethod
    def marks(self, backend: Backend) -> Marks:
        """Return what marks points in the device's work.

        Args:
            backend: What the collectives run on whose ends are to be marked.
        """

    @abstractmethod
    def end_of_work(self) -> EndOfWork | None:
        """The end of the work given so far; None where the host never runs ahead.

        To wait for it, the host sleeps instead of spinning where the device's runtime can.
        """

    # -- memory -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def allocator(self) -> MemoryFigures | None:
        """Figures of the device's own allocator, which knows all that it has given out.

        None where tensors must be counted from outside.
        """

    @property
    def memory(self) -> MemoryFigures | None:
        """Figures that cost nothing to keep, of the allocator or of what plays the device."""
        return self.allocator

    @abstractmethod
    def empty_cache(self) -> None:
        """Give back what the allocator keeps, for libraries that do not ask it for memory."""

    def limit_memory(self, limit_bytes: float) -> Callable[[], None]:
        """Have the device refuse what is above a limit, where it can do so exactly.

        An allocator that limits what it *reserves* cannot: that is more than what tensors take,
        and a plan that fills the limit would be refused.

        Args:
            limit_bytes: Bytes of live tensors; infinite for no limit.

        Returns:
            What lifts the limit; it does nothing the second time.
        """
        return _nothing

    # -- host memory --------------------------------------------------------------------------

    @abstractmethod
    def allocate_host(self, nbytes: int) -> Tensor:
        """Return so many bytes of host memory, 1-d uint8; pinned where copies want that.

        Raises:
            RuntimeError: Or MemoryError, by the platform, if the host does not have it.
        """

    @abstractmethod
    def on_host(self) -> AbstractContextManager[None]:
        """For what is made on the CPU to stay there: no part of an emulated device's memory."""

    @abstractmethod
    def copies(self) -> Copies:
        """Return what copies between the device and host memory, with a queue of its own."""

    # -- random numbers -----------------------------------------------------------------------

    @abstractmethod
    def random_states(self) -> tuple[Tensor, ...]:
        """States of the generators that a model may draw from: the CPU's and the device's."""

    @abstractmethod
    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        """Put the generators back to where they were."""


def _nothing() -> None:
    """There is no limit to lift."""
