"""What the ranks spend beside computing: gathers, reduces, agreements, the optimizer."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_cephalo.accumulation.runner import ROOT
from lightning_cephalo.engine import Engine
from lightning_cephalo.sharding.unit import Unit

# Units beside the root that are timed, and how often; a unit is much like the next.
_UNITS, _REPEATS, _LONG_S = 4, 5, 0.25
# Elements of the tensor that stands for a shard when the optimizer is timed.
_SAMPLE_NUMEL = 2**18


@dataclass(frozen=True)
class NetworkTimes:
    """Seconds beside compute, the slowest rank's.

    Attributes:
        gather_s: Gather of a mean unit.
        reduce_s: Reduce of a mean unit.
        root_s: Gather and reduce of the root unit.
        exchange_s: One exchange of small messages.
        optimizer_s: AdamW over an even share of the parameters.
    """

    gather_s: float
    reduce_s: float
    root_s: float
    exchange_s: float
    optimizer_s: float

    @property
    def step_overhead_s(self) -> float:
        """What a step waits for whatever the ranks compute.

        The root unit is gathered before and reduced after everything, the first unit's gather and
        the last one's reduce have no compute to hide behind, and there are two exchanges.
        """
        return self.root_s + self.gather_s + self.reduce_s + 2 * self.exchange_s


def measure_network(engine: Engine, clock: Callable[[], float]) -> NetworkTimes:
    """Time the collectives of a step on the groups that the step uses; collective.

    Leaves no gradients and nothing gathered behind.

    Args:
        engine: The sharded model; has run a step.
        clock: Seconds, when all work issued to the device is done.
    """
    engine.runner.reshard()
    others = _spread([unit for unit in engine.units[1:] if unit.flats], _UNITS)
    timed = [_unit_times(engine, unit, clock) for unit in others]
    root_gather_s, root_reduce_s = _unit_times(engine, engine.units[ROOT], clock)
    return NetworkTimes(
        gather_s=statistics.fmean(gather_s for gather_s, _ in timed) if timed else 0.0,
        reduce_s=statistics.fmean(reduce_s for _, reduce_s in timed) if timed else 0.0,
        root_s=root_gather_s + root_reduce_s,
        exchange_s=_exchange_time(engine),
        optimizer_s=_optimizer_time(engine, clock),
    )


def _spread(units: Sequence[Unit], count: int) -> list[Unit]:
    if len(units) <= count:
        return list(units)
    return [units[round(index * (len(units) - 1) / (count - 1))] for index in range(count)]


def _unit_times(engine: Engine, unit: Unit, clock: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of gathering and of reducing a unit, each the slowest rank's."""
    gathers, reduces = [], []
    for _ in range(_REPEATS):
        gathers.append(_slowest(engine, clock, unit.wait_gather))
        if unit.trainable:
            unit.arm()
            reduces.append(_slowest(engine, clock, lambda: _reduce(unit)))
        unit.free()
        if gathers[-1] + sum(reduces[-1:]) > _LONG_S:
            break  # agreed: all ranks have the slowest one's time
    return statistics.median(gathers), statistics.median(reduces) if reduces else 0.0


def _reduce(unit: Unit) -> None:
    unit.start_reduce(1.0)
    unit.wait_reduce()


def _slowest(engine: Engine, clock: Callable[[], float], function: Callable[[], None]) -> float:
    clock()
    engine.agreement.exchange([0.0])  # start together
    start_s = clock()
    function()
    return max(row[0] for row in engine.agreement.exchange([clock() - start_s]))


def _exchange_time(engine: Engine) -> float:
    times = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        engine.agreement.exchange([0.0, 0.0])
        times.append(time.perf_counter() - start_s)
    return max(row[0] for row in engine.agreement.exchange([statistics.median(times)]))


def _optimizer_time(engine: Engine, clock: Callable[[], float]) -> float:
    """Seconds of AdamW over an even share, from steps over a tensor of at most a megabyte.

    The user's optimizer is made for the planned shards, later; AdamW is what most will use.
    """
    own_s = 0.0
    with contextlib.suppress(torch.OutOfMemoryError):  # a rank that is full already: others tell
        own_s = _adamw_time(engine, clock)
    if not own_s:
        gc.collect()  # the frames of the failed step hold its tensors
    return max(row[0] for row in engine.agreement.exchange([own_s]))


def _adamw_time(engine: Engine, clock: Callable[[], float]) -> float:
    numel = sum(flat.numel for unit in engine.units for flat in unit.flats if flat.trainable)
    share = numel / engine.agreement.world_size
    sample = max(1, min(int(share), _SAMPLE_NUMEL))
    parameter = torch.nn.Parameter(torch.zeros(sample, device=engine.device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    times = []
    for _ in range(_REPEATS):
        start_s = clock()
        optimizer.step()
        times.append(clock() - start_s)
    return statistics.median(times) * share / sample
