"""Connects a model with its executor, and with what few steps need."""

from __future__ import annotations

from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.features import meetings, over_batch


def install(executor: Executor) -> None:
    """Let calls of units come to the executor, and layers and losses that meet to theirs."""
    meetings.install(executor)  # a unit may be such a layer itself
    executor.tracer.places_of_all[over_batch.AT_BATCH] = over_batch.go_on
    executor.hooks.install()
