"""What the loaders of all ranks are dealt by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_cephalo.data.batch_layout import BatchLayout

Broadcast = Callable[[Any], Any]
"""A collective that returns rank 0's object on every rank."""

Gather = Callable[[list[float]], list[list[float]]]
"""A collective that returns every rank's numbers, in rank order; called in the main process."""


@dataclass(frozen=True)
class Dealing:
    """How the samples of a loader are dealt to the ranks."""

    rank: int
    sizes: tuple[int, ...]  # of every rank's part of a step, in proportion
    seed: int
    broadcast: Broadcast
    gather: Gather
    epoch: int = 0
    trains: bool = True
    # a step with too few samples for that is left out: every rank must run the code of each step
    every_rank: bool = False
    # over all ranks; None: the loader's batch size times the ranks
    global_batch_size: int | None = None
    layout: BatchLayout = field(default_factory=BatchLayout)  # of ready batches
