"""Training that changes its plan by itself, as made-up times of its ranks say."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
from common import Net, in_ranks, loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from plans import GLOBAL_BATCH, QUIET, plan_of

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.observe.report import replan_line
from lightning_cephalo.plan import Problem, RankProfile, StateBytes, predict, solve
from lightning_cephalo.plan.replan import ReplanPolicy
from lightning_cephalo.preparation import replanning
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.limits import Limits
from lightning_cephalo.preparation.options import Options

CURVE = [0.01 * size for size in range(1, 9)]
RANK = RankProfile("made up", CURVE, [2 * s for s in CURVE], CURVE, [0.0] * 8, 1e9)
PROBLEM = Problem([RANK, RANK], units=3, state=StateBytes(2**20), global_batch_size=GLOBAL_BATCH)
STEPS, SLOW = 120, range(30, 70)
# Its optimizer state lives in host memory, before a change and after it.
OFFLOADED = replace(
    PROBLEM,
    ranks=[
        replace(
            RANK,
            host_capacity_bytes=1e9,
            to_device_bytes_per_s=1e9,
            to_host_bytes_per_s=1e9,
            host_updated_parameters_per_s=1e9,
        )
    ]
    * 2,
    optimizer_offload=True,
    unit_parameters=[125, 258, 150, 258],
    moment_bytes=8,
)


class MadeUpWatch:
    """Says what a rank's work would take."""

    def __init__(self, strategy: CephaloStrategy, run: Trainer) -> None:
        self.strategy, self.run = strategy, run

    def __getattr__(self, name: str):
        return getattr(self.strategy._watch, name)

    def take_busy_s(self) -> float:
        rank, step = self.run.global_rank, self.run.global_step
        own = predict(OFFLOADED, self.strategy.plan).ranks[rank]
        pace = 3.0 if rank == 1 and step in SLOW else 1.0
        return math.nan if not step else pace * (3 * (own.forward_s + own.backward_s) + own.tail_s)


class SolvesAtOnce:
    def __init__(self, problem: Problem) -> None:
        self.plan, self.is_done = solve(problem), True

    def close(self) -> None:
        pass


class BeginsToReplan(Callback):
    """Lets a training by a given plan change it."""

    def __init__(self, problem: Problem = PROBLEM) -> None:
        self.problem = problem

    def on_train_start(self, trainer, module) -> None:
        strategy = trainer.strategy
        changes = strategy._training.changes
        policy = ReplanPolicy(self.problem, changes.session.plan)
        changes.watch = MadeUpWatch(strategy, trainer)
        strategy._training.replanning = replanning.Replanning(changes, self.problem, policy)


def _fit(plan, folder=None, problem=PROBLEM, steps=STEPS):
    model = Net()
    logger = False if folder is None else CSVLogger(folder)
    callbacks = [] if plan is None else [BeginsToReplan(problem)]
    quiet = {
        **QUIET,
        "max_epochs": -1,
        "max_steps": steps,
        "logger": logger,
        "limit_val_batches": 0,
    }
    strategy = "auto"
    if plan is not None:
        strategy = CephaloStrategy(
            plan=plan, global_batch_size=GLOBAL_BATCH, planner=Planner(verbose=False)
        )
    devices = 1 if plan is None else 2
    run = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", callbacks=callbacks, **quiet
    )
    run.fit(model, loader(60, shuffle=True), loader(8))
    return model.losses, [] if plan is None else list(run.strategy.report.replans)


def _replans(folder):
    replanning.SolverBeside = SolvesAtOnce
    losses, seen = _fit(solve(PROBLEM), folder)
    moved, changes = _fit(solve(OFFLOADED), None, OFFLOADED, steps=SLOW[0] + 50)
    assert moved == pytest.approx(losses[: len(moved)], abs=1e-6)
    (change,) = changes
    for rank in (*change.old_plan.ranks, *change.plan.ranks):
        assert rank.resident_fraction == 0.0 and rank.state_host_bytes > 0
    return losses, seen


@pytest.mark.slow
def test_a_rank_that_slows_down_and_recovers_changes_the_plan_twice_and_no_loss(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(replanning, "SolverBeside", SolvesAtOnce)
    wanted, _ = _fit(None)
    (losses, changes), (others, same) = in_ranks(2, _replans, tmp_path)
    assert losses == pytest.approx(wanted, abs=1e-6) and others == pytest.approx(wanted, abs=1e-6)
    assert [(c.step, c.plan) for c in changes] == [(c.step, c.plan) for c in same]
    slow, back = changes
    assert slow.rank == 1 and slow.factor == pytest.approx(3) and slow.since_step == SLOW[0]
    assert slow.step - SLOW[0] < 30 and back.step - SLOW[-1] < 45
    batches = [rank.batch_size for rank in slow.plan.ranks]
    assert batches == [6, 2] and slow.plan.step_s < 0.7 * slow.old_step_s
    assert [rank.batch_size for rank in back.plan.ranks] == [4, 4]
    logged = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "cephalo/step_s" in logged and "cephalo/replans" in logged
    line = replan_line(slow, "P40")
    assert line.startswith(f"Step {slow.step}: rank 1 (P40) takes 3.0x as long since step 30. New")
    assert "moved in" in line and replan_line(back).count("0.3x as long") == 1


def _wishes():
    """What is said with replan=True where no other plan can be followed."""
    said = []

    for wish in (True, "auto", False):
        job = Job(Options(replan=wish), (Limits(),))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said.append((replanning.may_replan(job), [str(each.message) for each in caught]))
    return said


def test_the_plan_of_a_single_rank_does_not_change():
    assert _wishes() == [(False, [])] * 3
    with pytest.raises(ValueError, match=r"replan: expected True, False or 'auto', but got 1\.5"):
        CephaloStrategy(replan=1.5)


class ChangesByHand(Callback):
    def __init__(self, plan) -> None:
        self.plan = plan

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            trainer.strategy.change_plan(self.plan)


SHORT = RankProfile("short", CURVE[:4], CURVE[:4], CURVE[:4], [0.0] * 4, 1e9)
# a microbatch that is larger than all that were measured; state that moves at unknown rates
NOT_MEASURED = {
    "microbatch size 6 was not profiled": (
        replace(PROBLEM, ranks=(SHORT, SHORT)),
        plan_of(((6,), 0.6), ((2,), 0.4)),
    ),
    "what that takes is not measured": (
        PROBLEM,
        plan_of(((4,), 0.6), ((4,), 0.4), resident_fraction=0.5),
    ),
}


def _by_hand(problem, changed):
    callbacks = [BeginsToReplan(problem), ChangesByHand(changed)]
    plan = plan_of(((4,), 0.5), ((4,), 0.5))
    strategy = CephaloStrategy(
        plan=plan, global_batch_size=GLOBAL_BATCH, planner=Planner(verbose=False)
    )
    run = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", callbacks=callbacks, max_steps=4, **QUIET
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Net(), loader(), loader(8))
    said = [str(each.message) for each in caught if "by itself" in str(each.message)]
    return said, strategy.plan == changed, strategy.report.replans


def _each_by_hand():
    return [_by_hand(*case) for case in NOT_MEASURED.values()]


def test_behind_a_plan_of_the_users_that_was_not_measured_no_other_follows():
    for why, own, other in zip(NOT_MEASURED, *in_ranks(2, _each_by_hand), strict=True):
        (said, *first), (silent, *second) = own, other
        assert len(said) == 1 and why in said[0] and not silent
        assert first == second == [True, ()]


def _measured():
    """A given plan that is replaced; its own sizes are measured."""
    plan = plan_of(((2, 2), 0.5), ((4,), 0.5))
    strategy = CephaloStrategy(
        plan=plan,
        replan=True,
        global_batch_size=GLOBAL_BATCH,
        planner=Planner(verbose=False, budget_s=60.0),
    )
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, *args) -> None:
            seen.append(strategy._training.replanning is not None)

    run = Trainer(
        strategy=strategy, devices=2, accelerator="cpu", callbacks=[Looks()], max_steps=2, **QUIET
    )
    run.fit(Net(), loader(), loader(8))
    return seen, strategy.plan == plan, strategy._training


def _both_measured():
    return [_measured(), _measured()]


def test_a_given_plan_is_measured_where_it_may_change(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path))
    followed = [([True, True], True, None)] * 2
    # the second start finds the measurements of the first
    assert in_ranks(2, _both_measured) == [followed] * 2


class TakesOnce:
    """A watch with one number, which it gives once."""

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s

    def take_busy_s(self) -> float:
        taken, self.busy_s = self.busy_s, math.nan
        return taken


def _alone(watch):
    plan = solve(PROBLEM)
    changes = Mock(watch=watch)
    changes.session.control.rank, changes.session.plan = 0, plan
    changes.view.step, changes.view.steps_left = 5, math.inf
    return replanning.Replanning(changes, PROBLEM, ReplanPolicy(PROBLEM, plan))


def test_the_last_of_several_exchanges_of_a_step_carries_the_pace_too():
    watch = TakesOnce(0.25)
    alone = _alone(watch)
    assert [alone.note()[0] for _ in range(2)] == [0.25, 0.25]
    alone.learn([alone.note(), (0.25, 0.0)])
    assert math.isnan(alone.note()[0])  # the next step has not been timed


def test_a_plan_that_was_announced_is_dropped_if_the_users_own_comes_first():
    alone = _alone(TakesOnce(0.25))
    alone._ready = Mock()
    alone.learn([alone.note(), (0.25, 0.0)])
    alone._session.plan = plan_of(((4,), 0.5), ((4,), 0.5))
    alone.changed()
    alone.between_steps()
    alone._changes.request.assert_not_called()
    alone._session.control.broadcast.assert_not_called()
