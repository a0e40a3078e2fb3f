"""Lets layers of synchronised batch normalisation meet; see [Note: meetings] in normalisation.py.

Their ``forward`` is replaced on the instance, like that of units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.graph import now, refuse_saved_tensor_hooks
from lightning_cephalo.execution.normalisation import (
    Joint,
    Meeting,
    Statistics,
    joined,
    no_moments,
    refuse_single_value,
    update_running,
)
from lightning_cephalo.plan.program import ROOT, Instruction, Operation, Visit
from lightning_cephalo.sharding.collectives import all_gather_rows

if TYPE_CHECKING:
    from lightning_cephalo.execution.backward_pass import BackwardPass
    from lightning_cephalo.execution.executor import Executor
    from lightning_cephalo.execution.microbatch import Microbatch
    from lightning_cephalo.execution.recomputed import RecomputedVisit


class SynchronisedNorms:
    """The layers of synchronised normalisation, whose calls come here."""

    def __init__(self, module: nn.Module, running: Callable[[], Microbatch | None]) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
        self.again: RecomputedVisit | None = None
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
            return _normalise(running, index, layer, value)
        if self.again is not None:
            return self.again.normalise_again(layer, value)
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
    assert meeting.statistics is not None
    update_running(norm, meeting.statistics)
    if entered is not None:
        return meeting.normalised(value)
    microbatch.mark_behind_meeting(differentiable=differentiable)
    output = meeting.normalised(value)
    microbatch.behind_visit()
    return output


class Meetings:
    """Sums what microbatches of all ranks bring to a meeting; collective."""

    def __init__(self, norms: SynchronisedNorms, device: torch.device) -> None:
        self._norms = norms
        self._device = device
        self._brought: Tensor | None = None
        self._taken: Tensor | None = None

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
        moments = [no_moments(self._norms.layers[visit.meeting], self._device)]
        found = [each.meeting for each in step.microbatches if each.code.parked == visit]
        waiting = [meeting for meeting in found if meeting is not None]
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
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken

    def _backward(self, executor: Executor, visit: Visit) -> None:
        own, self._brought = self._brought, None
        if own is None:  # nothing here depends on them
            own = no_moments(self._norms.layers[visit.meeting], self._device)[1:]
        with executor.link.waiting():
            self._taken = self._of_ranks(executor, own).sum(0)

    def _of_ranks(self, executor: Executor, own: Tensor) -> Tensor:
        """Return the rows of all ranks, stacked; in rank order, so that sums are equal on all."""
        world_size = executor.link.control.world_size
        if world_size == 1:
            return own[None]
        group: Any = dist.group.WORLD  # its own: gathers and reduces may be under way
        return all_gather_rows(own[None], [1] * world_size, group)
