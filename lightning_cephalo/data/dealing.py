"""What the loaders of all ranks are dealt by, and what a rank without samples collates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.data.randomness import preserved_randomness

Broadcast = Callable[[Any], Any]
"""A collective that returns rank 0's object on every rank."""

Gather = Callable[[list[float]], list[list[float]]]
"""A collective that returns every rank's numbers, in rank order; called in the main process."""

# Samples that are tried for one that the collate function does not drop.
_TRIED = 64


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


class RankCollate:
    """The user's ``collate_fn``, extended to accept zero samples.

    A rank without samples gets `NoSamples`, as most collate functions fail on an empty list. None,
    which drops all samples, becomes the same: Lightning would skip the step on this rank alone.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], dataset: Any) -> None:
        self.collate_fn, self.dataset = collate_fn, dataset

    def __call__(self, samples: Any) -> Any:
        # a dataset's __getitems__ may return something without a length
        if hasattr(samples, "__len__") and len(samples) == 0:
            return self._shown()
        batch = self.collate_fn(samples)
        return self._shown() if batch is None else batch

    def _shown(self) -> NoSamples:
        """Returns the first sample that the user's function does not drop; it is read anew."""
        failure: Exception | None = None
        with preserved_randomness():
            try:
                for key in range(min(len(self.dataset), _TRIED)):
                    batch = self.collate_fn(own_copy(fetch(self.dataset, [key]), with_arrays=True))
                    if batch is not None:
                        return NoSamples(batch)
            except Exception as error:
                failure = error
        raise RuntimeError(
            "A rank has no samples in a step, and none of the dataset's first samples, of which"
            f" hooks would see one there, can be read and collated ({failure!r}). Use"
            " DataLoader(drop_last=True) if it is the last step, a plan that gives every rank"
            " samples, or a dataset without samples that collate_fn drops."
        ) from failure


class EmptyFetch(Dataset[Any]):
    """A dataset whose ``__getitems__`` returns no samples for no keys, where many others fail."""

    def __init__(self, dataset: Any) -> None:
        self.wrapped = dataset

    def __getattr__(self, name: str) -> Any:
        # pickle asks before __init__ has set `wrapped`
        if name.startswith("__") or name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        return self.wrapped[key]

    def __getitems__(self, keys: list[Any]) -> Any:
        return self.wrapped.__getitems__(keys) if keys else []

    def __len__(self) -> int:
        return len(self.wrapped)


def fetch(dataset: Any, keys: Sequence[Any]) -> Any:
    """Returns the samples at ``keys``, read as torch's DataLoader reads them."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(list(keys))
    return [dataset[key] for key in keys]
