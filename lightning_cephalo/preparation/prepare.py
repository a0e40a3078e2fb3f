"""Measures a job, or loads an earlier measurement, and makes a plan for it. Collective."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

from lightning_cephalo.adapters.batch_norm import smallest_microbatch
from lightning_cephalo.adapters.held_state import OptimizerFacts
from lightning_cephalo.adapters.precision import loss_scaler
from lightning_cephalo.adapters.user_module import step_on
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.texts import printable
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, solve
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.limits import named_where_nothing_fits, with_host_memory
from lightning_cephalo.profiling import job_cache
from lightning_cephalo.profiling.measure import measure
from lightning_cephalo.profiling.memory_model import largest_row
from lightning_cephalo.profiling.probe import ProfiledStep
from lightning_cephalo.profiling.state_rates import has_state_rates, with_state_rates
from lightning_cephalo.profiling.sweep import ProfileOptions
from lightning_cephalo.ranks.control import ControlGroup

_ROUNDING = 1e-6
_NO_HOST = (
    "no rank has host memory apart from its device (a CPU's is the same memory, and host_memory_cap"
    " may be 0)"
)


def measure_or_load(
    job: Job, model: ShardedModel, view: TrainerView, manual: PhasedSteps | None
) -> Problem:
    """Return the measured or cached problem, with the choices of the plan; collective."""
    options, control, offload = job.options, model.control, _optimizer_offload(job)
    device, smallest = job.limits[control.rank].device, smallest_microbatch(model.module)
    of_job = {**options.of_measuring(), "samples of a step": job.global_batch_size}
    describe = partial(job_cache.describe, model, view, partial(job.loaders.read, smallest), of_job)
    cached = job_cache.look_up(control, device, describe, remeasure=options.planner.remeasure)
    shows = options.verbose and control.rank == 0
    if cached.said is not None and shows:
        print(printable(cached.said), flush=True)
    problem = cached.problem
    if problem is None:
        step = partial(step_on, view.module)
        with named_where_nothing_fits(job.limits):
            problem = measure(
                model=model,
                view=view,
                device=device,
                read_batch=job.loaders.read,
                step=ProfiledStep(step, view.precision.train_step_context, manual),
                options=ProfileOptions(
                    global_batch_size=job.global_batch_size,
                    budget_s=options.planner.budget_s,
                    minimum_microbatch_size=smallest,
                    ready_samples=job.ready_samples,
                    single_microbatch=options.planner.single_microbatch or manual is not None,
                    choose_recompute=options.recompute == "auto" and manual is None,
                    verbose=options.verbose,
                ),
            )
    if offload is not False and not has_state_rates(problem):
        scales = loss_scaler(view.precision) is not None
        problem = with_state_rates(
            problem, model, device.capacity_bytes, with_host_updates=not scales
        )
    if problem is not cached.problem and control.rank == 0 and cached.path is not None:
        lost = job_cache.save(cached.path, problem)
        if lost is not None and shows:
            print(printable(f"The next start of this job will measure again: {lost}"), flush=True)
    model.release_buffers()
    problem = replace(problem, no_idle_ranks=True)
    if manual is not None:
        return replace(problem, reshard_after_forward=True)
    if not job.late:
        problem = problem.with_early_update()
    problem = replace(
        problem,
        reshard_after_forward=options.reshard_after_forward,
        optimizer_offload=offload,
    )
    problem = with_optimizers(problem, model, job.optimizers)
    if not options.recompute and offload is False:
        return problem
    # retained activations hold the boundaries: there is only state to offload
    hosts = [own.host for own in job.limits]
    return with_host_memory(problem, hosts, boundaries=bool(options.recompute))


def _optimizer_offload(job: Job) -> bool | Literal["auto"]:
    """Return whether the plan may keep optimizer state in host memory, or has to."""
    option = job.options.optimizer_offload
    has_room = any(own.host.is_apart and own.host.capacity_bytes for own in job.limits)
    why = job.optimizers.stays or ("" if has_room else _NO_HOST)
    if option is True and why:
        raise PlanError(
            f"optimizer_offload=True, but optimizer state has to stay on the devices: {why}. Use"
            " optimizer_offload='auto', which moves it only where that can be."
        )
    return False if why else option


def with_optimizers(problem: Problem, model: ShardedModel, facts: OptimizerFacts) -> Problem:
    """Return a problem that counts what the user's optimizers hold, in place of Adam's moments."""
    planned, each = problem.moment_bytes, facts.each_bytes
    if each is not None and not math.isclose(each, planned, rel_tol=_ROUNDING):
        problem = problem.with_moments(each)
        # a rank may hold a row more than its share
        row_bytes = max(0.0, each - planned) * largest_row(model)[0]
        problem = replace(problem, gathered_bytes=problem.gathered_bytes + row_bytes)
    return problem


def make_plan(job: Job, problem: Problem, control: ControlGroup) -> Plan:
    """Solve for the plan on rank 0, and return it on every rank; collective."""

    def solved() -> Plan | None:
        with named_where_nothing_fits(job.limits):
            try:
                return solve(problem) if control.rank == 0 else None
            except InfeasibleError as error:
                if job.options.recompute:
                    raise
                hint = "Recomputation is off: CephaloStrategy(recompute=True) takes less memory."
                raise InfeasibleError(f"{error} {hint}") from None

    return control.broadcast(control.together("solving for the plan", solved))
