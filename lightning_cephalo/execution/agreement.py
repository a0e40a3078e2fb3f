"""What all ranks tell one another at the end of a forward, and of a backward, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from lightning_cephalo.execution.step import ForwardOutcome

if TYPE_CHECKING:
    from lightning_cephalo.execution.executor import Executor

# A rank's state at the end of a forward; a place where all wait for one another has its own code.
_WELL, _FAILED, _UNFINISHED = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class Report:
    """What a rank tells at the end of its forward, in numbers.

    Attributes:
        state: Well, failed, unfinished, or the unit's number of a place where microbatches wait.
        weight: Sum of the weights of its losses.
        overlay: What its modules hold; see overlay.py.
        made_all: Whether it has made all visits.
        losses: Number of microbatches with a loss.
        updates_early: Whether it may update units inside the backward.
        samples: Number of samples with a weight.
    """

    state: float
    weight: float
    overlay: float
    made_all: float
    losses: float
    updates_early: float
    samples: float


_LENGTH = len(fields(Report))
_DOING = "running training_step"


def end_forward(executor: Executor) -> None:
    """Agree on what a forward has come to, or go on with it, or raise on all ranks; collective."""
    step, failure = executor.step, executor.failure
    failure.guarded(step.weights.read)
    failure.guarded(executor.guards.backward_begins, step)
    if all(microbatch.code.finished for microbatch in step.microbatches):
        failure.guarded(executor.overlay.finish)  # others read and store what these hold
    own = _report(executor)
    rows = executor.link.exchange([*astuple(own), *step.note()])
    said = [Report(*row[:_LENGTH]) for row in rows]
    states = {each.state for each in said}
    if _FAILED in states:
        executor.give_up(_DOING)
    if _UNFINISHED in states:
        executor.run(executor.tracer.rest(executor))
        return
    for place, go_on in executor.tracer.places_of_all.items():
        if place.unit in states:
            returned = any(e.state == _WELL and e.losses for e in said)
            go_on(executor, returned)
            return
    _finish(executor, said, [row[_LENGTH:] for row in rows])


def _report(executor: Executor) -> Report:
    step = executor.step
    state = _FAILED if executor.failure.error is not None else _WELL
    if state == _WELL and not all(microbatch.code.finished for microbatch in step.microbatches):
        at = {place for place in step.parked if place is not None}
        (place,) = at if len(at) == 1 else (None,)
        state = float(place.unit) if place in executor.tracer.places_of_all else _UNFINISHED
    return Report(
        state=state,
        weight=math.fsum(step.weights.values),
        overlay=executor.overlay.code,
        made_all=all(step.made()),
        losses=len(step.with_loss),
        updates_early=executor.updates.is_on,
        samples=step.samples_with_weight,
    )


def _finish(executor: Executor, said: Sequence[Report], notes: Sequence[Sequence[float]]) -> None:
    step = executor.step
    total = math.fsum(each.weight for each in said)
    step.outcome = ForwardOutcome(
        tuple(microbatch.code.result for microbatch in step.microbatches),
        tuple(step.weights.values),
        total,
        tuple(map(tuple, notes)),
        losses=tuple(int(each.losses) for each in said),
    )
    if not total > 0.0:
        executor.failure.error = ValueError(
            f"The weights of all microbatches of this step sum to {total}; expected more than"
            " 0. Does training_step return a wrong 'weight', or did no rank get a sample?"
        )
        executor.give_up(_DOING)
    combine_overlay(executor, [each.overlay for each in said], _DOING)
    executor.weighing.learn(total, math.fsum(each.samples for each in said))
    executor.tracer.learn(
        executor,
        someone_made_all=any(each.made_all for each in said),
        changes=executor.updates.agree(all(each.updates_early for each in said)),
    )
    for microbatch in step.microbatches:
        microbatch.code.result = None


def combine_overlay(executor: Executor, codes: Sequence[float], doing: str) -> None:
    """Merge what microbatches of all ranks have written on modules; collective."""
    try:
        executor.overlay.combine(codes)
    except Exception as failure:  # on all ranks
        executor.failure.note(failure)
        executor.give_up(doing)


def end_backward(executor: Executor) -> None:
    """Set the gradients of parameters that at least one rank used, or raise on all ranks."""
    step, failure = executor.step, executor.failure
    executor.await_reduce()
    executor.hooks.in_backward = False
    if not step.goes_on:
        step.forget_microbatches()
        executor.throttle.end_step()
    failure.guarded(executor.guards.step_ends, step)
    flags = [failure.error is not None]
    for used in step.used.values():
        flags.extend(used)
    with executor.link.waiting():
        agreed = executor.link.control.any(flags)
    if agreed[0]:
        executor.give_up("running the backward")
    start = 1
    for index, used in step.used.items():
        end = start + len(used)
        executor.units[index].publish(agreed[start:end])
        start = end
