"""Times the communication of a step: gathers, reduces, exchanges of small messages.

Collectives pass as in a step without compute: alone they take another time
(docs/design/collectives.md, "As steps run them"). All ranks get the slowest rank's times.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.state_groups import fractions_are_even
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.unit import Unit

# Most units of a pass: in one of a few, ranks hardly drift apart.
_UNITS = 8
# Passes that count, behind one that may make connections; a longer one than so many seconds for
# each collective is the last.
_PASSES, _LONG_S = 3, 0.25
# From this many units on, a gather and a reduce run at the same time in a backward.
_WITH_BOTH = 3
# Even shares save time if it is more than this part of it.
_NOISE = 0.05
_EXCHANGES = 5


@dataclass(frozen=True)
class MeanTimes:
    """Mean seconds of gathering and of reducing a unit, and of both at the same time."""

    gather_s: float = 0.0
    reduce_s: float = 0.0
    gather_and_reduce_s: float | None = None
    padded_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of a unit's gather in the forward, and of its gather and reduce after it."""
        both_s = self.gather_and_reduce_s
        return self.gather_s + (self.gather_s + self.reduce_s if both_s is None else both_s)

    def reduced(self, part: float) -> MeanTimes:
        """Return the means over units of which only this part is reduced."""
        both_s = self.gather_and_reduce_s
        if both_s is not None:
            both_s = self.gather_s + part * (both_s - self.gather_s)
        return replace(self, reduce_s=part * self.reduce_s, gather_and_reduce_s=both_s)


@dataclass(frozen=True)
class NetworkTimes:
    """Seconds of communication: of blocks, and of what comes before and behind them."""

    uneven: MeanTimes  # or with the only shares that were timed
    even: MeanTimes | None  # None: unknown, or no faster
    root: MeanTimes
    last: MeanTimes
    exchange_s: float

    def in_problem(self, problem: Problem, reduced: float) -> Problem:
        """Return a problem with these times; ``reduced`` is the part of its units that train."""
        own = self.uneven.reduced(reduced)
        problem = replace(
            problem,
            gather_s=own.gather_s,
            reduce_s=own.reduce_s,
            gather_and_reduce_s=own.gather_and_reduce_s,
            root_gather_s=self.root.gather_s,
            root_reduce_s=self.root.reduce_s,
            last_gather_s=self.last.gather_s,
            last_reduce_s=self.last.reduce_s,
            # the first unit's gather and the last unit's reduce, which no compute hides
            fill_s=self.uneven.gather_s + self.uneven.reduce_s,
            # the two exchanges that every step waits for, whatever the ranks compute
            step_overhead_s=2 * self.exchange_s,
        )
        if self.even is None:
            return problem
        even = self.even.reduced(reduced)
        return replace(
            problem,
            even_gather_s=even.gather_s,
            even_reduce_s=even.reduce_s,
            even_gather_and_reduce_s=even.gather_and_reduce_s,
            padded_bytes=even.padded_bytes,
        )


def measure_network(
    model: ShardedModel, clock: Callable[[], float], capacity_bytes: float
) -> NetworkTimes:
    """Time the collectives of a step on the groups that the step uses; collective.

    Where every rank has the memory, it also measures with shares of the other kind, even or uneven.
    It restores the shares.
    """
    model.executor.reshard()
    fractions = model.fractions
    was_even, count = fractions_are_even(fractions), len(fractions)
    times = {was_even: _times_of_blocks(model, clock, was_even, capacity_bytes)}
    weights = [3.0 if was_even and rank % 2 else 1.0 for rank in range(count)]
    other = [weight / sum(weights) for weight in weights]
    # groups of ranks that each hold the whole state cut it anyhow
    has_other = model.units[1:] and count > 1 and not model.state_groups
    if has_other and _have_room(model, other, capacity_bytes):
        model.change_fractions(other)
        times[not was_even] = _times_of_blocks(model, clock, not was_even, capacity_bytes)
        model.change_fractions(fractions)
    uneven, even = times.get(False, times[was_even]), times.get(True, times[was_even])
    exchange = partial(model.control.gather, [0.0, 0.0])
    return NetworkTimes(
        uneven=uneven,
        even=even if even.total_s < (1 - _NOISE) * uneven.total_s else None,
        root=_sum_of(model, clock, UnitKind.ROOT, UnitKind.EMBEDDING),
        last=_sum_of(model, clock, UnitKind.HEAD),
        exchange_s=statistics.median(
            _slowest(model, model.accelerator.now_s, exchange) for _ in range(_EXCHANGES)
        ),
    )


def _have_room(model: ShardedModel, fractions: Sequence[float], capacity_bytes: float) -> bool:
    """Return whether every rank could hold its parameters and gradients with these shares."""
    held = sum(f.contents.master_bytes * (2 if f.trainable else 1) for f in model.flats)
    # Twice: the old shards are freed only after the new ones are filled.
    needed = model.gathered_bytes + 2 * held * fractions[model.control.rank]
    return model.control.all(needed < capacity_bytes)


def _times_of_blocks(
    model: ShardedModel, clock: Callable[[], float], even: bool, capacity_bytes: float
) -> MeanTimes:
    """Return the times with the present shares, in the faster of the forms that they can have."""
    times = mean_times(model, clock, model.of_kind(UnitKind.BLOCK))
    padded_bytes = model.padded_bytes().total if even else 0
    if not padded_bytes or not _have_room(model, model.fractions, capacity_bytes - padded_bytes):
        return times
    model.padding.is_on = True
    padded = mean_times(model, clock, model.of_kind(UnitKind.BLOCK))
    model.padding.is_on = False
    model.release_buffers()
    padded = replace(padded, padded_bytes=padded_bytes)
    return min(padded, times, key=lambda each: each.total_s)


def _sum_of(model: ShardedModel, clock: Callable[[], float], *kinds: UnitKind) -> MeanTimes:
    """Return the times of all units of some kinds, one after the other."""
    times = [mean_times(model, clock, [unit]) for kind in kinds for unit in model.of_kind(kind)]
    return MeanTimes(sum(each.gather_s for each in times), sum(each.reduce_s for each in times))


def mean_times(model: ShardedModel, clock: Callable[[], float], units: Sequence[Unit]) -> MeanTimes:
    """Return the mean times of units whose collectives run as in a step."""
    passed = _spread([unit for unit in units if unit.flats])
    trained = _spread([unit for unit in units if unit.trainable])
    if not passed:
        return MeanTimes()
    passes: list[tuple[float, float, float]] = []
    while len(passes) <= _PASSES:
        passes.append(_pass(partial(_slowest, model, clock), passed, trained))
        if sum(passes[-1]) > _LONG_S * 2 * len(passed):
            break  # on all ranks: they share the slowest rank's time
    forward_s, backward_s, last_s = map(
        statistics.median, zip(*(passes[1:] or passes), strict=True)
    )
    gather_s = forward_s / len(passed)
    if not trained:
        return MeanTimes(gather_s)
    # the last reduce runs alone: its unit counts for all by its bytes
    mean_bytes = statistics.fmean(unit.gradient_bytes for unit in trained)
    reduce_s = last_s * mean_bytes / max(1, trained[0].gradient_bytes)
    if len(trained) < _WITH_BOTH:
        return MeanTimes(gather_s, reduce_s)
    both_s = (backward_s - gather_s - reduce_s) / (len(trained) - 2)
    # a gather or a reduce alone is never longer
    return MeanTimes(gather_s, reduce_s, max(gather_s, reduce_s, both_s))


def _spread(units: Sequence[Unit]) -> Sequence[Unit]:
    return units[:: max(1, math.ceil(len(units) / _UNITS))]


def _pass(
    timed: Callable[[Callable[[], None]], float], units: Sequence[Unit], trained: Sequence[Unit]
) -> tuple[float, float, float]:
    """Return the seconds of a forward, of a backward, and of its last reduce."""
    forward_s = timed(partial(_forward, units))
    if not trained or units[-1] is not trained[-1]:
        units[-1].free()
    if not trained:
        return forward_s, 0.0, 0.0
    trained[-1].wait_gather()
    return forward_s, timed(partial(_backward, trained)), timed(partial(_reduce, trained[0]))


def _forward(units: Sequence[Unit]) -> None:
    """Gather units in turn, each while the one before is waited for; the last one stays."""
    units[0].start_gather()
    for unit, following in itertools.zip_longest(units, units[1:]):
        if following is not None:
            following.start_gather()
        unit.wait_gather()
        if following is not None:
            unit.free()


def _backward(units: Sequence[Unit]) -> None:
    """Gather and reduce units in turn, from the last one on, up to the first one's reduce."""
    before: Unit | None = None
    for unit, following in itertools.zip_longest(units[::-1], units[-2::-1]):
        if following is not None:
            following.start_gather()
        unit.arm()
        unit.wait_gather()
        if before is not None:
            before.wait_reduce()
            before.drop_gradients()
        if following is not None:
            unit.start_reduce(1.0, in_place=True)
        unit.free()
        before = unit


def _reduce(unit: Unit) -> None:
    unit.start_reduce(1.0, in_place=True)
    unit.wait_reduce()
    unit.drop_gradients()


def _slowest(
    model: ShardedModel, clock: Callable[[], float], function: Callable[[], object]
) -> float:
    """Return the slowest rank's seconds; collective."""
    clock()
    model.control.barrier()
    start_s = clock()
    function()
    return model.control.max(clock() - start_s)
