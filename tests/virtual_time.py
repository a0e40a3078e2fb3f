"""Time that a test moves itself, on one rank or on several: the same on every machine.

``VirtualHost`` stands for the machine that plays an emulated device. Nothing takes time on it but
what the test says does. ``SharedTime`` ties the hosts of several ranks together: a collective is
done when the last of its ranks has issued it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cephalo.accelerator.emulated.clock import VirtualClock
from lightning_cephalo.emulation import EmulatedDevice

__all__ = ["SharedTime", "VirtualHost", "virtual_rank"]


class VirtualHost:
    """A machine whose time passes only when it is told to.

    Args:
        tick_s: What reading the clock takes, so that nothing takes no time at all.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = self.active_s = self.slept_s = 0.0
        self.tick_s = tick_s

    def clock(self) -> VirtualClock:
        """A device's clock that goes by this host's time."""
        return VirtualClock(self.now, lambda: self.active_s, self.sleep)

    def now(self) -> float:
        self.run(self.tick_s)
        return self.now_s

    def run(self, seconds: float) -> None:
        """Work, or wait for a processor."""
        self.now_s += seconds
        self.active_s += seconds

    def block(self, seconds: float) -> None:
        """Wait for something else."""
        self.now_s += seconds

    def block_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.block(seconds)


class SharedTime(TorchDispatchMode):
    """Lets the host of this rank wait for those of the others in collectives; every rank enters it.

    Enter it before an emulated device, which then waits before a collective is issued here. Works
    that are waited for by C++ (in DistributedDataParallel) do not move the host's time.

    Args:
        host: Of this rank.
        folder: The same for all ranks, and empty.
        transfer_s: From when the last rank has issued a collective until it is done.
    """

    supports_higher_order_operators = True

    def __init__(self, host: VirtualHost, folder: str | Path, transfer_s: float = 0.0) -> None:
        super().__init__()
        self._host, self._transfer_s = host, transfer_s
        self._issued = dist.FileStore(str(Path(folder) / "issued"), -1)
        self._counts: Counter[tuple[Any, ...]] = Counter()
        # Torch's works do not keep alive the Python objects that they call; these in turn keep
        # tensors alive, and must be let go of in time.
        self._works: set[_TimedWork] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.namespace != "c10d":
            return function(*args, **kwargs or {})
        places = self._meet(function, args)
        result = function(*args, **kwargs or {})
        work = result[1] if isinstance(result, tuple) else result
        timed = _TimedWork(dist.Work.unbox(work), self, places)
        self._works.add(timed)
        boxed = timed.boxed()
        return (result[0], boxed) if isinstance(result, tuple) else boxed

    def _meet(self, function: Any, args: Any) -> list[str]:
        """Say when this rank issues a collective; return where all of its ranks say so."""
        boxed = next(
            argument
            for argument in args
            if isinstance(argument, torch.ScriptObject)
            and argument._type().name() == "ProcessGroup"
        )
        group = dist.ProcessGroup.unbox(boxed)
        rank, ranks = group.rank(), tuple(range(group.size()))
        if function is torch.ops.c10d.send.default:
            ranks = (rank, args[2])
        elif function is torch.ops.c10d.recv_.default:
            ranks = (args[2], rank)
        meeting = (group.group_name, ranks)
        places = [f"{meeting} {self._counts[meeting]} {other}" for other in ranks]
        self._counts[meeting] += 1
        self._issued.set(places[ranks.index(rank)], repr(self._host.now_s))
        return places

    def finish(self, work: _TimedWork, places: list[str]) -> None:
        """Let the host wait for all ranks of a collective."""
        issued_s = [float(self._issued.get(place)) for place in places]
        self._host.block_until(max(issued_s) + self._transfer_s)
        self.drop(work)

    def drop(self, work: _TimedWork) -> None:
        """Let go of a collective that is done, or that has failed."""
        self._works.discard(work)


class _TimedWork(dist.Work):
    """A collective under way that takes virtual time to be done."""

    def __init__(self, inner: dist.Work, time: SharedTime, places: list[str]) -> None:
        super().__init__()
        self._inner: dist.Work | None = inner
        self._time, self._places = time, places

    def wait(self, timeout: Any = None) -> bool:
        inner, self._inner = self._inner, None  # whose tensors nobody keeps alive afterwards
        try:
            if inner is None:
                done = True
            else:
                done = inner.wait() if timeout is None else inner.wait(timeout)
        except RuntimeError:
            self._time.drop(self)
            raise
        del inner
        self._time.finish(self, self._places)
        return done

    def get_future(self) -> Any:
        return self._inner.get_future()


@contextlib.contextmanager
def virtual_rank(host: VirtualHost, folder: str | Path, name: str = "cpu") -> Iterator[None]:
    """Time everything in this rank by ``host``: on a device that is as fast as the host."""
    with SharedTime(host, folder), EmulatedDevice(name=name, clock=host.clock):
        yield
