"""Moves the bytes of simulated collectives between processes, over gloo."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_POLL_S = 2e-4
_TEXT_BYTES = 512


class Aborted(RuntimeError):
    """The communicator was aborted while a collective was under way."""


class Wire:
    """Blocking collectives of CPU tensors that an abort can end.

    Args:
        store: Where the ranks of this wire meet.
        rank: This rank, of ``world_size``.
        world_size: Number of ranks.
        timeout: Of one collective.
        is_aborted: Whether to give up.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: datetime.timedelta,
        is_aborted: Callable[[], bool],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._is_aborted = is_aborted
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def wait_for(self, timeout: datetime.timedelta) -> None:
        """Let collectives wait for ``timeout`` from now on."""
        self._gloo._set_default_timeout(timeout)

    def _finish(self, work: dist.Work) -> None:
        # not work.wait(): an abort in another thread must end it
        while not work.is_completed():
            if self._is_aborted():
                raise Aborted("NCCL communicator was aborted")
            time.sleep(_POLL_S)
        work.wait()

    def start_texts(self, own: str) -> Callable[[], list[str]]:
        """Send a text to every rank; return a function that waits for the texts of all."""
        raw = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b" ")
        with _disable_current_modes():
            sent = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            parts = [torch.empty_like(sent) for _ in range(self.world_size)]
            work = self._gloo.allgather([parts], [sent])

        def finish() -> list[str]:
            with _disable_current_modes():
                self._finish(work)
                return [bytes(part.tolist()).decode().rstrip() for part in parts]

        return finish

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the tensor of one; it is contiguous."""
        if tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        with _disable_current_modes(), torch.no_grad():
            self._finish(self._gloo.broadcast([tensor.view(-1).view(torch.uint8)], options))

    def rows(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return every rank's tensor, flat.

        Args:
            own: This rank's, of any shape.
            counts: Elements of every rank's.
        """
        with _disable_current_modes(), torch.no_grad():
            found = []
            for source, count in enumerate(counts):
                row = own.reshape(-1).clone() if source == self.rank else own.new_empty(count)
                self.broadcast(row, source)
                found.append(row)
            return found
