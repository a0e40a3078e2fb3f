"""Small messages between the processes of all ranks, on a CPU group of their own.

They keep ranks from waiting for one another for ever: whatever goes wrong on one rank is carried
to the next exchange, where all ranks learn of it and raise together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError


class Agreement:
    """Exchanges of numbers and objects between all ranks.

    Args:
        group: A group of all ranks that takes CPU tensors (gloo).

    Attributes:
        told: What this rank has failed with, if the other ranks know it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.told: BaseException | None = None

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers; all ranks give equally many."""
        if self.world_size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self._group)
        return [part.tolist() for part in parts]

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every rank's object."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the object of rank ``source``."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=source)
        return values[0]

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Return per flag whether any rank has set it."""
        if self.world_size == 1 or not flags:
            return list(flags)
        own = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in own.tolist()]

    def raise_together(self, failure: BaseException | None, doing: str) -> None:
        """Raise on all ranks if any has failed; collective.

        Args:
            failure: What this rank failed with, or None.
            doing: What was being done, for the message.

        Raises:
            BaseException: This rank's own failure as it is.
            RemoteRankError: If only other ranks have failed.
        """
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        messages = self.exchange_objects(message)
        if failure is not None:
            self.told = failure
            raise failure
        failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
        if failed:
            rank, text = failed[0]
            others = f" (and ranks {[r for r, _ in failed[1:]]})" if failed[1:] else ""
            raise RemoteRankError(f"Rank {rank}{others} failed while {doing}: {text}")
