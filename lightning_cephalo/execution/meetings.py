"""Lets layers of synchronised batch normalisation meet; see [Note: meetings] in normalisation.py.

Their ``forward`` is replaced on the instance, like that of units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import now
from lightning_cephalo.execution.normalisation import (
    Joint,
    Statistics,
    joined,
    no_moments,
    refuse_single_value,
)
from lightning_cephalo.plan.program import Visit
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_gather_rows

if TYPE_CHECKING:
    from lightning_cephalo.execution.failure import Failure
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
            return running.normalise(index, layer, value)
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
        self.numbers: set[int] = set()
        self._brought: Tensor | None = None
        self._taken: Tensor | None = None

    def begin_step(self) -> None:
        self.numbers = set()

    def forward(
        self,
        visit: Visit,
        microbatches: Sequence[Microbatch],
        meet: Callable[[Tensor], Tensor],
        waiting_for_ranks: _Context,
    ) -> None:
        """Give the microbatches that wait at this visit the statistics of the global batch."""
        moments = [no_moments(self._norms.layers[visit.meeting], self._device)]
        found = [each.meeting for each in microbatches if each.parked == visit]
        waiting = [meeting for meeting in found if meeting is not None]
        rows = [meeting.row for meeting in waiting if meeting.row is not None]

        def collect() -> None:
            if rows:
                moments.append(joined(torch.stack([row.detach() for row in rows])))

        self._failure.guarded(collect)
        with waiting_for_ranks():
            together = joined(self._of_ranks(moments[-1]))

        def answer() -> None:
            refuse_single_value(together, sum(each.values_per_channel for each in waiting))
            statistics = Statistics.of_moments(together)
            joint: Tensor | None = None
            if visit.differentiable and any(row.requires_grad for row in rows):
                self.numbers.add(now())
                with torch.enable_grad():
                    joint = Joint.apply(statistics, meet, *rows)
            for each in waiting:
                each.statistics, each.joint, each.row = statistics, joint, None

        self._failure.guarded(answer)

    def bring(self, gradient: Tensor) -> None:
        """Note this rank's gradient of the statistics, for the meeting that comes next."""
        self._brought = gradient

    def backward(self, visit: Visit, waiting_for_ranks: _Context) -> None:
        """Sum the gradients of the statistics over all ranks."""
        own, self._brought = self._brought, None
        if own is None:  # nothing here depends on them
            own = no_moments(self._norms.layers[visit.meeting], self._device)[1:]
        with waiting_for_ranks():
            self._taken = self._of_ranks(own).sum(0)

    def take(self) -> Tensor:
        """Return the sum of the last meeting."""
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken

    def _of_ranks(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, stacked; in rank order, so that sums are equal on all."""
        if self._control.world_size == 1:
            return own[None]
        group: Any = dist.group.WORLD  # its own: gathers and reduces may be under way
        return all_gather_rows(own[None], [1] * self._control.world_size, group)
