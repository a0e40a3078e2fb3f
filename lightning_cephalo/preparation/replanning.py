"""Follows the paces of ranks while they train, and changes the plan where that pays.

Paces, and that a plan is ready, travel with the exchange that ends each forward, so that watching
costs no message. Rank 0 decides (:mod:`~lightning_cephalo.plan.replan`); a process solves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.observe import report
from lightning_cephalo.plan import Plan, Problem, predict
from lightning_cephalo.plan.beside import SolverBeside
from lightning_cephalo.plan.replan import Replan, ReplanPolicy
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.plan_change import REFUSALS, PlanChanges
from lightning_cephalo.preparation.relief import make_room
from lightning_cephalo.profiling.state_rates import has_state_rates


def may_replan(job: Job) -> bool:
    """Return whether the plan may change in this job: not that of a single rank."""
    option = job.options.replan
    if option is False or (option == "auto" and job.plan is not None):
        return False
    return len(job.limits) > 1


def policy_of(problem: Problem, plan: Plan, step: int) -> ReplanPolicy | None:
    """Return what decides on changes of a plan; None, with a warning, if it was not measured."""
    if plan.moves_state and not has_state_rates(problem):
        rank_zero_warn(
            "The plan will not change by itself: it keeps optimizer state in host memory"
            " (resident_fraction), and what that takes is not measured. Use"
            " optimizer_offload='auto', which measures it before training."
        )
        return None
    try:
        return ReplanPolicy(problem, plan, step)
    except PlanError as error:
        rank_zero_warn(f"The plan will not change by itself: its sizes are not measured. {error}")
        return None


class Replanning:
    """Changes the plan of a running training where ranks change their pace."""

    def __init__(self, changes: PlanChanges, problem: Problem, policy: ReplanPolicy) -> None:
        self._changes, self._problem = changes, problem
        self._session, self._view, self._watch = changes.session, changes.view, changes.watch
        self._policy: ReplanPolicy | None = policy if self._session.control.rank == 0 else None
        self._solver: SolverBeside | None = None
        self._ready: Replan | None = None  # on rank 0
        self._is_announced = False
        self._accepted: Replan | None = None
        self._busy_s = math.nan

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
            self._policy.observe(self._view.step, [busy_s for busy_s, _ in notes])

    # -- between steps ------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Ask for a ready plan before every batch, and look whether another pays; collective."""
        if self._is_announced:
            self._is_announced = False
            self._ask()
        if self._policy is not None and self._accepted is None and self._ready is None:
            self._look(self._policy)

    def _look(self, policy: ReplanPolicy) -> None:
        step = self._view.step
        if step < policy.next_look:
            return
        if self._solver is not None:
            if self._solver.is_done:
                self._ready = policy.judge(step, self._view.steps_left, self._solver.plan)
                self.close()
            return
        problem = policy.look(step)
        if problem is not None:
            try:
                self._solver = SolverBeside(problem)
            except OSError as error:
                policy.keep(step)
                rank_zero_warn(f"No other plan can be looked for: {error}")

    def _ask(self) -> None:
        change: Replan = self._session.control.broadcast(self._ready)
        self._ready = None
        step = self._view.step
        try:
            if self._changes.request(change.plan, by_user=False):
                self._accepted = change
        except REFUSALS as error:
            if self._policy is not None:
                self._policy.keep(step)
            rank_zero_warn(f"Step {step}: another plan was found, but refused. {error}")

    def changed(self) -> None:
        """Note that a plan has taken effect."""
        change, self._accepted = self._accepted, None
        step, plan = self._view.step, self._session.plan
        if change is None or change.plan != plan:  # the user's own
            self._begin_anew(plan)
            return
        if change.cause != "pace":
            self._begin_anew(plan)
        elif self._policy is not None:
            self._policy.follow(step, change)
        self._tell(replace(change, step=step, moved_s=self._changes.change_s))

    def _begin_anew(self, plan: Plan) -> None:
        """Forget the paces so far, and a plan that was looked for."""
        self.close()
        self._ready, self._is_announced = None, False
        if self._session.control.rank == 0:
            self._policy = policy_of(self._problem, plan, self._view.step)

    def _tell(self, change: Replan) -> None:
        """Tell the user of a change that has taken effect."""
        self._watch.note(change)
        if self._session.job.options.verbose and self._session.control.rank == 0:
            report.show(report.replan_line(change, self._problem.ranks[change.rank].name))
        changes = float(len(self._watch.report.replans))
        values = {"cephalo/replans": changes, "cephalo/replan_s": change.moved_s}
        if change.plan.step_s is not None:
            values["cephalo/step_s"] = change.plan.step_s
        for logger in self._view.loggers:
            logger.log_metrics(values, step=change.step)

    # -- in a step that has failed --------------------------------------------------------------

    def relieve(self, error: Exception, refused: str) -> None:
        """Follow a plan that takes less memory, so that the step can be repeated; collective."""
        step, old = self._view.step, self._session.plan
        found = make_room(self._changes, self._problem, error, refused)
        self._problem = found.problem
        old_step_s = predict(found.problem, old).step_s
        change = Replan(
            step=step,
            plan=found.now,
            old_plan=old,
            old_step_s=old_step_s,
            rank=found.rank,
            factor=1.0,
            since_step=step,
            moved_s=self._changes.change_s,
            cause="memory",
        )
        self._begin_anew(found.now)
        self._accepted = None
        self._tell(change)
        if found.later != found.now and self._session.control.rank == 0:
            old, old_step_s = found.now, found.now.step_s or 0.0
            self._ready = replace(
                change, plan=found.later, old_plan=old, old_step_s=old_step_s, cause="loaded"
            )

    def close(self) -> None:
        """End the process that solves, if there is one."""
        if self._solver is not None:
            self._solver.close()
            self._solver = None
