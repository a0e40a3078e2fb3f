"""A training from ``setup`` to ``teardown``: its session, and what may change its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.repeated_step import RepeatedStep
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan.reasons import reasons
from lightning_cephalo.preparation.loss_check import compare_losses
from lightning_cephalo.preparation.plan_change import PlanChanges
from lightning_cephalo.preparation.prepare import make_plan, measure_or_load
from lightning_cephalo.preparation.replanning import Replanning, may_replan, policy_of
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.ranks.control import NotCopied
from lightning_cephalo.recovery.recovering import Recovering


class Training(NotCopied):
    """A training: measured, planned, and followed through its changes of plan.

    Args:
        recovering: Copies the state of training meanwhile.

    Attributes:
        changes: Changes the plan between two steps.
        replanning: Changes it where ranks change their pace; None: it does not change by itself.
        repeated: Runs forwards and backwards, some of them again, where the plan may change.
        notes: Sentences below the plan's table: why it divides the work so.
    """

    def __init__(self, session: Session, watch: Watch, recovering: Recovering) -> None:
        self.session, self.view, self.watch = session, session.view, watch
        self._recovering = recovering
        self._has_compared = False
        self.changes = PlanChanges(session, watch)
        self.replanning: Replanning | None = None
        self.repeated = RepeatedStep(session.model)
        self.notes: tuple[str, ...] = ()

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow a plan that counts on the optimizers, and let them hold their rows; collective."""
        session, view, plan = self.session, self.view, self.session.job.plan
        session.count_on(optimizers)
        replans = may_replan(session.job)
        measured = partial(measure_or_load, session.job, session.model, view, session.manual)
        if plan is not None:
            session.check(plan)  # before the ranks are measured for nothing
            problem = measured() if replans else None
        else:
            problem = measured()
            plan = make_plan(session.job, problem, session.control)
            if session.control.rank == 0:
                self.notes = tuple(reasons(problem, plan))
        # some hold rows from the beginning, such as Adagrad
        session.hold([own for own in optimizers if any(isinstance(p, DTensor) for p in own.state)])
        session.adopt(session.accept(plan))
        session.shard_averages(view.callbacks)
        self.watch.begin(session.model, plan)
        policy = policy_of(problem, plan, view.step) if problem is not None and replans else None
        if problem is not None and policy is not None:
            self.replanning = Replanning(self.changes, problem, policy)
            if session.manual is None:
                self.repeated = RepeatedStep(session.model, self._relieve)
        session.use_optimizers(optimizers)

    def note(self) -> tuple[float, ...]:
        """Return what the exchange of a step carries to all ranks."""
        return () if self.replanning is None else self.replanning.note()

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Learn :meth:`note` of every rank."""
        if self.replanning is not None:
            self.replanning.learn(notes)

    def begin_batch(self, optimizers: Sequence[Optimizer]) -> None:
        """Let a waiting plan take effect; collective. The user may have replaced optimizers."""
        session = self.session
        session.hold(optimizers)
        session.lasting.between_steps()
        self.repeated.begin_batch()
        if self.changes.is_pending:
            self._recovering.settle()  # rows may be about to move
        if self.changes.take_effect():
            session.start_training()
            if self.replanning is not None:
                self.replanning.changed()
        if self.replanning is not None:
            self.replanning.between_steps()

    def compare_losses(
        self, batch: Any, pieces: Sequence[tuple[Any, int]], step: Callable[[Any], Any]
    ) -> None:
        """Compare the loss of a microbatch with its halves', in the first step; collective."""
        if not self._has_compared:
            self._has_compared = True
            compare_losses(self.session, batch, pieces, step)
            self.watch.start_step()  # its time is not that of the step

    def settle(self) -> None:
        """Wait until no copy of the state is under way, before it changes."""
        self._recovering.settle()

    def close(self) -> None:
        """End what runs beside the training."""
        if self.replanning is not None:
            self.replanning.close()

    def _relieve(self, error: Exception, refused: str) -> None:
        """Follow a plan in the middle of a step that takes less memory, or raise the error."""
        assert self.replanning is not None
        self._recovering.settle()  # rows are about to move
        self.replanning.relieve(error, refused)
        self.session.start_training()
        self.watch.start_step()
