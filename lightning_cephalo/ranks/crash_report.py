"""Publishes a failing rank's error so that ranks that lose the connection can report it.

Code outside of a step (a callback, the dataset, a hook) may fail on one rank alone, while the
other ranks wait in a collective. When the failing process ends, the process group only reports a
closed connection. So the failing rank first stores its message in the processes of the first and
the last rank, where the other ranks read it.

Alternatives considered: the default process group's own store lives on rank 0 and dies with it;
files do not reach other hosts.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from lightning_cephalo.accelerator.backends import SIGNS_OF_LOSS
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks.control import ControlGroup

_KEY = "cephalo/crash_report"
_PATIENCE = timedelta(seconds=5)


@dataclass
class CrashReport:
    """Stores a failing rank's message on two small servers, on the first and on the last rank.

    Attributes:
        control: Knows the failure that all ranks have raised together.
        addresses: Rank, host and port of the servers.
    """

    control: ControlGroup
    addresses: tuple[tuple[int, str, int], ...]
    _own: dist.TCPStore | None = field(default=None, repr=False)

    @classmethod
    def create(cls, control: ControlGroup) -> CrashReport:
        """Start the servers; collective."""
        if control.world_size == 1:
            return cls(control, ())
        own = None
        if control.rank in (0, control.world_size - 1):
            own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        here = socket.gethostname()
        rows = control.gather((control.rank, here, own.port if own is not None else None))
        addresses = tuple(
            (rank, "localhost" if host == here else host, port)
            for rank, host, port in rows
            if port is not None
        )
        return cls(control, addresses, own)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    def is_common(self, exception: BaseException) -> bool:
        """Whether all ranks raise at this point, so that none has a collective under way."""
        return isinstance(exception, RemoteRankError) or exception is self.control.raised

    def on_exception(self, exception: BaseException) -> None:
        """Publish this rank's failure; add the other rank's message to a lost connection's error.

        Does nothing with a failure that all ranks raise.
        """
        if self.is_common(exception):
            return
        if isinstance(exception, RuntimeError) and any(s in str(exception) for s in SIGNS_OF_LOSS):
            self._explain(exception)
            return
        message = f"Rank {self.rank} failed: {type(exception).__name__}: {exception}"
        for rank, host, port in self.addresses:
            if rank != self.rank:
                try:
                    _connect(host, port).set(_KEY, message)
                except Exception:  # that rank has ended too: no server is left there
                    continue

    def _explain(self, exception: BaseException) -> None:
        message = (
            "Another rank has gone: its process ended or was killed (perhaps it was out of memory)."
            " Its own output says more."
        )
        # this rank's own server first: it is certainly alive
        for rank, host, port in sorted(self.addresses, key=lambda a: a[0] != self.rank):
            try:
                own = self._own if rank == self.rank else None
                store = own if own is not None else _connect(host, port)
                if store.check([_KEY]):
                    message = store.get(_KEY).decode(errors="replace")
                    break
            except Exception:  # that rank is the one that has ended
                continue
        exception.args = (f"{message}\nThis rank then lost its connection: {exception}",)


def _connect(host: str, port: int) -> dist.TCPStore:
    # a store would retry again and again to reach a process that has ended
    socket.create_connection((host, port), _PATIENCE.total_seconds()).close()
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
