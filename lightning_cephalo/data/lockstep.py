"""Loaders that cannot be dealt from outside, kept in step across ranks.

What an iterable dataset yields, and how much, is known to nobody in advance, so ranks may run out
at different steps; a rank that goes on alone would wait for the others for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import BatchLayout, MicrobatchList, zero_rows
from lightning_cephalo.data.containers import contains_arrays
from lightning_cephalo.data.randomness import preserved_randomness

AllHaveNext = Callable[[bool], bool]
"""True on every rank if every rank passed True; a collective, called in the main process."""


class LockStepLoader:
    """Iterates ``loader`` on every rank for the same number of steps.

    Unknown attributes are the wrapped loader's, for reading and for writing, so that Lightning and
    callbacks find ``dataset``, ``worker_init_fn`` or ``num_workers`` where they look for them.

    Args:
        loader: this rank's loader.
        all_have_next: control between ranks. It is called once per step, once more at the end,
            and while constructing when ``loader`` has a length.
        until: ``"first"`` stops all ranks when any has run out (training: no step of a smaller
            global batch than planned, the rest is not seen this epoch); ``"last"`` goes on with
            empty batches on the ranks that have run out (evaluation: every sample once).
        idle: this rank takes no samples. It yields empty batches shaped like the loader's first,
            which is the only one pulled.
        layout: how to cut a batch to zero rows.
        original: the user's loader if ``loader`` was rebuilt from it.
    """

    _own = frozenset(
        (
            "loader",
            "original",
            "_all_have_next",
            "_until",
            "_idle",
            "_layout",
            "_length",
            "_template",
        )
    )

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        all_have_next: AllHaveNext,
        until: str = "first",
        idle: bool = False,
        layout: BatchLayout | None = None,
        original: object | None = None,
    ) -> None:
        self.loader = loader
        self.original = loader if original is None else original
        self._all_have_next = all_have_next
        self._until = until
        self._idle = idle
        self._layout = layout
        self._template: Any = None
        self._length = self._agree_on_length()

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
                    if self._until == "last" and self._template is None:
                        self._template = self._without_rows(batch)
            if self._until == "first":
                if not self._all_have_next(have):
                    return
            # any has next <=> not all have none; an idle rank has none of its own to wait for
            elif self._all_have_next(not have or batches is None):
                return
            yield self._empty_batch() if batches is None or not have else batch

    def _empty_batch(self) -> Any:
        if self._template is None:
            with preserved_randomness():
                first = next(iter(self.loader), None)
            self._template = self._without_rows(first)
        template = self._template
        if isinstance(template, MicrobatchList):
            return MicrobatchList((), ())
        return self._without_rows(template)

    def _without_rows(self, batch: Any) -> Any:
        if not contains_arrays(batch) and self._layout is None:
            return MicrobatchList((), ())
        try:
            return zero_rows(batch, self._layout)
        except BatchSplitError:
            return MicrobatchList((), ())

    def _agree_on_length(self) -> int | None:
        """The number of steps that all ranks will take, found by asking "at least this many?"."""
        local: int | None = None
        if not self._idle:
            try:
                local = len(self.loader)  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                local = None
        if not self._all_have_next(self._idle or local is not None):
            return None

        def reached(steps: int) -> bool:
            mine = local is not None and local >= steps
            if self._until == "first":
                return self._all_have_next(self._idle or mine)
            return not self._all_have_next(not mine)

        high = 1
        while reached(high):
            if high > sys.maxsize:  # no rank has an end: none of them takes samples
                return None
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if reached(middle) else (low, middle)
        return low


class StatefulLockStepLoader(LockStepLoader):
    """A `LockStepLoader` around a loader that Lightning can save and restore in mid-epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The wrapped loader's state."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the wrapped loader's state."""
        self.loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


def lock_step(loader: Any, **options: Any) -> LockStepLoader:
    """A `LockStepLoader`, stateful if ``loader`` is; ``options`` are its arguments."""
    # Two classes, because Lightning asks isinstance(loader, _Stateful), which is hasattr.
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulLockStepLoader if stateful else LockStepLoader)(loader, **options)
