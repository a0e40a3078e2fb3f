"""Combines ``self.log`` values of a step's microbatches, of which ranks have different numbers.

Lightning synchronises inside every ``self.log`` call and keeps the last call's value. Both are
wrong here: the number of calls differs between ranks (a hang), and the last microbatch is not the
batch. So values are only collected while a microbatch runs. After the step each key gets one value:
the weighted mean (or sum, minimum, maximum) over microbatches and, for ``sync_dist=True``, over
ranks. For the epoch, Lightning accumulates this rank's part of that value.

==================  ================================================================================
weight of a value   the ``batch_size`` given to ``self.log``; else the ``"weight"`` that
                    ``training_step`` returned; else the microbatch's samples
torchmetrics        collected by the object itself, exactly; its value of a *step* is the weighted
                    mean over microbatches, exact for metrics that are means over samples
sums                add up over microbatches, so that counts of samples are right; a constant counts
                    once for each microbatch
no samples          a rank without samples in a step takes the other ranks' value
==================  ================================================================================

[Note: Lightning's result collection] ``trainer._results`` and its metrics are private; they are
touched in this file only, and ``tests/lightning/test_logging.py`` fails when they change.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.adapters.torchmetrics import metrics_of
from lightning_cephalo.execution.step import ForwardOutcome
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.collectives import all_gather_rows, broadcast


class _Samples(int):
    """A batch size that the user has not given."""


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


@dataclass(frozen=True)
class _Logged:
    """One call of ``self.log`` in a microbatch."""

    microbatch: int
    value: Tensor
    batch_size: int


@dataclass(frozen=True)
class _Combined:
    """The value of one key, combined over this rank's microbatches.

    The value stays a tensor: reading it would make the host wait for the device in every step.
    """

    value: Tensor
    weight: float
    samples: int
    scaled: bool


@dataclass(frozen=True)
class _Key:
    """The description of a logged key for ranks that have not logged it themselves."""

    key: str
    options: dict[str, Any]
    dataloader_idx: int | None
    metric_attribute: str | None


class StepLog:
    """Collects what the microbatches of one step log.

    Args:
        results: The trainer's result collection of the running loop, or None.
        sample_counts: Samples of each of this rank's microbatches.
        is_seen: Whether values count; those of a repeated forward do not.

    Attributes:
        weight: Weight of this rank's samples in an evaluation; 0 while training.
    """

    def __init__(
        self,
        results: Any,
        sample_counts: Sequence[int],
        is_seen: bool = True,
    ) -> None:
        self._is_seen = is_seen
        self._results = results
        # what watches hooks, and sees values again when no microbatch runs
        self._outside = None if results is None else results.__dict__.get("update_metrics")
        self._sample_counts = sample_counts
        self._samples = sum(sample_counts)
        self._microbatch = 0
        self._calls: dict[str, list[_Logged]] = {}
        self._metric_values: dict[str, dict[int, Any]] = {}
        self.weight = 0.0

    # -- while microbatches run ---------------------------------------------------------------

    def resume(self, microbatch: int) -> None:
        """Collect the values that a microbatch logs, as it starts or resumes."""
        if self._results is None:
            return
        self._microbatch = microbatch
        self._results.batch_size = _Samples(self._sample_counts[microbatch])
        self._results.update_metrics = self._collect  # on the instance, until pause

    def pause(self, microbatch: int) -> None:
        """Stop collecting, as the microbatch has paused or returned."""
        if self._results is None:
            return
        if self._outside is not None:
            self._results.update_metrics = self._outside
        else:
            self._results.__dict__.pop("update_metrics", None)

    def _collect(self, key: str, value: Any, batch_size: int) -> None:
        if not self._is_seen:
            return
        metric = self._results[key]
        metric.has_reset = False
        metric.__dict__.pop("_cephalo_borrowed", None)
        if metric.is_tensor:
            self._calls.setdefault(key, []).append(_Logged(self._microbatch, value, batch_size))
        else:
            type(self._results).update_metrics(self._results, key, value, batch_size)
            self._metric_values.setdefault(key, {})[self._microbatch] = metric._forward_cache

    def note(self) -> tuple[float, ...]:
        """Return what all ranks must know of this rank's step.

        These are a checksum of the keys, whether values are synchronised, samples, and weight.
        """
        self.pause(self._microbatch)
        # numbers travel as float64, which holds every checksum of 32 bits exactly
        checksum = zlib.crc32("\n".join(self._live()).encode())
        synced = any(self._synced(key) for key in self._live())
        return float(checksum), float(synced), float(self._samples), self.weight

    @property
    def _idle(self) -> bool:
        return not self._samples

    def _live(self) -> dict[str, Any]:
        """Return the keys logged since they were last reset at the end of an epoch."""
        items = (self._results or {}).items()
        return {
            key: metric
            for key, metric in items
            if not metric.has_reset and not metric.meta.sync.rank_zero_only
        }

    def _synced(self, key: str) -> bool:
        metric = self._results[key]
        return bool(metric.is_tensor and metric.meta.on_step and metric.meta.sync.should)

    # -- after the step -----------------------------------------------------------------------

    def finish(
        self,
        weights: Sequence[float],
        notes: Sequence[Sequence[float]],
        ranks: ValuesOfRanks,
        module: torch.nn.Module,
        sync: Callable[..., Any],
        total_weight: float,
    ) -> None:
        """Combine the values; collective exactly if the notes of all ranks require it.

        Args:
            weights: Weights of this rank's microbatches.
            notes: :meth:`note` of every rank.
            ranks: Exchanges values between ranks.
            module: The LightningModule, which holds the torchmetrics objects that were logged.
            sync: Lightning's reduce function, for keys that this rank has not logged itself.
            total_weight: Weight of the losses of all ranks; the notes have that of the others.
        """
        samples = sum(row[2] for row in notes)
        total = total_weight + sum(row[3] for row in notes)
        weight_of_sample = total / samples if samples else 1.0
        own, shown = {}, {}
        for key, calls in self._calls.items():
            last = list({call.microbatch: call for call in calls}.values())
            own[key] = shown[key] = self._combined(key, calls, weights)
            # a key may be logged twice: an epoch has all values of a step, which shows the last
            if len(last) < len(calls):
                shown[key] = self._combined(key, last, weights)
        for key, values in self._metric_values.items():
            self._combine_metric(key, values, weights)
        differ = len({row[0] for row in notes}) > 1
        if differ:
            self._agree_on_keys(ranks.control, module, sync)
        for key, combined in own.items():
            self._accumulate(key, combined, weight_of_sample)
            self._write(key, shown[key].value)
        idle = any(not row[2] for row in notes)
        if differ or idle or any(row[1] for row in notes):
            self._share(shown, ranks, samples)
        if self._results is not None and self._is_seen:
            # for what hooks log of this batch: samples, or as many as its tokens count for
            own_weight = sum(weights) if samples and total else float(self._samples)
            self._results.batch_size = _whole(own_weight / (weight_of_sample or 1.0))

    def _combined(self, key: str, calls: Sequence[_Logged], weights: Sequence[float]) -> _Combined:
        values = _values(calls)
        reduce_fx = self._results[key].meta.reduce_fx
        samples = sum(int(call.batch_size) for call in calls)
        if reduce_fx is not torch.mean:
            return _Combined(reduce_fx(values), 1.0, samples, True)
        given = not all(isinstance(call.batch_size, _Samples) for call in calls)
        shares = [float(call.batch_size) if given else weights[call.microbatch] for call in calls]
        return _Combined(_weighted_mean(values, shares), sum(shares), samples, given)

    def _combine_metric(self, key: str, values: dict[int, Any], weights: Sequence[float]) -> None:
        found = {
            index: value
            for index, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        total = sum(weights[index] for index in found)
        if len(found) > 1 and total:
            self._results[key]._forward_cache = sum(
                value.detach() * (weights[index] / total)
                for index, value in found.items()
                if weights[index]
            )

    def _accumulate(self, key: str, combined: _Combined, weight_of_sample: float) -> None:
        """Pass Lightning one value for the step, in place of those of the microbatches."""
        metric = self._results[key]
        value = combined.value
        if (
            metric.meta.is_mean_reduction
            and metric.meta.sync.should
            and not combined.scaled
            and combined.samples
        ):
            # Over ranks, Lightning weights values by samples; the step may weight them by tokens.
            accumulated = value * combined.weight / (weight_of_sample * combined.samples)
        else:
            accumulated = value
        self._update(key, accumulated, combined.samples)

    def _update(self, key: str, value: Tensor, samples: int) -> None:
        self._results.update_metrics(key, value.to(self._results[key].value), samples)

    def _write(self, key: str, value: Tensor) -> None:
        """Set the value of the step, which is shown and logged."""
        metric = self._results[key]
        if not metric.meta.on_step:
            return
        metric._forward_cache = value.to(metric.value)
        if not metric.meta.on_epoch:
            metric.value = metric._forward_cache

    def _share(self, own: dict[str, _Combined], ranks: ValuesOfRanks, samples: float) -> None:
        """Write the step's values over all ranks, for keys that synchronise or lack a value."""
        tensors = [key for key, metric in self._live().items() if metric.is_tensor]
        if not tensors:
            return
        missing = _Combined(torch.zeros((), dtype=torch.float64), -1.0, 0, True)
        given = [own.get(key, missing) for key in tensors]
        weights, values = ranks.gather([one.weight for one in given], [one.value for one in given])
        for index, key in enumerate(tensors):
            held = [rank for rank, row in enumerate(weights) if row[index] >= 0.0]
            if not held:
                continue
            metric = self._results[key]
            found = torch.stack([values[rank, index] for rank in held])
            value = _over_ranks(metric, found, [weights[rank][index] for rank in held])
            if self._synced(key):
                self._write(key, value)
            elif key not in own and not metric.meta.sync.should:
                self._borrow(key, value, int(samples))

    def _borrow(self, key: str, value: Tensor, samples: int) -> None:
        """Show the other ranks' value on a rank that has not logged the key itself."""
        if self._results[key].__dict__.get("_cephalo_borrowed"):
            self._update(key, value, samples)
        elif self._idle:
            self._write(key, value)

    # -- keys that not all ranks have logged --------------------------------------------------

    def _agree_on_keys(
        self, control: ControlGroup, module: torch.nn.Module, sync: Callable[..., Any]
    ) -> None:
        """Give all ranks the same keys in the same order.

        At the end of the epoch, Lightning synchronises the keys by order, without their names.
        """
        own = [
            _Key(
                key,
                _options(metric.meta),
                metric.meta.dataloader_idx,
                metric.meta.metric_attribute,
            )
            for key, metric in self._live().items()
        ]
        everyone = control.gather(tuple(own))
        if self._results is None:
            return
        order: dict[str, _Key] = {}
        for keys in everyone:
            for item in keys:
                order.setdefault(item.key, item)
        live = self._live()
        for item in order.values():
            if item.key not in live:
                self._adopt(item, module, sync)
        results = dict(self._results)
        self._results.clear()
        self._results.update({key: results.pop(key) for key in order})
        self._results.update(results)

    def _adopt(self, item: _Key, module: Any, sync: Callable[..., Any]) -> None:
        """Log a key that this rank has not logged, in a way that changes nothing."""
        if item.metric_attribute is not None:
            value = module.get_submodule(item.metric_attribute)
            # else torchmetrics warns that it was never updated, but other ranks have updated it
            value._update_count = value._update_count or 1
        else:
            neutral = {"max": float("-inf"), "min": float("inf")}
            number = neutral.get(item.options["reduce_fx"], 0.0)
            value = torch.full((), number, device=module.device)  # no copy to wait for
        previous = self._results.batch_size, self._results.dataloader_idx
        self._results.dataloader_idx = item.dataloader_idx
        self._results.log(
            value=value,
            sync_dist_fn=sync,
            batch_size=0,
            metric_attribute=item.metric_attribute,
            **item.options,
        )
        self._results.batch_size, self._results.dataloader_idx = previous
        metric = self._results[item.key]
        metric._forward_cache = None  # this step has no value to show
        metric._cephalo_borrowed = True


class ValuesOfRanks:
    """Exchanges logged values between ranks; the host waits for no device."""

    def __init__(self, groups: Groups, accelerator: Accelerator) -> None:
        self.control = groups.control
        self._group = groups.gather
        self._accelerator = accelerator

    def gather(
        self, weights: list[float], values: Sequence[Tensor]
    ) -> tuple[list[list[float]], Tensor]:
        """Return every rank's weights, and its values in a tensor of shape (ranks, values)."""
        ranks, device = self.control.world_size, self._accelerator.device
        own = torch.stack([value.to(device, non_blocking=True) for value in values])
        if not backend_of(self._group).runs_on_device:
            numbers = self.control.gather([*weights, *own.tolist()])
            count = len(weights)
            read = torch.tensor([row[count:] for row in numbers], dtype=torch.float64)
            return [row[:count] for row in numbers], read.to(device)
        # a number that the host reads, it must wait for: the values stay on the device
        everyones = all_gather_rows(own[None], [1] * ranks, self._group)
        return self.control.gather(weights), everyones

    def broadcast(self, values: Any, source: int) -> Any:
        """Return a tree of rank ``source`` with its tensors on this rank's device; collective."""
        is_source = self.control.rank == source
        outline = values
        if is_source:
            on_meta = partial(torch.empty_like, device="meta")
            outline = pytree.tree_map_only(Tensor, on_meta, values)
        leaves, spec = pytree.tree_flatten(self.control.broadcast(outline, source))
        own = pytree.tree_leaves(values) if is_source else leaves
        device = self._accelerator.device
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                there = own[index] if is_source else torch.empty_like(leaf, device=device)
                leaves[index] = there.to(device, non_blocking=True)
                broadcast(leaves[index], self._group, source)
        return pytree.tree_unflatten(leaves, spec)


class StepLogs:
    """Creates the log of each step, and combines it over microbatches and ranks.

    Args:
        module: The user's module.
        groups: The process groups of the run.
        accelerator: This rank's device.

    Attributes:
        metrics: The module's torchmetrics objects, by their names.
        ranks: Exchanges values between ranks.
        are_combining: Whether values of a step are being combined right now; meanwhile the strategy
            leaves tensors alone that Lightning would reduce.
    """

    def __init__(self, module: Any, groups: Groups, accelerator: Accelerator) -> None:
        self.metrics = metrics_of(module)
        self.are_combining = False
        self._module = module
        self.ranks = ValuesOfRanks(groups, accelerator)

    def of_step(self, sample_counts: Sequence[int], *, is_seen: bool = True) -> StepLog:
        """Return the log of a step."""
        return StepLog(self._module.trainer._results, sample_counts, is_seen)

    def finish(
        self,
        log: StepLog,
        outcome: ForwardOutcome,
        weights: Sequence[float],
        sync: Callable[..., Any],
    ) -> None:
        """Combine the logged values of a step; collective exactly if the ranks' notes say so."""
        self.are_combining = True
        try:
            total = outcome.total_weight
            log.finish(weights, outcome.notes, self.ranks, self._module, sync, total)
        finally:
            self.are_combining = False


def _over_ranks(metric: Any, values: Tensor, weights: Sequence[float]) -> Tensor:
    if not metric.meta.is_mean_reduction:
        return metric.meta.reduce_fx(values)
    return _weighted_mean(values, weights)


def _values(calls: Sequence[_Logged]) -> Tensor:
    return torch.stack([call.value.detach().double().reshape(()) for call in calls])


def _weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean of 1-d values; plain if there is no weight.

    A value without weight may be NaN (a mean over no tokens), which it stays if multiplied by 0.
    """
    chosen = [index for index, weight in enumerate(weights) if weight]
    if not chosen:
        return values.mean()
    known = torch.stack([values[index] for index in chosen])
    share = torch.tensor([weights[index] for index in chosen], dtype=torch.float64)
    return (known * share.to(values.device, non_blocking=True)).sum() / sum(weights)


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
