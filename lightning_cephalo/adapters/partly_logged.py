"""Warns of means that only some microbatches of a step log.

A mean over some samples, such as those of a class, is logged where there are any. A microbatch's
value then counts with all of its samples, unless ``batch_size=`` says of how many it is the mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence


class PartlyLogged:
    """Warns once of a key whose mean some microbatches log, and others do not."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def look(self, name: str, microbatches: Sequence[int], count: int) -> None:
        """Look at a key that these of ``count`` microbatches have logged."""
        logged = len(set(microbatches))
        if logged == count or name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"{logged} of {count} microbatches log {name!r}. Its mean weighs each by all of its"
            " samples, so that it depends on the plan, if it is a mean over some of them: log it"
            " with batch_size=, the number of samples that it is the mean of.",
            stacklevel=2,
        )
