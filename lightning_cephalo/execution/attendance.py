"""One microbatch's part in meetings; see [Note: meetings] in normalisation.py.

A microbatch that comes to a layer of synchronised batch normalisation parks there. When it goes
on, it has the statistics of the global batch. Its backward stops there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.boundaries import Boundaries, refuse_saved_tensor_hooks
from lightning_cephalo.execution.captures import Captures
from lightning_cephalo.execution.normalisation import (
    Meeting,
    Statistics,
    moments_of,
    update_running,
)
from lightning_cephalo.execution.replay import RandomState
from lightning_cephalo.execution.visit_records import VisitRecords
from lightning_cephalo.plan.program import ROOT, Visit


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
                meeting.random = RandomState(self._accelerator)
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
        meeting.random.restore()
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
        self._boundaries.through_glue(position)
        if record is not None:
            self._captures.backward(record, before=position)
