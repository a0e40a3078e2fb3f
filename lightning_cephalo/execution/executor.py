"""Runs programs and issues every collective of a step, so that all ranks issue the same ones.

What few steps need comes from ``features/``, which adds its handlers and places. For a rank that
fails, see [Note: failures] in failure.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.throttle import Throttle
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError
from lightning_cephalo.execution.agreement import end_backward, end_forward
from lightning_cephalo.execution.backward_pass import BackwardPass
from lightning_cephalo.execution.failure import Failure
from lightning_cephalo.execution.guards import BEFORE_BACKWARD, guards_of
from lightning_cephalo.execution.link import Link
from lightning_cephalo.execution.loss_weights import Weighing
from lightning_cephalo.execution.microbatch import BEHIND_THE_LAST, Microbatch, MicrobatchOptions
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.overlay import Overlay
from lightning_cephalo.execution.recomputed import Places, Recomputing
from lightning_cephalo.execution.step import NO_OUTCOME, ForwardOutcome, MicrobatchCall, Step
from lightning_cephalo.execution.tracing import Tracer
from lightning_cephalo.execution.unit_hooks import UnitHooks
from lightning_cephalo.execution.updates import Updates
from lightning_cephalo.execution.user_writes import (
    UserWrites,
    explained,
    read_elsewhere,
    used_outside,
)
from lightning_cephalo.execution.visits import FAILED, FINISHED, where
from lightning_cephalo.plan.orders import Choice
from lightning_cephalo.plan.program import (
    COMPUTE,
    NONE,
    ROOT,
    Ends,
    Instruction,
    Operation,
    Visit,
    evaluation_of,
    gathered_after,
    loss_unit,
)
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.placement import Meet
from lightning_cephalo.sharding.unit import Unit, UnitState

_Microbatch = TypeVar("_Microbatch", bound=Microbatch)

Handler = Callable[["Executor", Instruction], None]
"""Runs the instructions of one operation. A method would form a cycle, which keeps groups alive."""


@dataclass(frozen=True)
class _Mode:
    recompute: bool
    reshard_after_forward: bool = True


class Executor:
    """Runs training and evaluation steps over units.

    ::

        outcome = executor.forward(calls)   # the program's forward
        executor.backward()                 # its backward: gradients on the sharded parameters
        with executor.update():             # its update
            optimizer.step()

    Attributes:
        handlers: What runs each operation.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        control: ControlGroup,
        accelerator: Accelerator,
        recompute: bool = True,
        meet: Meet = lambda purpose, remedy: None,
    ) -> None:
        self.units = list(units)
        self.link, self.weighing = Link(control), Weighing()
        self.failure = Failure(control.rank, [unit.name for unit in units])
        self.hooks = UnitHooks(units, meet, UserWrites(units))
        self.guards = guards_of(units, self.hooks.writes)
        overlay = Overlay(units[ROOT].module, control, accelerator)
        self._places = Places(accelerator, overlay, None)
        self.updates, self.backward_pass = Updates(units), BackwardPass()
        self.tracer = Tracer(_ends_of(units))
        self.throttle = Throttle(accelerator)
        self._mode = _Mode(recompute=recompute)
        self.step = self._new_step((), [])
        self.handlers: dict[Operation, Handler] = {**_HANDLERS}
        self._choose_residence()
        # gathered once a step: no retained graph depends on finding the same memory again
        self.units[ROOT].choose_residence(Residence.POOLED)

    # -- parts --------------------------------------------------------------------------------

    @property
    def ends(self) -> Ends:
        """The units that are embeddings and heads."""
        return self.tracer.ends

    @property
    def accelerator(self) -> Accelerator:
        return self._places.accelerator

    @property
    def overlay(self) -> Overlay:
        return self._places.overlay

    @property
    def recomputing(self) -> Recomputing:
        """Holds the visit that is computed again."""
        return self._places.recomputing

    @property
    def writes(self) -> UserWrites:
        return self.hooks.writes

    @property
    def visits(self) -> tuple[Visit, ...]:
        """The order of visits of the last training step."""
        return self.tracer.visits.last

    @property
    def inside_microbatch(self) -> bool:
        return self.hooks.running is not None

    # -- settings -----------------------------------------------------------------------------

    @property
    def arena(self) -> HostArena | None:
        """Host memory for what enters units; None: it stays on the device."""
        return self._places.arena

    @arena.setter
    def arena(self, arena: HostArena | None) -> None:
        self._places = replace(self._places, arena=arena)

    @property
    def recompute(self) -> bool:
        """Whether the backward recomputes units; may change between steps."""
        return self._mode.recompute

    @recompute.setter
    def recompute(self, recompute: bool) -> None:
        self._mode = replace(self._mode, recompute=recompute)
        self._choose_residence()

    @property
    def reshard_after_forward(self) -> bool:
        """Whether units are freed after the forward; all ranks set it together."""
        return self._mode.reshard_after_forward

    @reshard_after_forward.setter
    def reshard_after_forward(self, reshard_after_forward: bool) -> None:
        self._mode = replace(self._mode, reshard_after_forward=reshard_after_forward)
        self._choose_residence()

    def _choose_residence(self) -> None:
        if not self.reshard_after_forward:
            residence = Residence.RESIDENT
        else:
            residence = Residence.POOLED if self.recompute else Residence.OWN
        for unit in self.units[1:]:
            unit.choose_residence(residence)

    # -- passes -------------------------------------------------------------------------------

    def forward(
        self,
        calls: Sequence[MicrobatchCall],
        scale_loss: Callable[[Tensor], Tensor] | None = None,
        note: Callable[[], Sequence[float]] = tuple,
        failure: BaseException | None = None,
    ) -> ForwardOutcome:
        """Pass all microbatches through all units and run the losses' backward."""
        self._hide_held_gradients()  # of a step whose backward has not come
        self.throttle.begin_step()
        visits = self._begin(calls)
        step = self.step
        step.weights.scale_loss, step.note = scale_loss, note
        if failure is not None:
            self.failure.note(failure)
        if self.arena is not None:
            self.failure.guarded(self.arena.start)  # may allocate
        self.failure.guarded(self.overlay.begin, [call.samples for call in calls])
        with self.writes.locked():
            self.run(self.tracer.forward(self) if visits is None else step.program.forward)
        step.showing = [u for u in self.units if u.state is not UnitState.SHARDED]
        self.show_held_gradients()
        # no reference stays here: results hold graphs, which must die with the caller's references
        outcome, step.outcome = step.outcome, NO_OUTCOME
        return outcome

    def _begin(self, calls: Sequence[MicrobatchCall]) -> Sequence[Visit] | None:
        self.updates.begin()
        step = self._new_step(calls, [])
        step.trainable = tuple(unit.trainable for unit in self.units)
        self.guards.begin_step(is_timed=self.updates.drops)
        visits = self.tracer.visits.known(step.trainable)
        last = NONE
        if visits is not None:
            last = len(visits) - 1 - (loss_unit(visits, self.ends) != ROOT)
        windows = step.windows if self.guards.all_look else None
        options = MicrobatchOptions(self.recompute, last, meets=True, windows=windows)
        step.microbatches = self.microbatches_of(calls, options, Microbatch)
        self._start(step, "beginning of the root unit")
        self.failure.guarded(self.guards.step_begins, step)
        if visits is not None:
            self.tracer.replay(self, visits)
        return visits

    def _new_step(self, calls: Sequence[MicrobatchCall], microbatches: list[Microbatch]) -> Step:
        readback = self.accelerator.readback()
        return Step(calls, microbatches, self.weighing.of_step(len(calls), readback))

    def _start(self, step: Step, place: str) -> None:
        self.step = step
        self.failure.begin(step.microbatches, place)

    def microbatches_of(
        self,
        calls: Sequence[MicrobatchCall],
        options: MicrobatchOptions,
        kind: type[_Microbatch],
    ) -> list[_Microbatch]:
        """Return the microbatches of a step."""
        return [
            kind(index, call.step, self._places, options, self.backward_pass)
            for index, call in enumerate(calls)
        ]

    def begin_phases(
        self,
        calls: Sequence[MicrobatchCall],
        microbatches: Sequence[Microbatch],
        visits: Sequence[Visit],
    ) -> Step:
        """Begin a step that calls its backwards itself; see ``features/manual_step.py``."""
        self.throttle.begin_step()
        step = self._new_step(calls, [*microbatches])
        step.visits, step.is_traced, step.goes_on = visits, True, True
        self._start(step, "beginning of the step")
        return step

    def end_phases(self, visits: Sequence[Visit]) -> None:
        self.tracer.visits.last = tuple(visits)
        self.forget_step()
        self.throttle.end_step()

    def forget_step(self) -> None:
        """Let go of a step's microbatches and results."""
        self.step.forget_microbatches()
        self.step = self._new_step((), [])

    def show_held_gradients(self) -> None:
        """Show hooks the gradients of earlier steps, and pass on what they have assigned."""
        for unit in self.step.showing:
            unit.show_gradients()

    def _hide_held_gradients(self) -> None:
        for unit in self.step.showing:
            unit.hide_gradients()
        self.step.showing = ()

    def backward(self, divisor: float = 1.0) -> None:
        """Run the backward of all units and set the gradients of the sharded parameters."""
        step, self.failure.gave_up = self.step, False
        step.gradient_scale = 1.0 / (step.weights.scale * self.weighing.total * divisor)
        self._hide_held_gradients()
        self.hooks.in_backward = True
        # hooks may have freed units that the forward left gathered (checkpoints, samples)
        for unit in gathered_after(step.program.forward):
            if self.units[unit].state is UnitState.SHARDED:
                self.execute(Instruction(Operation.GATHER, unit))
        try:
            self.backward_pass.run(self, step.program.backward)
        except BaseException as failure:
            self.updates.explain(failure)
            raise

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run the program's last update, which is the body of the ``with`` block."""
        instruction = Instruction(Operation.UPDATE)
        self.failure.place = instruction
        self.link.before(instruction)
        try:
            yield
        except Exception as failure:
            explained = self.failure.explain(failure)
            self.updates.explain(explained)
            if explained is failure:
                raise
            raise explained from failure
        self.updates.finish()
        self.link.after(instruction)

    def before_step(self) -> Container[int]:
        """Update what the optimizer's own step leaves out; return ids of updated parameters."""
        return self.updates.before_step(self)

    def after_step(self) -> None:
        """Wait for updates that the host makes meanwhile."""
        self.updates.after_step(self)

    def evaluate(
        self,
        call: MicrobatchCall | None,
        doing: str,
        note: Callable[[], Sequence[float]] = tuple,
    ) -> ForwardOutcome:
        """Run one step without gradients, gathering units as ranks request them.

        Ranks may call units differently often (text generation): all go on to the last call.
        """
        calls = [] if call is None else [call]
        places = replace(self._places, arena=None)
        options = MicrobatchOptions(recompute=False)
        microbatches = [
            Microbatch(index, each.step, places, options, self.backward_pass)
            for index, each in enumerate(calls)
        ]
        step = self._new_step(calls, microbatches)
        step.is_traced = True
        self._start(step, "evaluation of the root unit")
        self.execute(Instruction(Operation.GATHER, ROOT))
        self.execute(Instruction(Operation.FORWARD, ROOT, microbatch=0))
        while True:
            parked = step.parked or [None]
            if parked == [None]:
                self.failure.guarded(self.writes.check, doing.removeprefix("running "))
            place = where(failed=self.failure.error is not None, parked=parked, choice=Choice(()))
            rows = self.link.exchange([place[0], *note()])
            units = [row[0] for row in rows]
            if FAILED in units:
                self.give_up(doing)
            wanted = [unit for unit in units if unit != FINISHED]
            if not wanted:
                break
            unit = min(wanted)
            self.run(evaluation_of(int(unit), takes_part=place[0] == unit))
        results = tuple(microbatch.code.result for microbatch in microbatches)
        self.forget_step()
        return ForwardOutcome(results, (), 0.0, tuple(tuple(row[1:]) for row in rows))

    def reshard(self) -> None:
        """Free all gathered units; call it before code reads or changes the shards."""
        for unit in self.units:
            unit.free()

    # -- running instructions -----------------------------------------------------------------

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self.execute(instruction)

    def execute(self, instruction: Instruction) -> None:
        self.link.now = self.failure.place = instruction
        operation = instruction.operation
        if operation in COMPUTE and instruction.unit != NONE:
            unit = self.units[instruction.unit]
            if unit.state is not UnitState.GATHERED:
                unit.wait_gather(self.link.wait)
        self.link.before(instruction)
        handler = self.handlers[operation]
        if operation not in _OF_ONE_RANK:
            handler(self, instruction)
        elif self.failure.error is None and self.step.microbatches:
            try:  # as in Failure.guarded, without another call for each visit
                handler(self, instruction)
            except Exception as error:
                self.failure.note(error)
        self.link.after(instruction)

    def begin_visit(self, instruction: Instruction) -> None:
        """The engine is about to run the backward of a visit."""
        self.link.now = self.failure.place = instruction
        unit = self.units[instruction.unit]
        if unit.state is not UnitState.GATHERED and unit.kind is not UnitKind.EMBEDDING:
            unit.wait_gather(self.link.wait)
        if self.step.before_visit is not None:
            self.step.before_visit(instruction)
        self.link.before(instruction)

    def end_visit(self, instruction: Instruction) -> None:
        """The engine has run it."""
        self.link.after(instruction)

    def await_reduce_of(self, unit: Unit) -> None:
        """Wait for the reduce that is under way if it is this unit's."""
        if self.step.reducing is unit:
            self.await_reduce()

    def await_reduce(self, following: Unit | None = None) -> None:
        """Wait for the reduce that is under way; the next one is about to begin."""
        # one reduce is under way at a time: it overlaps the next unit's compute
        if self.step.reducing is not None:
            self.step.reducing.wait_reduce(self.link.wait)
        self.step.reducing = following

    def advance(self, index: int) -> None:
        """Let a microbatch's code run until it waits."""
        microbatch, call = self.step.microbatches[index], self.step.calls[index]
        if call.on_resume is not None:
            call.on_resume()
        self.overlay.resume(index)
        nodes = None
        if microbatch.code.parked is None or microbatch.code.parked is BEHIND_THE_LAST:
            nodes = self.units[ROOT].renew_accumulators()
        try:
            self.hooks.advance(microbatch)
        except RuntimeError as error:
            raise explained(error) from error.__cause__
        del nodes  # the graph holds them
        self.overlay.pause(index)
        if call.on_pause is not None:
            call.on_pause()
        self.guards.microbatch_pauses(self.step, index)

    def run_loss(self, instruction: Instruction) -> None:
        """Run what is left of a microbatch behind all visits, and the backward of its loss."""
        step, index = self.step, instruction.microbatch
        microbatch, with_head = step.microbatches[index], instruction.unit != ROOT
        if index in step.with_loss:
            return
        if microbatch.code.parked is BEHIND_THE_LAST or microbatch.is_answered:
            self.advance(index)
        if with_head and microbatch.code.parked == step.visits[instruction.visit]:
            self.advance(index)
        if not microbatch.has_loss:  # it visits more units than are known
            if with_head and microbatch.code.parked not in self.tracer.places_of_all:
                microbatch.let_pass(instruction.visit)
            return
        if with_head:
            microbatch.drop_marks_of_head(instruction.visit)
        step.with_loss.add(index)
        weighed = self._weighed(index)
        if weighed is None:
            return
        try:
            self.overlay.resume(index)  # for hooks of users
            with self.hooks.backward():
                step.roots += microbatch.backward_of_loss(*weighed)
        except RuntimeError as error:
            self.writes.check("training_step")  # a write may be the cause
            self._explain_embeddings(error)
            raise
        self.overlay.pause(index)

    def _weighed(self, index: int) -> tuple[Tensor, Tensor | None] | None:
        """Return a microbatch's loss with its weight; None if it has no weight."""
        step, microbatch = self.step, self.step.microbatches[index]
        loss, weight = step.calls[index].weight_of(microbatch.code.result)
        return step.weights.weigh(index, loss, weight)

    # -- failures -----------------------------------------------------------------------------

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for one of a backward."""
        if not isinstance(error, RuntimeError):
            return error
        try:
            self.writes.check(BEFORE_BACKWARD)  # a write may be the cause
            self._explain_embeddings(error)
        except Exception as found:
            return found
        return explained(error)

    def _explain_embeddings(self, error: RuntimeError) -> None:
        """Raise by name if a backward has failed as the values of an embedding are gone."""
        for unit in self.units:
            if unit.kind is UnitKind.EMBEDDING:
                read_elsewhere(error, unit)

    def give_up(self, doing: str) -> None:
        """Free and disarm all units, then raise on all ranks."""
        failure = self.failure.take()
        self.release_all()
        self.hooks.in_backward = False
        try:
            self.link.control.raise_if_any_failed(failure, doing)
        except Exception as error:  # else the connection is lost
            self.failure.gave_up = error is failure or isinstance(error, RemoteRankError)
            raise

    def release_all(self) -> None:
        """Drop what the step holds."""
        self.failure.abandon()
        self.overlay.abandon()
        self.step.reducing = None
        for unit in self.units:
            unit.wait_reduce()
            unit.free()


def _ends_of(units: Sequence[Unit]) -> Ends:
    kinds = (UnitKind.EMBEDDING, UnitKind.HEAD)
    return Ends(*(frozenset(n for n, u in enumerate(units) if u.kind is kind) for kind in kinds))


# -- handlers ---------------------------------------------------------------------------------


def _gather(executor: Executor, instruction: Instruction) -> None:
    unit = executor.units[instruction.unit]
    if unit.state is UnitState.SHARDED:
        executor.link.issued(executor.failure.with_memory(unit.start_gather))


def _arm(executor: Executor, instruction: Instruction) -> None:
    # comes before the wait for the unit: zeroing overlaps with its gather
    unit, step = executor.units[instruction.unit], executor.step
    if instruction.unit in step.armed:  # a head that losses have armed
        return
    step.armed.add(instruction.unit)
    if executor.failure.error is None and unit.has_landed:
        executor.failure.note(UnitUseError(used_outside([unit.name])))
    executor.failure.with_memory(unit.arm)


def _forward(executor: Executor, instruction: Instruction) -> None:
    step, index, position = executor.step, instruction.microbatch, instruction.visit
    microbatch = step.microbatches[index]
    if position != NONE:
        place, parked = step.visits[position], microbatch.code.parked
        if parked is not place and parked != place:
            microbatch.let_pass(position)
            return
    executor.advance(index)
    if microbatch.code.finished and not step.is_traced and position < len(step.visits) - 1:
        executor.run_loss(replace(instruction, unit=ROOT))  # else its memory would wait


def _loss(executor: Executor, instruction: Instruction) -> None:
    executor.run_loss(instruction)


def _offload(executor: Executor, instruction: Instruction) -> None:
    executor.step.microbatches[instruction.microbatch].offload(instruction.visit)


def _fetch(executor: Executor, instruction: Instruction) -> None:
    executor.step.microbatches[instruction.microbatch].fetch(instruction.visit)


def _reduce(executor: Executor, instruction: Instruction) -> None:
    unit, step = executor.units[instruction.unit], executor.step
    if instruction.unit not in step.armed:  # a head, on a rank without a loss of its own
        executor.failure.with_memory(unit.arm)
    step.armed.discard(instruction.unit)
    in_place = instruction.unit in step.program.updated_in_backward
    step.used[instruction.unit] = unit.used()
    executor.await_reduce(unit)
    start = partial(unit.start_reduce, step.gradient_scale, in_place=in_place)
    executor.link.issued(executor.failure.with_memory(start))


def _free(executor: Executor, instruction: Instruction) -> None:
    executor.units[instruction.unit].free(executor.link.wait)


def _agree(executor: Executor, instruction: Instruction) -> None:
    if executor.hooks.in_backward:
        end_backward(executor)
    else:
        end_forward(executor)


def _update(executor: Executor, instruction: Instruction) -> None:
    executor.updates.update(executor, instruction)


def _move_state(executor: Executor, instruction: Instruction) -> None:
    executor.updates.move(executor, instruction)


# those of this rank alone: what fails there is noted
_OF_ONE_RANK = frozenset({Operation.FORWARD, Operation.LOSS, Operation.OFFLOAD, Operation.FETCH})

_HANDLERS: dict[Operation, Handler] = {
    Operation.GATHER: _gather,
    Operation.ARM: _arm,
    Operation.FORWARD: _forward,
    Operation.LOSS: _loss,
    Operation.OFFLOAD: _offload,
    Operation.FETCH: _fetch,
    Operation.REDUCE: _reduce,
    Operation.FREE: _free,
    Operation.AGREE: _agree,
    Operation.UPDATE: _update,
    Operation.HOST_UPDATE: _update,
    Operation.FETCH_STATE: _move_state,
    Operation.STORE_STATE: _move_state,
}
