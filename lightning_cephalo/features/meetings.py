"""Lets layers of synchronised batch normalisation meet; see [Note: meetings] in normalisation.py.

Their ``forward`` is replaced on the instance, like that of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.graph import now, refuse_saved_tensor_hooks
from lightning_cephalo.execution.unit_hooks import ReplacedForward
from lightning_cephalo.features.normalisation import (
    Joint,
    Meeting,
    Statistics,
    joined,
    no_moments,
    refuse_single_value,
)
from lightning_cephalo.plan.program import ROOT, Instruction, Operation, Visit
from lightning_cephalo.sharding.collectives import all_gather_rows, everyone

if TYPE_CHECKING:
    from lightning_cephalo.execution.backward_pass import BackwardPass
    from lightning_cephalo.execution.executor import Executor
    from lightning_cephalo.execution.microbatch import Microbatch
    from lightning_cephalo.execution.recomputed import RecomputedVisit


class NormForward(ReplacedForward):
    def __init__(self, executor: Executor, index: int, layer: nn.SyncBatchNorm) -> None:
        self._hooks, self._recomputing = executor.hooks, executor.recomputing
        self._index, self._layer = index, layer
        vars(layer)["forward"] = self

    def __call__(self, value: Tensor) -> Tensor:
        layer, running, again = self._layer, self._hooks.running, self._recomputing.visit
        if not layer.training:
            return type(layer).forward(layer, value)  # which communicates in training mode only
        if running is not None:
            return _normalise(running, self._index, layer, value)
        if again is not None:
            return _normalise_again(again, layer, value)
        raise UnitUseError(
            "A torch.nn.SyncBatchNorm in training mode is called outside of training_step, where"
            " not all ranks meet. Call it in training_step, or after eval()."
        )

    def remove(self) -> None:
        vars(self._layer).pop("forward", None)


def install(executor: Executor) -> None:
    """Let the layers of synchronised normalisation of a model meet."""
    modules = executor.units[ROOT].module.modules()
    layers = [each for each in modules if isinstance(each, nn.SyncBatchNorm)]
    for index, layer in enumerate(layers):
        executor.hooks.add(NormForward(executor, index, layer))
    executor.handlers[Operation.MEET] = Meetings(layers, executor.accelerator.device).run


def _normalise(microbatch: Microbatch, index: int, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
    """Meet all microbatches of all ranks at a layer, then return its output."""
    if not microbatch.meets:
        raise UnsupportedError(
            "A torch.nn.SyncBatchNorm in training mode is called in evaluation, or with manual"
            " optimization. Ranks cannot meet there: they may call it differently often. Call"
            " eval() before, or use torch.nn.BatchNorm."
        )
    entered = microbatch.entered
    if entered is None:
        needs = any(each.requires_grad for each in (value, *norm.parameters(recurse=False)))
        differentiable = torch.is_grad_enabled() and needs
    else:
        differentiable = entered.differentiable
    if differentiable and microbatch.visiting is None:
        refuse_saved_tensor_hooks("torch.nn.SyncBatchNorm")
    meeting = Meeting(norm, microbatch.arrival())
    meeting.bring(value)
    unit = ROOT if entered is None else entered.unit
    microbatch.meet(Visit(unit, differentiable, index), meeting)
    if entered is not None:
        return meeting.normalised(value)
    microbatch.mark_behind_meeting(differentiable=differentiable)
    output = meeting.normalised(value)
    microbatch.behind_visit()
    return output


def _normalise_again(visit: RecomputedVisit, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
    """Return the output of a layer while its unit is computed again."""
    meeting = visit.meet_again()
    if meeting is None or meeting.norm is not norm:
        raise UnitUseError(
            "A unit calls its layers of torch.nn.SyncBatchNorm otherwise when it is computed"
            " again for the backward. Use CephaloStrategy(recompute=False)."
        )
    meeting.bring(value)  # its graph saves what that of the first run has saved
    output: Tensor = meeting.normalised(value)
    return output


class Meetings:
    """Sums what microbatches of all ranks bring to a meeting; collective."""

    def __init__(self, layers: Sequence[nn.SyncBatchNorm], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._brought: Tensor | None = None
        self._taken: list[Tensor] = []

    def run(self, executor: Executor, instruction: Instruction) -> None:
        """Let microbatches meet at a visit, in a forward or a backward."""
        visit = executor.step.visits[instruction.visit]
        if executor.hooks.in_backward:
            self._backward(executor, visit)
        else:
            self._forward(executor, visit, instruction.visit)

    def _forward(self, executor: Executor, visit: Visit, position: int) -> None:
        """Give the microbatches that wait at this visit the statistics of the global batch."""
        step, failure = executor.step, executor.failure
        moments = [no_moments(self._layers[visit.meeting], self._device)]
        found = [each.meeting for each in step.microbatches if each.code.parked == visit]
        waiting = [meeting for meeting in found if isinstance(meeting, Meeting)]
        rows = [meeting.row for meeting in waiting if meeting.row is not None]

        def collect() -> None:
            if rows:
                moments.append(joined(torch.stack([row.detach() for row in rows])))

        failure.guarded(collect)
        with executor.link.waiting():
            together = joined(self._of_ranks(executor, moments[-1]))

        def answer() -> None:
            refuse_single_value(together, sum(each.values_per_channel for each in waiting))
            statistics = Statistics.of_moments(together)
            joint: Tensor | None = None
            if visit.differentiable and any(row.requires_grad for row in rows):
                step.windows.joint.add(now())
                meet = partial(self._meet, executor.backward_pass, position)
                with torch.enable_grad():
                    joint = Joint.apply(statistics, meet, *rows)
            for each in waiting:
                each.statistics, each.joint, each.row = statistics, joint, None

        failure.guarded(answer)

    def _meet(self, backward: BackwardPass, position: int, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks of the gradients of statistics."""
        self._brought = gradient
        backward.run_to(Operation.MEET, position)
        return self._taken.pop()

    def _backward(self, executor: Executor, visit: Visit) -> None:
        own, self._brought = self._brought, None
        if own is None:  # nothing here depends on them
            own = no_moments(self._layers[visit.meeting], self._device)[1:]
        with executor.link.waiting():
            self._taken = [self._of_ranks(executor, own).sum(0)]

    def _of_ranks(self, executor: Executor, own: Tensor) -> Tensor:
        """Return the rows of all ranks, stacked; in rank order, so that sums are equal on all."""
        world_size = executor.link.control.world_size
        if world_size == 1:
            return own[None]
        # not by the groups of gathers and reduces, which may be under way
        return all_gather_rows(own[None], [1] * world_size, everyone())
