"""Exchanges small messages between all ranks, on a CPU group of their own, and lets all raise.

An error on one rank travels with the next message, so that no rank waits for another forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.common.texts import printable


def _not_connected() -> None:
    """Return what a copy of an object has in place of its connections."""


class NotCopied:
    """Becomes None in a copy: users copy and pickle callbacks, and with them the strategy."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _not_connected, ()


class ControlGroup(NotCopied):
    """Lets all ranks exchange numbers and objects, and fail together.

    ::

        capacities = control.gather(capacity_bytes)    # [8e9, 24e9], in rank order
        if control.any(loss_is_bad):                   # the same answer on every rank
            ...
        layout = control.together("reading the dataloader", read)    # raises everywhere or nowhere

    Every method is collective: all ranks call it at the same point of the program. ``group`` takes
    CPU tensors (gloo). After a failure, ``raised`` is what this rank has raised together with the
    others, and ``is_of_all`` whether each of them raised one of the same kind.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.raised: BaseException | None = None
        self.is_of_all = False

    @overload
    def gather(self, value: float) -> list[float]: ...

    @overload
    def gather(self, value: list[float]) -> list[list[float]]: ...

    @overload
    def gather(self, value: Any) -> list[Any]: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks must pass the same kind of value.

        A number, or a list of numbers of equal length everywhere, returns as float64. Other values
        are pickled, which takes longer.
        """
        if isinstance(value, (int, float)):
            return [row[0] for row in self._gather_numbers([value])]
        if isinstance(value, list) and all(isinstance(number, (int, float)) for number in value):
            return self._gather_numbers(value)
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        if self.world_size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self.group)
        return [part.tolist() for part in parts]

    def all(self, flag: bool) -> bool:
        """Return whether every rank has set its flag."""
        return not self.any(not flag)

    @overload
    def any(self, flags: bool) -> bool: ...

    @overload
    def any(self, flags: Sequence[bool]) -> list[bool]: ...

    def any(self, flags: bool | Sequence[bool]) -> bool | list[bool]:
        """Return whether any rank has set its flag; given several, the answer for each."""
        if isinstance(flags, bool):
            return self.any([flags])[0]
        if self.world_size == 1 or not flags:
            return list(flags)
        own = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in own.tolist()]

    def max(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""
        return max(self.gather(number))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.gather(0.0)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the object of rank ``source``."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]

    def together(self, doing: str, function: Callable[[], Any]) -> Any:
        """Call a function, which must not communicate; if it fails on any rank, all ranks raise.

        A rank raises its own failure as it is, or RemoteRankError with what another was ``doing``.
        """
        failure: BaseException | None = None
        result = None
        try:
            result = function()
        except Exception as error:
            failure = error
        self.raise_if_any_failed(failure, doing)
        return result

    def raise_if_any_failed(self, failure: BaseException | None, doing: str) -> None:
        """Raise on all ranks if any has failed: its own failure, or RemoteRankError elsewhere.

        ``doing`` describes this rank's activity in the message of other ranks.
        """
        if not self.any(failure is not None):  # quicker than messages
            return
        told = None
        if failure is not None:
            kind = type(failure).__name__
            told = (kind, printable(f"{doing}: {kind}: {failure}"))
        each = self.gather(told)
        failed = [(rank, *told) for rank, told in enumerate(each) if told is not None]
        if failure is not None:
            self.raised = failure
            self.is_of_all = len(failed) == len(each) and len({kind for _, kind, _ in failed}) == 1
            raise failure
        if failed:
            rank, _, text = failed[0]
            others = f" (and ranks {[r for r, *_ in failed[1:]]})" if failed[1:] else ""
            raise RemoteRankError(f"Rank {rank}{others} failed while {text}")
