"""Sends and receives do what those of torch.distributed do."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from lightning_cephalo.sharding.transfers import Transfer, exchange, receive, send


class Work:
    """A handle, which must not be waited for twice."""

    def __init__(self, may_end: threading.Event | None = None) -> None:
        self.waits, self._may_end = 0, may_end

    def wait(self) -> None:
        self.waits += 1
        if self._may_end is not None:
            assert self._may_end.wait(10)


class Group:
    """Notes what is called on a group of three ranks, of which this one has rank 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], int, int]] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def __getattr__(self, name: str) -> Any:
        def call(tensors: list[torch.Tensor], *numbers: int) -> Work:
            self.calls.append((name, [tensor.data_ptr() for tensor in tensors], *numbers))
            return Work()

        return call


def test_a_send_and_a_receive_call_a_group_as_those_of_torch_do():
    part, own, torchs = torch.ones(3), Group(), Group()
    send(part, 2, own)
    receive(part, 0, own)
    dist.isend(part, group=torchs, group_dst=2)
    dist.irecv(part, group=torchs, group_src=0)
    assert own.calls == torchs.calls, "torch has changed: see what it does beyond these calls"
    address = [part.data_ptr()]
    assert own.calls == [("send", address, 2, 0), ("recv", address, 0, 0)]


def test_receives_start_first_and_empty_slices_do_not_travel():
    group, empty = Group(), torch.empty(0)
    outgoing = [torch.ones(2), torch.ones(2), torch.ones(2)]
    incoming = [torch.ones(1), torch.ones(1), torch.ones(1)]
    assert len(exchange(outgoing, incoming, group)) == 4
    assert [(name, rank) for name, _, rank, _ in group.calls] == [
        ("recv", 0),
        ("recv", 2),
        ("send", 2),
        ("send", 0),
    ]
    group.calls.clear()
    exchange([empty, empty, torch.ones(1)], [torch.ones(1), empty, empty], group)
    assert [(name, rank) for name, _, rank, _ in group.calls] == [("recv", 0), ("send", 2)]


def test_a_handle_is_waited_for_once_by_all_that_wait():
    may_end, told = threading.Event(), threading.Event()
    work = Work(may_end)
    transfer = Transfer(work)
    transfer.when_done(told.set)
    waiting = threading.Thread(target=transfer.wait)
    waiting.start()
    assert not told.wait(0.05)
    may_end.set()
    waiting.join(10)
    assert told.wait(10)
    transfer.wait()
    assert work.waits == 1
