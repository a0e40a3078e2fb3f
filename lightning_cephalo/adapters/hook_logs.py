"""Makes means that hooks log for a step those of the global batch.

Lightning reduces such a value over the ranks at once, and all of them count alike. Ranks have
different numbers of samples here. Over an epoch Lightning itself weighs by ``batch_size``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.data.cutting import evaluation_samples


class HookLogs:
    """Knows the samples of the value that a hook is logging for a step.

    Example:
        >>> results = trainer.fit_loop.epoch_loop._results
        >>> logs.watch(results)
        >>> module.log("loss", outputs["loss"], sync_dist=True)  # reduces while ``samples`` is set

    Attributes:
        samples: While a mean for a step is being logged, this rank's samples: the ``batch_size`` of
            ``self.log``, or those of its batch. Else None.

    Args:
        lacks_samples: Returns whether a hook sees a repeated sample, which counts in no mean.
    """

    def __init__(self, lacks_samples: Callable[[], bool] = lambda: False) -> None:
        self.samples: float | None = None
        self._lacks_samples = lacks_samples

    def watch(self, results: Any) -> None:
        """Watch what is logged outside of microbatches.

        Args:
            results: Lightning's result collection of the running loop.
        """
        results.update_metrics = partial(self._update, results)  # on the instance

    def unwatch(self, results: Any) -> None:
        """End what :meth:`watch` has begun."""
        results.__dict__.pop("update_metrics", None)

    def _update(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        meta = results[key].meta
        is_averaged = results[key].is_tensor and meta.is_mean_reduction
        is_of_step = is_averaged and meta.on_step
        if is_of_step and not meta.on_epoch and results.batch_size is None and batch_size == 1:
            # before the step, for values of steps alone, Lightning does not look at the batch
            batch_size = evaluation_samples(results.batch)
        if results.batch is not None and self._lacks_samples():
            batch_size = 0
        self.samples = float(batch_size) if is_of_step else None
        if is_averaged and meta.sync.should and not batch_size:
            value = torch.zeros_like(value)  # a mean over nothing may be NaN, and counts nothing
        try:
            type(results).update_metrics(results, key, value, batch_size)
        finally:
            self.samples = None


def mean_over_samples(value: Tensor, samples: float, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of all ranks' values, weighed by their samples; NaN without any.

    Args:
        value: This rank's, of any shape; ignored without samples.
        samples: This rank's.
        total: Sums a tensor over the ranks; collective.
    """
    own = value * samples if samples else torch.zeros_like(value)
    summed = total(torch.cat([own.flatten(), own.new_tensor([samples])]))
    return (summed[:-1] / summed[-1]).reshape(value.shape)
