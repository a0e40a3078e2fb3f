"""Lets layers of synchronised batch normalisation meet; see [Note: meetings] in normalisation.py.

Their ``forward`` is replaced on the instance, like that of units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.boundaries import Boundaries, refuse_saved_tensor_hooks
from lightning_cephalo.execution.captures import Captures, VisitRecords
from lightning_cephalo.execution.normalisation import (
    Meeting,
    Statistics,
    joined,
    moments_of,
    no_moments,
    refuse_single_value,
    update_running,
)
from lightning_cephalo.plan.program import ROOT, Visit
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_gather_rows

if TYPE_CHECKING:
    from lightning_cephalo.execution.failure import Failure
    from lightning_cephalo.execution.microbatch import Microbatch


class SynchronisedNorms:
    def __init__(self, module: nn.Module, running: Callable[[], Microbatch | None]) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
        self.replaying: Microbatch | None = None
        self._running = running
        self.forwards: list[NormForward] = []

    def install(self) -> None:
        self.forwards = [NormForward(self, index, each) for index, each in enumerate(self.layers)]

    def uninstall(self) -> None:
        for layer in self.layers[: len(self.forwards)]:
            vars(layer).pop("forward", None)
        self.forwards = []

    def enter(self, index: int, value: Tensor) -> Tensor:
        layer, running = self.layers[index], self._running()
        if not layer.training:
            return type(layer).forward(layer, value)  # which communicates in training mode only
        if running is not None:
            return running.normalise(index, layer, value)
        if self.replaying is not None:
            return self.replaying.attendance.normalise_again(layer, value)
        raise UnitUseError(
            "A torch.nn.SyncBatchNorm in training mode is called outside of training_step, where"
            " not all ranks meet. Call it in training_step, or after eval()."
        )


class NormForward:
    def __init__(self, norms: SynchronisedNorms, index: int, layer: nn.Module) -> None:
        self._norms = norms
        self._index = index
        layer.forward = self

    def __call__(self, value: Tensor) -> Tensor:
        return self._norms.enter(self._index, value)


class Attendance:
    """What one microbatch brings to meetings, and what it gets from them."""

    def __init__(
        self,
        records: VisitRecords,
        boundaries: Boundaries,
        captures: Captures,
        park: Callable[[Visit], object],
        accelerator: Accelerator,
        *,
        recompute: bool,
        is_on: bool,
    ) -> None:
        self._records = records
        self._boundaries = boundaries
        self._captures = captures
        self._park = park
        self._accelerator = accelerator
        self._recompute = recompute
        self._is_on = is_on
        self.again: Iterator[Meeting] = iter(())
        self.moments: Tensor | None = None
        self.values_per_channel = 0
        self.statistics: Statistics | None = None

    def normalise(self, index: int, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Meet all microbatches of all ranks at a layer, then return its output."""
        if not self._is_on:
            raise UnsupportedError(
                "A torch.nn.SyncBatchNorm in training mode is called in evaluation, or with manual"
                " optimization. Ranks cannot meet there: they may call it differently often. Call"
                " eval() before, or use torch.nn.BatchNorm."
            )
        entered = self._records.entered
        if entered is None:
            needs = [value, *norm.parameters(recurse=False)]
            differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in needs)
        else:
            differentiable = entered.differentiable
        if differentiable:
            refuse_saved_tensor_hooks("torch.nn.SyncBatchNorm")
        self._boundaries.drop_values()
        self.moments = moments_of(norm, value)
        self.values_per_channel = value.numel() // value.shape[1]
        self._park(Visit(ROOT if entered is None else entered.unit, differentiable, index))
        statistics, self.moments, self.statistics = self.statistics, None, None
        assert statistics is not None
        record = self._records.entered_record
        meeting = Meeting(norm, len(self._records), statistics, record)
        self._records.add(meeting if differentiable else None)
        update_running(norm, statistics)
        if record is not None:
            record.meetings = (*record.meetings, meeting)
            if self._recompute:
                # other microbatches have drawn numbers meanwhile
                meeting.random = self._accelerator.random_states()
                return meeting.normalised(value)
        return self._cut_at(meeting, value)

    def _cut_at(self, meeting: Meeting, value: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return meeting.normalised(value)
        is_inside = meeting.record is not None
        return meeting.cut(
            value, self._boundaries.leaf_of(value, meeting.position, is_inside=is_inside)
        )

    # -- backward -----------------------------------------------------------------------------

    def normalise_again(self, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Return a layer's output while its unit is computed again, with a graph."""
        meeting = next(self.again, None)
        if meeting is None or meeting.norm is not norm:
            raise UnitUseError(
                "A unit calls its layers of torch.nn.SyncBatchNorm otherwise when it is computed"
                " again for the backward. Use CephaloStrategy(recompute=False)."
            )
        assert meeting.random is not None
        self._accelerator.restore_random_states(meeting.random)
        update_running(norm, meeting.statistics)
        return self._cut_at(meeting, value)

    def sums_at(self, position: int) -> Tensor | None:
        """Return what this microbatch brings to a meeting in the backward; None: nothing."""
        meeting = self._records[position]
        return meeting.sums() if isinstance(meeting, Meeting) else None

    def backward(self, position: int, sums: Tensor) -> None:
        """Run the backward of a layer, and of the code before it back to the last cut."""
        meeting = self._records[position]
        record = None
        if isinstance(meeting, Meeting):
            meeting.finish(sums)
            record = meeting.record
            self._records[position] = None
        self._boundaries.passed(position)
        if record is not None:
            self._captures.backward(record, before=position)


_Context = Callable[[], AbstractContextManager[None]]


class Meetings:
    """Sums what microbatches of all ranks bring to a meeting; every method is collective."""

    def __init__(
        self,
        norms: SynchronisedNorms,
        failure: Failure,
        control: ControlGroup,
        device: torch.device,
    ) -> None:
        self._norms = norms
        self._failure = failure
        self._control = control
        self._device = device

    def forward(
        self, visit: Visit, microbatches: Sequence[Microbatch], waiting_for_ranks: _Context
    ) -> None:
        """Give the microbatches that wait at this visit the statistics of the global batch."""
        moments = [no_moments(self._norms.layers[visit.meeting], self._device)]
        waiting = [each.attendance for each in microbatches if each.parked == visit]

        def collect() -> None:
            own = [each.moments for each in waiting if each.moments is not None]
            if own:
                moments.append(joined(torch.stack(own)))

        self._failure.guarded(collect)
        with waiting_for_ranks():
            rows = self._of_ranks(moments[-1])
        together = joined(rows)

        def answer() -> None:
            refuse_single_value(together, sum(each.values_per_channel for each in waiting))
            statistics = Statistics.of_moments(together)
            for attendance in waiting:
                attendance.statistics = statistics

        self._failure.guarded(answer)

    def backward(
        self,
        visit: Visit,
        position: int,
        microbatches: Sequence[Microbatch],
        waiting_for_ranks: _Context,
    ) -> None:
        """Pass gradients on, through the statistics of the global batch."""
        sums = no_moments(self._norms.layers[visit.meeting], self._device)[1:]

        def collect() -> None:
            for microbatch in microbatches:
                own = microbatch.attendance.sums_at(position)
                if own is not None:
                    sums.add_(own)

        self._failure.guarded(collect)
        with waiting_for_ranks():
            rows = self._of_ranks(sums)
        together = rows.sum(0)

        def finish() -> None:
            for microbatch in microbatches:
                microbatch.attendance.backward(position, together)

        self._failure.guarded(finish)

    def _of_ranks(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, stacked; in rank order, so that sums are equal on all."""
        if self._control.world_size == 1:
            return own[None]
        group: Any = dist.group.WORLD  # its own: gathers and reduces may be under way
        return all_gather_rows(own[None], [1] * self._control.world_size, group)
