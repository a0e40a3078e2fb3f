"""A loader that no sampler deals, and that all ranks iterate together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.passes import is_stateful


class RankLoader(ABC):
    """Iterates ``loader`` on every rank; its attributes are those of the wrapped loader.

    Creating and iterating it is collective.

    Attributes:
        original: the user's loader.
    """

    def __init__(self, loader: Iterable[Any], dealing: Dealing, original: object) -> None:
        self.loader, self.original, self._dealing = loader, original, dealing
        if is_stateful(loader):  # as Lightning looks for
            for name in ("state_dict", "load_state_dict"):
                object.__setattr__(self, name, getattr(loader, name))
        own = self._own_length()
        everyones = [row[0] for row in dealing.gather([-1.0 if own is None else float(own)])]
        longest = min(everyones) if dealing.every_rank else max(everyones)
        self._length = None if min(everyones) < 0 else int(longest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("loader", "original"):
            object.__setattr__(self, name, value)
        else:  # such as Lightning's worker_init_fn
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return self._length

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches."""

    def _own_length(self) -> int | None:
        return known_length(self.loader)
