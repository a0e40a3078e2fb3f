"""Warns of a ``batch_size=`` of ``self.log`` that is the same for microbatches of any size.

``self.log("loss", loss, batch_size=self.batch_size)`` is right on one device, where the batch has
as many samples. A microbatch has fewer, and microbatches of different sizes then weigh alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


class ConstantBatchSizes:
    """Warns once of a key whose means have one weight, whatever the samples of a microbatch.

    It is the loader's ``batch_size``, or more than a microbatch has samples and no multiple of
    them: tokens are one, and a mean over a part of the samples gives less. The first steps decide.
    """

    _STEPS = 3

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[int, int]]] = {}
        self._left: dict[str, int] = {}

    def look(
        self, name: str, given: Sequence[int], samples: Sequence[int], of_loader: Any = None
    ) -> None:
        """Look at the numbers that a step's microbatches with these samples give for a key.

        Args:
            name: The key.
            given: The numbers.
            samples: Of each of these microbatches.
            of_loader: The training loader's ``batch_size``, if it has one.
        """
        left = self._left.setdefault(name, self._STEPS)
        if not left:
            return
        seen = self._seen.setdefault(name, [])
        seen.extend(zip(map(int, given), samples, strict=True))
        numbers, sizes = map(set, zip(*seen, strict=True))
        self._left[name] = left - 1 if len(numbers) == 1 else 0
        if left > 1 or len(numbers) > 1:
            return
        (number,) = numbers
        may_count = number <= max(sizes) or (len(sizes) == 1 and number % min(sizes) == 0)
        if sizes == {number} or (may_count and number != of_loader):
            return
        counts = " and ".join(map(str, sorted(sizes)))
        warnings.warn(
            f"self.log({name!r}, ..., batch_size={number}) gives this number for microbatches of"
            f" {counts} samples. It weighs their means, so that the logged value depends on the"
            " plan. Leave batch_size out: then a microbatch counts with its samples. Or give their"
            " number, such as batch_size=len(batch[0]).",
            stacklevel=2,
        )
