"""Follows the paces of ranks while they train, and changes the plan where that pays.

Paces, and that a plan is ready, travel with the exchange that ends each forward, so that watching
costs no message. Rank 0 decides (:mod:`~lightning_cephalo.plan.replan`); a process solves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import format_mib, format_seconds
from lightning_cephalo.observe import report
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan import Plan, Problem, predict
from lightning_cephalo.plan.beside import SolverBeside
from lightning_cephalo.plan.replan import Replan, ReplanPolicy, Trial, moved_share
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.options import Automatic, Options
from lightning_cephalo.preparation.plan_change import REFUSALS, PlanChanges
from lightning_cephalo.preparation.relief import make_room
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.profiling.memory_model import predicted
from lightning_cephalo.profiling.state_rates import has_state_rates

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def wants(wish: Automatic, job: Job) -> bool:
    """Return whether the plan may change in this job; with True, say why if it cannot."""
    if wish is False or (wish == "auto" and job.plan is not None):
        return False
    why = None
    if len(job.limits) == 1:
        why = "there is one rank only"
    if why is not None and wish is True:
        rank_zero_warn(f"replan=True has no effect: {why}.")
    return why is None


def begin(
    session: Session,
    trainer: Trainer,
    changes: PlanChanges,
    watch: Watch,
    problem: Problem,
    options: Options,
) -> Replanning | None:
    """Begin to watch a training; None, with a warning, if its plan cannot be compared."""
    policy = _policy_of(problem, session.plan, trainer.global_step)
    if policy is None:
        return None
    return Replanning(session, trainer, changes, watch, problem, policy, options)


def _policy_of(problem: Problem, plan: Plan, step: int) -> ReplanPolicy | None:
    """Return what decides on changes of a plan; None, with a warning, if it was not measured."""
    if plan.moves_state and not has_state_rates(problem):
        rank_zero_warn(
            "The plan will not change by itself: it keeps optimizer state in host memory"
            " (resident_fraction), and what that takes is not measured. Give such a plan to"
            " CephaloStrategy(plan=), or use optimizer_offload='auto', which measure it before"
            " training."
        )
        return None
    try:
        return ReplanPolicy(problem, plan, step)
    except PlanError as error:
        rank_zero_warn(f"The plan will not change by itself: its sizes are not measured. {error}")
        return None


class Replanning:
    """Changes the plan of a running training where ranks change their pace."""

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        changes: PlanChanges,
        watch: Watch,
        problem: Problem,
        policy: ReplanPolicy,
        options: Options,
    ) -> None:
        self._session, self._trainer, self._changes = session, trainer, changes
        self._watch, self._problem = watch, problem
        self._verbose = options.verbose
        self._policy: ReplanPolicy | None = policy if session.control.rank == 0 else None
        self._solver: SolverBeside | None = None
        self._trial: Trial | None = None
        self._ready: Replan | None = None  # on rank 0
        self._is_announced = False
        self._accepted: Replan | None = None
        self._busy_s = math.nan
        self.replans: tuple[Replan, ...] = ()

    # -- with the exchange of a step ----------------------------------------------------------

    def note(self) -> tuple[float, float]:
        """Return the numbers to send: seconds of work, and whether a plan is ready."""
        busy_s = self._watch.take_busy_s()
        if not math.isnan(busy_s):  # a step may have several exchanges; the last one counts
            self._busy_s = busy_s
        return self._busy_s, float(self._ready is not None)

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Learn :meth:`note` of every rank."""
        self._is_announced, self._busy_s = bool(notes[0][1]), math.nan
        if self._policy is not None:
            self._policy.observe(self._trainer.global_step, [busy_s for busy_s, _ in notes])

    # -- between steps ------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Ask for a ready plan before every batch, and look whether another pays; collective."""
        if self._is_announced:
            self._is_announced = False
            self._ask()
        if self._policy is not None and self._accepted is None and self._ready is None:
            self._look(self._policy)

    def _look(self, policy: ReplanPolicy) -> None:
        step = self._trainer.global_step
        if self._solver is not None:
            if not self._solver.is_done:
                return
            assert self._trial is not None
            self._ready = policy.judge(self._trial, self._solver.plan)
            self.close()
            return
        self._trial = policy.look(step, _steps_left(self._trainer))
        if self._trial is not None and self._trial.answer is not None:
            self._ready = policy.judge(self._trial, self._trial.answer)
        elif self._trial is not None:
            try:
                self._solver = SolverBeside(self._trial.problem)
            except OSError as error:
                policy.keep(step)
                rank_zero_warn(f"No other plan can be looked for: {error}")

    def _ask(self) -> None:
        change: Replan = self._session.control.broadcast(self._ready)
        self._ready = None
        step = self._trainer.global_step
        try:
            memory = predicted(self._problem, change.plan, self._session.model)
            if self._changes.request(change.plan, memory, by_user=False):
                self._accepted = change
        except REFUSALS as error:
            if self._policy is not None:
                self._policy.keep(step)
            rank_zero_warn(f"Step {step}: another plan would be faster, but was refused. {error}")

    def changed(self, plan: Plan, seconds: float) -> None:
        """Note that a plan has taken effect, and tell everybody who wants to know."""
        change, self._accepted = self._accepted, None
        step = self._trainer.global_step
        if change is None or change.plan != plan:  # the user's own
            self._begin_anew(plan)
            return
        if change.cause != "pace":
            self._begin_anew(plan)
        elif self._policy is not None:
            assert self._trial is not None
            self._policy.follow(step, change, self._trial.paces)
        self.tell(replace(change, step=step, moved_s=seconds))

    def _begin_anew(self, plan: Plan) -> None:
        """Forget the paces so far, and a plan that was looked for."""
        self.close()
        self._ready, self._is_announced = None, False
        if self._session.control.rank == 0:
            self._policy = _policy_of(self._problem, plan, self._trainer.global_step)

    def tell(self, change: Replan) -> None:
        """Tell the user of a change that has taken effect."""
        self.replans = (*self.replans, change)
        if self._verbose and self._session.control.rank == 0:
            report.show(line_of(change, self._problem.ranks[change.rank].name))
        values = {"cephalo/replans": float(len(self.replans)), "cephalo/replan_s": change.moved_s}
        if change.plan.step_s is not None:
            values["cephalo/step_s"] = change.plan.step_s
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=change.step)

    # -- in a step that has failed --------------------------------------------------------------

    def relieve(self, error: Exception, refused: str) -> Replan:
        """Follow a plan that takes less memory, so that the step can be repeated; collective."""
        session, step, old = self._session, self._trainer.global_step, self._session.plan
        found = make_room(session, self._changes, self._problem, error, refused)
        self._problem = found.problem
        change = Replan(
            step=step,
            plan=found.now,
            old_plan=old,
            old_step_s=predict(found.problem, old).step_s,
            rank=found.rank,
            factor=1.0,
            since_step=step,
            moved_bytes=moved_share(old, found.now) * found.problem.state_bytes,
            moved_s=self._changes.change_s,
            cause="memory",
        )
        self._begin_anew(found.now)
        self._accepted = None
        if found.is_requested:
            moved_bytes = moved_share(found.now, found.plan) * found.problem.state_bytes
            self._accepted = replace(
                change,
                plan=found.plan,
                old_plan=found.now,
                old_step_s=found.now.step_s or 0.0,
                moved_bytes=moved_bytes,
                cause="loaded",
            )
        return change

    def close(self) -> None:
        """End the process that solves, if there is one."""
        if self._solver is not None:
            self._solver.close()
            self._solver = None


def line_of(change: Replan, name: str = "") -> str:
    """Return the line that tells the user of a change."""
    factor, than = change.factor, "slower"
    if factor < 1.0:
        factor, than = 1.0 / factor, "faster"
    rank = f"{change.rank} ({name})" if name else str(change.rank)
    why = {
        "pace": f"rank {rank} is {factor:.1f}x {than} since step {change.since_step}.",
        "memory": f"rank {rank} ran out of memory; the step is repeated.",
        "loaded": "batches follow, as all that were loaded before are trained.",
    }[change.cause]
    return (
        f"Step {change.step}: {why}"
        f" New plan: {format_seconds(change.plan.step_s)} a step, not"
        f" {format_seconds(change.old_step_s)}; about {format_mib(change.moved_bytes)} moved in"
        f" {format_seconds(change.moved_s)}."
    )


def _steps_left(trainer: Trainer) -> float:
    """Return the updates that are left; infinite if unknown."""
    left = math.inf
    if trainer.max_steps >= 0:
        left = float(trainer.max_steps - trainer.global_step)
    epochs = trainer.max_epochs
    if epochs is not None and epochs >= 0:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        batches = (epochs - trainer.current_epoch) * float(trainer.num_training_batches) - done
        left = min(left, batches / trainer.accumulate_grad_batches)
    return max(left, 0.0)
