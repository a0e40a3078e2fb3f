"""Holds what may change the plan of a running training, or repeat a step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_cephalo.adapters.repeated_step import Relief, RepeatedStep
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.replan import Replan
from lightning_cephalo.preparation import replanning
from lightning_cephalo.preparation.loss_check import compare_losses
from lightning_cephalo.preparation.options import Options
from lightning_cephalo.preparation.plan_change import PlanChanges
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.ranks.control import not_connected
from lightning_cephalo.recovery.recovering import Recovering

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Training:
    """A training that follows a plan, from ``setup`` to ``teardown``.

    Args:
        recovering: Copies the state of training meanwhile.
        problem: The measured problem; None: the plan does not change by itself.
        plan_changed: Called behind each change of the plan.

    Attributes:
        changes: Changes the plan between two steps.
        replanning: Changes it where ranks change their pace; None: it does not change by itself.
        repeated: Repeats steps that lack memory, or that use an end of the root unit where it is
            away; None: they end the run.
    """

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        watch: Watch,
        recovering: Recovering,
        problem: Problem | None,
        options: Options,
        plan_changed: Callable[[], None],
    ) -> None:
        self._session, self._trainer = session, trainer
        self._watch, self._recovering = watch, recovering
        self._plan_changed, self._has_compared = plan_changed, False
        self.changes = PlanChanges(session, trainer)
        self.replanning: replanning.Replanning | None = None
        self.repeated: RepeatedStep | None = None
        if problem is not None:
            self.replanning = replanning.begin(
                session, trainer, self.changes, watch, problem, options
            )
        may_repeat = self.replanning is not None
        if may_repeat and session.manual is None:
            self.repeated = RepeatedStep(session.model, session.logs.metrics)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy, as of a session."""
        return not_connected, ()

    @property
    def replans(self) -> tuple[Replan, ...]:
        """The changes of plan so far, without those of the user."""
        return () if self.replanning is None else self.replanning.replans

    def note(self) -> tuple[float, ...]:
        """Return what the exchange of a step carries to all ranks."""
        return () if self.replanning is None else self.replanning.note()

    def learn(self, notes: Sequence[Sequence[float]]) -> None:
        """Learn :meth:`note` of every rank."""
        if self.replanning is not None:
            self.replanning.learn(notes)

    def begin_batch(self, optimizers: Sequence[Optimizer]) -> None:
        """Let a waiting plan take effect; collective. The user may have replaced optimizers."""
        self._session.optimizers = list(optimizers)
        self._session.lasting.between_steps()
        if self.repeated is not None:
            self.repeated.begin_batch()
        if self.changes.is_pending:
            self._recovering.settle()  # rows may be about to move
        # of a step that pulls its batch, Lightning's hook gets the number of the batch before
        number = self._trainer.fit_loop.epoch_loop.batch_idx
        if self.changes.take_effect(number):
            self._follow()
            if self.replanning is not None:
                self.replanning.changed(self._session.plan, self.changes.change_s)
        if self.replanning is not None:
            self.replanning.between_steps()

    def compare_losses(
        self, batch: Any, pieces: Sequence[tuple[Any, int]], step: Callable[[Any], Any]
    ) -> None:
        """Compare the loss of a microbatch with its halves', in the first step; collective."""
        if not self._has_compared:
            self._has_compared = True
            compare_losses(self._session, TrainerView(self._trainer), batch, pieces, step)

    def forward(self, run: Callable[[bool], Any]) -> Any:
        """Run a forward, again if a rank lacks memory; ``run`` gets whether the step goes on."""
        return run(True) if self.repeated is None else self.repeated.forward(run, self._relief)

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward; repeat the step if a rank lacks the memory."""
        if self.repeated is None:
            run()
        else:
            self.repeated.backward(run, self._relief)

    def end_without_backward(self) -> None:
        """End a step of which no rank has a loss."""
        if self.repeated is not None:
            self.repeated.end()

    @property
    def may_repeat(self) -> bool:
        """Whether a step may run again."""
        return self.repeated is not None

    @property
    def step_was_repeated(self) -> bool:
        """Whether the running step is a repeated one, so that its time says nothing."""
        return self.repeated is not None and self.repeated.was_repeated

    def close(self) -> None:
        """End what runs beside the training."""
        if self.replanning is not None:
            self.replanning.close()

    def _follow(self) -> None:
        self._watch.count_again()
        self._session.start_training(self._session.optimizers)
        self._plan_changed()

    @property
    def _relief(self) -> Relief | None:
        return None if self.replanning is None else self._relieve

    def _relieve(self, error: Exception, refused: str) -> None:
        """Follow a plan in the middle of a step that takes less memory, or raise the error."""
        assert self.replanning is not None
        self._recovering.settle()  # rows are about to move
        change = self.replanning.relieve(error, refused)
        self._follow()
        self.replanning.tell(change)
        self._watch.start_step()
