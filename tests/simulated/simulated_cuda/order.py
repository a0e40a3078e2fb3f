"""Compares the order in which ranks call collectives, over all communicators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist

from simulated_cuda.wire import Wire


class RuleBroken(RuntimeError):
    """A use of NCCL that NCCL or torch refuses, hangs on, or answers with wrong data."""


class Order:
    """Compares what each two ranks call, over all communicators that both are in.

    NCCL runs the collectives of a rank one after the other, so two ranks that call those they share
    in different orders wait for each other. Any two compare: sets of ranks that overlap in part are
    covered too.

    Args:
        store: Where the ranks meet.
        rank: This rank in the job.
        members: All ranks that may compare.
        wire: Makes the wire of two ranks, given a store, the own rank of it, and its size.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: Collection[int],
        wire: Callable[[dist.Store, int, int], Wire],
    ) -> None:
        self.members = frozenset(members)
        self._store, self._rank, self._wire = store, rank, wire
        self._wires: dict[int, Wire] = {}

    def compare(self, own: str, others: Sequence[int]) -> None:
        """Raise RuleBroken if another rank calls another collective.

        Args:
            own: What this rank calls.
            others: The other ranks of the collective.
        """
        # all are sent before any is waited for: ranks of which two differ still hear the third
        waiting = [(other, self._wire_to(other).start_texts(own)) for other in others]
        for other, texts in waiting:
            found = texts()[int(other > self._rank)]
            if found != own:
                raise RuleBroken(
                    "ranks call different collectives at the same place, which on GPUs is a hang"
                    f" or wrong data:\n  rank {self._rank}: {own}\n  rank {other}: {found}"
                )

    def _wire_to(self, other: int) -> Wire:
        if other not in self._wires:
            first, second = sorted((self._rank, other))
            store = dist.PrefixStore(f"{first} {second}", self._store)
            self._wires[other] = self._wire(store, int(self._rank == second), 2)
        return self._wires[other]
