"""Changes the plan of a running training between two steps.

::

    request(plan)          all ranks check the plan, and agree on the step of the change
        │                  loaders deal the new sizes from that step on
        ▼  steps that are loaded already are trained by the old plan
    take_effect(step)      rows move; the next step follows the new plan

Until all ranks have accepted a plan, nothing changes. A later request replaces a waiting plan,
except for batches that are loaded already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.adapters import batch_norm
from lightning_cephalo.adapters.dealt_loaders import DealtLoaders, Mark, deal_alike
from lightning_cephalo.common.errors import (
    HostMemoryError,
    PlanError,
    RemoteRankError,
    TooLittleMemoryError,
    UnsupportedError,
)
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

REFUSALS = (PlanError, UnsupportedError, HostMemoryError, TooLittleMemoryError, RemoteRankError)
"""What a plan is refused with, on all ranks together; the old one stays."""


@dataclass(frozen=True)
class _Pending:
    """A plan that all ranks have accepted, and when it takes effect."""

    plan: Plan
    memory: tuple[RankMemory, ...]
    arena: HostArena | None
    from_batch: float
    mark: Mark
    is_users: bool


class PlanChanges:
    """Lets a training follow another plan between two of its steps."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session, self._trainer = session, trainer
        self._pending: list[_Pending] = []  # in the order of their batches
        self._steps_before: int | None = None
        self._accumulates = False
        self.change_s = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether a change waits, so that rows may move before the next batch."""
        return bool(self._pending)

    @property
    def waits_for_users(self) -> bool:
        """Whether a plan of the user's will take effect."""
        return any(pending.is_users for pending in self._pending)

    def request(
        self,
        plan: Plan | str | PathLike[str],
        memory: Sequence[RankMemory] = (),
        *,
        by_user: bool = True,
    ) -> bool:
        """Accept a plan on all ranks, or raise on all of them; collective."""
        if self.waits_for_users and not by_user:
            return False
        session, control = self._session, self._session.control
        loaders = DealtLoaders(self._trainer)
        read = partial(self._read, plan, loaders)
        checked: Plan = control.together("checking the new plan", read)
        everyones = control.gather((checked,))
        for rank, (other,) in enumerate(everyones):
            if other != everyones[0][0]:
                raise PlanError(
                    f"Rank {rank} gives another plan than rank 0. Give change_plan() the same plan"
                    " on every rank, for example strategy.broadcast(plan)."
                )
        session.check_move(checked)
        arena = control.together("allocating host memory", partial(session.host_memory_of, checked))
        first = float(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        dealt = session.dealt_plan
        if not deal_alike(dealt, checked):
            first = loaders.first_free_step(int(first), control)
        elif self._pending:  # the batches before it have the present plan's sizes
            first = self._pending[-1].from_batch
        if math.isfinite(first):
            together = self._trainer.accumulate_grad_batches
            first = math.ceil(first / together) * together
        self._pending = [each for each in self._pending if each.from_batch < first]
        self._pending.append(
            _Pending(checked, tuple(memory), arena, first, loaders.mark(), by_user)
        )
        session.dealt_plan = checked
        if not deal_alike(dealt, checked):
            loaders.deal(checked, first)
        return True

    def _read(self, plan: Plan | str | PathLike[str], loaders: DealtLoaders) -> Plan:
        if self._session.inside_microbatch:
            raise UnsupportedError(
                "change_plan() inside of a step. Call it in a hook, such as on_train_batch_end()."
            )
        checked = plan if isinstance(plan, Plan) else Plan.load(plan)
        self._session.check(checked)
        loaders.refuse_other_sizes(self._session.dealt_plan, checked)
        return checked

    def take_effect(self, batch: int) -> bool:
        """Follow an accepted plan if its batch has come; collective then."""
        steps = self._trainer.global_step
        # no update since the batch before: its gradients are needed still
        self._accumulates = batch > 0 and steps == self._steps_before
        self._steps_before = steps
        due = [each for each in self._pending if self._is_due(each, batch)]
        if not due:
            return False
        self._pending = self._pending[len(due) :]
        last = due[-1]
        plan = self._movable(last.plan)
        memory = last.memory if plan is last.plan else ()
        self._follow(plan, memory, last.arena, self._accumulates)
        return True

    def _movable(self, plan: Plan) -> Plan:
        """Return a plan; with the present shares, and a warning, if rows cannot move any more."""
        try:
            self._session.check_move(plan, self._accumulates)
        except (UnsupportedError, TooLittleMemoryError, RemoteRankError) as error:
            rank_zero_warn(
                f"The new plan takes effect, but rows of the model stay where they are: {error}"
            )
            present = zip(plan.ranks, self._session.model.fractions, strict=True)
            ranks = tuple(replace(rank, state_fraction=share) for rank, share in present)
            return replace(plan, ranks=ranks)
        return plan

    def _is_due(self, pending: _Pending, batch: int) -> bool:
        if batch >= pending.from_batch:
            return True
        is_next = DealtLoaders(self._trainer).is_behind(pending.mark)
        return is_next and not (batch and pending.mark.have_begun)

    def follow_now(self, plan: Plan, memory: Sequence[RankMemory]) -> None:
        """Follow a plan from the middle of a step that has failed on all ranks; collective."""
        session, control = self._session, self._session.control
        control.together("checking the new plan", partial(session.check, plan))
        session.check_move(plan, keeps_gradients=True)
        arena = control.together("allocating host memory", partial(session.host_memory_of, plan))
        self._follow(plan, memory, arena, True, in_step=True)

    def _follow(
        self,
        plan: Plan,
        memory: Sequence[RankMemory],
        arena: HostArena | None,
        keeps_gradients: bool,
        *,
        in_step: bool = False,
    ) -> None:
        session, start_s = self._session, time.perf_counter()
        session.follow(plan, memory, arena, keeps_gradients, in_step)
        if self._pending:
            session.dealt_plan = self._pending[-1].plan
        self.change_s = time.perf_counter() - start_s
        batch_norm.warn_of_microbatches(session.model.module, plan, session.control.rank)
