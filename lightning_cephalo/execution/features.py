"""What few steps need, and the executor does not name: each brings its handler."""

from __future__ import annotations

from lightning_cephalo.execution import over_batch
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.meetings import Meetings
from lightning_cephalo.plan.program import Operation


def install(executor: Executor) -> None:
    """Add synchronised normalisation and losses over the whole batch."""
    meetings = Meetings(executor.hooks.norms, executor.accelerator.device)
    executor.handlers[Operation.MEET] = meetings.run
    executor.tracer.places_of_all[over_batch.AT_BATCH] = over_batch.go_on
