"""Runs a step whose code calls its backwards and optimizers itself (manual optimization).

[Note: phases]
``training_step`` runs once on each rank, as one microbatch. Each backward ends a phase of the step:
all ranks meet there. A unit is gathered once and reduced once per backward. Gradients add up until
the code sets them to None. Between its uses a parameter is its shard. The root unit is gathered
when the code first computes with it, and freed by a backward and by an optimizer's step.

Before each gather all ranks exchange their places, as code may take another way at any time. The
next unit of the step before is gathered ahead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.agreement import combine_overlay
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.microbatch import MicrobatchOptions
from lightning_cephalo.execution.step import ForwardOutcome, MicrobatchCall, Step
from lightning_cephalo.execution.visits import FAILED, FINISHED, NO_DATA, agree, where
from lightning_cephalo.features.manual_microbatch import AT_BACKWARD, AT_UPDATE, ManualMicrobatch
from lightning_cephalo.features.phases import (
    Seen,
    adopt,
    note_update,
    rows_written,
    seen_of,
    show_flags,
)
from lightning_cephalo.features.step_functions import StepFunctions, warn_of_own_gradient
from lightning_cephalo.plan.orders import Choice
from lightning_cephalo.plan.program import (
    NONE,
    ROOT,
    Instruction,
    Operation,
    Visit,
    layered_backward,
    prefetch,
)
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.unit import Unit, UnitState
from lightning_cephalo.sharding.write_guard import spelled

_DOING = "running training_step"
# where ranks wait for all others, by the code that they exchange
_MEETINGS = {place.unit: place for place in (AT_BACKWARD, AT_UPDATE)}
_DOES = {
    FINISHED: "have returned",
    AT_BACKWARD.unit: "call self.manual_backward()",
    AT_UPDATE.unit: "clip gradients or call optimizer.step()",
}


class PhasedSteps:
    """Runs steps with several backwards on one executor.

    Attributes:
        is_measured: Whether steps are measured: optimizers update nothing then.
        losses: What this rank's backwards of a measured step began from.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._functions = StepFunctions(self)
        self.is_measured = False
        self.calls_hooks = True
        self.losses: list[Tensor] = []
        self._told_of_gradient = False
        self._expected: list[Visit] = []
        self._places: list[Visit] = []
        self._order: list[Visit] = []
        self._choice = Choice(())
        self._seen: list[Seen] = []
        # a graph of glue may live from one gather of the root unit to the next
        self._root.choose_residence(Residence.OWN)

    @property
    def _root(self) -> Unit:
        return self._executor.units[ROOT]

    # -- a step -------------------------------------------------------------------------------

    def run(
        self,
        call: MicrobatchCall | None,
        note: Callable[[], Sequence[float]] = tuple,
        failure: BaseException | None = None,
    ) -> ForwardOutcome:
        """Run a step; collective. Only while ranks are measured, a rank may have no ``call``."""
        executor = self._executor
        calls = [] if call is None else [replace(call, step=self._watched(call.step))]
        if call is None and failure is None and not self.is_measured:
            failure = UnsupportedError(
                "This rank has no samples in a step with manual optimization, whose code every rank"
                " must run, as it updates the optimizers. Use DataLoader(drop_last=True), or a"
                " plan with samples for every rank."
            )
        options = MicrobatchOptions(executor.recompute)
        microbatches = executor.microbatches_of(calls, options, ManualMicrobatch)
        for microbatch in microbatches:
            microbatch.outside = self._functions.suspended
        self._places, self._order, self._seen = [], [], []
        self._choice = Choice([place for place in self._expected if place.unit > ROOT])
        step = executor.begin_phases(calls, microbatches, self._order)
        step.before_visit = self._show_flags
        if failure is not None:
            executor.failure.note(failure)
        samples = [each.samples for each in calls]
        executor.failure.guarded(executor.overlay.begin, samples, False)
        self._advance(step)
        while (place := self._next_place(step)) is not None:
            if place == AT_BACKWARD:
                self._backward(step)
            elif place == AT_UPDATE:
                self.reshard()
                self._advance(step)
            else:
                self._visit(step, place)
            self._places.append(place)
        return self._finish(step, note)

    @contextmanager
    def measuring(self, *, calls_hooks: bool = True) -> Iterator[None]:
        self.is_measured, self.losses = True, []
        self.calls_hooks = calls_hooks
        try:
            with self._rows_put_back(), warnings.catch_warnings():
                # no optimizer steps here, which schedules that step complain of
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                yield
        finally:
            self.is_measured, self.calls_hooks = False, True

    @contextmanager
    def _rows_put_back(self) -> Iterator[None]:
        """Undo writes to shards in a ``with`` block: clamped weights, or a target that moves."""
        shards = [flat.shard for unit in self._executor.units for flat in unit.flats]
        with self._executor.accelerator.on_host():
            before = [(shard, shard._version, shard.to("cpu", copy=True)) for shard in shards]
        try:
            yield
        finally:
            for shard, version, rows in before:
                if shard._version != version:
                    shard.copy_(rows)

    def _watched(self, user: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> Any:
            with self._functions:
                return user()

        return step

    def _advance(self, step: Step, unit: int = NONE, position: int = NONE) -> None:
        """Run the step's code until it parks, and take over what it does to parameters."""
        self._executor.execute(Instruction(Operation.FORWARD, unit, position, microbatch=0))
        self._executor.failure.guarded(self._look, step)

    def _look(self, step: Step) -> None:
        if any(unit.has_landed for unit in self._executor.units):
            raise UnitUseError(
                "training_step has run a backward that ends at a unit, so that its gradient would"
                " be that of this rank alone (torch.autograd.backward?), or assigns a gradient"
                " between a forward and its backward. Call self.manual_backward(loss), and assign"
                " gradients behind it."
            )
        stale: list[str] = []
        for unit in self._gathered():
            adopt(unit)
            stale.extend(rows_written(unit))
        if stale:
            raise UnitUseError(
                f"training_step writes to {spelled(stale)} between a forward that uses it and the"
                " next backward or update: the forward's copy would keep the old values. Write"
                " before the forward, or after the update."
            )

    def _gathered(self) -> list[Unit]:
        return [unit for unit in self._executor.units if unit.state is UnitState.GATHERED]

    def _next_place(self, step: Step) -> Visit | None:
        """Return the place where ranks go on; None at the end of the step and after a failure.

        A backward or an update comes when all ranks have called theirs.
        """
        executor, choice = self._executor, self._choice
        failed = executor.failure.error is not None
        said = executor.link.exchange(where(failed=failed, parked=step.parked, choice=choice))
        place, _ = agree([row for row in said if row[0] not in _MEETINGS], choice)
        codes = {row[0] for row in said} - {NO_DATA}
        if place is None and FAILED not in codes and not codes.isdisjoint(_MEETINGS):
            if len(codes) == 1:
                return _MEETINGS[int(codes.pop())]
            does = ", others ".join(_DOES[code] for code in sorted(codes, reverse=True))
            executor.failure.note(
                UnitUseError(
                    f"Ranks do different things in training_step: some {does}. All ranks run each"
                    " backward and each update together, so that none may depend on a rank's own"
                    " samples."
                )
            )
        if place is None and any(not each.code.finished for each in step.microbatches):
            executor.failure.abandon()  # the exchange at the end of the step reports the failure
        return place

    def _visit(self, step: Step, place: Visit) -> None:
        units = self._executor.units
        if place.unit == ROOT:
            self._gather(ROOT)
            if place in step.parked:  # other ranks may wait elsewhere
                self._advance(step, ROOT)
            return
        position = len(self._order)
        self._order.append(place)  # which is also `step.visits`
        if self._executor.reshard_after_forward:
            for index, unit in enumerate(units[1:], start=1):
                if index != place.unit and unit.state is not UnitState.SHARDED:
                    self._executor.execute(Instruction(Operation.FREE, index, position))
        self._gather(place.unit, position)
        self._gather_ahead(place, position)
        self._seen.append(seen_of(units[place.unit]))
        self._advance(step, place.unit, position)

    def _gather(self, unit: int, position: int = NONE) -> None:
        if self._executor.units[unit].state is UnitState.SHARDED:
            rows_written(self._executor.units[unit])  # graphs of before are refused from now on
            self._executor.execute(Instruction(Operation.GATHER, unit, position))
            self._executor.units[unit].show_gradients()

    def _gather_ahead(self, place: Visit, position: int) -> None:
        """Begin to gather the unit that followed this place in the last step."""
        known = [*self._places, place]
        if self._expected[: len(known)] != known:
            return
        for after in self._expected[len(known) : len(known) + 1]:
            if after.unit > ROOT and after.unit != place.unit:
                self._gather(after.unit, position + 1)

    def _finish(self, step: Step, note: Callable[[], Sequence[float]]) -> ForwardOutcome:
        executor = self._executor
        executor.failure.guarded(executor.writes.check, "training_step")
        executor.failure.guarded(executor.overlay.finish)
        failed = executor.failure.error is not None
        samples = math.fsum(call.samples for call in step.calls)
        own = [float(failed), samples, executor.overlay.code]
        said = executor.link.exchange([*own, *note()])
        if any(row[0] for row in said):
            executor.give_up(_DOING)
        combine_overlay(executor, [row[2] for row in said], _DOING)
        self.reshard()
        self._expected = self._places
        results = tuple(microbatch.code.result for microbatch in step.microbatches)
        executor.end_phases(self._order)
        total = math.fsum(row[1] for row in said)
        notes = tuple(tuple(row[3:]) for row in said)
        weights = tuple(float(call.samples) for call in step.calls)
        return ForwardOutcome(results, weights, total, notes)

    # -- a backward ---------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run the backward of a loss, from within a step; arguments as for ``Tensor.backward``."""
        given = {"gradient": gradient, "create_graph": create_graph, "inputs": inputs}
        wrong = [name for name, value in given.items() if value is not None and value is not False]
        if wrong:
            raise UnsupportedError(
                f"backward({wrong[0]}=...) under strategy='cephalo': only retain_graph is possible,"
                " because the backward runs over units, one by one, on all ranks. Multiply the loss"
                " instead of a gradient."
            )
        running = self.check_is_running()
        if self.is_measured:
            self.losses.append(loss.detach())
        running.need_backward(loss, bool(retain_graph))

    def check_is_running(self) -> ManualMicrobatch:
        """Return the microbatch that runs, which is the one of this step."""
        running = self.running
        if running is None:
            raise UnsupportedError(
                "manual_backward() outside of training_step: all ranks run the backward together,"
                " unit by unit. Call it in training_step()."
            )
        return running

    @property
    def running(self) -> ManualMicrobatch | None:
        running = self._executor.hooks.running
        return running if isinstance(running, ManualMicrobatch) else None

    def _backward(self, step: Step) -> None:
        executor, units = self._executor, self._executor.units
        reached = [False] * len(self._order)

        def find_visits() -> None:
            for microbatch in self._microbatches(step):
                step.reached = frozenset(microbatch.visits_behind([microbatch.code.result]))
                for position in step.reached:
                    reached[position] = True

        executor.failure.guarded(find_visits)
        executor.failure.guarded(executor.writes.check, "training_step")
        failed = executor.failure.error is not None
        samples = math.fsum(call.samples for call in step.calls)
        said = executor.link.exchange([float(failed), samples, *reached])
        if any(row[0] for row in said):
            executor.give_up(_DOING)
        total = math.fsum(row[1] for row in said)
        step.weights.scale, step.gradient_scale = 1.0 / total, 1.0
        step.trainable = tuple(unit.trainable for unit in units)
        step.used, step.with_loss = {}, set()
        visits = [
            replace(visit, differentiable=any(row[2 + position] for row in said))
            for position, visit in enumerate(self._order)
        ]
        executor.failure.guarded(self._check_unchanged, visits)
        for unit in units:
            unit.hide_gradients()
        self._gather(ROOT)
        self._root.hide_gradients()
        executor.execute(Instruction(Operation.ARM, ROOT))
        executor.execute(Instruction(Operation.LOSS, ROOT, len(visits) - 1, microbatch=0))
        held = self._held()
        embeddings = replace(executor.ends, heads=frozenset())
        after = layered_backward(visits, len(step.microbatches), step.trainable, held, embeddings)
        executor.hooks.in_backward = True
        retains = any(microbatch.retains for microbatch in self._microbatches(step))
        executor.backward_pass.run(executor, prefetch(after), retain=retains)
        self.reshard()
        self._advance(step)

    @staticmethod
    def _microbatches(step: Step) -> list[ManualMicrobatch]:
        return [each for each in step.microbatches if isinstance(each, ManualMicrobatch)]

    def _show_flags(self, instruction: Instruction) -> None:
        """Let a unit's parameters need the gradients that they needed in its forward."""
        show_flags(self._executor.units[instruction.unit], self._seen[instruction.visit])

    def _held(self) -> list[int]:
        """Return the unit of the last visit if it is still gathered; free all others."""
        held = self._order[-1].unit if self._order else NONE
        for index, unit in enumerate(self._executor.units[1:], start=1):
            if index != held and self._executor.reshard_after_forward:
                unit.free()
        is_gathered = held != NONE and self._executor.units[held].state is UnitState.GATHERED
        return [held] if is_gathered else []

    def _check_unchanged(self, visits: Sequence[Visit]) -> None:
        """Raise if a backward would find other parameters than its forward."""
        for position, visit in enumerate(visits):
            if not visit.differentiable:
                continue
            unit = self._executor.units[visit.unit]
            rows_written(unit)
            before, now = self._seen[position], seen_of(unit)
            if now.versions != before.versions:
                raise UnitUseError(
                    f"The parameters of unit {unit.name!r} were updated between a forward and its"
                    " backward, which needs their old values; torch refuses this too, on one"
                    " device. Run the backward before the optimizer's step, or the forward again."
                )
            pairs = zip(chain(*before.flags), chain(*now.flags), strict=True)
            if any(needed and not needs for needed, needs in pairs):
                raise UnitUseError(
                    f"Parameters of unit {unit.name!r} needed gradients in the forward, but"
                    " requires_grad is False in its backward. Let toggle_optimizer() and"
                    " untoggle_optimizer() enclose both."
                )

    # -- updates of parameters ----------------------------------------------------------------

    def reshard(self) -> None:
        """Free all gathered units: from here on, code sees the shards."""
        for unit in self._gathered():
            adopt(unit)
        for unit in self._executor.units:
            unit.hide_gradients()
        self._executor.reshard()

    @contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer see and change the shards in a ``with`` block; collective."""
        with self._functions.suspended():
            self.meet()
            yield
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for unit in self._executor.units:
                note_update(unit, held)

    def closure(self, user: Callable[[], Any]) -> Callable[[], Any]:
        """Return the step's own closure of an optimizer, for that block."""

        def closure() -> Any:
            with self._functions.resumed():
                outcome = user()
            self.meet()
            return outcome

        return closure

    def meet(self) -> None:
        """Wait for all ranks before code that communicates, and show it the shards."""
        with self._functions.suspended():
            self._executor.writes.check("training_step")
            if self.running is None:
                self.reshard()
            else:
                self.running.need_update()

    # -- torch functions of the step's code ---------------------------------------------------

    def root_parameters(self) -> dict[int, Tensor]:
        """Return the gathered parameters of the root unit, by the ids of their shards."""
        return {id(sharded): gathered for sharded, gathered in self._root.parameter_pairs()}

    def names_inside(self) -> dict[int, str]:
        """Return the names of the trained parameters of all other units, by their ids."""
        named = [pair for unit in self._executor.units[1:] for pair in unit.named_sharded()]
        return {id(parameter): name for name, parameter in named if parameter.requires_grad}

    def need_root(self) -> None:
        """Gather the root unit, from within a step; with this step's torch functions suspended."""
        if self._root.state is UnitState.SHARDED and self.running is not None:
            self.running.need_root()

    def warn_of_own_gradient(self) -> None:
        if self._executor.link.control.world_size > 1 and not self._told_of_gradient:
            self._told_of_gradient = True
            warn_of_own_gradient()

    def refuse_gradients_through_units(self, outputs: Sequence[Tensor], inputs: Any) -> None:
        running = self.running
        wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
        if running is not None and running.visits_between(outputs, wanted):
            raise UnsupportedError(
                "torch.autograd.grad() of something that units have computed (a gradient penalty?)"
                " under strategy='cephalo': a unit's graph exists only in the layered backward."
                " Leave that network out of the units: CephaloStrategy(units=[...]) with the"
                " blocks of the other networks."
            )
