"""Collates a rank's samples into a batch, and shows one to hooks of a rank without any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.randomness import preserved_randomness

# Samples that are tried for one that the collate function does not drop.
_TRIED = 64


def fetch(dataset: Any, keys: Sequence[Any]) -> Any:
    """Returns the samples at ``keys``, read as torch's DataLoader reads them."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(list(keys))
    return [dataset[key] for key in keys]


def copied(samples: Any) -> Any:
    """Returns copies of samples, each by itself: some collate functions change what they get."""
    if isinstance(samples, list | tuple):
        return [_copy_of(sample) for sample in samples]
    return _copy_of(samples)


def _copy_of(sample: Any) -> Any:
    try:
        return copy.deepcopy(sample)
    except Exception:  # any error of the user's class means no
        return sample


class RankCollate:
    """The user's ``collate_fn``, extended to accept zero samples.

    A rank without samples gets `NoSamples`, as most collate functions fail on an empty list. So it
    does for None, which drops all samples: Lightning would skip the step on this rank alone.
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
        with preserved_randomness():
            try:
                for key in range(min(len(self.dataset), _TRIED)):
                    batch = self.collate_fn(copied(fetch(self.dataset, [key])))
                    if batch is not None:
                        return NoSamples(batch)
            except Exception as error:
                raise RuntimeError(
                    "A rank has no samples in a step, and dataset[0], which hooks would see there,"
                    f" could not be read ({error!r}). Use DataLoader(drop_last=True) if it is the"
                    " last step, or a plan that gives every rank samples."
                ) from error
        raise RuntimeError(
            "A rank has no samples in a step, and the collate function drops the first"
            " samples of the dataset, so that hooks have none to see. Leave out samples"
            " that cannot be used in the dataset, or give them a weight of 0."
        )


class EmptyFetchDataset(Dataset[Any]):
    """Looks like the dataset, whose ``__getitems__`` fails on an empty list, and returns ``[]``."""

    def __init__(self, dataset: Any) -> None:
        self.wrapped = dataset

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if "wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        return self.wrapped[key]

    def __getitems__(self, keys: list[Any]) -> Any:
        return self.wrapped.__getitems__(keys) if keys else []

    def __len__(self) -> int:
        return len(self.wrapped)

    def __reduce__(self) -> Any:
        return EmptyFetchDataset, (self.wrapped,)


def tolerates_empty_fetch(dataset: Any) -> bool:
    """Returns whether a fetch of no keys from ``dataset`` gives no samples, as torch needs here."""
    if not getattr(dataset, "__getitems__", None):
        return True
    with preserved_randomness():
        try:
            return list(dataset.__getitems__([])) == []
        except Exception:  # any error of the user's method means no
            return False
