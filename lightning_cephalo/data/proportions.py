"""Finds whether the batches of several loaders are divided alike in every step.

Only then is a loss that adds a mean over each loader a weighted mean over microbatches. A smaller
last batch cannot always be divided like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Batches:
    """One loader's batches in a pass; ``size`` and ``rest`` (the last one's) may be unknown."""

    size: int | None
    rest: int | None
    steps: float = inf

    @classmethod
    def of(cls, size: int | None, samples: int | None, *, drop_last: bool) -> Batches:
        """Returns the batches of a loader; sizes and ``samples`` are None where unknown.

        Example:
            >>> Batches.of(8, 30, drop_last=False)
            Batches(size=8, rest=6, steps=4)
        """
        if size is None or samples is None:
            return cls(size, 0 if drop_last and size else None)
        rest = 0 if drop_last else samples % size
        return cls(size, rest, samples // size + (rest > 0))


def are_divided_alike(
    loaders: Sequence[Batches], mode: str, sizes: Sequence[int] | None = None
) -> bool:
    """Returns whether each microbatch has the same part of every loader's batch, in all steps.

    Example:
        >>> eight = Batches.of(8, 32, drop_last=False)
        >>> are_divided_alike([eight, Batches.of(4, 16, drop_last=False)], "min_size", (6, 2))
        True
        >>> are_divided_alike([eight, Batches.of(4, 16, drop_last=False)], "min_size", (7, 1))
        False
    """
    if len(loaders) < 2 or mode == "sequential":
        return True
    known = [each.size for each in loaders if each.size]
    if len(known) < len(loaders):
        return False
    first = known[0]
    if any(each.rest != 0 and _is_met(each, loaders, mode) for each in loaders):
        # all come to the same rest in the same step
        return len(set(loaders)) == 1 and loaders[0].rest is not None
    if all(size % first == 0 for size in known):
        return True
    return sizes is not None and all(size * part % first == 0 for size in known for part in sizes)


def _is_met(loader: Batches, loaders: Sequence[Batches], mode: str) -> bool:
    """Returns whether the last batch of a loader comes together with one of another."""
    others = list(loaders)
    others.remove(loader)
    if mode == "max_size":
        return any(other.steps >= loader.steps for other in others)
    return mode != "min_size" or all(other.steps >= loader.steps for other in others)
