"""Keeps modules in the mode, training or evaluation, in which the user's code has called them.

Each microbatch finds all modules as it has left them itself. A unit that is computed again does so
in the modes that it had before: the code may have switched it in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

_NAME = "training"

Modes = tuple[bool, ...]
"""Whether each module is in training mode."""


class TrainingModes:
    """Reads and sets the modes of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        # every visit reads the modes of all modules, where a loop in Python would cost the most; a
        # scripted module keeps its mode elsewhere than among its attributes
        holders: list[Any] = [vars(module) for module in self._modules]
        read: Callable[[Any], bool] = itemgetter(_NAME)
        if any(_NAME not in names for names in holders):
            holders, read = self._modules, attrgetter(_NAME)
        self._read = partial(map, read, holders)
        self._all_train = (True,) * len(holders)

    def now(self) -> Modes:
        """Return the modes."""
        return self._all_train if all(self._read()) else tuple(self._read())

    def show(self, modes: Modes) -> None:
        """Set the modes; those that are so already cost no write."""
        if modes == self.now():
            return
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training != mode:
                module.training = mode

    @contextmanager
    def shown(self, modes: Modes) -> Iterator[None]:
        """Show modes in a ``with`` block, then those of before."""
        before = self.now()
        self.show(modes)
        try:
            yield
        finally:
            self.show(before)
