"""Runs programs and issues every collective of a step, so that all ranks issue the same ones.

For a rank that fails, see [Note: failures] in failure.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.accelerator.throttle import Throttle
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError
from lightning_cephalo.execution.backward_pass import BackwardPass
from lightning_cephalo.execution.early_updates import EarlyUpdates
from lightning_cephalo.execution.failure import Failure
from lightning_cephalo.execution.loss_weights import LossWeights, loss_scale
from lightning_cephalo.execution.meetings import Meetings
from lightning_cephalo.execution.microbatch import (
    AT_BATCH,
    BEHIND_THE_LAST,
    Microbatch,
    MicrobatchOptions,
)
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.execution.orders import Choice
from lightning_cephalo.execution.over_batch import exchange_rows, refuse_own_weight
from lightning_cephalo.execution.overlay import Overlay
from lightning_cephalo.execution.recomputed import Places, SavedAgain
from lightning_cephalo.execution.state_moves import StateMoves
from lightning_cephalo.execution.step import ForwardOutcome, MicrobatchCall, Step
from lightning_cephalo.execution.unit_hooks import Meet, UnitHooks
from lightning_cephalo.execution.user_collectives import UserCollectives
from lightning_cephalo.execution.user_writes import (
    UserWrites,
    explained,
    read_elsewhere,
    used_outside,
)
from lightning_cephalo.execution.visits import (
    FAILED,
    FINISHED,
    Visits,
    agree,
    where,
    without_backward,
)
from lightning_cephalo.plan.program import (
    NONE,
    ROOT,
    Ends,
    Instruction,
    Operation,
    Visit,
    evaluation_of,
    gathered_after,
    layered_forward,
    offloading,
    resumed_forward,
    with_loss,
    without_frees,
)
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.gathered import Residence
from lightning_cephalo.sharding.unit import Unit, UnitState

# A rank's state in the exchange that ends a forward.
_WELL, _FAILED, _UNFINISHED, _ASKS = 0.0, 1.0, 2.0, 3.0

_OWN_UPDATE = Instruction(Operation.UPDATE)

# code of the user that runs while parameters are gathered for the backward, for messages
_BEFORE_BACKWARD = "a hook between the forward and the backward"


class Executor:
    """Runs training and evaluation steps over units.

    ::

        outcome = executor.forward(calls)   # the program's forward
        executor.backward()                 # its backward: gradients on the sharded parameters
        with executor.update():             # its update
            optimizer.step()
    """

    def __init__(
        self,
        units: Sequence[Unit],
        control: ControlGroup,
        accelerator: Accelerator,
        recompute: bool = True,
        meet: Meet = lambda purpose, remedy: None,
    ) -> None:
        names = [unit.name for unit in units]
        self.units = list(units)
        self.control = control
        self.accelerator = accelerator
        self.ends = Ends(*(_of_kind(units, k) for k in (UnitKind.EMBEDDING, UnitKind.HEAD)))
        self.writes = UserWrites(units)
        self.hooks = UnitHooks(units, meet, self.writes)
        self.failure = Failure(control.rank, names)
        self.meetings = Meetings(self.hooks.norms, self.failure, control, accelerator.device)
        self._sends_gradients = False  # not with manual optimization
        self.overlay = Overlay(units[ROOT].module, control, accelerator)
        self.early = EarlyUpdates(units)
        self.state_moves = StateMoves()
        self.arena: HostArena | None = None
        self.user_collectives: UserCollectives | None = None
        self.gave_up = self.drops_gradients = False
        self.steps_per_update, self.runs_hooks = 1, False
        self._visits = Visits()
        self._throttle = Throttle(accelerator)
        self._observers: tuple[Observer, ...] = ()
        self._recompute, self._reshard_after_forward = recompute, True
        self._total_weight = self._weighed_samples = 1.0  # of the last step
        self._whole_batch = 0.0  # not known
        self._step = self._new_step((), [])
        self._outcome = ForwardOutcome((), (), 0.0)
        # units that stay gathered from a forward to its backward
        self._showing: list[Unit] = []
        self._note: Callable[[], Sequence[float]] = tuple
        self._now = Instruction(Operation.AGREE)
        self._reducing: Unit | None = None
        self._has_gradients = False
        self._pass, self._saved_again = BackwardPass(), SavedAgain()
        # plain functions: bound methods would form a cycle that keeps process groups alive
        self._handlers: dict[Operation, Callable[[Executor, Instruction], None]] = {
            Operation.GATHER: Executor._gather,
            Operation.ARM: Executor._arm,
            Operation.REDUCE: Executor._reduce,
            Operation.UPDATE: Executor._update,
            Operation.FETCH_STATE: Executor._move_state,
            Operation.SEND_GRADIENT: Executor._send_gradient,
            Operation.HOST_UPDATE: Executor._update,
            Operation.STORE_STATE: Executor._move_state,
            Operation.FREE: Executor._free,
            Operation.MEET: Executor._meet,
            Operation.AGREE: Executor._agree,
        }
        # those of this rank alone: what fails there is noted
        self._local_handlers: dict[Operation, Callable[[Executor, Instruction], None]] = {
            Operation.OFFLOAD: Executor._offload,
            Operation.FETCH: Executor._fetch,
        }
        self._compute_handlers: dict[Operation, Callable[[Executor, Instruction], None]] = {
            Operation.FORWARD: Executor._forward,
            Operation.LOSS: Executor._loss,
        }
        self._choose_residence()
        # gathered once a step: no retained graph depends on finding the same memory again
        self.units[ROOT].choose_residence(Residence.POOLED)

    # -- settings -----------------------------------------------------------------------------

    @property
    def recompute(self) -> bool:
        """Whether the backward recomputes units; may change between steps."""
        return self._recompute

    @recompute.setter
    def recompute(self, recompute: bool) -> None:
        self._recompute = recompute
        self._choose_residence()

    @property
    def reshard_after_forward(self) -> bool:
        """Whether units are freed after the forward; all ranks set it together."""
        return self._reshard_after_forward

    @reshard_after_forward.setter
    def reshard_after_forward(self, reshard_after_forward: bool) -> None:
        self._reshard_after_forward = reshard_after_forward
        self._choose_residence()

    def _choose_residence(self) -> None:
        if not self._reshard_after_forward:
            residence = Residence.RESIDENT
        else:
            residence = Residence.POOLED if self._recompute else Residence.OWN
        for unit in self.units[1:]:
            unit.choose_residence(residence)

    def expect_weight(self, total: float) -> None:
        """Set the sum of the weights of a whole batch, if each sample weighs 1; [Note: weights]."""
        self._whole_batch = float(total)

    @property
    def visits(self) -> tuple[Visit, ...]:
        """The order of visits of the last training step."""
        return self._visits.last

    @property
    def inside_microbatch(self) -> bool:
        return self.hooks.running is not None

    def reshard(self) -> None:
        """Free all gathered units; call it before code reads or changes the shards."""
        for unit in self.units:
            unit.free()

    def attach(self, observer: Observer) -> None:
        self._observers = (*self._observers, observer)

    def detach(self, observer: Observer) -> None:
        self._observers = tuple(other for other in self._observers if other is not observer)

    def is_observed_by(self, observer: Observer) -> bool:
        return any(other is observer for other in self._observers)

    @contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Let steps inside hold no gradients of units, and update nothing."""
        self.drops_gradients = True
        try:
            yield
        finally:
            self.drops_gradients = False

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        self.attach(observer)
        try:
            yield
        finally:
            self.detach(observer)

    # -- passes -------------------------------------------------------------------------------

    def forward(
        self,
        calls: Sequence[MicrobatchCall],
        scale_loss: Callable[[Tensor], Tensor] | None = None,
        note: Callable[[], Sequence[float]] = tuple,
        failure: BaseException | None = None,
    ) -> ForwardOutcome:
        """Pass all microbatches through all units and run the losses' backward."""
        self.gave_up = False
        self._sends_gradients = self.state_moves.begin_step()
        self._hide_held_gradients()  # of a step whose backward has not come
        self._throttle.begin_step()
        trainable = tuple(unit.trainable for unit in self.units)
        visits = self._visits.known(trainable)
        self._begin(calls, trainable, visits)
        self._step.weights.scale_loss = scale_loss
        self._note = note
        if failure is not None:
            self.failure.note(failure)
        if self.arena is not None:
            self.failure.guarded(self.arena.start)  # may allocate
        samples = [call.samples for call in calls]
        self.failure.guarded(self.overlay.begin, samples)
        with self.writes.locked():
            self.run(self._traced() if visits is None else self._step.program.forward)
        if not self._outcome.is_skipped:
            self._showing = [u for u in self.units if u.state is not UnitState.SHARDED]
            self.show_held_gradients()
        # no reference stays here: results hold graphs, which must die with the caller's references
        outcome, self._outcome = self._outcome, ForwardOutcome((), (), 0.0)
        return outcome

    def _begin(
        self,
        calls: Sequence[MicrobatchCall],
        trainable: tuple[bool, ...],
        visits: Sequence[Visit] | None,
    ) -> None:
        self.early.begin()
        self.state_moves.is_late = False
        last = NONE if visits is None else len(visits) - 1 - (with_loss(visits, self.ends) != NONE)
        checks = not self._visits.is_checked(trainable)
        options = MicrobatchOptions(
            self._recompute,
            last,
            meets=True,
            searches=checks,
        )
        microbatches = self.microbatches_of(calls, options)
        step = self._step = self._new_step(calls, microbatches)
        step.trainable, step.checks = trainable, checks
        self.failure.begin(microbatches, "beginning of the root unit")
        self.meetings.begin_step()
        if visits is not None:
            self._replay(visits)

    def _new_step(self, calls: Sequence[MicrobatchCall], microbatches: list[Microbatch]) -> Step:
        whole = self._whole_batch
        samples = (self._weighed_samples or whole) if whole else 1.0
        scale = loss_scale(self._total_weight / samples, whole or 1.0) / self.steps_per_update
        weights = LossWeights(len(calls), scale, self.accelerator.readback())
        return Step(calls, microbatches, weights)

    def microbatches_of(
        self, calls: Sequence[MicrobatchCall], options: MicrobatchOptions
    ) -> list[Microbatch]:
        """Return the microbatches of a step."""
        arena = self.arena if options.outside is None else None
        places = Places(self.accelerator, self.overlay, arena, self.hooks.norms, self._saved_again)
        return [
            Microbatch(index, call.step, places, options, self._pass)
            for index, call in enumerate(calls)
        ]

    def _replay(self, visits: Sequence[Visit]) -> None:
        step = self._step
        step.visits = tuple(visits)
        step.program = self._visits.program(
            visits,
            len(step.calls),
            step.trainable,
            reshard_after_forward=self._reshard_after_forward,
            offload_boundaries=self.arena is not None,
            updates_early=self.early.is_on or self.drops_gradients,
            homes=() if self.drops_gradients else tuple(self.state_moves.homes),
            sends_gradients=self._sends_gradients and not self.early.is_on,
            ends=self.ends,
        )

    def begin_phases(
        self,
        calls: Sequence[MicrobatchCall],
        microbatches: list[Microbatch],
        visits: Sequence[Visit],
    ) -> Step:
        """Begin a step that calls its backwards itself; see ``execution/manual_step.py``."""
        self.gave_up = self._sends_gradients = False
        self._throttle.begin_step()
        step = self._step = self._new_step(calls, microbatches)
        step.visits, step.is_traced, step.goes_on = visits, True, True
        self.failure.begin(microbatches, "beginning of the step")
        return step

    def end_phases(self, visits: Sequence[Visit]) -> None:
        self._visits.last = tuple(visits)
        self._step.forget_microbatches()
        self._step = self._new_step((), [])
        self._throttle.end_step()

    def show_held_gradients(self) -> None:
        """Show hooks the gradients of earlier steps, and pass on what they have assigned."""
        for unit in self._showing:
            unit.show_gradients()

    def _hide_held_gradients(self) -> None:
        for unit in self._showing:
            unit.hide_gradients()
        self._showing = []

    def backward(self, divisor: float = 1.0, factor: float = 1.0) -> None:
        """Run the backward of all units and set the gradients of the sharded parameters."""
        step, self.gave_up = self._step, False
        step.gradient_scale = factor / (step.weights.scale * self._total_weight * divisor)
        self._hide_held_gradients()
        self.overlay.begin_backward(self.runs_hooks)
        self._has_gradients = True
        self.hooks.in_backward = True
        # hooks may have freed units that the forward left gathered (checkpoints, samples)
        for unit in gathered_after(step.program.forward):
            if self.units[unit].state is UnitState.SHARDED:
                self.execute(Instruction(Operation.GATHER, unit))
        try:
            self.run_backward(step.program.backward)
        except BaseException as failure:
            self.early.explain(failure)
            raise

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run the program's last update, which is the body of the ``with`` block."""
        instruction = Instruction(Operation.UPDATE)
        self.failure.place = instruction
        for observer in self._observers:
            observer.before(instruction)
        try:
            yield
        except Exception as failure:
            explained = self.failure.explain(failure)
            self.early.explain(explained)
            if explained is failure:
                raise
            raise explained from failure
        self.early.finish()
        if self.state_moves.mover is not None:
            self.state_moves.mover.finish()
        self._has_gradients = self.state_moves.is_late = False
        for observer in self._observers:
            observer.after(instruction)

    def before_step(self) -> Container[int]:
        """Update units whose optimizer state is in host memory, inside of :meth:`update`."""
        mover = self.state_moves.mover
        if mover is None:
            return ()
        self.state_moves.is_late = True
        # a step that is skipped has no gradients of its own
        own = self._step.program.update if self._has_gradients else (_OWN_UPDATE,)
        self.run(own[: own.index(_OWN_UPDATE)])
        return mover.update_left()

    def after_step(self) -> None:
        """Wait for what the host updates; the counterpart of :meth:`before_step`."""
        if self.state_moves.mover is not None and self._has_gradients:
            own = self._step.program.update
            self.run(own[own.index(_OWN_UPDATE) + 1 :])

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
        places = Places(self.accelerator, None, None, self.hooks.norms)
        options = MicrobatchOptions(recompute=False)
        microbatches = [
            Microbatch(index, each.step, places, options, self._pass)
            for index, each in enumerate(calls)
        ]
        self._step = step = self._new_step(calls, microbatches)
        step.is_traced = True
        self.failure.begin(microbatches, "evaluation of the root unit")
        self.execute(Instruction(Operation.GATHER, ROOT))
        self.execute(Instruction(Operation.FORWARD, ROOT, microbatch=0))
        while True:
            parked = step.parked or [None]
            if parked == [None]:
                self.failure.guarded(self.writes.check, doing.removeprefix("running "))
            place = where(failed=self.failure.error is not None, parked=parked, choice=Choice(()))
            rows = self.exchange([place[0], *note()])
            units = [row[0] for row in rows]
            if FAILED in units:
                self.give_up(doing)
            wanted = [unit for unit in units if unit != FINISHED]
            if not wanted:
                break
            unit = min(wanted)
            self.run(evaluation_of(int(unit), takes_part=place[0] == unit))
        results = tuple(microbatch.result for microbatch in microbatches)
        step.forget_microbatches()
        self._step = self._new_step((), [])
        return ForwardOutcome(results, (), 0.0, tuple(tuple(row[1:]) for row in rows))

    # -- running instructions -----------------------------------------------------------------

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self.execute(instruction)

    def execute(self, instruction: Instruction) -> None:
        self._now = self.failure.place = instruction
        operation = instruction.operation
        handler = self._compute_handlers.get(operation)
        if handler is None:
            handler = self._local_handlers.get(operation)
        elif instruction.unit != NONE:
            unit = self.units[instruction.unit]
            if unit.state is not UnitState.GATHERED:
                self.wait_for(unit)
        for observer in self._observers:
            observer.before(instruction)
        if handler is None:
            self._handlers[operation](self, instruction)
        elif self.failure.error is None:
            try:  # as in Failure.guarded, without another call for each visit
                handler(self, instruction)
            except Exception as error:
                self.failure.note(error)
        for observer in self._observers:
            observer.after(instruction)

    def begin_visit(self, instruction: Instruction) -> None:
        """The engine is about to run the backward of a visit."""
        self._now = self.failure.place = instruction
        unit = self.units[instruction.unit]
        if unit.state is not UnitState.GATHERED and unit.kind is not UnitKind.EMBEDDING:
            self.wait_for(unit)
        if self._step.before_visit is not None:
            self._step.before_visit(instruction)
        for observer in self._observers:
            observer.before(instruction)

    def end_visit(self, instruction: Instruction) -> None:
        """The engine has run it."""
        for observer in self._observers:
            observer.after(instruction)

    def wait_for(self, unit: Unit) -> None:
        """Wait for the gather of a unit; begin it if nobody has."""
        if unit.state is UnitState.SHARDED:
            unit.start_gather()
        unit.finish_gather(self._wait)

    def _wait(self, work: Any) -> None:
        with self._waiting():
            work.wait()

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank; each gives equally many."""
        with self._waiting():
            return self.control.gather(list(numbers))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        for observer in self._observers:
            observer.before_wait(self._now)
        yield
        for observer in self._observers:
            observer.after_wait(self._now)

    def _gather(self, instruction: Instruction) -> None:
        unit = self.units[instruction.unit]
        if unit.state is not UnitState.SHARDED:
            return
        self.failure.with_memory(unit.start_gather)
        for observer in self._observers:
            observer.issued(instruction, unit.works[0])

    def _arm(self, instruction: Instruction) -> None:
        # comes before the wait for the unit: zeroing overlaps with its gather
        unit = self.units[instruction.unit]
        if instruction.unit in self._step.armed:  # a head that losses have armed
            return
        self._step.armed.add(instruction.unit)
        if self.failure.error is None and unit.has_landed:
            self.failure.note(used_outside([unit.name]))
        self.failure.with_memory(unit.arm)

    def _forward(self, instruction: Instruction) -> None:
        step, index, position = self._step, instruction.microbatch, instruction.visit
        if not step.microbatches:
            return
        microbatch = step.microbatches[index]
        if position != NONE:
            place, parked = step.visits[position], microbatch.parked
            if parked is not place and parked != place:
                microbatch.let_pass(position)
                return
        self._advance(index)
        if microbatch.finished and not step.is_traced and position < len(step.visits) - 1:
            self._loss(replace(instruction, unit=ROOT))  # else its memory would wait

    def _advance(self, index: int) -> None:
        microbatch, call = self._step.microbatches[index], self._step.calls[index]
        if call.on_resume is not None:
            call.on_resume()
        self.overlay.resume(index)
        nodes = None
        if microbatch.parked is None or microbatch.parked is BEHIND_THE_LAST:
            nodes = self.units[ROOT].renew_accumulators()
        try:
            if self.user_collectives is None:
                self.hooks.advance(microbatch)
            else:
                with self.user_collectives.watched():
                    self.hooks.advance(microbatch)
        except RuntimeError as error:
            raise explained(error) from error.__cause__
        del nodes  # the graph holds them
        self.overlay.pause(index)
        if call.on_pause is not None:
            call.on_pause()

    def _loss(self, instruction: Instruction) -> None:
        step, index = self._step, instruction.microbatch
        if not step.microbatches or index in step.with_loss:
            return
        microbatch, with_head = step.microbatches[index], instruction.unit != ROOT
        if microbatch.parked is BEHIND_THE_LAST or microbatch.asking.is_answered:
            self._advance(index)
        if with_head and microbatch.parked == step.visits[instruction.visit]:
            self._advance(index)
        if not microbatch.has_loss:  # it visits more units than are known
            if with_head and microbatch.parked is not AT_BATCH:
                microbatch.let_pass(instruction.visit)
            return
        if with_head:
            microbatch.drop_marks_of_head(instruction.visit)
        step.with_loss.add(index)
        weighed = self._weighed(index)
        if weighed is None:
            return
        try:
            with self.hooks.backward(), self._showing_stored(index):
                step.roots += microbatch.backward_of_loss(*weighed, self.meetings.numbers)
        except RuntimeError as error:
            self.writes.check("training_step")  # a write may be the cause
            self._explain_embeddings(error)
            raise

    def _weighed(self, index: int) -> tuple[Tensor, Tensor | None] | None:
        """Return a microbatch's loss with its weight; None if it has no loss, or no weight."""
        step, microbatch = self._step, self._step.microbatches[index]
        found = step.calls[index].weight_of(microbatch.result)
        if microbatch.was_over_batch:
            refuse_own_weight(None if found is None else found[1], step.calls[index].samples)
        if found is None:
            step.skipped += 1
            return None
        return step.weights.weigh(index, *found)

    @contextmanager
    def _showing_stored(self, index: int) -> Iterator[None]:
        """Let hooks of users find what a microbatch has stored, in a ``with`` block."""
        self.runs_hooks = self.runs_hooks or self._step.microbatches[index].has_hooks
        if not self.runs_hooks:
            yield
            return
        self.overlay.resume(index)
        try:
            yield
        finally:
            self.overlay.pause(index)

    def _offload(self, instruction: Instruction) -> None:
        if self._step.microbatches:
            self._step.microbatches[instruction.microbatch].offload(instruction.visit)

    def _fetch(self, instruction: Instruction) -> None:
        if self._step.microbatches:
            self._step.microbatches[instruction.microbatch].fetch(instruction.visit)

    def run_backward(self, instructions: Sequence[Instruction], *, retain: bool = False) -> None:
        """Run instructions with a backward among them."""
        self._pass.run(self, instructions, self._step, retain=retain)

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for one of a backward."""
        if not isinstance(error, RuntimeError):
            return error
        try:
            self.writes.check(_BEFORE_BACKWARD)  # a write may be the cause
            self._explain_embeddings(error)
        except Exception as found:
            return found
        return explained(error)

    def _explain_embeddings(self, error: RuntimeError) -> None:
        """Raise by name if a backward has failed as the values of an embedding are gone."""
        for index in self.ends.embeddings:
            read_elsewhere(error, self.units[index])

    def _meet(self, instruction: Instruction) -> None:
        step, visit = self._step, self._step.visits[instruction.visit]
        if self.hooks.in_backward:
            self.meetings.backward(visit, self._waiting)
        else:
            meet = partial(self._pass.meet, instruction.visit)
            self.meetings.forward(visit, step.microbatches, meet, self._waiting)

    def _reduce(self, instruction: Instruction) -> None:
        unit, step = self.units[instruction.unit], self._step
        if instruction.unit not in step.armed:  # a head, on a rank without a loss of its own
            self.failure.with_memory(unit.arm)
        step.armed.discard(instruction.unit)
        in_place = instruction.unit in step.program.updated_in_backward
        start = partial(unit.start_reduce, step.gradient_scale, in_place=in_place)
        step.used[instruction.unit] = unit.used()
        self._finish_reduce(unit)
        self.failure.with_memory(start)
        for observer in self._observers:
            observer.issued(instruction, unit.works[1])

    def _finish_reduce(self, following: Unit | None) -> None:
        # one reduce is under way at a time: it overlaps the next unit's compute
        if self._reducing is not None:
            self._reducing.wait_reduce(self._wait)
        self._reducing = following

    def _update(self, instruction: Instruction) -> None:
        index, step = instruction.unit, self._step
        on_host = instruction.operation is Operation.HOST_UPDATE
        if self.state_moves.is_late:
            assert self.state_moves.mover is not None
            self.early.count()
            self.state_moves.mover.update(index, on_host)
            return
        unit = self.units[index]
        if self._reducing is unit:
            self._finish_reduce(None)
        if not self.drops_gradients:
            self.early.count()
            has_samples = bool(step.calls)
            self.failure.guarded(self.early.update, unit, step.used[index], has_samples, on_host)
        if self.drops_gradients or self.failure.error is not None:
            unit.drop_gradients()  # the next units need the memory

    def _send_gradient(self, instruction: Instruction) -> None:
        step, unit = self._step, self.units[instruction.unit]
        if self._reducing is unit:
            self._finish_reduce(None)
        used, has_samples = step.used[instruction.unit], bool(step.calls)
        self.failure.guarded(self.state_moves.send_gradient, unit, used, has_samples)

    def _move_state(self, instruction: Instruction) -> None:
        mover = self.state_moves.mover
        assert mover is not None
        move = mover.fetch if instruction.operation is Operation.FETCH_STATE else mover.store
        if self.state_moves.is_late:  # behind the last exchange: an error ends the step at once
            move(instruction.unit)
        else:
            self.failure.guarded(move, instruction.unit)

    def _free(self, instruction: Instruction) -> None:
        self.units[instruction.unit].free(self._wait)

    # -- agreement between ranks --------------------------------------------------------------

    def _agree(self, instruction: Instruction) -> None:
        if self.hooks.in_backward:
            self._end_backward()
        else:
            self._end_forward()

    def _end_forward(self) -> None:
        step, doing = self._step, "running training_step"
        self.failure.guarded(step.weights.read)
        self.failure.guarded(self.writes.check, "training_step")
        is_finished = all(microbatch.finished for microbatch in step.microbatches)
        if is_finished:  # the others still read and store what these hold
            self.failure.guarded(self.overlay.finish)
        state = _FAILED if self.failure.error is not None else _WELL
        if state == _WELL and not is_finished:
            state = _ASKS if set(step.parked) <= {AT_BATCH, None} else _UNFINISHED
        made = step.made()
        with_loss = len(step.with_loss) - step.skipped
        own = [state, math.fsum(step.weights.values), self.overlay.code]
        own += [all(made), with_loss, step.skipped, self.early.is_on]
        own.append(step.samples_with_weight)
        said = self.exchange([*own, *self._note()])
        states = {row[0] for row in said}
        if _FAILED in states:
            self.give_up(doing)
        if _UNFINISHED in states:
            self._trace_rest()
            return
        if _ASKS in states:
            self._answer(any(row[0] == _WELL and row[4] + row[5] for row in said))
            return
        total = math.fsum(row[1] for row in said)
        outcome = ForwardOutcome(
            tuple(microbatch.result for microbatch in step.microbatches),
            tuple(step.weights.values),
            total,
            tuple(tuple(row[8:]) for row in said),
            losses=tuple(int(row[4]) for row in said),
            skipped=int(sum(row[5] for row in said)),
        )
        if not total > 0.0 and not outcome.is_skipped:
            self.failure.error = ValueError(
                f"The weights of all microbatches of this step sum to {total}; expected more than"
                " 0. Does training_step return a wrong 'weight', or did no rank get a sample?"
            )
            self.give_up(doing)
        self.combine_overlay([row[2] for row in said], doing)
        if total:
            self._total_weight, self._weighed_samples = total, math.fsum(row[7] for row in said)
        # without a loss, tensors that reach it past the units' outputs cannot be found
        searched = step.checks and any(outcome.losses)
        changes = self.early.agree(all(row[6] for row in said))
        self._learn(
            made,
            someone_made_all=any(row[3] for row in said),
            is_checked=searched,
            changes=changes,
        )
        for microbatch in step.microbatches:
            microbatch.result = None
        self._outcome = outcome
        if outcome.is_skipped:
            self._release_all()
            self._throttle.end_step()

    def combine_overlay(self, codes: Sequence[float], doing: str) -> None:
        """Merge what microbatches of all ranks have written on modules; collective."""
        try:
            self.overlay.combine(codes)
        except Exception as failure:  # on all ranks
            self.failure.note(failure)
            self.give_up(doing)

    def _end_backward(self) -> None:
        """Set the gradients of parameters that at least one rank used, or raise on all ranks."""
        step = self._step
        self._finish_reduce(None)
        self.hooks.in_backward = False
        self.failure.guarded(self.overlay.end_backward)
        if not step.goes_on:
            step.forget_microbatches()
            self._throttle.end_step()
        self.failure.guarded(self.writes.check, _BEFORE_BACKWARD)
        self.failure.guarded(self._refuse_late_gradients)
        self.failure.guarded(self.early.check)
        flags = [self.failure.error is not None]
        for used in step.used.values():
            flags.extend(used)
        with self._waiting():
            agreed = self.control.any(flags)
        if agreed[0]:
            self.give_up("running the backward")
        start = 1
        for index, used in step.used.items():
            end = start + len(used)
            self.units[index].publish(agreed[start:end])
            start = end

    def _refuse_late_gradients(self) -> None:
        """Raise if a gradient has come to a unit behind its reduce."""
        late = [unit.name for unit in self.units[1:] if unit.take_late()]
        if late:
            raise used_outside(late)

    def give_up(self, doing: str) -> None:
        """Free and disarm all units, then raise on all ranks."""
        failure = self.failure.take()
        self._release_all()
        self.hooks.in_backward = False
        try:
            self.control.raise_if_any_failed(failure, doing)
        except Exception as error:  # else the connection is lost
            self.gave_up = error is failure or isinstance(error, RemoteRankError)
            raise

    def _release_all(self) -> None:
        self.failure.abandon()
        self.overlay.abandon()
        self._reducing = None
        for unit in self.units:
            unit.wait_reduce()
            unit.free()

    # -- losses over the whole batch ----------------------------------------------------------

    def _answer(self, others_returned: bool) -> None:
        """Give all microbatches the rows of the whole batch, and go on with them; collective."""
        step, doing = self._step, "computing a loss over the batch"
        asked = [microbatch.asking.tensors for microbatch in step.microbatches]
        if others_returned or None in asked:
            self.failure.note(
                UnitUseError(
                    "Some microbatches call loss_over_batch, and others return without it. Its rows"
                    " are those of all samples of the step: call it in every training_step."
                )
            )
        said = self.exchange([float(self.failure.error is not None)])
        if any(row[0] for row in said):
            self.give_up(doing)
        try:
            answers = exchange_rows(
                [each for each in asked if each is not None],
                [call.samples for call in step.calls],
                self.control,
                step.weights.scale_loss,
                [gathered for _, gathered in self.units[ROOT].parameter_pairs()],
                self.accelerator.device,
            )
        except UnitUseError as failure:  # on all ranks
            self.failure.note(failure)
            self.give_up(doing)
            raise
        for microbatch, answer in zip(step.microbatches, answers, strict=True):
            microbatch.asking.answer(answer)
        last = len(step.visits) - 1
        head = with_loss(step.visits, self.ends)
        unit = ROOT if head == NONE else step.visits[head].unit
        if unit != ROOT and step.trainable[unit]:
            self.execute(Instruction(Operation.ARM, unit, last))
        for index in range(len(step.calls)):
            self.execute(Instruction(Operation.LOSS, unit, last, index))
        self.execute(Instruction(Operation.AGREE))

    # -- tracing ------------------------------------------------------------------------------

    def _traced(self) -> Iterator[Instruction]:
        """Yield the forward of a step whose order of visits is discovered while it runs."""
        step = self._step
        visits: list[Visit] = []
        step.is_traced, step.visits = True, visits
        instructions = layered_forward(
            self._discovered(visits),
            len(step.calls),
            step.has_returned,
            self.ends,
            step.trainable,
        )
        return self._by_mode(instructions, visits)

    def _trace_rest(self) -> None:
        """Trace the visits that are left when the known order has come to its end."""
        step = self._step
        for unit in self.units[1:]:
            unit.free()
        for microbatch in step.microbatches:
            microbatch.last = NONE
        visits = list(step.visits)
        step.is_traced, step.visits, step.is_apart = True, visits, True
        instructions = resumed_forward(
            self._discovered(visits),
            len(visits),
            len(step.calls),
            step.has_returned,
            self.ends,
            step.trainable,
        )
        self.run(self._by_mode(instructions, visits))

    def _learn(
        self, made: Sequence[bool], *, someone_made_all: bool, is_checked: bool, changes: bool
    ) -> None:
        """Store the order, and compile the backward of the visits that were made; collective."""
        step, paths = self._step, None
        if someone_made_all:
            made = [True] * len(step.visits)
        else:
            rows = self.exchange([float(is_made) for is_made in made])
            made = [any(column) for column in zip(*rows, strict=True)]
        if step.is_apart:
            of_ranks = self.control.gather(step.paths())
            paths = [path for paths_of_rank in of_ranks for path in paths_of_rank]
        visits = step.visits
        self._visits.learn(step.trainable, visits, made, paths, is_checked=is_checked)
        if step.is_traced or changes or not all(made):
            self._replay(without_backward(visits, made))

    def _by_mode(
        self, instructions: Iterator[Instruction], visits: Sequence[Visit]
    ) -> Iterator[Instruction]:
        """Apply the passes of a compiled program to instructions while they are discovered."""
        if not self._reshard_after_forward:
            instructions = without_frees(instructions, self.ends)
        if self.arena is not None:
            instructions = offloading(instructions, lambda at: visits[at].differentiable)
        return instructions

    def _discovered(self, visits: list[Visit]) -> Iterator[Visit]:
        """Yield visits as ranks reach them: before each gather all ranks exchange positions."""
        step = self._step
        choice = Choice(self._visits.known(step.trainable) or ())
        while True:
            failed = self.failure.error is not None
            parked = [None if at is AT_BATCH else at for at in step.parked]
            place = where(failed=failed, parked=parked, choice=choice)
            visit, is_apart = agree(self.exchange(place), choice)
            step.is_apart = step.is_apart or is_apart
            if visit is None:
                break
            visits.append(visit)
            yield visit
        if any(each.parked not in (None, AT_BATCH) for each in step.microbatches):
            self.failure.abandon()  # another rank has failed; the next exchange reports it


def _of_kind(units: Sequence[Unit], kind: UnitKind) -> frozenset[int]:
    return frozenset(index for index, unit in enumerate(units) if unit.kind is kind)
