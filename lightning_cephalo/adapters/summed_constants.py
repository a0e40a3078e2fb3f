"""Warns of constants that users log as sums, which count once for each microbatch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import Tensor


class SummedConstants:
    """Warns once of a key whose summed value is the same in all microbatches of several steps.

    Such a value may be a constant, which counts once a step on one device. Multiples of the samples
    are counts. Only the first steps are looked at: the host waits for the values.
    """

    _STEPS = 3

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}

    def look(self, name: str, values: Tensor, sizes: Sequence[int]) -> None:
        """Look at the values of a step's microbatches, which have these numbers of samples."""
        seen = self._seen.setdefault(name, [])
        if len(seen) >= self._STEPS:
            return
        found = values.tolist()
        is_count = all(size and value % size == 0 for value, size in zip(found, sizes, strict=True))
        if len(set(found)) > 1 or is_count:
            seen.extend([math.nan] * self._STEPS)  # decided: no constant
            return
        seen.append(found[0])
        if len(seen) == self._STEPS and len(set(seen)) == 1:
            warnings.warn(
                f"self.log({name!r}, ..., reduce_fx='sum') got {found[0]:g} in each of"
                f" {len(found)} microbatches, in {self._STEPS} steps. A sum adds the values of all"
                " microbatches, so that a constant depends on the plan; on one device it counts"
                " once a step. Log a constant in on_train_batch_end(). Sums over samples are"
                " right.",
                stacklevel=2,
            )
