"""Executes the schedule: owns every collective of a step, so that all ranks issue the same.

What happens when a rank fails: [Note: failures] in guard.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_cephalo.accelerator.throttle import Throttle
from lightning_cephalo.execution.arguments import UnitUseError
from lightning_cephalo.execution.call import ForwardOutcome, MicrobatchCall, StepTimes
from lightning_cephalo.execution.entrance import ROOT
from lightning_cephalo.execution.failure import BEGINNING
from lightning_cephalo.execution.memory_errors import Place
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.modes import Modes
from lightning_cephalo.execution.offload import UNITS_THAT_STAY, HostRing
from lightning_cephalo.execution.visits import Order, where
from lightning_cephalo.plan.program import (
    Action,
    Operation,
    Visit,
    backward_actions,
    forward_actions,
)
from lightning_cephalo.plan.timeline import Activity
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.unit import Unit, UnitState

_DOING = {
    Operation.GATHER: "gather",
    Operation.FORWARD: "forward",
    Operation.BACKWARD: "backward",
    Operation.REDUCE: "reduce",
    Operation.FREE: "release",
}


class Runner(Modes):
    """Runs training and evaluation steps over units.

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
        recompute: bool = True,
    ) -> None:
        super().__init__(units, control, device, recompute)
        self.stopwatch = control.stopwatch
        self.ring: HostRing | None = None
        self._throttle = Throttle(device)
        self.clock: Callable[[], float] | None = None
        self.times: StepTimes | None = None
        self._order = Order([unit.name for unit in self.units])
        self._orders: dict[tuple[bool, ...], tuple[Visit, ...]] = {}
        self._visits: tuple[Visit, ...] = ()
        self._loss_scale = 1.0
        self._total_weight = 1.0

    def expect_weight(self, total: float) -> None:
        """Say what the weights of the next step's microbatches sum to, about.

        The loss is scaled by a power of two near that, so that gradients are as large as those of
        one device: in fp16 larger ones would overflow. From then on each step goes by the last.
        """
        self._total_weight = max(self._total_weight, total)

    def forget_order(self) -> None:
        """Discover the order of visits anew in the next step."""
        self._orders.clear()

    @property
    def inside_microbatch(self) -> bool:
        """Whether a microbatch's step is running right now."""
        return self._running is not None

    @property
    def visits(self) -> tuple[Visit, ...]:
        """The order of visits of the last training step."""
        return self._visits

    # -- training: forward --------------------------------------------------------------------

    def forward(
        self,
        calls: Sequence[MicrobatchCall],
        loss_factor: float = 1.0,
        note: Callable[[], Sequence[float]] = tuple,
        failure: BaseException | None = None,
    ) -> ForwardOutcome:
        """Pass all microbatches through all units and run the tails' backward.

        Args:
            calls: This rank's microbatches; may be empty. Other ranks may have other numbers.
            loss_factor: Factor of every loss beside its weight (a gradient scaler's).
            note: Numbers to send to all ranks with the exchange that ends the forward; equally
                many on every rank.
            failure: Why this rank has no microbatches to run, where it should have. It takes part
                in the step without any, and all ranks raise at its end.

        Raises:
            RemoteRankError: If another rank failed; this rank's own failure is raised as it is.
        """
        self.stopwatch.restart()
        self.stopwatch.begin()
        self._throttle.begin_step()
        trainable = tuple(unit.trainable for unit in self.units)
        order = self._orders.get(trainable)
        inside = self._inside_units() if order is None else None
        self.times, self._place = None, BEGINNING
        self._failure = None if failure is None else self._explained(failure)
        self._loss_scale = loss_factor / 2.0 ** round(math.log2(max(self._total_weight, 1e-30)))
        self._loss_factor = loss_factor
        self._calls = list(calls)
        self._weights: list[float] = [0.0] * len(calls)
        self._microbatches = [
            Microbatch(
                call.step,
                self.device,
                self.recompute,
                self.clock,
                inside,
                self.ring,
                math.inf if order is None else len(order) - UNITS_THAT_STAY,
            )
            for call in calls
        ]
        if self.ring is not None:
            self._guarded(self.ring.start)  # may allocate
        self._outer_s = 0.0
        self._start_gather(ROOT)
        if order:  # what comes before the first unit hides its gather
            self._start_gather(order[0].unit)
        self.units[ROOT].wait_gather()
        self.units[ROOT].arm()
        for index in range(len(self._microbatches)):
            self._compute(Activity.TAIL, ROOT, index, self._advance_and_tail, index)
        visits = self._discovered() if order is None else order
        actions = forward_actions(
            visits,
            len(calls),
            prefetch=order is not None,
            reshard=self.reshard_after_forward,
        )
        for action in actions:
            self._execute(action, order)
        if order is not None:
            self._visits = order
        self._guarded(self._all_finished)
        outcome = self._agree(note())
        self._orders[trainable] = self._visits
        self.stopwatch.end()
        return outcome

    def _inside_units(self) -> frozenset[int]:
        flats = [flat for unit in self.units[1:] for flat in unit.flats]
        return frozenset(id(parameter) for flat in flats for parameter in flat.parameters)

    def _advance_and_tail(self, index: int) -> None:
        if not self._microbatches:
            return
        microbatch = self._microbatches[index]
        start = self.clock() if self.clock else 0.0
        inside = sum(microbatch.forward_s)
        self._calls[index].on_resume()
        self._advance(microbatch)
        self._calls[index].on_pause()
        if microbatch.finished:
            if self.recorder is not None:
                self.recorder.returned()
            loss, weight = self._calls[index].weight_of(microbatch.result)
            self._weights[index] = weight
            if weight:  # else its loss may be 0/0: a mean over no tokens
                self._tail_backward(microbatch, loss * (weight * self._loss_scale))
        if self.clock:
            self._outer_s += self.clock() - start - (sum(microbatch.forward_s) - inside)

    def _tail_backward(self, microbatch: Microbatch, loss: Tensor) -> None:
        self._in_backward = True
        try:
            microbatch.backward_of_loss(loss)
        finally:
            self._in_backward = False

    def _execute(self, action: Action, order: Sequence[Visit] | None) -> None:
        index, microbatch = action.unit, action.microbatch
        if self.watch is not None:
            self.watch()
        if index >= 0:
            name, count = self.units[index].name, len(self._calls)
            self._place = Place(_DOING[action.operation], name, microbatch, count)
        match action.operation:
            case Operation.GATHER:
                self._start_gather(index)
            case Operation.FORWARD:
                self.units[index].wait_gather()
                if order is not None:
                    self._guarded(self._at_unit, microbatch, order[action.visit])
                self._compute(
                    Activity.FORWARD, index, microbatch, self._advance_and_tail, microbatch
                )
            case Operation.TAIL:
                pass  # a microbatch that returns runs its tail at once: see _advance_and_tail
            case Operation.BACKWARD:
                self.units[index].wait_gather()
                self._compute(
                    Activity.BACKWARD,
                    index,
                    microbatch,
                    self._backward_of_visit,
                    microbatch,
                    action.visit,
                )
            case Operation.REDUCE:
                self._reduce(index)
            case Operation.FREE:
                self.units[index].free()

    def _compute(
        self, name: Activity, unit: int, microbatch: int, function: Callable[..., None], *args: int
    ) -> None:
        if self.recorder is None:
            self._guarded(function, *args)
            return
        with self.recorder.computing(name, unit, microbatch):
            self._guarded(function, *args)

    def _start_gather(self, index: int) -> None:
        unit = self.units[index]
        if unit.state is not UnitState.SHARDED:
            return
        start = self.recorder.now() if self.recorder is not None else None
        self._with_memory(unit.start_gather)
        if self.recorder is not None:
            self.recorder.issued(Activity.GATHER, index, start, unit.works[0])

    def _at_unit(self, index: int, expected: Visit) -> None:
        if self._microbatches:
            self._order.check(index, self._microbatches[index].parked, expected)

    def _all_finished(self) -> None:
        for index, microbatch in enumerate(self._microbatches):
            if not microbatch.finished:
                self._order.check(index, microbatch.parked, None)

    def _discovered(self) -> Iterator[Visit]:
        """Find the order while running it: before each gather all ranks say where they are."""
        found: list[Visit] = []
        while True:
            self._guarded(self._all_at_one_place)
            place = where(
                failed=self._failure is not None,
                parked=[microbatch.parked for microbatch in self._microbatches],
            )
            try:
                visit = self._order.agree(self.control.gather(list(place)))
            except UnitUseError as failure:
                self._failure = failure
                visit = None
            if visit is None:
                break
            found.append(visit)
            yield visit
        if any(not microbatch.finished for microbatch in self._microbatches):
            self._abandon()  # another rank has failed, which the exchange to come will tell
        self._visits = tuple(found)

    def _all_at_one_place(self) -> None:
        self._order.check_parked([microbatch.parked for microbatch in self._microbatches])

    def _agree(self, note: Sequence[float]) -> ForwardOutcome:
        failed = self._failure is not None
        said = self.control.gather([float(failed), math.fsum(self._weights), *note])
        if any(row[0] for row in said):
            self._give_up("running training_step")
        total = math.fsum(row[1] for row in said)
        if not total > 0.0:
            self._failure = ValueError(
                f"The weights of all microbatches of this step sum to {total}; expected more than"
                " 0. Does training_step return a wrong 'weight', or did no rank get a sample?"
            )
            self._give_up("running training_step")
        self._total_weight = total
        results = tuple(microbatch.result for microbatch in self._microbatches)
        for microbatch in self._microbatches:
            microbatch.result = None
        notes = tuple(tuple(row[2:]) for row in said)
        return ForwardOutcome(results, tuple(self._weights), total, notes)

    # -- training: backward -------------------------------------------------------------------

    def backward(self, divisor: float = 1.0) -> None:
        """Carry the gradients through all units and set them on the sharded parameters.

        Args:
            divisor: Gradients are divided by it (steps that are accumulated before an update).
        """
        self.stopwatch.begin()
        self._final_scale = self._loss_factor / (self._loss_scale * self._total_weight * divisor)
        self._reducing: Unit | None = None
        self._used: dict[int, list[bool]] = {}
        armed: set[int] = set()
        self._in_backward = True
        trainable = [unit.trainable for unit in self.units]
        # hooks may have freed what stays for the backward (checkpoints, samples)
        for visit in self._visits[-1:] if self.reshard_after_forward else self._visits:
            self._start_gather(visit.unit)
        self._start_gather(ROOT)
        self.units[ROOT].wait_gather()
        actions = backward_actions(
            self._visits, len(self._calls), trainable, reshard=self.reshard_after_forward
        )
        for action in actions:
            needs_gradients = action.operation in (Operation.BACKWARD, Operation.REDUCE)
            if needs_gradients and action.unit not in armed:
                self._place = Place("gradient", self.units[action.unit].name)
                # before anyone waits for the unit: zeroing hides some of its gather
                self._with_memory(self.units[action.unit].arm)
                armed.add(action.unit)
            self._execute(action, None)
        self._reduce(ROOT)
        self._finish_reduce(None)
        self.units[ROOT].free()
        self._in_backward = False
        self._note_times()
        self._microbatches = []
        self._throttle.end_step()
        self._publish(armed | {ROOT})
        self.stopwatch.end()

    def _backward_of_visit(self, index: int, position: int) -> None:
        if self._microbatches:
            self._microbatches[index].backward_of_visit(position)

    def _reduce(self, index: int) -> None:
        unit = self.units[index]
        self._used[id(unit)] = unit.used()
        self._finish_reduce(unit)
        start = self.recorder.now() if self.recorder is not None else None
        self._with_memory(partial(unit.start_reduce, self._final_scale))
        if self.recorder is not None:
            self.recorder.issued(Activity.REDUCE, index, start, unit.works[1])

    def _finish_reduce(self, following: Unit | None) -> None:
        # one reduce is under way at a time: it overlaps the next unit's compute
        if self._reducing is not None:
            self._reducing.wait_reduce()
        self._reducing = following

    def _note_times(self) -> None:
        if self.clock and self._microbatches:
            self.times = StepTimes(
                sum(sum(microbatch.forward_s) for microbatch in self._microbatches),
                sum(sum(microbatch.backward_s) for microbatch in self._microbatches),
                self._outer_s,
                len(self._visits),
            )

    def _publish(self, reduced: set[int]) -> None:
        """Give gradients to the parameters that any rank used, or raise on all ranks."""
        units = [self.units[index] for index in sorted(reduced)]
        flags = [self._failure is not None]
        for unit in units:
            flags.extend(self._used.get(id(unit), []))
        agreed = self.control.any(flags)
        if agreed[0]:
            self._give_up("running the backward")
        start = 1
        for unit in units:
            end = start + len(self._used.get(id(unit), []))
            unit.publish(agreed[start:end])
            start = end
