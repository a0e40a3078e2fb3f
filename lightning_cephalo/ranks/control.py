"""Exchanges small messages between the processes of all ranks, on a CPU group of their own.

The messages keep ranks from waiting for other ranks forever. An error on one rank travels with the
next message. All ranks learn of it from that message and raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.common.texts import printable


def not_connected() -> None:
    """Return what a copy of an object has in place of its connections."""


class ControlGroup:
    """Lets all ranks exchange numbers and objects, and fail together.

    ::

        capacities = control.gather(capacity_bytes)    # [8e9, 24e9], in rank order
        if control.any(loss_is_bad):                   # the same answer on every rank
            ...
        layout = control.together("reading the dataloader", read)    # raises everywhere or nowhere

    Every method is collective: all ranks call it at the same point of the program.

    Args:
        group: A group of all ranks that takes CPU tensors (gloo).

    Attributes:
        group: As given.
        raised: The failure that this rank has raised together with the others, if any.
        is_of_all: Whether each of the others has raised one of the same kind then.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.raised: BaseException | None = None
        self.is_of_all = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy: callbacks and trainers are copied and pickled, connections not."""
        return not_connected, ()

    @overload
    def gather(self, value: float) -> list[float]: ...

    @overload
    def gather(self, value: list[float]) -> list[list[float]]: ...

    @overload
    def gather(self, value: Any) -> list[Any]: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order.

        A number travels and returns as float64. So does a list of numbers, which must be equally
        long on all ranks. Other values are pickled, which takes longer. All ranks must pass the
        same kind of value.
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
        """Call a function and return its result; if it fails on any rank, raise on all ranks.

        Args:
            doing: Description of the function for the message: "reading the plan".
            function: The function; it must not communicate.

        Raises:
            BaseException: This rank's own failure as it is.
            RemoteRankError: If the function has failed on other ranks only.
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
        """Raise on all ranks if any of them has failed.

        Args:
            failure: This rank's failure, or None.
            doing: Description of this rank's activity; the message on other ranks repeats it.

        Raises:
            BaseException: This rank's own failure as it is.
            RemoteRankError: If only other ranks have failed.
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
