"""Changes the plan of a running training between two steps.

::

    request(plan)          all ranks check the plan, and agree on the step of the change
        │                  loaders deal the new sizes from that step on
        ▼  steps that are loaded already are trained by the old plan
    take_effect(step)      rows move; the next step follows the new plan

Until all ranks have accepted a plan, nothing changes on any of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING

from lightning_cephalo.adapters import batch_norm
from lightning_cephalo.adapters.dealt_loaders import DealtLoaders, Mark
from lightning_cephalo.common.errors import PlanError, UnsupportedError
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class _Pending:
    """A plan that all ranks have accepted, and when it takes effect.

    Attributes:
        plan: The plan.
        memory: Its predicted memory.
        arena: This rank's host memory for it.
        from_batch: The batch of the present epoch from which on it is followed; infinite: the
            next epoch.
        mark: Where the loaders stood when it was accepted.
    """

    plan: Plan
    memory: tuple[RankMemory, ...]
    arena: HostArena | None
    from_batch: float
    mark: Mark


class PlanChanges:
    """Lets a training follow another plan between two of its steps.

    Args:
        session: The session of the training.
        trainer: The trainer that is fitting.

    Attributes:
        change_s: Seconds that the last change took on this rank.
    """

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session, self._trainer = session, trainer
        self._pending: _Pending | None = None
        self._steps_before: int | None = None
        self.change_s = 0.0

    @property
    def pending(self) -> Plan | None:
        """A plan that will take effect; None if there is none."""
        return None if self._pending is None else self._pending.plan

    def request(self, plan: Plan | str | PathLike[str], memory: Sequence[RankMemory] = ()) -> None:
        """Accept a plan on all ranks, or raise on all of them; collective.

        Args:
            plan: The plan, equal on every rank, or its path.
            memory: The predicted memory of every rank; empty: the peaks of the plan.

        Raises:
            PlanError: If the plan does not fit the run, or ranks give different plans.
            UnsupportedError: If something that this run needs cannot change.
            HostMemoryError: If a host has less memory than the plan needs.
            RemoteRankError: If any of these happened on another rank.
        """
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
        if not _same_batches(checked, session.plan):
            first = loaders.first_free_step(int(first), control)
        if math.isfinite(first):
            together = self._trainer.accumulate_grad_batches
            first = math.ceil(first / together) * together
        self._pending = _Pending(checked, tuple(memory), arena, first, loaders.mark())
        session.dealt_plan = checked
        if not _same_batches(checked, session.plan):
            loaders.deal([rank.batch_size for rank in checked.ranks], first)

    def _read(self, plan: Plan | str | PathLike[str], loaders: DealtLoaders) -> Plan:
        if self._pending is not None:
            raise UnsupportedError(
                "change_plan() before the last change has taken effect: dataloaders deal its sizes"
                f" from batch {self._pending.from_batch:g} of the epoch on. Call it again behind"
                " that batch. If the plan is changing by itself: CephaloStrategy(replan=False)."
            )
        if self._session.inside_microbatch:
            raise UnsupportedError(
                "change_plan() inside of a step. Call it in a hook, such as on_train_batch_end()."
            )
        checked = plan if isinstance(plan, Plan) else Plan.load(plan)
        self._session.check(checked)
        loaders.refuse_other_sizes(self._session.plan, checked)
        return checked

    def take_effect(self, batch: int) -> bool:
        """Follow the accepted plan if its batch has come; collective then.

        Args:
            batch: Number of the batch in its epoch that is about to be trained.

        Returns:
            Whether the plan has changed.
        """
        pending, steps = self._pending, self._trainer.global_step
        # no update since the batch before: its gradients are needed still
        accumulates = batch > 0 and steps == self._steps_before
        self._steps_before = steps
        if pending is None:
            return False
        if batch < pending.from_batch:
            is_next = DealtLoaders(self._trainer).is_behind(pending.mark)
            if not is_next or (batch and pending.mark.have_begun):
                return False
        self._pending = None
        session, start_s = self._session, time.perf_counter()
        session.follow(pending.plan, pending.memory, pending.arena, accumulates)
        self.change_s = time.perf_counter() - start_s
        batch_norm.warn_of_microbatches(session.model.module, pending.plan, session.control.rank)
        return True


def _same_batches(one: Plan, other: Plan) -> bool:
    return [rank.batch_size for rank in one.ranks] == [rank.batch_size for rank in other.ranks]
