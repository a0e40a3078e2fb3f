"""Combines ``self.log`` values over microbatches and ranks, by their samples.

Lightning synchronises inside of every ``self.log`` call and keeps the last call's value. Here the
number of calls differs between ranks (a hang), and the last microbatch is not the batch. So values
are only collected while a microbatch runs. After the step each key gets one value: the weighted
mean (or sum, minimum, maximum) over microbatches and, for ``sync_dist=True``, over ranks. For the
epoch, Lightning accumulates this rank's part of it. Means that hooks log are weighted, too.

A value weighs the ``batch_size`` given to ``self.log``; else the ``"weight"`` that
``training_step`` returned; else the microbatch's samples. torchmetrics collect exactly themselves;
their value of a *step* is the weighted mean over microbatches. A rank without samples in a step
takes the other ranks' keys and values.

[Note: Lightning's result collection] A collection and its metrics are private; they are touched in
this file only, and ``tests/lightning/test_logging.py`` fails when they change. At the end of an
epoch Lightning synchronises keys by their order, without their names: other keys are refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cephalo.adapters.view import TrainerView, result_metric
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.common.weighted_mean import weighted_mean
from lightning_cephalo.data.cutting import evaluation_samples
from lightning_cephalo.execution.step import ForwardOutcome
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.collectives import all_gather_rows


class _Samples(int):
    """A batch size that the user has not given."""


class _Note(NamedTuple):
    """What all ranks get of a rank's step: a checksum of keys, and what its samples weigh."""

    synced_keys: float
    shows_synced: float
    samples: float
    weight: float


class _Logged(NamedTuple):
    """A value of a microbatch, or of all of them; a tensor, as reading it would wait."""

    value: Tensor
    weight: float
    microbatch: int = 0


# weights of ranks that have not logged a key are negative
_MISSING = _Logged(torch.zeros((), dtype=torch.float64), -1.0)


class StepLog:
    """Collects what the microbatches of one step log; ``counts`` are their samples."""

    def __init__(self, logs: StepLogs, results: Any, counts: Sequence[int]) -> None:
        self.results, self.counts = results, counts  # results are None where no value counts
        self.calls: dict[str, list[_Logged]] = {}
        self.weight = 0.0  # of this rank's samples in an evaluation
        self._logs, self._microbatch = logs, 0

    def resume(self, microbatch: int) -> None:
        """Collect the values that a microbatch logs, as it starts or resumes."""
        self._logs.running, self._microbatch = self, microbatch
        if self.results is not None:
            self.results.batch_size = _Samples(self.counts[microbatch])

    def pause(self) -> None:
        """Stop collecting, as the microbatch has paused or returned."""
        self._logs.running = None

    def collect(self, key: str, value: Any, batch_size: int) -> None:
        """Collect a value of the running microbatch."""
        if self.results is None:
            return
        metric = self.results[key]
        metric.has_reset = False
        if not metric.is_tensor:
            _update(self.results, key, value, batch_size)
            value = metric._forward_cache
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1):
                return
        self.calls.setdefault(key, []).append(_Logged(value, batch_size, self._microbatch))

    def note(self) -> tuple[float, ...]:
        """Return what all ranks must know of this rank's step."""
        self.pause()
        synced = {key: each for key, each in _live(self.results).items() if _is_synced(each)}
        # numbers travel as float64, which holds every checksum of 32 bits exactly
        checksum = zlib.crc32("\n".join(synced).encode())
        shows = any(metric.is_tensor and metric.meta.on_step for metric in synced.values())
        return _Note(checksum, shows, sum(self.counts), self.weight)


class StepLogs:
    """Creates the log of each step, and combines it over microbatches and ranks.

    ``lacks_samples`` returns whether hooks see a repeated sample, which counts in no mean.
    """

    def __init__(
        self, view: TrainerView, groups: Groups, lacks_samples: Callable[[], bool]
    ) -> None:
        self.are_combining = False  # the strategy leaves alone what Lightning would reduce
        self.running: StepLog | None = None  # that of the microbatch that runs
        self._control, self._group = groups.control, groups.gather
        self._view, self._lacks_samples = view, lacks_samples

    def watch(self, results: Any) -> None:
        """Take the values that are logged into a result collection of Lightning."""
        results.update_metrics = partial(self._take, results)  # on the instance

    def unwatch(self, results: Any) -> None:
        """End what :meth:`watch` has begun."""
        results.__dict__.pop("update_metrics", None)

    def of_step(self, counts: Sequence[int], *, is_seen: bool = True) -> StepLog:
        """Return the log of a step whose values count, unless it is a repeated forward."""
        return StepLog(self, self._view.results if is_seen else None, counts)

    def finish(self, log: StepLog, outcome: ForwardOutcome) -> None:
        """Combine the logged values of a step; collective exactly if the ranks' notes say so."""
        notes = [_Note(*row[: len(_Note._fields)]) for row in outcome.notes]
        keys = self._shared_keys(log, notes)
        if log.results is None:
            return
        samples = sum(note.samples for note in notes)
        total = outcome.total_weight + sum(note.weight for note in notes)
        weights = outcome.weights or ([log.weight] if sum(log.counts) else [])
        if not total:
            weights, total = [float(count) for count in log.counts], samples
        # in units of samples, by which Lightning weights what hooks log, and the steps of an epoch
        weights = [weight * samples / total for weight in weights]
        own: dict[str, _Logged] = {}
        for key, calls in log.calls.items():
            metric = log.results[key]
            weighed = [
                call._replace(weight=weights[call.microbatch])
                if isinstance(call.weight, _Samples)
                else call
                for call in calls
            ]
            if metric.is_tensor:
                self._accumulate(log.results, key, _reduced(metric.meta, weighed))
            # an epoch has all values of a key that is logged twice, and a step the last
            own[key] = _reduced(metric.meta, {call.microbatch: call for call in weighed}.values())
            _show(metric, own[key].value)
        if keys:
            self._share(log, own, keys, samples)
        log.results.batch_size = _whole(sum(weights))  # for what hooks log of this batch

    def _shared_keys(self, log: StepLog, notes: Sequence[_Note]) -> list[str]:
        """Return the keys whose values the ranks exchange, which all of them have."""
        with_samples = [rank for rank, note in enumerate(notes) if note.samples]
        live = _live(log.results)
        if len({notes[rank].synced_keys for rank in with_samples}) > 1:
            _refuse_other_keys(
                self._control.gather(tuple(key for key in live if _is_synced(live[key]))),
                with_samples,
            )
        if len(with_samples) in (0, len(notes)):
            shows = any(note.shows_synced for note in notes)
            return [k for k, each in live.items() if shows and each.is_tensor and _is_synced(each)]
        sent = tuple((key, each.is_tensor, _sendable(each.meta)) for key, each in live.items())
        described = self._control.gather(sent)[with_samples[0]]
        if not sum(log.counts):
            self._adopt(log.results, described, live)
        return [key for key, is_tensor, _ in described if is_tensor]

    def _adopt(self, results: Any, described: Iterable[Any], live: Collection[str]) -> None:
        """Log the keys of another rank, in their order, in a way that changes nothing."""
        module = self._view.module
        for key, is_tensor, meta in described:
            meta.sync = replace(meta.sync, fn=self._view.strategy.reduce)
            metric = results.setdefault(key, result_metric(meta, is_tensor).to(module.device))
            results[key] = results.pop(key)  # behind those before it
            if key in live:
                continue
            metric.has_reset, metric._forward_cache = False, None
            if not is_tensor:
                metric.value = module.get_submodule(meta.metric_attribute)
            for counted in (metric, *([] if is_tensor else [metric.value])):
                # else torchmetrics warns that it was never updated, but others have updated it
                counted._update_count, counted._computed = counted._update_count or 1, None
        # as if it had logged them: else its first own value would reset them
        self._view.connector("logger")._current_fx = module._current_fx_name

    def _share(
        self, log: StepLog, own: dict[str, _Logged], keys: Sequence[str], samples: float
    ) -> None:
        """Show the values over all ranks of keys that synchronise; here all, without samples."""
        given = [own.get(key, _MISSING) for key in keys]
        # the host waits for no device: values stay on it, and weights are numbers
        device = self._view.strategy.root_device
        own_values = torch.stack([g.value.to(device, non_blocking=True) for g in given])
        values = all_gather_rows(own_values[None], [1] * self._control.world_size, self._group)
        weights = self._control.gather([g.weight for g in given])
        for key, of_ranks, column in zip(keys, zip(*weights, strict=True), values.T, strict=True):
            pairs = zip(column, of_ranks, strict=True)
            held = [_Logged(value, weight) for value, weight in pairs if weight >= 0.0]
            metric = log.results.get(key)
            if not held or metric is None:
                continue
            value = _reduced(metric.meta, held).value
            if not _is_synced(metric):
                if sum(log.counts):
                    continue
                self._accumulate(log.results, key, _Logged(value, samples))
            _show(metric, value)

    def _accumulate(self, results: Any, key: str, logged: _Logged) -> None:
        """Pass Lightning a value of this rank for its epoch, which is not reduced over ranks."""
        # a mean over nothing may be NaN, and counts nothing
        value = logged.value if logged.weight else torch.zeros_like(logged.value)
        self.are_combining = True
        try:
            _update(results, key, value.to(results[key].value), _whole(logged.weight))
        finally:
            self.are_combining = False

    # -- hooks --------------------------------------------------------------------------------

    def _take(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        meta = metric.meta
        if self.running is not None:
            self.running.collect(key, value, batch_size)
            return
        if not metric.is_tensor or not meta.is_mean_reduction:
            _update(results, key, value, batch_size)
            return
        if not meta.on_epoch and results.batch_size is None and batch_size == 1:
            # before the step, for values of steps alone, Lightning does not look at the batch
            batch_size = evaluation_samples(results.batch)
        if results.batch is not None and self._lacks_samples():
            batch_size = 0
        self._accumulate(results, key, _Logged(value, batch_size))
        if meta.on_step and _is_synced(metric):
            value = value.double() if batch_size else torch.zeros_like(value.double())
            parts = torch.stack([value * batch_size, torch.full_like(value, batch_size)])
            total, size = meta.sync.fn(parts, group=meta.sync.group, reduce_op="sum")
            _show(metric, total / size)


def _refuse_other_keys(of_ranks: Sequence[Sequence[str]], with_samples: Sequence[int]) -> None:
    first, *others = (set(of_ranks[rank]) for rank in with_samples)
    differ = sorted(set().union(*(first ^ other for other in others))) or ["their order"]
    raise UnsupportedError(
        "Ranks have logged different keys with sync_dist=True, or different metrics:"
        f" {', '.join(differ)}. Lightning synchronises keys by their order. Log the same ones on"
        " every rank: log a value that some batches lack as a sum, 0 where it is missing, or leave"
        " out sync_dist=True."
    )


def _live(results: Any) -> dict[str, Any]:
    """Return the keys logged since they were last reset at the end of an epoch."""
    return {
        key: metric
        for key, metric in (results or {}).items()
        if not metric.has_reset and not metric.meta.sync.rank_zero_only
    }


def _is_synced(metric: Any) -> bool:
    """Return whether Lightning, or torchmetrics, synchronises a metric at the end of an epoch."""
    sync = metric.meta.sync
    return not metric.is_tensor or (sync.should and not sync.rank_zero_only)


def _sendable(meta: Any) -> Any:
    return replace(meta, _sync=replace(meta.sync, fn=None, _group=None))


def _update(results: Any, key: str, value: Any, batch_size: float) -> None:
    type(results).update_metrics(results, key, value, batch_size)


def _show(metric: Any, value: Tensor) -> None:
    """Set the value of the step, which is shown and logged."""
    if metric.meta.on_step:
        metric._forward_cache = value.to(
            metric.value if metric.is_tensor else metric._forward_cache
        )
        if metric.is_tensor and not metric.meta.on_epoch:
            metric.value = metric._forward_cache


def _reduced(meta: Any, logged: Collection[_Logged]) -> _Logged:
    """Return the value of a key over microbatches or ranks, with its weight."""
    values = [each.value.detach().double().reshape(()) for each in logged]
    if not meta.is_mean_reduction:
        return _Logged(meta.reduce_fx(torch.stack(values)), 1.0)
    weights = [each.weight for each in logged]
    return _Logged(weighted_mean(values, weights), sum(weights))


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number
