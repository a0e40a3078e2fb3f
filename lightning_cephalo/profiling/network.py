"""Times the communication of a step: gathers, reduces, exchanges of small messages."""

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

# Most units that are timed apart from the root. In a pass of a few, ranks hardly drift apart.
_UNITS = 8
# Repetitions of a collective and of a pass, and the seconds of a collective after which they stop.
_REPEATS, _PASSES, _LONG_S = 5, 3, 0.25
# From this many units on, a gather and a reduce run beside each other in a backward.
_WITH_BOTH = 3
# Times that differ by less are noise.
_NOISE = 0.05


@dataclass(frozen=True)
class MeanTimes:
    """Mean seconds of gathering and of reducing a unit, as steps do it."""

    gather_s: float = 0.0
    reduce_s: float = 0.0
    gather_and_reduce_s: float | None = None
    padded_bytes: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float | None]:
        """Seconds of each, and of both beside each other."""
        return self.gather_s, self.reduce_s, self.gather_and_reduce_s

    @property
    def total_s(self) -> float:
        """Seconds of a unit's gather in the forward, and of its gather and reduce after it."""
        both_s = self.gather_and_reduce_s
        return self.gather_s + (self.gather_s + self.reduce_s if both_s is None else both_s)


@dataclass(frozen=True)
class NetworkTimes:
    """Seconds of communication on the slowest rank: of blocks, and of what comes before and behind.

    Attributes:
        uneven: With uneven shares, or with the only ones that were timed.
        even: With even shares; None: unknown, or they are the only ones.
    """

    uneven: MeanTimes
    even: MeanTimes | None
    root: MeanTimes
    last: MeanTimes
    exchange_s: float

    def in_problem(self, problem: Problem, visits: int, reduced: float) -> Problem:
        """Return a problem with these times.

        Args:
            visits: Visits of units in a step; without any, nothing is gathered.
            reduced: Part of the units whose gradients are reduced: a problem has means over all.
        """

        def of_reduces(seconds: float | None, gather_s: float = 0.0) -> float | None:
            # only what reduced units take beyond a gather
            return None if seconds is None else gather_s + reduced * (seconds - gather_s)

        own, even = self.uneven, self.even or self.uneven
        gather_s = own.gather_s if visits else 0.0
        even_gather_s, even_reduce_s, even_both_s = map(_saved, even.seconds, own.seconds)
        saves = any(each is not None for each in (even_gather_s, even_reduce_s, even_both_s))
        return replace(
            problem,
            gather_s=gather_s,
            reduce_s=own.reduce_s * reduced,
            gather_and_reduce_s=of_reduces(own.gather_and_reduce_s, gather_s),
            even_gather_s=even_gather_s if visits else None,
            even_reduce_s=of_reduces(even_reduce_s),
            even_gather_and_reduce_s=of_reduces(
                even_both_s, own.gather_s if even_gather_s is None else even_gather_s
            ),
            padded_bytes=even.padded_bytes if saves else 0.0,
            root_gather_s=self.root.gather_s,
            root_reduce_s=self.root.reduce_s,
            last_gather_s=self.last.gather_s,
            last_reduce_s=self.last.reduce_s,
            # the first unit's gather and the last unit's reduce, which no compute hides
            fill_s=own.gather_s + own.reduce_s,
            # the two exchanges that every step waits for, whatever the ranks compute
            step_overhead_s=2 * self.exchange_s,
        )


def measure_network(
    model: ShardedModel, clock: Callable[[], float], capacity_bytes: float
) -> NetworkTimes:
    """Time the collectives of a step on the groups that the step uses; collective.

    They run as in a step: alone they take another time (docs/design/collectives.md, "As steps run
    them"). Where every rank has the memory, it also measures with shares of the other kind, even
    or uneven. It restores the shares.
    """
    model.executor.reshard()
    root, last = root_times(model, clock)
    fractions = model.fractions
    was_even = fractions_are_even(fractions)
    first = _times(model, clock, was_even, capacity_bytes)
    second = None
    other = _uneven(len(fractions)) if was_even else [1 / len(fractions)] * len(fractions)
    # groups of ranks that each hold the whole state cut it anyhow
    has_other = len(fractions) > 1 and not model.state_groups
    if model.units[1:] and has_other and _have_room(model, other, capacity_bytes):
        model.change_fractions(other)
        second = _times(model, clock, not was_even, capacity_bytes)
        model.change_fractions(fractions)
    even, uneven = (first, second or first) if was_even else (second, first)
    return NetworkTimes(
        uneven, None if model.state_groups else even, root, last, exchange_time(model)
    )


def _uneven(world_size: int) -> list[float]:
    """Return shares of which every other is three times as large."""
    weights = [3.0 if rank % 2 else 1.0 for rank in range(world_size)]
    return [weight / sum(weights) for weight in weights]


def _have_room(model: ShardedModel, fractions: Sequence[float], capacity_bytes: float) -> bool:
    """Return whether every rank could hold its parameters and gradients with these shares."""
    held = sum(
        flat.contents.master_bytes * (2 if flat.trainable else 1)
        for unit in model.units
        for flat in unit.flats
    )
    # Twice: the old shards are freed only after the new ones are filled.
    needed = model.gathered_bytes + 2 * held * fractions[model.control.rank]
    return model.control.all(needed < capacity_bytes)


def _saved(even_s: float | None, uneven_s: float | None) -> float | None:
    """Return ``even_s`` if it is less than ``uneven_s`` by more than noise, else None."""
    if even_s is None or uneven_s is None:
        return None
    return even_s if even_s < (1 - _NOISE) * uneven_s else None


def _times(
    model: ShardedModel, clock: Callable[[], float], even: bool, capacity_bytes: float
) -> MeanTimes:
    """Return the times with the present shares, in the faster of the forms that they can have."""
    times = mean_times(model, clock)
    padded_bytes = model.padded_bytes().total if even else 0
    if not padded_bytes or not _have_room(model, model.fractions, capacity_bytes - padded_bytes):
        return times
    model.padding.is_on = True
    padded = mean_times(model, clock)
    model.padding.is_on = False
    model.release_buffers()
    if padded.total_s >= times.total_s:
        return times
    return replace(padded, padded_bytes=padded_bytes)


def mean_times(model: ShardedModel, clock: Callable[[], float]) -> MeanTimes:
    """Return the mean times of blocks, whose collectives run as in a step."""
    units = _spread([unit for unit in model.of_kind(UnitKind.BLOCK) if unit.flats], _UNITS)
    trained = _spread([unit for unit in model.of_kind(UnitKind.BLOCK) if unit.trainable], _UNITS)
    if len(trained) >= _WITH_BOTH:
        return _in_turn(model, units, trained, clock)
    times = [unit_times(model, unit, clock) for unit in units]
    return MeanTimes(*map(statistics.fmean, zip(*times, strict=True)))


def _in_turn(
    model: ShardedModel,
    units: Sequence[Unit],
    trained: Sequence[Unit],
    clock: Callable[[], float],
) -> MeanTimes:
    """Return the mean times of units that pass as in a step without any compute.

    The last reduce is beside nothing, and timed apart: its unit counts for all by its bytes.
    """
    mean_bytes = statistics.fmean(unit.gradient_bytes for unit in trained)
    passes = []

    def once(passed: Sequence[Unit], trained: Sequence[Unit]) -> tuple[float, float, float]:
        forward_s = slowest(model, clock, partial(_forward, passed))
        if passed[-1] is not trained[-1]:
            passed[-1].free()
            trained[-1].wait_gather()
        backward_s = slowest(model, clock, partial(_backward, trained))
        return forward_s, backward_s, slowest(model, clock, partial(_reduce, trained[0]))

    once(trained[:_WITH_BOTH], trained[:_WITH_BOTH])  # the first ones may make connections
    for _ in range(_PASSES):
        passes.append(once(units, trained))
        if sum(passes[-1]) > _LONG_S * 2 * len(units):
            break  # on all ranks: they share the slowest rank's time
    forward_s, backward_s, last_s = map(statistics.median, zip(*passes, strict=True))
    gather_s = forward_s / len(units)
    reduce_s = last_s * mean_bytes / max(1, trained[0].gradient_bytes)
    both_s = (backward_s - gather_s - reduce_s) / (len(trained) - 2)
    # a gather or a reduce alone is never longer
    return MeanTimes(gather_s, reduce_s, max(gather_s, reduce_s, both_s))


def _forward(units: Sequence[Unit]) -> None:
    """Gather units in turn, the next one beside each; the last one stays."""
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


def _spread(units: Sequence[Unit], count: int) -> list[Unit]:
    if len(units) <= count:
        return list(units)
    return [units[round(index * (len(units) - 1) / (count - 1))] for index in range(count)]


def root_times(model: ShardedModel, clock: Callable[[], float]) -> tuple[MeanTimes, MeanTimes]:
    """Return the times of what is no block: of the root unit with embeddings, and of heads."""

    def of_kinds(*kinds: UnitKind) -> MeanTimes:
        units = [unit for kind in kinds for unit in model.of_kind(kind)]
        times = [unit_times(model, unit, clock) for unit in units]
        return MeanTimes(*map(math.fsum, zip(*times, strict=True)))

    return of_kinds(UnitKind.ROOT, UnitKind.EMBEDDING), of_kinds(UnitKind.HEAD)


def unit_times(model: ShardedModel, unit: Unit, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the slowest rank's median seconds of gathering and of reducing a unit."""
    gathers, reduces = [], []
    for repeat in range(1 + _REPEATS):
        gather_s, reduce_s = slowest(model, clock, unit.wait_gather), 0.0
        if unit.trainable:
            unit.arm()
            reduce_s = slowest(model, clock, lambda: _reduce(unit))
        unit.free()
        if not repeat:
            continue  # the first collective of a kind may make connections
        gathers.append(gather_s)
        reduces.append(reduce_s)
        if gather_s + reduce_s > _LONG_S:
            break  # on all ranks: they share the slowest rank's time
    return statistics.median(gathers), statistics.median(reduces)


def _reduce(unit: Unit) -> None:
    unit.start_reduce(1.0, in_place=True)
    unit.wait_reduce()
    unit.drop_gradients()


def slowest(model: ShardedModel, clock: Callable[[], float], function: Callable[[], None]) -> float:
    clock()
    model.control.barrier()
    start_s = clock()
    function()
    return model.control.max(clock() - start_s)


def exchange_time(model: ShardedModel) -> float:
    """Return the slowest rank's median seconds of one exchange of small messages; collective."""
    times = []
    for _ in range(_REPEATS):
        start_s = model.accelerator.now_s()
        model.control.gather([0.0, 0.0])
        times.append(model.accelerator.now_s() - start_s)
    return model.control.max(statistics.median(times))
