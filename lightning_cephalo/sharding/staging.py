"""Moves slices of device tensors between ranks through host memory, for backends like gloo.

gloo sends and receives host memory only. Ranks whose devices have no other backend in common, such
as CUDA, ROCm and CPU ranks in one job, can thus train together: all of them exchange the same
messages of :func:`~lightning_cephalo.sharding.transfers.exchange`.

A thread per direction waits until the device has filled the host memory, then exchanges. The host
goes on in the meantime, and waits only for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.base import EndOfWork
from lightning_cephalo.sharding.line import Line
from lightning_cephalo.sharding.routes import Route
from lightning_cephalo.sharding.transfers import Pending, spread


class HostStage:
    """Runs the collectives of one rank's device tensors in host memory, in two threads.

    It keeps pinned memory for the next collective, because torch would not return it to the system.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies = accelerator.copies()
        self._idle: list[tuple[Tensor, EndOfWork | None]] = []
        self._gathers, self._reduces = Line(), Line()

    def gather(self, full: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Pending:
        """Fill ``full`` with every rank's slice; see ``gather_slices``."""
        rank = group.rank()
        memory, host = self._take(full.numel(), full.dtype)
        slices = host.split(list(sizes))
        copied = self._copies.start(slices[rank], full.split(list(sizes))[rank])

        def move() -> None:
            copied.synchronize()
            for transfer in spread(slices, group):
                transfer.wait()

        def finish() -> None:
            # `.data` has a version counter of its own: graphs that point into `full` stay valid
            full.data.copy_(host, non_blocking=True)
            self._give(memory)

        return Pending([self._gathers.run(move)], finish, (full,))

    def reduce(
        self,
        full: Tensor,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        deliver: Callable[[Tensor], None],
        route: Route,
    ) -> Pending:
        """Sum ``full`` over the ranks, and give this rank's slice to ``deliver``, of a dtype."""
        rank = group.rank()
        sent, host = self._take(full.numel(), full.dtype)
        received, summands = self._take(route.received_numel(sizes, rank), full.dtype)
        copied = self._copies.start(host, full)
        totals: list[Tensor] = []

        def move() -> None:
            copied.synchronize()
            transfers, total = route.reduce(host.split(list(sizes)), summands, group, dtype)
            for transfer in transfers:
                transfer.wait()
            totals.append(total())

        def finish() -> None:
            if sizes[rank]:
                deliver(totals[0].to(full.device, non_blocking=True))
            self._give(sent)
            self._give(received)

        return Pending([self._reduces.run(move)], finish, (full,))

    def release(self) -> None:
        """Free the memory that no collective uses."""
        for _, last_copy in self._idle:
            if last_copy is not None:
                last_copy.synchronize()
        self._idle.clear()

    def _take(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a piece of host memory, and a tensor at its beginning."""
        nbytes = numel * dtype.itemsize
        fitting = [piece for piece in self._idle if piece[0].numel() >= nbytes]
        if fitting:
            # by identity: tensors compare by their elements
            piece = min(fitting, key=lambda piece: piece[0].numel())
            self._idle = [other for other in self._idle if other is not piece]
            memory, last_copy = piece
            if last_copy is not None:
                last_copy.synchronize()
        else:
            with torch.inference_mode(False):  # another thread writes to it, outside of that mode
                memory = self._accelerator.allocate_host(nbytes)
        return memory, memory[:nbytes].view(dtype)

    def _give(self, memory: Tensor) -> None:
        """Take a piece back; the copies from it that were submitted may still run."""
        self._idle.append((memory, self._accelerator.end_of_work()))
