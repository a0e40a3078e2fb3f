"""What a failing rank says before it goes, for the ranks that lose their connection to it.

Code that runs outside of a step (a callback, the dataset, a hook) may fail on one rank alone, while
the others wait in some collective. When its process ends, the process group tells them that a
connection was closed, and nothing more. So the failing rank leaves its message at two other places
first, from where the others read it.

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
from lightning_cephalo.ranks.control import Agreement

_KEY = "cephalo/last_words"
_PATIENCE = timedelta(seconds=2)


@dataclass
class LastWords:
    """Two small servers, on the first and on the last rank, which take a failing rank's message.

    Attributes:
        agreement: Knows what was told to all ranks already.
        addresses: Rank, host and port of the servers.
    """

    agreement: Agreement
    addresses: tuple[tuple[int, str, int], ...]
    _own: dist.TCPStore | None = field(default=None, repr=False)

    @classmethod
    def create(cls, agreement: Agreement) -> LastWords:
        """Start the servers; collective."""
        if agreement.world_size == 1:
            return cls(agreement, ())
        own = None
        if agreement.rank in (0, agreement.world_size - 1):
            own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        said = agreement.exchange_objects(
            (agreement.rank, socket.gethostname(), own.port if own is not None else None)
        )
        here = socket.gethostname()
        addresses = tuple(
            (rank, "localhost" if host == here else host, port)
            for rank, host, port in said
            if port is not None
        )
        return cls(agreement, addresses, own)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.agreement.rank

    def is_known(self, exception: BaseException) -> bool:
        """Whether all ranks raise at this point, so that none has a collective under way."""
        return isinstance(exception, RemoteRankError) or exception is self.agreement.told

    def on_exception(self, exception: BaseException) -> None:
        """Leave a message; if the connection was lost, add another rank's to the exception."""
        if self.is_known(exception):
            return
        if isinstance(exception, RuntimeError) and any(
            sign in str(exception) for sign in SIGNS_OF_LOSS
        ):
            self._explain(exception)
            return
        message = f"Rank {self.rank} failed: {type(exception).__name__}: {exception}"
        for rank, host, port in self.addresses:
            if rank != self.rank:
                try:
                    _connect(host, port).set(_KEY, message)
                except Exception:  # that rank has gone too: there is no one to tell
                    continue

    def _explain(self, exception: BaseException) -> None:
        message = (
            "Another rank has gone: its process ended or was killed (perhaps it was out of memory)."
            " Its own output says more."
        )
        # its own first, which cannot have gone
        for rank, host, port in sorted(self.addresses, key=lambda a: a[0] != self.rank):
            try:
                own = rank == self.rank and self._own is not None
                store = self._own if own else _connect(host, port)
                assert store is not None
                if store.check([_KEY]):
                    message = store.get(_KEY).decode(errors="replace")
                    break
            except Exception:  # that rank is the one that has gone
                continue
        exception.args = (f"{message}\nThis rank then lost its connection: {exception}",)


def _connect(host: str, port: int) -> dist.TCPStore:
    # a store would try again and again to reach a process that has gone
    socket.create_connection((host, port), _PATIENCE.total_seconds()).close()
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
