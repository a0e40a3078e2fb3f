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
    """How the samples of a loader are dealt to the ranks.

    Attributes:
        rank: this rank.
        sizes: samples per step of every rank. They are exact if they sum to the loader's global
            batch, else proportions (for a second loader, and in evaluation).
        seed: the seed of the order (`agreed_seed`).
        trains: whether the loader is for training; in evaluation a batch may be left whole.
        every_rank: give every rank a sample in each step; drop a step with too few for that, with
            a warning. For steps whose code every rank must run.
        global_batch_size: samples per step over all ranks; by default the loader's batch size
            times the ranks. For a custom batch sampler a multiple of the length of its lists.
        layout: the layout for cutting ready batches, and the first sample out of a batch.
    """

    rank: int
    sizes: tuple[int, ...]
    seed: int
    broadcast: Broadcast
    gather: Gather
    epoch: int = 0
    trains: bool = True
    every_rank: bool = False
    global_batch_size: int | None = None
    layout: BatchLayout = field(default_factory=BatchLayout)

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not 0 <= self.rank < len(sizes) or min(sizes) < 0 or sum(sizes) == 0:
            raise ValueError(
                f"Expects one batch size of 0 or more for each rank, not all 0, but got {sizes}."
            )
