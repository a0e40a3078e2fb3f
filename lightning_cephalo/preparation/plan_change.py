"""Changes the plan of a running training between two steps.

::

    request(plan)          all ranks check the plan, and agree on the step of the change
        │                  loaders deal the new sizes from that step on
        ▼  steps that are loaded already are trained by the old plan
    take_effect(step)      rows move; the next step follows the new plan

Until all ranks have accepted a plan, nothing changes. One plan waits at a time: the user's replaces
another whose batches no rank has loaded yet.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.adapters.dealt_loaders import DealtLoaders, Mark, deal_alike
from lightning_cephalo.common.errors import (
    HostMemoryError,
    PlanError,
    RemoteRankError,
    TooLittleMemoryError,
    UnsupportedError,
)
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.session import Adoption, Session

REFUSALS = (PlanError, UnsupportedError, HostMemoryError, TooLittleMemoryError, RemoteRankError)
"""What a plan is refused with, on all ranks together; the old one stays."""


@dataclass(frozen=True)
class _Pending:
    """A plan that all ranks have accepted, and when it takes effect."""

    adoption: Adoption
    from_batch: float
    mark: Mark


class PlanChanges:
    """Lets a training follow another plan between two of its steps.

    Attributes:
        change_s: Seconds that the last change has taken.
    """

    def __init__(self, session: Session, watch: Watch) -> None:
        self.session, self.view, self.watch = session, session.view, watch
        self._pending: _Pending | None = None
        self._steps_before: int | None = None
        self.change_s = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether a change waits, so that rows may move before the next batch."""
        return self._pending is not None

    @property
    def dealt_plan(self) -> Plan:
        """The plan whose sizes dataloaders deal that are made from now on."""
        return self.session.plan if self._pending is None else self._pending.adoption.plan

    def request(self, plan: Plan | str | PathLike[str], *, by_user: bool = True) -> bool:
        """Accept a plan on all ranks, or raise on all of them; collective.

        Returns False without a look at it where a plan waits and this one is not the user's.
        """
        waiting = self._pending
        if waiting is not None and not by_user:
            return False
        session, control = self.session, self.session.control
        loaders, dealt = DealtLoaders(self.view), self.dealt_plan
        read = partial(self._read, plan, loaders)
        # that of rank 0, as of plans that are given
        checked: Plan = control.broadcast(control.together("checking the new plan", read))
        adoption = session.accept(checked)
        first = float(self.view.batches_ready)
        if not deal_alike(dealt, checked):
            first = loaders.first_free_step(int(first), control)
            if waiting is not None and waiting.from_batch < first:
                raise UnsupportedError(
                    f"change_plan() while batches are loaded for another plan, which follows at"
                    f" batch {waiting.from_batch:.0f}. Call it again from that batch on."
                )
        elif waiting is not None:  # the batches before it have the present plan's sizes
            first = waiting.from_batch
        if math.isfinite(first):
            together = self.view.accumulates
            first = math.ceil(first / together) * together
        self._pending = _Pending(adoption, first, loaders.mark())
        if not deal_alike(dealt, checked):
            loaders.deal(checked, first)
        return True

    def _read(self, plan: Plan | str | PathLike[str], loaders: DealtLoaders) -> Plan:
        if self.session.model.executor.inside_microbatch:
            raise UnsupportedError(
                "change_plan() inside of a step. Call it in a hook, such as on_train_batch_end()."
            )
        checked = plan if isinstance(plan, Plan) else Plan.load(plan)
        loaders.refuse_other_sizes(self.dealt_plan, checked)
        return checked

    def take_effect(self) -> bool:
        """Follow an accepted plan if its batch has come; collective then."""
        batch, steps, waiting = self.view.batch, self.view.step, self._pending
        # no update since the batch before: its gradients are needed still
        accumulates = batch > 0 and steps == self._steps_before
        self._steps_before = steps
        if waiting is None or (
            batch < waiting.from_batch
            and not DealtLoaders(self.view).are_behind(waiting.mark, batch)
        ):
            return False
        self._pending = None
        self._follow(self._movable(waiting.adoption, accumulates), accumulates)
        return True

    def _movable(self, adoption: Adoption, accumulates: bool) -> Adoption:
        """Return a plan; with the present shares, and a warning, if rows cannot move any more."""
        session, plan = self.session, adoption.plan
        try:
            session.check_move(plan, accumulates)
        except (UnsupportedError, TooLittleMemoryError, RemoteRankError) as error:
            rank_zero_warn(
                f"The new plan takes effect, but rows of the model stay where they are: {error}"
            )
            present = zip(plan.ranks, session.model.fractions, strict=True)
            ranks = tuple(replace(rank, state_fraction=share) for rank, share in present)
            return replace(adoption, plan=replace(plan, ranks=ranks))
        return adoption

    def follow_now(self, plan: Plan) -> None:
        """Follow a plan from the middle of a step that has failed on all ranks; collective."""
        adoption = self.session.accept(plan, keeps_gradients=True)
        self._follow(adoption, True)

    def _follow(self, adoption: Adoption, keeps_gradients: bool) -> None:
        session, start_s = self.session, time.perf_counter()
        session.adopt(adoption, keeps_gradients=keeps_gradients)
        self.watch.follow(session.plan)
        self.change_s = time.perf_counter() - start_s
