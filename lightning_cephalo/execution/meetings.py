"""Lets layers of synchronised batch normalisation meet; see [Note: meetings] in normalisation.py.

Their ``forward`` is replaced on the instance, like that of units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.failure import Failure
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.normalisation import (
    Statistics,
    joined,
    no_moments,
    refuse_single_value,
)
from lightning_cephalo.plan.program import Visit
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_gather_rows


class SynchronisedNorms:
    """The layers of synchronised batch normalisation of a model."""

    def __init__(self, module: nn.Module, running: Callable[[], Microbatch | None]) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
        self.replaying: Microbatch | None = None
        self._running = running
        self.forwards: list[NormForward] = []

    def install(self) -> None:
        """Replace the layers' forwards."""
        self.forwards = [NormForward(self, index, each) for index, each in enumerate(self.layers)]

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        for layer in self.layers[: len(self.forwards)]:
            vars(layer).pop("forward", None)
        self.forwards = []

    def enter(self, index: int, value: Tensor) -> Tensor:
        """Run in place of a layer's forward."""
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
    """Replaces the forward of one layer."""

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
