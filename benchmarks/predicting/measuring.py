"""Measures a problem once and trains by many plans, all in one set of processes."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.emulation import Emulation
from lightning_cephalo.observe.pace import predicted_busy_s
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.preparation import prepare as planning

from .models import Model
from .plans import SOLVED, cases

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Figures:
    """Figures of the step and of every rank; predicted or measured."""

    step_s: float
    busy_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """One plan, predicted and measured."""

    plan_name: str
    plan: Plan
    predicted: Figures
    measured: Figures


def run_rank(model: Model, steps: int, names: tuple[str, ...] = ()) -> list[Outcome]:
    """Measure and train in this rank; every rank calls it.

    Args:
        model: The model to train.
        steps: Steps of every plan.
        names: Plans to run in addition to the solver's; empty: all.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    problem, strategy = _planned(model, steps)
    outcomes = [_outcome(SOLVED, problem.units, strategy)]
    for case in cases(problem, model.speeds):
        if not names or case.name in names:
            strategy = _fit(model, steps, plan=case.plan)
            outcomes.append(_outcome(case.name, problem.units, strategy))
    return outcomes


def _planned(model: Model, steps: int) -> tuple[Problem, CephaloStrategy]:
    """Train by the solver's plan; returns its problem and the strategy."""
    problems: list[Problem] = []
    with_host_memory = planning.with_host_memory

    def keeping(*arguments: Any, **more: Any) -> Problem:
        problems.append(with_host_memory(*arguments, **more))
        return problems[-1]

    with patch.object(planning, "with_host_memory", keeping):
        strategy = _fit(model, steps, recompute="auto")
    return problems[0], strategy


def _fit(model: Model, steps: int, **options: Any) -> CephaloStrategy:
    strategy = CephaloStrategy(
        global_batch_size=model.global_batch_size,
        planner=Planner(verbose=False),
        timeout=_TIMEOUT,
        **options,
    )
    Trainer(
        accelerator="cpu",
        devices=len(model.speeds),
        strategy=strategy,
        callbacks=[Emulation(model.speeds, total_flops_per_s=model.total_flops_per_s)],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model.make(), model.loader(steps))
    return strategy


def _outcome(name: str, units: int, strategy: CephaloStrategy) -> Outcome:
    plan, ranks, memory = strategy.plan, strategy.report.ranks, strategy.report.memory
    assert plan is not None and plan.step_s is not None and memory is not None
    predicted = Figures(
        plan.step_s,
        tuple(predicted_busy_s(rank, units) or 0.0 for rank in plan.ranks),
        tuple(rank.memory_bytes or 0.0 for rank in plan.ranks),
    )
    measured = Figures(
        max(rank.step_s for rank in ranks),
        tuple(rank.busy_s for rank in ranks),
        tuple(rank.peak_bytes or 0.0 for rank in memory),
    )
    return Outcome(name, plan, predicted, measured)
