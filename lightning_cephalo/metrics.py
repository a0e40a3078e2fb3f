"""``self.log`` when a step is several microbatches, and ranks have different numbers of them.

Lightning synchronises inside every ``self.log`` call and keeps the last call's value. Both are
wrong here: ranks call it differently often (a hang), and the last microbatch is not the batch.
So nothing communicates while a microbatch runs; afterwards the values of a step become the
weighted mean (or sum, minimum, maximum) over microbatches, and, for ``sync_dist=True``, over ranks.

[Note: Lightning's result collection] ``trainer._results`` and its metrics are private; they are
touched in this file only, and ``tests/test_metrics.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.accumulation.agreement import Agreement


@dataclass(frozen=True)
class _Shared:
    """One logged key as other ranks need to know it."""

    key: str
    options: dict[str, Any]
    metric_attribute: str | None
    value: float | None
    weight: float


class StepLog:
    """Collects what the microbatches of one step log.

    Args:
        results: The trainer's result collection of the running loop, or None.
        sample_counts: Samples of each of this rank's microbatches.
    """

    def __init__(self, results: Any, sample_counts: Sequence[int]) -> None:
        self._results = results
        self._sample_counts = sample_counts
        self._seen: dict[str, Any] = {}
        self._values: dict[str, dict[int, Any]] = {}
        if results is not None:
            self._seen = {key: metric._forward_cache for key, metric in results.items()}

    def resume(self, microbatch: int) -> None:
        """A microbatch goes on: means are weighted by its samples."""
        if self._results is not None:
            self._results.batch_size = self._sample_counts[microbatch]

    def pause(self, microbatch: int) -> None:
        """A microbatch has parked or returned: note what it has logged since."""
        if not self._results:
            return
        for key, metric in self._results.items():
            cache = metric._forward_cache
            if cache is not None and cache is not self._seen.get(key):
                self._seen[key] = cache
                self._values.setdefault(key, {})[microbatch] = cache

    def note(self) -> tuple[float, float]:
        """``(number of live keys, whether a step's value must be synchronised)``."""
        synced = any(self._synced(key) for key in self._values)
        return float(len(self._live())), float(synced)

    def _live(self) -> dict[str, Any]:
        """Keys logged since they were last reset at the end of an epoch."""
        items = (self._results or {}).items()
        return {key: metric for key, metric in items if not metric.has_reset}

    def _synced(self, key: str) -> bool:
        metric = self._results[key]
        return bool(metric.is_tensor and metric.meta.on_step and metric.meta.sync.should)

    def finish(
        self,
        weights: Sequence[float],
        notes: Sequence[tuple[float, float]],
        agreement: Agreement,
        module: torch.nn.Module,
        sync: Callable[..., Any],
    ) -> None:
        """Combine the values; collective exactly when the notes of all ranks say so.

        Args:
            weights: Of this rank's microbatches.
            notes: :meth:`note` of every rank.
            agreement: Exchanges between ranks.
            module: The LightningModule, which holds the torchmetrics objects that were logged.
            sync: Lightning's reduce function, for keys that this rank has not logged itself.
        """
        local: dict[str, tuple[Tensor, float]] = {}
        for key, values in self._values.items():
            metric = self._results[key]
            if metric.is_tensor and metric.meta.on_step:
                local[key] = self._combined(metric, values, weights)
        counts = {count for count, _ in notes}
        if len(counts) > 1 or any(synced for _, synced in notes):
            self._share(local, agreement, module, sync)
        for key, (value, _) in local.items():
            self._write(key, value)

    @staticmethod
    def _combined(
        metric: Any, values: dict[int, Any], weights: Sequence[float]
    ) -> tuple[Tensor, float]:
        stacked = torch.stack([value.detach().double() for value in values.values()])
        if metric.meta.is_mean_reduction:
            chosen = torch.tensor(
                [weights[index] for index in values], dtype=torch.float64, device=stacked.device
            )
            total = float(chosen.sum())
            return (stacked * chosen).sum() / (total or 1.0), total
        return metric.meta.reduce_fx(stacked), 1.0

    def _write(self, key: str, value: Tensor) -> None:
        metric = self._results[key]
        cache = metric._forward_cache
        # a microbatch of this rank may not have logged it at all
        dtype = cache.dtype if isinstance(cache, Tensor) else torch.get_default_dtype()
        metric._forward_cache = value.to(dtype)
        if not metric.meta.on_epoch:
            metric.value = metric._forward_cache

    def _share(
        self,
        local: dict[str, tuple[Tensor, float]],
        agreement: Agreement,
        module: torch.nn.Module,
        sync: Callable[..., Any],
    ) -> None:
        own = []
        for key, metric in self._live().items():
            value, weight = None, 0.0
            if key in local and self._synced(key):
                value, weight = float(local[key][0]), local[key][1]
            own.append(
                _Shared(key, _options(metric.meta), metric.meta.metric_attribute, value, weight)
            )
        everyone = agreement.exchange_objects(own)
        if self._results is None:
            return
        found: dict[str, list[_Shared]] = {}
        for shared in everyone:
            for item in shared:
                found.setdefault(item.key, []).append(item)
        for key, items in found.items():
            if key not in self._live():
                self._adopt(items[0], module, sync)
            held = [item for item in items if item.value is not None]
            if held:
                metric = self._results[key]
                numbers = torch.tensor([item.value for item in held], dtype=torch.float64)
                if metric.meta.is_mean_reduction:
                    share = torch.tensor([item.weight for item in held], dtype=torch.float64)
                    combined = (numbers * share).sum() / (share.sum() or 1.0)
                else:
                    combined = metric.meta.reduce_fx(numbers)
                device = metric.value.device if isinstance(metric.value, Tensor) else "cpu"
                local[key] = (combined.to(device), 1.0)

    def _adopt(self, item: _Shared, module: torch.nn.Module, sync: Callable[..., Any]) -> None:
        """Log a key that this rank had no sample to log, with no weight.

        Without it the ranks would synchronise different keys at the end of the epoch.
        """
        value: Any = torch.zeros(())
        if item.metric_attribute is not None:
            value = module.get_submodule(item.metric_attribute)
        elif item.options["reduce_fx"] in ("max", "min"):
            value = torch.tensor(float("-inf" if item.options["reduce_fx"] == "max" else "inf"))
        previous = self._results.batch_size
        self._results.log(
            value=value,
            sync_dist_fn=sync,
            batch_size=0,
            metric_attribute=item.metric_attribute,
            **item.options,
        )
        self._results.batch_size = previous


def _options(meta: Any) -> dict[str, Any]:
    suffix = f".{meta.dataloader_idx}"
    suffixed = meta.add_dataloader_idx and meta.dataloader_idx is not None
    return {
        # the collection adds the suffix of the running dataloader itself
        "fx": meta.fx.removesuffix(suffix) if suffixed else meta.fx,
        "name": meta.name,
        "prog_bar": meta.prog_bar,
        "logger": meta.logger,
        "on_step": meta.on_step,
        "on_epoch": meta.on_epoch,
        "reduce_fx": meta.reduce_fx.__name__,
        "enable_graph": False,
        "sync_dist": meta.sync.should,
        "add_dataloader_idx": meta.add_dataloader_idx,
        "rank_zero_only": meta.sync.rank_zero_only,
    }
