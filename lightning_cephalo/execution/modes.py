"""What stays on a device from the forward to the backward: activations, and gathered units."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cephalo.execution.entrance import ROOT
from lightning_cephalo.execution.evaluator import Evaluator
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.unit import Unit


class Modes(Evaluator):
    """Steps in one of several modes, each of which asks for other memory to gather units into.

    Args:
        units: All units; the root unit first.
        control: Exchanges between the ranks' processes.
        device: This rank's device.
        recompute: Whether units are computed again in the backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        control: ControlGroup,
        device: torch.device,
        recompute: bool,
    ) -> None:
        super().__init__(units, control, device)
        self._recompute, self._reshard_after_forward = recompute, True
        self._choose_memory()
        self.units[ROOT].choose_memory(kept=False)  # gathered once a step: nothing finds it again

    @property
    def recompute(self) -> bool:
        """Whether units are computed again in the backward; may change between steps."""
        return self._recompute

    @recompute.setter
    def recompute(self, recompute: bool) -> None:
        self._recompute = recompute
        self._choose_memory()

    @property
    def reshard_after_forward(self) -> bool:
        """Whether units are freed after the forward and gathered again in the backward.

        May change between steps, on all ranks together.
        """
        return self._reshard_after_forward

    @reshard_after_forward.setter
    def reshard_after_forward(self, reshard_after_forward: bool) -> None:
        self._reshard_after_forward = reshard_after_forward
        self._choose_memory()

    def _choose_memory(self) -> None:
        for unit in self.units[1:]:
            unit.choose_memory(kept=not self._recompute, stays=not self._reshard_after_forward)
