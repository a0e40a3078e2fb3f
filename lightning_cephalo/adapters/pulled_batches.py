"""Serves steps that pull their own batches: ``training_step(self, dataloader_iter)``.

Lightning gives such a step an iterator in place of a batch. The batch must be known before the step
runs, as it is cut into microbatches. So the strategy pulls it, and each microbatch gets an iterator
that yields its part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_cephalo.common.errors import UnsupportedError


def pulls_batches(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives a step an iterator; the name of the argument says so."""
    return _takes_an_iterator(getattr(step, "__func__", step))


# every step asks, and reading a signature takes longer than the answer is worth
@functools.lru_cache(maxsize=64)
def _takes_an_iterator(function: Callable[..., Any]) -> bool:
    return "dataloader_iter" in inspect.signature(function).parameters


@dataclass(frozen=True)
class Pulled:
    """A batch that the strategy has pulled for a step.

    ::

        pulled = Pulled.from_iterator(dataloader_iter)
        pulled.run(self.training_step, pulled.batch)

    Attributes:
        batch: This rank's batch, as the dataloader yields it; the step moves it to the device.
        batch_idx: Its number.
        dataloader_idx: The number of its dataloader.
        source: Lightning's iterator; its other attributes are seen by the step.
    """

    batch: Any
    batch_idx: int = 0
    dataloader_idx: int = 0
    source: Any = None

    @classmethod
    def from_iterator(cls, source: Iterator[Any]) -> Pulled:
        """Pull the next batch.

        Raises:
            StopIteration: If there is none, on every rank; Lightning then ends the epoch.
        """
        batch, batch_idx, dataloader_idx = next(source)
        return cls(batch, batch_idx, dataloader_idx, source)

    @property
    def is_last(self) -> bool:
        """Whether the dataloader has no more batches."""
        return bool(getattr(self.source, "done", False))

    def run(self, step: Callable[[Any], Any], piece: Any) -> Any:
        """Call a step with an iterator over one item, a part of the batch.

        Raises:
            UnsupportedError: If the step does not pull exactly one batch.
        """
        iterator = _OneItem((piece, self.batch_idx, self.dataloader_idx), self.source)
        result = step(iterator)
        if iterator.items:
            raise UnsupportedError(_wrong_number("no batch"))
        return result

    def step_of(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function of a part of the batch, for a step that takes an iterator."""
        return partial(self.run, step)


class _OneItem(Iterator[Any]):
    def __init__(self, item: tuple[Any, int, int], source: Any) -> None:
        self.items = [item]
        self._source = source

    def __next__(self) -> tuple[Any, int, int]:
        if not self.items:
            raise UnsupportedError(_wrong_number("several batches"))
        return self.items.pop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._source, name)


def _wrong_number(came: str) -> str:
    return (
        f"A step with dataloader_iter has pulled {came}, expected one: each step is one batch,"
        " which is divided between ranks and microbatches. Call next(dataloader_iter) once in each"
        " step, or use training_step(batch, batch_idx)."
    )
