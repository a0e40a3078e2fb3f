"""Says what rounding the gradients that travel has changed in the first step."""

from __future__ import annotations

import math

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.profiling.progress import Progress


class RoundingReport:
    """Measures the first step's rounding, and tells the user of it once.

    ::

        report = RoundingReport(model, verbose=True)
        report.between_steps()  # nothing yet
        ...                     # the first step
        report.between_steps()  # rank 0 prints the line

    Args:
        model: The sharded model; without rounding, there is nothing to say.
        verbose: Whether rank 0 prints the line.

    Attributes:
        share: What the gradient changed by, divided by its norm; None: it was not measured.
    """

    def __init__(self, model: ShardedModel, *, verbose: bool) -> None:
        self._control, self._rounding = model.control, model.rounding
        self._verbose = verbose
        self.share: float | None = None
        if self._rounding is not None:
            self._rounding.measure()

    def between_steps(self) -> None:
        """Tell what has been measured; collective until it has been told."""
        if self._rounding is None or not self._rounding.is_measured:
            return
        parts = self._control.gather(self._rounding.squares())
        changed, whole = (math.fsum(squares) for squares in zip(*parts, strict=True))
        if whole == 0.0:  # no step yet, or one without a gradient
            return
        if not math.isfinite(changed + whole):  # a step that is skipped, as scaled ones may be
            self._rounding.measure()
            return
        self._rounding.stop()
        self.share = math.sqrt(changed / whole)
        if changed == 0.0:  # nothing is wider than what travels
            return
        dtype = str(self._rounding.dtype).removeprefix("torch.")
        Progress(self._verbose and self._control.rank == 0).warn(
            f"Gradients travel as {dtype}: rounding changed that of the first step by"
            f" {self.share:.2%} of its norm."
        )
