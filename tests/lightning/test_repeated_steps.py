"""Steps in which a rank runs out of memory: another plan, and the same step once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, in_ranks, loader, values_of
from lightning.pytorch import Callback, Trainer
from plans import GLOBAL_BATCH, QUIET, plan_of
from profiled import GPT, fit
from profiled import in_ranks as in_emulated_ranks
from profiled import loader as tokens
from torchmetrics import MeanMetric, SumMetric

from lightning_cephalo import CephaloStrategy, Plan, Planner
from lightning_cephalo.adapters.repeated_step import RepeatedStep
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.plan import Problem, RankProfile, StateBytes, solve
from lightning_cephalo.plan.replan import ReplanPolicy
from lightning_cephalo.preparation import replanning

CURVE = [0.01 * size for size in range(1, 9)]
BYTES = [1000.0 * size for size in range(1, 9)]
RANK = RankProfile("made up", CURVE, [2 * s for s in CURVE], CURVE, BYTES, 20_000.0)
PROBLEM = Problem([RANK, RANK], units=3, state=StateBytes(20_000), global_batch_size=GLOBAL_BATCH)
PLAN = solve(PROBLEM)
STEPS = 7


class Planted:
    """Where a rank runs out of memory, by batch; a module's own list would be put back."""

    def __init__(self, *places: tuple[int, str]) -> None:
        self.places = list(places)

    def take(self, step: int, doing: str) -> bool:
        if (step, doing) not in self.places:
            return False
        self.places.remove((step, doing))
        return True


class Hungry(Net):
    """Runs out of memory, and keeps every kind of state that a step may write."""

    hungry = 1

    def __init__(self, *places: tuple[int, str], optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.planted = Planted(*places)
        self.register_buffer("center", torch.zeros(5))
        self.seen, self.mean = SumMetric(), MeanMetric()
        self.calls: list[int] = []
        self.zeroed: list[int] = []
        self.early: list[bool] = []
        self.count = 0
        inside = next(self.blocks[self.hungry].children())
        inside.register_forward_pre_hook(self._eat)

    @property
    def _batch(self) -> int:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    def _eat(self, *_: object) -> None:
        if self.trainer.world_size == 1:
            return
        hooks = self.trainer.strategy.session.model.executor.hooks
        doing = "backward" if hooks.in_backward else "forward"
        if self.global_rank and self.planted.take(self._batch, doing):
            raise torch.OutOfMemoryError("planted: out of memory")

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.calls.append(len(batch[0]))
        self.seen.update(batch[0].sum())
        self.center.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        self.center_of_step = batch[0].mean()
        loss = super().training_step(batch, batch_idx)
        loss = loss + 0.01 * self.center.sum()
        self.mean(loss.detach(), len(batch[0]))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss


class UpdatesEarly(Hungry):
    """Notes which steps update units inside of the backward."""

    def on_train_batch_end(self, *given) -> None:
        super().on_train_batch_end(*given)
        if self.trainer.world_size > 1:
            self.early.append(self.trainer.strategy.session.model.executor.updates.is_on)


class Counts(Hungry):
    """Counts its hooks inside of a step; with one that may read gradients, no update is early."""

    def on_before_zero_grad(self, optimizer) -> None:
        self.zeroed.append(self.trainer.global_step)


class TakesLabels(Counts):
    """Takes the labels out of the batch that it gets."""

    def training_step(self, batch, batch_idx):
        y = batch.pop()
        return super().training_step([*batch, y], batch_idx)


class BeginsToReplan(Callback):
    """Lets a training by a given plan change it where memory is short."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def on_train_start(self, trainer, module) -> None:
        training, session = trainer.strategy._training, trainer.strategy.session
        policy = ReplanPolicy(self.problem, session.plan)
        training.replanning = replanning.Replanning(training.changes, self.problem, policy)
        training.repeated = RepeatedStep(session.model, training._relieve)


def _fit(model: Net, plan: Plan | None, problem: Problem = PROBLEM, early: Any = False, **options):
    callbacks: list[Callback] = []
    strategy: Any = "auto"
    if plan is not None:
        callbacks = [BeginsToReplan(problem)]
        strategy = CephaloStrategy(
            plan=plan,
            global_batch_size=GLOBAL_BATCH,
            planner=Planner(verbose=False, early_update=early),
        )
    options = {**QUIET, "max_epochs": -1, "max_steps": STEPS, "limit_val_batches": 0, **options}
    devices = 1 if plan is None else 2
    run = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", callbacks=callbacks, **options
    )
    run.fit(model, loader(32), loader(8))
    return [] if plan is None else list(run.strategy.report.replans), run


def _result(make: Callable[[], Hungry], plan: Plan | None, **options):
    model = make()
    seen, run = _fit(model, plan, **options)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    state = {
        "losses": model.losses,
        "values": values_of(model),
        "metrics": metrics,
        "zeroed": model.zeroed,
        "seen": model.seen.sum_value.item(),
        "early": model.early,
        "samples": sum(model.calls),
    }
    plans = [(change.cause, change.step, change.plan) for change in seen]
    return state, plans, model.count - len(model.losses)


CASES: dict[str, tuple[Callable[[], Hungry], dict[str, Any]]] = {
    "forward, and again": (lambda: Counts((3, "forward"), (3, "forward")), {}),
    "backward": (lambda: Counts((3, "backward"), optimizer="sgd"), {}),
    "both": (lambda: Counts((2, "forward"), (4, "backward"), (4, "forward")), {}),
    "behind early updates": (lambda: UpdatesEarly((3, "forward")), {"early": "auto"}),
    "accumulation": (lambda: Counts((1, "forward")), {"accumulate_grad_batches": 2}),
}


def _all(plan: Plan | None):
    found = {name: _result(make, plan, **options) for name, (make, options) in CASES.items()}
    if plan is not None:  # a batch that is not cut is the user's own object
        ranks = [replace(r, microbatch_sizes=(sum(r.microbatch_sizes),)) for r in PLAN.ranks]
        plan = replace(PLAN, ranks=tuple(ranks))
    found["a batch that loses its labels"] = _result(
        lambda: TakesLabels((2, "forward"), (4, "backward")), plan
    )
    return found


def test_a_repeated_step_is_that_of_one_device():
    wanted = in_ranks(1, _all, None)[0]
    ranks = in_ranks(2, _all, PLAN)
    for name in wanted:
        one, _, _ = wanted[name]
        (first, plans, again), (second, others, _) = (rank[name] for rank in ranks)
        assert again == 0, name
        assert first["samples"] + second["samples"] == one["samples"], name
        assert plans == others and len(plans) >= 1, name
        for own in (first, second):
            assert own["losses"] == pytest.approx(one["losses"], abs=1e-6), name
            assert own["zeroed"] == one["zeroed"], name
            assert own["early"] == [True] * STEPS * (name == "behind early updates"), name
            assert_same_tensors(own["values"], one["values"], 1e-5)
            assert own["metrics"] == pytest.approx(one["metrics"], abs=1e-5), name
        assert first["seen"] + second["seen"] == pytest.approx(one["seen"], abs=1e-4), name


class Fails(Hungry):
    """Also has another error, on the other rank."""

    def training_step(self, batch, batch_idx):
        if self.planted.take(self._batch, f"error on {self.global_rank}"):
            raise ValueError("planted: another error")
        return super().training_step(batch, batch_idx)


class ScalesInPlace(Hungry):
    """Writes to its batch before it runs out of memory."""

    def training_step(self, batch, batch_idx):
        batch[0].div_(2)
        return super().training_step(batch, batch_idx)


FULL = replace(PROBLEM, ranks=(replace(RANK, capacity_bytes=11_000.0),) * 2)
REFUSED: dict[str, tuple[Callable[[], Hungry], dict[str, Any]]] = {
    "repeated 2 times already": (lambda: Hungry(*[(1, "forward")] * 3), {}),
    "No other plan was found that takes less memory": (
        lambda: Hungry((1, "backward")),
        {"problem": FULL},
    ),
    "gradients add up over several batches": (
        lambda: Hungry((1, "backward")),
        {"accumulate_grad_batches": 2},
    ),
    "Weights are half-updated": (lambda: Hungry((1, "backward")), {"early": "auto"}),
    "has written to tensors of its batch in place": (lambda: ScalesInPlace((1, "forward")), {}),
    "another error": (lambda: Fails((1, "forward"), (1, "error on 0")), {}),
}


def _refused():
    said = {}
    for name, (make, options) in REFUSED.items():
        options = {"problem": PROBLEM, **options}
        try:
            _fit(make(), solve(options["problem"]), **options)
        except Exception as error:
            said[name] = type(error).__name__, str(error)
    return said


def test_a_step_that_cannot_be_repeated_ends_all_ranks_and_says_why():
    first, second = in_ranks(2, _refused)
    for name in REFUSED:
        (kind, own), (other, text) = first[name], second[name]
        if name == "another error":
            assert (kind, other) == ("ValueError", OutOfMemoryInStepError.__name__)
            continue
        if "in place" in name:  # on each rank
            assert (kind, other) == ("UnsupportedError",) * 2 and name in own and name in text
            continue
        assert (kind, other) == ("RemoteRankError", OutOfMemoryInStepError.__name__), name
        assert name in own and name in text, (name, own)
        assert "Rank 1 ran out of memory" in own and "planted" in text


class Grows(GPT):
    """Wants more memory for each sample from the third step on, on rank 1."""

    def __init__(self) -> None:
        super().__init__(width=64, depth=3, context=16)
        self.losses: list[float] = []
        self.largest: list[int] = []
        inside = next(self.network.blocks[1].children())
        inside.register_forward_pre_hook(self._eat)

    def _eat(self, _: object, args: tuple[torch.Tensor, ...]) -> None:
        if self.global_rank and self.global_step >= 2:
            torch.zeros(len(args[0]), 200_000)

    def on_train_batch_end(self, *_: object) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        plan = self.trainer.strategy.plan
        self.largest.append(max(plan.ranks[1].microbatch_sizes, default=0))


LARGE = [0.5e6 * size for size in range(1, 9)]
DEVICE = RankProfile("made up", CURVE, CURVE, CURVE, LARGE, 4.6e6)
ON_DEVICES = Problem(
    [DEVICE, DEVICE], units=3, state=StateBytes(2e6), global_batch_size=GLOBAL_BATCH
)


def _grown(capacity_bytes: int):
    model = Grows()
    callback = BeginsToReplan(ON_DEVICES)
    plan = plan_of(((4,), 0.5), ((4,), 0.5))
    run = fit(
        model,
        tokens(batch_size=4),
        strategy={"plan": plan, "global_batch_size": GLOBAL_BATCH},
        capacity_bytes=(10**9, capacity_bytes),
        callbacks=[callback],
        is_time_shared=False,
        max_steps=5,
    )
    return model.losses, model.largest, [(c.cause, c.step) for c in run.strategy.report.replans]


def _both():
    return _grown(10**9), _grown(4_600_000)


def test_a_rank_whose_device_is_full_goes_on_with_smaller_microbatches():
    for (wanted, kept, none), (losses, largest, changes) in in_emulated_ranks(2, _both):
        assert none == [] and kept == [4] * 5
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert largest[:2] == [4, 4] and largest[2] < 4
        assert changes[0] == ("memory", 2)
