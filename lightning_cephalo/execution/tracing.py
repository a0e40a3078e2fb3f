"""Finds the order of a step while it runs, and learns it for the steps that follow.

See docs/design/step.md. What ranks exchange and decide is in ``visits.py`` and ``orders.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_cephalo.execution.visits import Visits, agree, where, without_backward
from lightning_cephalo.plan.orders import Choice
from lightning_cephalo.plan.program import NONE, Ends, Instruction, Visit, layered_forward

if TYPE_CHECKING:
    from lightning_cephalo.execution.executor import Executor


class Tracer:
    """The orders of steps.

    Attributes:
        ends: The units that are embeddings and heads.
        visits: The orders that are known.
        places_of_all: Places where microbatches wait for those of all ranks, and what goes on
            there; called with whether other microbatches have returned.
    """

    def __init__(self, ends: Ends) -> None:
        self.ends, self.visits = ends, Visits()
        self.places_of_all: dict[Visit, Callable[[Executor, bool], None]] = {}

    def replay(self, executor: Executor, visits: Sequence[Visit]) -> None:
        """Give the step the program of an order."""
        step = executor.step
        step.visits = tuple(visits)
        step.program = self.visits.program(
            visits,
            len(step.calls),
            step.trainable,
            reshard_after_forward=executor.reshard_after_forward,
            offload_boundaries=executor.arena is not None,
            ends=self.ends,
            **executor.updates.passes(),
        )

    def forward(self, executor: Executor) -> Iterator[Instruction]:
        """Yield the forward of a step whose order of visits is discovered while it runs."""
        step = executor.step
        visits: list[Visit] = []
        step.is_traced, step.visits = True, visits
        return self._layered(executor, visits)

    def rest(self, executor: Executor) -> Iterator[Instruction]:
        """Yield the visits that are left when the known order has come to its end."""
        step = executor.step
        for unit in executor.units[1:]:
            unit.free()
        for microbatch in step.microbatches:
            microbatch.last = NONE
        visits = list(step.visits)
        step.is_traced, step.visits, step.is_apart = True, visits, True
        return self._layered(executor, visits, start=len(visits))

    def _layered(
        self, executor: Executor, visits: list[Visit], start: int | None = None
    ) -> Iterator[Instruction]:
        step, offloads = executor.step, executor.arena is not None
        return layered_forward(
            self._discovered(executor, visits),
            len(step.calls),
            step.has_returned,
            self.ends,
            step.trainable,
            start=start,
            reshards=executor.reshard_after_forward,
            is_away=lambda at: offloads and visits[at].differentiable,
        )

    def _discovered(self, executor: Executor, visits: list[Visit]) -> Iterator[Visit]:
        """Yield visits as ranks reach them: before each gather all ranks exchange positions."""
        step, failure = executor.step, executor.failure
        choice = Choice(self.visits.known(step.trainable) or ())
        waiting = {None, *self.places_of_all}
        while True:
            parked = [None if at in waiting else at for at in step.parked]
            place = where(failed=failure.error is not None, parked=parked, choice=choice)
            visit, is_apart = agree(executor.link.exchange(place), choice)
            step.is_apart = step.is_apart or is_apart
            if visit is None:
                break
            visits.append(visit)
            yield visit
        if any(each.code.parked not in waiting for each in step.microbatches):
            failure.abandon()  # another rank has failed; the next exchange reports it

    def learn(self, executor: Executor, *, someone_made_all: bool, changes: bool) -> None:
        """Store the order, and compile the backward of the visits that were made; collective."""
        step, paths = executor.step, None
        made = step.made()
        if someone_made_all:
            made = [True] * len(step.visits)
        else:
            rows = executor.link.exchange([float(is_made) for is_made in made])
            made = [any(column) for column in zip(*rows, strict=True)]
        if step.is_apart:
            of_ranks = executor.link.control.gather(step.paths())
            paths = [path for paths_of_rank in of_ranks for path in paths_of_rank]
        visits = step.visits
        self.visits.learn(step.trainable, visits, made, paths)
        if step.is_traced or changes or not all(made):
            self.replay(executor, without_backward(visits, made))
