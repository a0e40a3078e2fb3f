"""Traces the order in which microbatches visit units, then replays it; see docs/design/step.md.

Orders are stored per set of trainable units: freezing a unit changes which units are reduced.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.orders import Choice, is_too_long, merged
from lightning_cephalo.plan.program import Program, Visit, compile_step, visit_of

# sent in place of a unit's index
NO_DATA, FINISHED, FAILED = -1.0, -2.0, -3.0

# A visit that is not made in so many steps in a row has left the model for good, or nearly.
KEPT_FOR_STEPS = 16
# So many of the last steps with unknown visits are a property of the model.
_MANY, _OF_STEPS = 8, 16
# Where microbatches skip units at random, each step has a program of its own.
_PROGRAMS = 128


def where(
    *, failed: bool, parked: Sequence[Visit | None], choice: Choice
) -> tuple[float, float, float, float]:
    """Return this rank's unit or code, differentiable, meeting; and whether it has others."""
    if failed:
        return FAILED, 0.0, 0.0, 0.0
    if not parked:
        return NO_DATA, 0.0, 0.0, 0.0
    apart = float(len(set(parked)) > 1)
    visit = choice.first(parked)
    if visit is None:
        return FINISHED, 0.0, 0.0, apart
    return float(visit.unit), float(visit.differentiable), float(visit.meeting), apart


def agree(said: Sequence[Sequence[float]], choice: Choice) -> tuple[Visit | None, bool]:
    """Return the next visit, and whether microbatches are at different places."""
    with_data = {tuple(place) for *place, _ in said if place[0] != NO_DATA}
    if any(unit == FAILED for unit, _, _ in with_data):
        return None, False
    wanted = [
        visit_of(int(unit), bool(flag), int(meeting))
        for unit, flag, meeting in with_data
        if unit != FINISHED
    ]
    return choice.next(wanted), len(with_data) > 1 or any(apart for *_, apart in said)


@dataclass
class _Known:
    visits: tuple[Visit, ...]
    idle_steps: list[int] = field(default_factory=list)


class Visits:
    def __init__(self) -> None:
        self._known: dict[tuple[bool, ...], _Known] = {}
        self._programs: dict[tuple[object, ...], Program] = {}
        self._with_unknown: deque[bool] = deque(maxlen=_OF_STEPS)
        self._has_warned = False
        self.last: tuple[Visit, ...] = ()

    def known(self, trainable: tuple[bool, ...]) -> tuple[Visit, ...] | None:
        """Return the order with these units trainable; None: it must be traced."""
        known = self._known.get(trainable)
        return None if known is None else known.visits

    def learn(
        self,
        trainable: tuple[bool, ...],
        visits: Sequence[Visit],
        made: Sequence[bool],
        paths: Sequence[Sequence[Visit]] | None = None,
    ) -> None:
        self.last = tuple(visit for visit, is_made in zip(visits, made, strict=True) if is_made)
        known = self._known.get(trainable)
        self._count(paths is not None)
        if paths is not None:
            order = merged([() if known is None else known.visits, *paths])
            # those of other ranks are copies
            order = tuple(visit_of(at.unit, at.differentiable, at.meeting) for at in order)
            if is_too_long(order, paths):
                self._known.pop(trainable, None)
            else:
                self._known[trainable] = _Known(order, [0] * len(order))
        elif known is None:
            self._known[trainable] = _Known(tuple(visits), [0] * len(visits))
        else:
            self._drop_idle(known, made)

    @staticmethod
    def _drop_idle(known: _Known, made: Sequence[bool]) -> None:
        pairs = zip(known.idle_steps, made, strict=True)
        known.idle_steps = [0 if is_made else steps + 1 for steps, is_made in pairs]
        if any(steps >= KEPT_FOR_STEPS for steps in known.idle_steps):
            kept = [at for at, steps in enumerate(known.idle_steps) if steps < KEPT_FOR_STEPS]
            known.visits = tuple(known.visits[at] for at in kept)
            known.idle_steps = [known.idle_steps[at] for at in kept]

    def _count(self, has_unknown: bool) -> None:
        """Warn once if many of the last steps had visits that were not known."""
        self._with_unknown.append(has_unknown)
        count = sum(self._with_unknown)
        if count >= _MANY and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"In {count} of the last {len(self._with_unknown)} steps, microbatches visited"
                " units in an order that was not known. Gradients are right, but these steps are"
                " slower: the ranks exchange a message before each visit, and gather its unit only"
                " then. Blocks that are skipped cost nothing; visits in another order do. Keep the"
                " order, or let one unit hold all alternatives with"
                " CephaloStrategy(units=[...]).",
                stacklevel=2,
            )

    def program(
        self,
        visits: Sequence[Visit],
        microbatches: int,
        trainable: tuple[bool, ...],
        **options: Any,
    ) -> Program:
        """Return the checked program of a step; see :func:`~.program.compile_step`."""
        key = (tuple(visits), microbatches, trainable, *sorted(options.items()))
        if key not in self._programs:
            if len(self._programs) >= _PROGRAMS:
                self._programs.clear()
            program, without_data = (
                compile_step(visits, count, trainable, **options) for count in (microbatches, 0)
            )
            # the program without data is the same on all ranks: if each rank's collectives match
            # it, they match one another
            check([program, without_data])
            self._programs[key] = program
        return self._programs[key]


def without_backward(visits: Sequence[Visit], made: Sequence[bool]) -> tuple[Visit, ...]:
    """Return the visits so that a backward leaves out those that nobody has made."""
    return tuple(
        visit if is_made else replace(visit, differentiable=False)
        for visit, is_made in zip(visits, made, strict=True)
    )
