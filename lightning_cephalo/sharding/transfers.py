"""Slices on their way between ranks, and the sends and receives of gloo that move them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Wait = Callable[[Any], None]
"""Waits for a handle of torch.distributed."""


def wait_for(work: Any) -> None:
    """Wait for a handle without notifying observers."""
    work.wait()


@dataclass
class Pending:
    """A collective under way; ``nbytes`` counts its memory apart from pooled buffers."""

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    nbytes: int = 0

    def wait(self, wait: Wait = wait_for) -> None:
        """Block until the result may be used; on a device only the current stream waits."""
        for work in self.works:
            wait(work)
        self.works, self.tensors = [], ()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


class Transfer:
    """A send or a receive of gloo.

    Unlike the handle of a collective, its handle does not report completion, and must not be waited
    for twice. An observer therefore waits in a thread of its own, and other waits share that one.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Block until the transfer is done."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None

    def when_done(self, note: Callable[[], None]) -> None:
        """Call ``note`` in another thread as soon as the transfer is done."""

        def watch() -> None:
            self.wait()
            note()

        threading.Thread(target=watch, daemon=True).start()


# Two methods of groups that dist.isend and dist.irecv call. Those look the default group up several
# times before, and a unit's step between two ranks has six messages.
# tests/sharding/test_transfers.py fails when they do anything else.
def send(part: torch.Tensor, to: int, group: dist.ProcessGroup) -> Transfer:
    """Start to send a real tensor to a rank of a group, by its rank there."""
    return Transfer(group.send([part], to, 0))


def receive(part: torch.Tensor, source: int, group: dist.ProcessGroup) -> Transfer:
    """Start to receive a real tensor from a rank of a group, by its rank there."""
    return Transfer(group.recv([part], source, 0))


def sum_of(rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of tensors in their order, in a dtype; the first one changes if it has it."""
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total.add_(row)
    return total


def spread(slices: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Start to send this rank's slice to all other ranks, and to fill the slices of theirs."""
    return exchange([slices[group.rank()]] * len(slices), slices, group)


def exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[Any]:
    """Start to send ``outgoing`` to and receive ``incoming`` from all other ranks, by rank.

    Receives start first: gloo announces each receive to its sender on the connection of the data.
    An announcement would otherwise queue behind an outgoing slice. A link would then carry one
    direction after the other: broadcasts in one group did, and took twice the time on slow links.
    """
    rank, world_size = group.rank(), group.size()
    transfers: list[Any] = []
    for step in range(world_size - 1, 0, -1):
        other = (rank + step) % world_size
        if incoming[other].numel():
            transfers.append(receive(incoming[other], other, group))
    for step in range(1, world_size):
        other = (rank + step) % world_size
        if outgoing[other].numel():
            transfers.append(send(outgoing[other], other, group))
    return transfers
