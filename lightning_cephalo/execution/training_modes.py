"""Keeps modules in the mode, training or evaluation, in which the user's code has called them.

``module.eval()`` inside of ``training_step`` changes a module that all microbatches of a rank
share, and that the backward computes again. So each microbatch finds all modules as it has left
them itself. A unit computes in the modes that it had when it was called, also when it is computed
again: the code may have switched it in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

Modes = tuple[bool, ...]
"""Whether each module is in training mode."""


class TrainingModes:
    """Reads and sets the modes of some modules.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)

    def now(self) -> Modes:
        """Return the modes."""
        return tuple([module.training for module in self._modules])

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
