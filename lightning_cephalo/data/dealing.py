"""What the loaders of all ranks are dealt by, and the repeated sample of a rank without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples

Broadcast = Callable[[Any], Any]
"""A collective that returns rank 0's object on every rank."""

Gather = Callable[[list[float]], list[list[float]]]
"""A collective that returns every rank's numbers, in rank order; called in the main process."""


@dataclass(frozen=True)
class Dealing:
    """How the samples of a loader are dealt to the ranks."""

    rank: int
    # of every rank in a step: exact if they sum to the loader's global batch, else proportions (of
    # a second loader, and in evaluation)
    sizes: tuple[int, ...]
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


class Idle(list[Any]):
    """No keys, and a key that only hooks see; an attribute, as Lightning records the keys."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.shown = shown


class DealtSamples(Dataset[Any]):
    """The user's dataset, which also collates: only here a rank's keys are seen to be none.

    Its attributes are the dataset's, as functions that start workers read and set some, and so is
    its class for ``isinstance``.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        vars(self).update(wrapped=dataset, collate=collate_fn)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.wrapped)

    def __reduce__(self) -> tuple[Any, ...]:
        return DealtSamples, (self.wrapped, self.collate)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.wrapped[key]

    def __getitems__(self, keys: list[Any]) -> Any:
        if isinstance(keys, Idle):
            return NoSamples(self.collate(fetch(self.wrapped, [keys.shown])))
        batch = self.collate(fetch(self.wrapped, keys))
        # None drops all samples: Lightning would skip the step on this rank alone. Hooks see ().
        return NoSamples(()) if batch is None else batch

    def __len__(self) -> int:
        return len(self.wrapped)


def as_it_is(batch: Any) -> Any:
    """Collates what `DealtSamples` has collated."""
    return batch


def fetch(dataset: Any, keys: Sequence[Any]) -> Any:
    """Returns the samples at ``keys``, read as torch's DataLoader reads them."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(list(keys))
    return [dataset[key] for key in keys]
