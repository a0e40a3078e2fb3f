"""Times the communication of a step: gathers, reduces, exchanges of small messages.

Collectives pass as in a step without compute: alone they take another time
(docs/design/collectives.md, "As steps run them"). All ranks get the slowest rank's times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Links, Problem
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


def with_network_times(
    problem: Problem,
    model: ShardedModel,
    clock: Callable[[], float],
    capacity_bytes: float,
    reduced: float = 1.0,
) -> Problem:
    """Return a problem with the times of a step's collectives on the groups it uses; collective.

    Where every rank has the memory, it also measures with shares of the other kind, even or uneven.
    It restores the shares. ``reduced`` is the part of the problem's units that train.
    """
    model.executor.reshard()
    given, count = model.fractions, len(model.fractions)
    weights = [3.0 if fractions_are_even(given) and rank % 2 else 1.0 for rank in range(count)]
    other = tuple(weight / sum(weights) for weight in weights)
    padded_bytes = model.padded_bytes().total
    held = sum(f.contents.master_bytes * (2 if f.trainable else 1) for f in model.flats)
    # Twice: the old shards are freed only after the new ones are filled.
    needed = model.gathered_bytes + padded_bytes + 2 * held * other[model.control.rank]
    # groups of ranks that each hold the whole state cut it anyhow
    has_other = len(model.units) > 1 and count > 1 and not model.state_groups
    has_other = model.control.all(has_other and needed < capacity_bytes)
    times = {}
    for fractions in (given, other) if has_other else (given,):
        is_even = fractions_are_even(fractions)
        if fractions != model.fractions:
            model.change_fractions(fractions)
        model.padding.is_on = has_other and is_even and padded_bytes > 0
        times[is_even] = mean_times(model, clock, model.of_kind(UnitKind.BLOCK))
        model.padding.is_on = False
    if has_other:
        model.change_fractions(given)
    uneven, even = times.get(False, times[is_even]), times.get(True, times[is_even])
    root = _sum_of(model, clock, UnitKind.ROOT, UnitKind.EMBEDDING)
    last = _sum_of(model, clock, UnitKind.HEAD)
    exchange = partial(model.control.gather, [0.0, 0.0])
    exchanges_s = [_slowest(model, model.accelerator.now_s, exchange) for _ in range(_EXCHANGES)]
    problem = replace(
        problem,
        links=_with_reduced(uneven, reduced),
        root_links=root,
        last_links=last,
        # the first unit's gather and the last unit's reduce, which no compute hides
        fill_s=uneven.gather_s + uneven.reduce_s,
        # the two exchanges that every step waits for, whatever the ranks compute
        step_overhead_s=2 * statistics.median(exchanges_s),
    )
    # a unit's gather in the forward, and its gather and reduce after it
    even_s, uneven_s = (each.gather_s + each.both_s for each in (even, uneven))
    if even_s >= (1 - _NOISE) * uneven_s:
        return problem
    return replace(problem, even_links=_with_reduced(even, reduced), padded_bytes=padded_bytes)


def _with_reduced(links: Links, part: float) -> Links:
    """Return the mean times of units of which this part is reduced."""
    gather_s = links.gather_s
    return Links(gather_s, part * links.reduce_s, gather_s + part * (links.both_s - gather_s))


def _sum_of(model: ShardedModel, clock: Callable[[], float], *kinds: UnitKind) -> Links:
    """Return the times of all units of some kinds, one after the other."""
    times = [mean_times(model, clock, [unit]) for kind in kinds for unit in model.of_kind(kind)]
    return Links(sum(each.gather_s for each in times), sum(each.reduce_s for each in times))


def mean_times(model: ShardedModel, clock: Callable[[], float], units: Sequence[Unit]) -> Links:
    """Return the mean times of units whose collectives run as in a step."""
    passed = _spread([unit for unit in units if unit.flats])
    trained = _spread([unit for unit in units if unit.trainable])
    if not passed:
        return Links()
    timed = partial(_slowest, model, clock)

    def forward() -> None:
        """Gather units in turn, each while the one before is waited for; the last one stays."""
        for number, unit in enumerate(passed):
            for each in passed[number : number + 2]:
                each.start_gather()
            unit.wait_gather()
            if unit is not passed[-1]:
                unit.free()

    def backward() -> None:
        """Gather and reduce units in turn, from the last one on, up to the first one's reduce."""
        order = trained[::-1]
        for number, unit in enumerate(order):
            for each in order[number : number + 2]:
                each.start_gather()
            unit.arm()
            unit.wait_gather()
            if number:
                order[number - 1].wait_reduce()
                order[number - 1].drop_gradients()
            if unit is not trained[0]:
                unit.start_reduce(1.0, in_place=True)
            unit.free()

    def last_reduce() -> None:
        trained[0].start_reduce(1.0, in_place=True)
        trained[0].wait_reduce()
        trained[0].drop_gradients()

    passes: list[list[float]] = []
    while len(passes) <= _PASSES:
        passes.append([timed(forward)])
        for unit in passed:
            if unit not in trained[-1:]:
                unit.free()
        if trained:
            trained[-1].wait_gather()
            passes[-1] += [timed(backward), timed(last_reduce)]
        if sum(passes[-1]) > _LONG_S * 2 * len(passed):
            break  # on all ranks: they share the slowest rank's time
    forward_s, *of_trained = map(statistics.median, zip(*(passes[1:] or passes), strict=True))
    gather_s = forward_s / len(passed)
    if not trained:
        return Links(gather_s)
    backward_s, last_s = of_trained
    # the last reduce runs alone: its unit counts for all by its bytes
    mean_bytes = statistics.fmean(unit.gradient_bytes for unit in trained)
    reduce_s = last_s * mean_bytes / max(1, trained[0].gradient_bytes)
    if len(trained) < _WITH_BOTH:
        return Links(gather_s, reduce_s)
    both_s = (backward_s - gather_s - reduce_s) / (len(trained) - 2)
    return Links(gather_s, reduce_s, max(0.0, both_s))


def _spread(units: Sequence[Unit]) -> Sequence[Unit]:
    return units[:: max(1, math.ceil(len(units) / _UNITS))]


def _slowest(
    model: ShardedModel, clock: Callable[[], float], function: Callable[[], object]
) -> float:
    """Return the slowest rank's seconds; collective."""
    clock()
    model.control.barrier()
    start_s = clock()
    function()
    return model.control.max(clock() - start_s)
