"""Runs one rank of a comparison: builds every contender, plans, and times steps in turn."""

from __future__ import annotations

import datetime
import gc
import math
import os
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Plan, Problem, RankProfile, solve
from lightning_cephalo.profiling.memory_model import state_of
from lightning_cephalo.profiling.network import with_network_times
from lightning_cephalo.profiling.optimizer_time import optimizer_time
from lightning_cephalo.profiling.probe import Prober, ProfiledStep
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.profiling.state_rates import with_unit_parameters
from lightning_cephalo.profiling.sweep import ProfileOptions, measure_times

from . import links
from .cases import CEPHALO, DDP_BY_SPEED, Case, cut
from .contenders import CPU, Contender, ModelSize, Part, baselines, loss_of
from .contenders import cephalo as make_cephalo
from .results import RankRecord, StepTimes

_PROFILE_S = 30.0
_GRADIENTS_ALIKE = 1e-4
_TIMEOUT = datetime.timedelta(seconds=300)


@dataclass(frozen=True)
class Setup:
    """The settings of the ranks of one process group.

    Attributes:
        cases: All cases; they have one set of speeds and one link.
        flops_per_s: Rate of every rank's emulated device.
        namespaces: The network namespace of every rank; empty: loopback.
        folder: Folder of the store through which the ranks find each other.
        model: Size of the model to train.
        rounds: Most rounds of a case.
        least_rounds: Fewest rounds, however long they take.
        case_s: Seconds for a case, if ``least_rounds`` fit.
    """

    cases: tuple[Case, ...]
    flops_per_s: tuple[float, ...]
    namespaces: tuple[str, ...]
    folder: str
    model: ModelSize
    rounds: int
    least_rounds: int
    case_s: float


def run_rank(rank: int, setup: Setup) -> list[RankRecord]:
    """Measure all cases. Each rank calls it in a process of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is for its namespaces
    warnings.simplefilter("ignore")  # deprecations inside torch's own wrappers
    ranks = len(setup.flops_per_s)
    if setup.namespaces:
        links.enter(setup.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    store = f"file://{setup.folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    dist.barrier()
    try:
        own, sharded = make_cephalo(setup.model, ranks)
        others, reasons = baselines(setup.model, ranks)
        speeds = setup.cases[0].speeds
        device = EmulatedDevice(flops_per_s=setup.flops_per_s[rank], name=f"speed {speeds[rank]}")
        with device:
            largest = max(setup.cases, key=lambda case: case.samples)
            problem = _profile(sharded, device, _global_batch(largest, setup.model), largest)
            return [
                _measure(case, setup, own, sharded, others, reasons, problem, device)
                for case in setup.cases
            ]
    finally:
        dist.destroy_process_group()


def _measure(
    case: Case,
    setup: Setup,
    own: Contender,
    sharded: ShardedModel,
    others: Sequence[Contender],
    reasons: dict[str, str],
    problem: Problem,
    device: EmulatedDevice,
) -> RankRecord:
    rank = sharded.control.rank
    plan = sharded.control.broadcast(_solved(problem, case) if rank == 0 else None)
    sharded.change_fractions([part.state_fraction for part in plan.ranks])
    sharded.executor.reshard_after_forward = plan.reshard_after_forward is not False
    batch = _global_batch(case, setup.model)
    _prepare(own, batch, rank, [part.microbatch_sizes for part in plan.ranks])
    for other in others:
        counts = case.by_speed if other.name == DDP_BY_SPEED else case.even
        _prepare(other, batch, rank, [cut(count, case.samples) for count in counts])
    contenders = [own, *others]
    started_s = time.perf_counter()
    _warm_up(contenders)
    round_s = sharded.control.max(time.perf_counter() - started_s)
    rounds = min(setup.rounds, max(setup.least_rounds, int(setup.case_s / round_s)))
    times: dict[str, list[StepTimes]] = {contender.name: [] for contender in contenders}
    for index in range(rounds):
        # every contender is first, and follows every other one, about equally often
        first = index % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            times[contender.name].append(_timed(contender, device))
    samples = {
        contender.name: sum(len(part["tokens"]) for part in contender.parts)
        for contender in contenders
    }
    return RankRecord(samples, times, reasons, plan)


def _timed(contender: Contender, device: EmulatedDevice) -> StepTimes:
    gc.collect()
    dist.barrier()
    device.synchronize()  # the barrier's time is not part of the step
    busy_s, blocked_s = device.busy_s, device.blocked_s
    start_s = time.perf_counter()
    contender.step()
    device.synchronize()
    step_s = time.perf_counter() - start_s
    return StepTimes(step_s, device.busy_s - busy_s, device.blocked_s - blocked_s)


def _warm_up(contenders: Sequence[Contender]) -> None:
    """Run one step of each contender, for lazy initialisation and to compare the gradients.

    Raises:
        RuntimeError: If the gradients differ, as the contenders would not do the same work.
    """
    norms = {}
    for contender in contenders:
        dist.barrier()
        contender.accumulate()
        norms[contender.name] = contender.gradient_norm()
        contender.update()
    expected = norms[CEPHALO]
    if any(not math.isclose(norm, expected, rel_tol=_GRADIENTS_ALIKE) for norm in norms.values()):
        raise RuntimeError(f"The contenders' gradients have different norms: {norms}")


def _global_batch(case: Case, model: ModelSize) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.global_batch_size)
    shape = (case.global_batch_size, model.length + 1)
    return torch.randint(0, 256, shape, generator=generator)


def _prepare(
    contender: Contender, batch: torch.Tensor, rank: int, sizes: Sequence[Sequence[int]]
) -> None:
    """Give a contender this rank's microbatches of the common batch."""
    start = sum(sum(earlier) for earlier in sizes[:rank])
    own = batch[start : start + sum(sizes[rank])]
    parts: list[Part] = [{"tokens": part} for part in own.split(list(sizes[rank]))]
    contender.prepare(parts if sizes[rank] else [], len(batch))


def _profile(
    sharded: ShardedModel, device: EmulatedDevice, tokens: torch.Tensor, case: Case
) -> Problem:
    """Measure as the strategy does, except memory, which is not limited here."""
    clock = accelerator_of(CPU).clock  # the emulated device that this runs on

    def batch_of(size: int) -> Part:
        return {"tokens": tokens[:size]}

    def step(part: Part) -> torch.Tensor:
        return loss_of(sharded.module, part)

    prober = Prober(sharded, clock, batch_of, ProfiledStep(step))
    options = ProfileOptions(case.global_batch_size, _PROFILE_S)
    measured = measure_times(prober, options, device.name)
    updates = optimizer_time(sharded, clock)
    units = sum(visit.differentiable for visit in sharded.executor.visits)
    known, every = sorted(measured.times), np.arange(1, measured.largest + 1)

    def curve(part: str, divisor: int) -> tuple[float, ...]:
        values = [getattr(measured.times[size], part) / divisor for size in known]
        return tuple(np.interp(every, known, values).tolist())

    own = RankProfile(
        name=device.name,
        forward_s=curve("forward_s", units),
        backward_s=curve("backward_s", units),
        tail_s=curve("tail_s", 1),
        compute_bytes=(0.0,) * len(every),
        capacity_bytes=math.inf,
        updated_parameters_per_s=updates.parameters_per_s,
    )
    profiles = sharded.control.gather(own)
    problem = Problem(
        ranks=tuple(merge_equal_ranks(profiles)),
        units=units,
        state=state_of(sharded)[0],
        global_batch_size=case.global_batch_size,
        reshard_after_forward="auto",
        unresharded_bytes=float(sharded.unresharded_bytes),
    )
    problem = with_unit_parameters(problem, sharded)
    problem = with_network_times(problem, sharded, clock, math.inf)
    for flat in sharded.flats:
        flat.gradient.forget()
    update_s = updates.overhead_s
    return replace(problem, update_overhead_s=update_s, unit_update_s=update_s * problem.unit_part)


def _solved(problem: Problem, case: Case) -> Plan:
    """Solve for the plan, with microbatches no larger than those of the other contenders."""
    curves = ("forward_s", "backward_s", "tail_s", "compute_bytes")
    ranks = tuple(
        replace(rank, **{name: getattr(rank, name)[: case.samples] for name in curves})
        for rank in problem.ranks
    )
    return solve(replace(problem, ranks=ranks, global_batch_size=case.global_batch_size))
