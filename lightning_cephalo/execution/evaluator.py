"""Steps without gradients: units are gathered as ranks ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_cephalo.execution.call import ForwardOutcome, MicrobatchCall
from lightning_cephalo.execution.entrance import ROOT
from lightning_cephalo.execution.failure import Guard
from lightning_cephalo.execution.memory_errors import Place
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.visits import FAILED, FINISHED, where
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.unit import Unit


class Evaluator(Guard):
    """Runs steps of validation, testing and predicting.

    Args:
        units: All units; the root unit first.
        control: Exchanges between the ranks' processes.
        device: This rank's device.
    """

    def __init__(self, units: Sequence[Unit], control: ControlGroup, device: torch.device) -> None:
        super().__init__(units, control)
        self.device = device
        self._calls: list[MicrobatchCall] = []

    def evaluate(
        self,
        call: MicrobatchCall | None,
        doing: str,
        note: Callable[[], Sequence[float]] = tuple,
    ) -> ForwardOutcome:
        """Run one step without gradients, gathering units as ranks ask for them.

        Ranks may call units differently often (text generation): while one is still running, the
        others keep communicating.

        Args:
            call: This rank's step; None on a rank without samples.
            doing: For messages.
            note: As in :meth:`~.runner.Runner.forward`.

        Returns:
            The result, if this rank had a step, and the notes; weights are not asked for.
        """
        self._failure, self._place = None, Place("evaluation")
        self._calls = [] if call is None else [call]
        self._microbatches = [
            Microbatch(call.step, self.device, recompute=False) for call in self._calls
        ]
        self.units[ROOT].wait_gather()
        self._guarded(self._advance_evaluation)
        while True:
            parked = [microbatch.parked for microbatch in self._microbatches] or [None]
            own, _ = where(failed=self._failure is not None, parked=parked)
            rows = self.control.gather([own, *note()])
            said = [row[0] for row in rows]
            if FAILED in said:
                self._give_up(doing)
            wanted = [unit for unit in said if unit != FINISHED]
            if not wanted:
                break
            unit = self.units[int(min(wanted))]
            self._place = Place("evaluation", unit.name)
            unit.wait_gather()
            if own == min(wanted):
                self._guarded(self._advance_evaluation)
            unit.free()
        results = tuple(microbatch.result for microbatch in self._microbatches)
        self._microbatches = []
        return ForwardOutcome(results, (), 0.0, tuple(tuple(row[1:]) for row in rows))

    def _advance_evaluation(self) -> None:
        if self._microbatches:
            self._calls[0].on_resume()
            self._advance(self._microbatches[0])
            self._calls[0].on_pause()
