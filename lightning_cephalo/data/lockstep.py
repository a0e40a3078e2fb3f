"""Keeps loaders that give each rank samples of its own in step across ranks.

Ranks may run out at different steps; one that continued alone would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.containers import known_length, own_copy
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.randomness import preserved_randomness


class LockStepLoader:
    """Iterates ``loader`` on every rank until the last rank has run out.

    Ranks that have run out continue with `NoSamples`, so that every sample counts once. With
    ``every_rank`` all end with the first. Attributes and the class are those of the wrapped loader,
    as Lightning, callbacks and users look for them. Creating and iterating it is collective.
    """

    def __init__(self, loader: Iterable[Any], dealing: Dealing, original: object) -> None:
        self.loader, self.original = loader, original
        self._dealing = dealing
        self._sample: Any = None
        if is_stateful(loader):  # as Lightning looks for
            for name in ("state_dict", "load_state_dict"):
                object.__setattr__(self, name, getattr(loader, name))
        self._length = self._agree_on_length()

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        kind = type(self.__dict__.get("original", self))
        # lists and dicts of loaders are taken apart
        return type(self) if kind.__module__ == "builtins" else kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("loader", "original"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches, have = iter(self.loader), True
        while True:
            batch = None
            if have:
                try:
                    batch = next(batches)
                except StopIteration:
                    have = False
            if self._sample is None and batch is not None:
                self._sample = self._first_of(batch)
            everyones = [row[0] for row in self._dealing.gather([float(have)])]
            if not (all(everyones) if self._dealing.every_rank else any(everyones)):
                return
            # Lightning skips a step whose batch is None, and the other ranks would wait for it
            yield self._shown() if batch is None else batch

    def _shown(self) -> NoSamples:
        if self._sample is None:
            with preserved_randomness():
                first = next(iter(self.loader), None)
            # nothing can be shown of a part of a stream that has nothing at all
            self._sample = () if first is None else self._first_of(first)
        # a hook may change the containers that it gets
        return NoSamples(own_copy(self._sample, with_arrays=True))

    def _first_of(self, batch: Any) -> Any:
        """Returns the first sample of a batch, or a batch that cannot be cut as it is."""
        try:
            first = self._dealing.layout.take(batch, 0, 1)
        except BatchSplitError:
            first = batch
        return own_copy(first, with_arrays=True)

    def _agree_on_length(self) -> int | None:
        own = self._own_length()
        everyones = [row[0] for row in self._dealing.gather([-1.0 if own is None else float(own)])]
        if min(everyones) < 0:
            return None
        return int(min(everyones) if self._dealing.every_rank else max(everyones))

    def _own_length(self) -> int | None:
        return known_length(self.loader)


def is_stateful(loader: Any) -> bool:
    """Returns whether Lightning can save and restore ``loader`` mid-epoch."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
