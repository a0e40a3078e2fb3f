"""Keeps loaders that give each rank samples of its own in step across ranks.

Ranks may run out at different steps; one that continued alone would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples
from lightning_cephalo.data.containers import known_length, own_copy
from lightning_cephalo.data.randomness import preserved_randomness

AllHaveNext = Callable[[bool], bool]
"""A collective that returns True if every rank passed True; called in the main process."""

Gather = Callable[[list[float]], list[list[float]]]
"""A collective that returns every rank's numbers, in rank order; called in the main process."""


class LockStepLoader:
    """Iterates ``loader`` on every rank until the last rank has run out.

    Ranks that have run out continue with `NoSamples`, so that every sample counts once. With
    ``every_rank`` all end with the first. Attributes and the class are those of the wrapped loader,
    as Lightning, callbacks and users look for them.

    Args:
        all_have_next: lets the ranks agree. It is called once per step, once more at the end, and
            at least once on construction: more often if every rank's ``loader`` has a length.
        idle: this rank takes no samples. It shows one of the loader's first batch, the only one
            that it loads.
    """

    _own = frozenset(
        (
            "loader",
            "original",
            "_all_have_next",
            "_every_rank",
            "_idle",
            "_layout",
            "_length",
            "_sample",
        )
    )

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        all_have_next: AllHaveNext,
        idle: bool = False,
        layout: BatchLayout | None = None,
        every_rank: bool = False,
        original: object | None = None,
    ) -> None:
        self.loader = loader
        self.original = loader if original is None else original
        self._all_have_next = all_have_next
        self._idle = idle
        self._every_rank = every_rank
        self._layout = layout
        self._sample: Any = None
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
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader) if not self._idle else None
        have = True
        while True:
            batch = None
            if batches is not None and have:
                try:
                    batch = next(batches)
                except StopIteration:
                    have = False
                else:
                    if self._sample is None and batch is not None:
                        self._sample = self._first_of(batch)
            if not self._some_go_on(have and batches is not None):
                return
            # Lightning skips a step whose batch is None, and the other ranks would wait for it
            yield self._shown() if batch is None else batch

    def _some_go_on(self, have: bool) -> bool:
        """Returns whether enough ranks have what only this rank knows of itself; collective."""
        if self._every_rank:
            return self._all_have_next(have)
        # some rank has <=> not all ranks have not
        return not self._all_have_next(not have)

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
            first = (self._layout or BatchLayout()).take(batch, 0, 1)
        except BatchSplitError:
            first = batch
        return own_copy(first, with_arrays=True)

    def _agree_on_length(self) -> int | None:
        """Returns the number of steps of all ranks, found by asking "at least this many?"."""
        local = None if self._idle else self._own_length()
        if not self._all_have_next(self._idle or local is not None):
            return None

        def reached(steps: int) -> bool:
            return self._some_go_on(local is not None and local >= steps)

        high = 1
        while reached(high):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if reached(middle) else (low, middle)
        return low

    def _own_length(self) -> int | None:
        return known_length(self.loader)


class StatefulLockStepLoader(LockStepLoader):
    """A `LockStepLoader` around a loader that Lightning can save and restore mid-epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped loader's state."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the wrapped loader's state."""
        self.loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


def is_stateful(loader: Any) -> bool:
    """Returns whether Lightning can save and restore ``loader`` mid-epoch."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def lock_step(loader: Any, **options: Any) -> LockStepLoader:
    """Returns a `LockStepLoader`, stateful if ``loader`` is; ``options`` are its arguments."""
    return (StatefulLockStepLoader if is_stateful(loader) else LockStepLoader)(loader, **options)
