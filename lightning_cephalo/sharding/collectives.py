"""Gathers and reduces slices of unequal sizes, with one method per kind of backend.

- gloo on CPUs: sends and receives (``routes.py``). A gather receives into place. A reduce receives
  rows and sums them in one order, so it is deterministic.
- gloo on other devices: the same through host memory (``staging.py``), because gloo sends no other.
- Backends that run on the device (NCCL): the single-tensor operations for equal slices, and for
  nearly equal ones where the plan pads them; the list forms otherwise.

On gloo, padding was measured 3 to 13 times slower than sends: docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.accelerator.torch_versions import all_gather_single, reduce_scatter_single
from lightning_cephalo.sharding.padding import Padding
from lightning_cephalo.sharding.routes import STRAIGHT, Route
from lightning_cephalo.sharding.staging import HostStage
from lightning_cephalo.sharding.transfers import Pending, spread


@dataclass(frozen=True)
class Way:
    """How slices travel.

    Attributes:
        padding: Whether nearly equal slices are padded; None: they are not.
        stage: Moves device tensors over backends that run on the host; None: blocking copies do.
        route: The way of a reduce's sends and receives.
    """

    padding: Padding | None = None
    stage: HostStage | None = None
    route: Route = STRAIGHT


_USUAL = Way()


def gather_slices(
    full: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    way: Way = _USUAL,
    slices: Sequence[torch.Tensor] | None = None,
) -> Pending:
    """Fill ``full`` with every rank's slice (``slices`` if cut already); its own is in place."""
    if full.is_cpu:
        return Pending(spread(slices or full.split(list(sizes)), group))
    if backend_of(group).runs_on_device:
        rank, parts = group.rank(), list(full.split(list(sizes)))
        own = parts[rank]
        if len(set(sizes)) == 1:
            return Pending(
                [all_gather_single(full, own, group=group, async_op=True)], tensors=(full,)
            )
        slots = None if way.padding is None else way.padding.slots(full, sizes)
        if slots is not None:
            slots.of_ranks[rank][: sizes[rank]].copy_(own)
            work = all_gather_single(slots.whole, slots.of_ranks[rank], group=group, async_op=True)
            return Pending([work], lambda: slots.empty_into(full), (full, slots.whole))
        return Pending([dist.all_gather(parts, own, group=group, async_op=True)], tensors=(full,))
    if way.stage is not None:
        return way.stage.gather(full, sizes, group)
    host = full.cpu()
    gather_slices(host, sizes, group).wait()
    full.data.copy_(host)
    return Pending()


def reduce_slices(
    full: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    deliver: Callable[[torch.Tensor], None],
    dtype: torch.dtype,
    way: Way = _USUAL,
    slices: Sequence[torch.Tensor] | None = None,
) -> Pending:
    """Sum ``full`` over the ranks, and give this rank's slice to ``deliver``, in a dtype."""
    rank = group.rank()
    own = sizes[rank]
    if full.is_cpu:
        memory = full.new_empty(way.route.received_numel(sizes, rank))
        parts = slices or full.split(list(sizes))
        works, total_of = way.route.reduce(parts, memory, group, dtype)
        finish = (lambda: deliver(total_of())) if own else None
        return Pending(works, finish, (full,), memory.nbytes)
    if backend_of(group).runs_on_device:
        slots = None if way.padding is None else way.padding.slots(full, sizes, has_sum=True)
        if slots is not None:
            slots.fill(full)
            (sums,) = slots.more
            work = reduce_scatter_single(sums, slots.whole, group=group, async_op=True)

            def take() -> None:
                deliver(sums[:own])
                slots.give_back()

            return Pending([work], take, (slots.whole, sums))
        total = full.new_empty(own)
        if len(set(sizes)) == 1:
            work = reduce_scatter_single(total, full, group=group, async_op=True)
        else:
            parts = list(full.split(list(sizes)))
            work = dist.reduce_scatter(total, parts, group=group, async_op=True)
        return Pending([work], lambda: deliver(total), (full, total), total.nbytes)

    assert way.stage is not None
    return way.stage.reduce(full, sizes, group, dtype, deliver, way.route)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, source: int) -> None:
    """Give every rank the tensor of rank ``source``; blocking."""
    sent = tensor.contiguous() if communicates(tensor, group) else tensor.cpu().contiguous()
    dist.broadcast(sent, group=group, group_src=source)
    if sent is not tensor:
        tensor.copy_(sent)


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Pending:
    """Combine a tensor of all ranks in place; blocks for device tensors over gloo."""
    if communicates(tensor, group):
        return Pending([dist.all_reduce(tensor, op=op, group=group, async_op=True)])
    sent = tensor.cpu()
    dist.all_reduce(sent, op=op, group=group)
    tensor.copy_(sent)
    return Pending()


def all_to_all(
    sent: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the parts that all ranks have for this one, by sizes in rank order; blocking."""
    travels = communicates(sent, group)
    received = sent.new_empty(sum(receives), device=None if travels else "cpu")
    own = sent if travels else sent.cpu()
    dist.all_to_all_single(received, own, list(receives), list(sends), group=group)
    return received.to(sent.device)


def communicates(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether a group's backend communicates tensors of this device.

    Without process groups there is nothing that it could not communicate.

    gloo counts as one that does not: torch's gloo broadcasts and all-reduces CUDA tensors, through
    host memory of its own, but has no such functions for other devices.
    """
    if tensor.is_cpu or not dist.is_initialized():
        return True
    return backend_of(group).runs_on_device


def everyone() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group.")
    return group


def all_gather_rows(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows of all ranks stacked; blocking."""
    full = local.new_empty((sum(sizes), *local.shape[1:]))
    full.split(list(sizes))[group.rank()].copy_(local)
    row = local.shape[1:].numel()
    gather_slices(full.view(-1), [size * row for size in sizes], group).wait()
    return full
