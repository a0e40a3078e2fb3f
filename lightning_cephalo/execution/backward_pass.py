"""Runs the instructions of a backward in between the work of autograd's engine.

The engine goes from mark to mark; see [Note: marks] in graph.py. At each of them the instructions
up to that visit run. They are the same on all ranks, whatever a rank's graph is like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_cephalo.execution.graph import Root, run
from lightning_cephalo.plan.program import Instruction, Operation

if TYPE_CHECKING:
    from lightning_cephalo.execution.executor import Executor
    from lightning_cephalo.execution.recomputed import RecomputedVisit
    from lightning_cephalo.execution.step import Step


class _Stopped(Exception):
    """Ends a call of the engine after a failure that is noted."""


class BackwardPass:
    """What marks call: the place of the backward in its program."""

    def __init__(self) -> None:
        self._executor: Executor  # while it runs: a cycle keeps process groups
        self._rest: Iterator[Instruction] = iter(())
        self._due: set[tuple[int, int]] = set()
        self._passing: Instruction | None = None
        self._has_broken = False
        self._record: RecomputedVisit | None = None
        self._retains = False

    def run(
        self,
        executor: Executor,
        instructions: Sequence[Instruction],
        *,
        retain: bool = False,
    ) -> None:
        """Run them all; what fails in the engine is noted, as other ranks go on."""
        step = executor.step
        self._executor, self._rest = executor, iter(instructions)
        self._passing, self._has_broken = None, False
        self._retains = retain
        try:
            if executor.failure.error is None and step.microbatches:
                backward = (each for each in instructions if each.operation is Operation.BACKWARD)
                self._due = {(each.microbatch, each.visit) for each in backward}
                self._run_engine(step, retain=retain)
            for instruction in self._rest:
                self._go_on(instruction)
            self._end_visit()
        finally:
            self._due = set()
            del self._executor
            step.roots.clear()

    def _run_engine(self, step: Step, *, retain: bool) -> None:
        executor = self._executor
        roots: list[Root] = [*step.roots]
        step.roots.clear()
        try:
            for microbatch in step.microbatches:
                roots += microbatch.marks(step.reached)
            if roots:
                has_hooks = any(microbatch.has_hooks for microbatch in step.microbatches)
                is_measured = executor.updates.drops  # what it stores is put back
                with executor.overlay.backward(has_hooks=has_hooks and not is_measured):
                    run(roots, retain=retain)
        except _Stopped:
            pass
        except Exception as error:
            if self._has_broken:
                raise
            executor.failure.note(executor.explain(error))
        finally:
            roots.clear()  # an error's traceback refers to this frame, and they to all graphs
            self._end_record()

    def arrive(
        self,
        index: int,
        position: int,
        record: RecomputedVisit | None = None,
        gradients: Any = None,
    ) -> None:
        """Run what comes before a microbatch's backward of a visit."""
        place = index, position
        if place not in self._due:  # of a loss's backward, or of no visit that is agreed
            return
        if record is not self._record:
            self._end_record()
        for instruction in self._rest:
            self._go_on(instruction)
            if self._executor.failure.error is not None:
                raise _Stopped
            if place not in self._due:
                break
        if record is not None:
            record.arrive()
            self._record = record

    def run_to(self, operation: Operation, position: int) -> None:
        """Run instructions up to the one of an operation at a visit."""
        for instruction in self._rest:
            self._go_on(instruction)
            if self._executor.failure.error is not None:
                raise _Stopped
            if instruction.operation is operation and instruction.visit == position:
                break

    def _go_on(self, instruction: Instruction) -> None:
        self._end_visit()
        try:
            if instruction.operation is Operation.BACKWARD:
                self._due.discard((instruction.microbatch, instruction.visit))
                self._executor.begin_visit(instruction)
                self._passing = instruction
            else:
                self._executor.execute(instruction)
        except BaseException:
            self._has_broken = True
            raise

    def _end_record(self) -> None:
        """Drop what a visit has held for its backward; not while microbatches meet in it."""
        record, self._record = self._record, None
        if record is not None and record.is_last_part:
            record.leave(keeps=self._retains)

    def _end_visit(self) -> None:
        if self._passing is not None:
            passed, self._passing = self._passing, None
            self._executor.end_visit(passed)
