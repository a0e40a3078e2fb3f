"""Gathers and reduces slices of unequal sizes, with one method per kind of backend.

- gloo on CPUs: every rank receives from and sends to every other rank. A gather receives straight
  into place. A reduce receives rows and sums them in rank order, so that it is deterministic.
- gloo on other devices, whose tensors it does not send: a gather is one asynchronous broadcast per
  rank, a reduce is an all-to-all.
- Backends that run on the device (NCCL): the single-tensor operations for equal slices, and for
  nearly equal ones where the plan pads them; the list forms otherwise.

On gloo, padding was measured 3 to 13 times slower than sends: docs/design/collectives.md.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.sharding.padding import Padding

Wait = Callable[[Any], None]
"""Waits for a handle of torch.distributed."""


def wait_for(work: Any) -> None:
    """Wait for a handle without notifying observers."""
    work.wait()


@dataclass
class Pending:
    """A collective under way.

    Attributes:
        works: Handles of torch.distributed.
        finish: Local work that remains once the handles are done.
        tensors: What the collective reads and writes on a device. torch itself keeps it only until
            the first wait, which may be that of an observer on another stream.
    """

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    tensors: tuple[torch.Tensor, ...] = ()

    def wait(self, wait: Wait = wait_for) -> None:
        """Block until the result may be used; on a device only the current stream waits.

        Args:
            wait: Waits for one handle.
        """
        for work in self.works:
            wait(work)
        self.works, self.tensors = [], ()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets


def _alias(new: str, old: str) -> Callable[..., Any]:
    """Return a collective by its torch 2.13 name, else by its 2.11 name, which 2.13 deprecates."""
    return getattr(dist, new, None) or getattr(dist, old)


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


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[Any]:
    """Start to send ``outgoing`` to and receive ``incoming`` from all other ranks, by rank.

    Receives start first: gloo announces each receive to its sender on the connection of the data.
    An announcement would otherwise queue behind an outgoing slice. A link would then carry one
    direction after the other: broadcasts in one group did, and took twice the time on slow links.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + step) % world_size for step in range(1, world_size)]
    works = [
        dist.irecv(incoming[other], group=group, group_src=other)
        for other in reversed(others)
        if incoming[other].numel()
    ]
    works += [
        dist.isend(outgoing[other], group=group, group_dst=other)
        for other in others
        if outgoing[other].numel()
    ]
    return [Transfer(work) for work in works]


def gather_slices(
    full: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    padding: Padding | None = None,
) -> Pending:
    """Fill ``full`` with every rank's slice; this rank's own slice is already in place.

    Args:
        full: 1-d tensor of ``sum(sizes)`` elements.
        sizes: Elements of every rank, in group order; zeros allowed.
        group: The process group.
        padding: Whether nearly equal slices are padded, on backends that gain by it; None: not.
    """
    offsets = _offsets(sizes)
    if backend_of(group).runs_on_device:
        rank = dist.get_rank(group)
        own = full[offsets[rank] : offsets[rank + 1]]
        gather = _alias("all_gather_single", "all_gather_into_tensor")
        if len(set(sizes)) == 1:
            return Pending([gather(full, own, group=group, async_op=True)], tensors=(full,))
        slots = None if padding is None else padding.of_gather(full, sizes)
        if slots is not None:
            slots.of(rank)[: sizes[rank]].copy_(own)
            work = gather(slots.whole, slots.of(rank), group=group, async_op=True)
            return Pending([work], lambda: slots.empty_into(full), (full, slots.whole))
        slices = [full[a:b] for a, b in itertools.pairwise(offsets)]
        return Pending([dist.all_gather(slices, own, group=group, async_op=True)], tensors=(full,))
    if full.is_cpu:
        slices = full.split(list(sizes))
        return Pending(_exchange([slices[dist.get_rank(group)]] * len(sizes), slices, group))
    works = [
        dist.broadcast(full[a:b], group=group, group_src=source, async_op=True)
        for source, (a, b) in enumerate(itertools.pairwise(offsets))
        if b > a
    ]
    return Pending(works)


def reduce_slices(
    full: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    output: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    padding: Padding | None = None,
) -> Pending:
    """Sum ``full`` over the ranks and write ``scale`` times this rank's slice to ``output``.

    Args:
        full: 1-d tensor of ``sum(sizes)`` elements; must live until the wait for the result ends.
        sizes: Elements of every rank, in group order; zeros allowed.
        group: The process group.
        output: 1-d tensor of this rank's size.
        scale: Factor of the sum.
        accumulate: Add to ``output`` instead of overwriting it.
        padding: As for :func:`gather_slices`.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    own = sizes[rank]

    def deliver(total: torch.Tensor) -> None:
        if accumulate:
            output.add_(total, alpha=scale)
        elif scale == 1.0:
            output.copy_(total)
        else:
            torch.mul(total, scale, out=output)

    if backend_of(group).runs_on_device:
        reduce = _alias("reduce_scatter_single", "reduce_scatter_tensor")
        slots = None if padding is None else padding.of_reduce(full, sizes)
        if slots is not None:
            slots.fill(full)
            (sums,) = slots.more
            work = reduce(sums, slots.whole, op=dist.ReduceOp.SUM, group=group, async_op=True)

            def take() -> None:
                deliver(sums[:own])
                slots.give_back()

            return Pending([work], take, (slots.whole, sums))
        total = torch.empty_like(output)
        if len(set(sizes)) == 1:
            work = reduce(total, full, op=dist.ReduceOp.SUM, group=group, async_op=True)
        else:
            parts = list(full.split(list(sizes)))
            work = dist.reduce_scatter(
                total, parts, op=dist.ReduceOp.SUM, group=group, async_op=True
            )
        return Pending([work], lambda: deliver(total), (full, total))

    received = full.new_empty(world_size * own)
    rows = received.view(world_size, own)
    if full.is_cpu:
        outgoing = full.split(list(sizes))
        rows[rank].copy_(outgoing[rank])
        works = _exchange(outgoing, rows.unbind(), group)
    else:
        exchange = dist.all_to_all_single(
            received, full, [own] * world_size, list(sizes), group=group, async_op=True
        )
        works = [exchange]

    def finish() -> None:
        for row in rows[1:]:
            rows[0].add_(row)
        deliver(rows[0])

    return Pending(works, finish if own else None)


def summands_received(group: dist.ProcessGroup) -> int:
    """Return the number of summands that a reduce receives for this rank's slice.

    It is 1 where the backend itself adds up, else the number of ranks.
    """
    return 1 if backend_of(group).runs_on_device else dist.get_world_size(group)


def all_gather_rows(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows of all ranks stacked; blocking.

    Args:
        local: This rank's rows, shape ``(sizes[rank], ...)``.
        sizes: Number of rows of every rank.
        group: The process group.
    """
    offsets = _offsets(sizes)
    rank = dist.get_rank(group)
    full = local.new_empty((offsets[-1], *local.shape[1:]))
    full[offsets[rank] : offsets[rank + 1]].copy_(local)
    row = full[:1].numel() if offsets[-1] else 0
    gather_slices(full.view(-1), [size * row for size in sizes], group).wait()
    return full
