"""Optimizers are made once, before ranks are measured: with them, and for plans that count them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from profiled import fit, in_ranks
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.plan import Problem
from lightning_cephalo.preparation import prepare

# not on the module, where measuring would put them back
CALLS: list[str] = []
FOUND: list[Any] = []


class Watching(LightningModule):
    """Notes the order in which its hooks are called, and which optimizer a step finds."""

    def __init__(self, kind: Any = AdamW, automatic: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        self.kind, self.options, self.automatic_optimization = kind, options, automatic

    def setup(self, stage: str) -> None:
        CALLS.append("setup")

    def configure_model(self) -> None:
        CALLS.append("configure_model")

    def configure_optimizers(self) -> Any:
        CALLS.append("configure_optimizers")
        self.steps = self.trainer.estimated_stepping_batches
        matrices = [p for p in self.parameters() if p.ndim == 2]
        held = matrices if self.kind is Muon else self.parameters()
        optimizer = self.kind(held, lr=0.25, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_fit_start(self) -> None:
        CALLS.append("on_fit_start")

    def training_step(self, batch: Any, index: int) -> Any:
        CALLS.append("training_step")
        found: Any = self.optimizers()
        FOUND.append((type(found.optimizer), found.param_groups[0]["lr"]))
        loss = self.net(batch[0]).square().mean()
        if not self.automatic_optimization:
            found.zero_grad()
            self.manual_backward(loss)
            found.step()
            return None
        return loss


def _loader() -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(24, 32, generator=generator)), batch_size=4)


def _run(kind: Any, automatic: bool, **options: Any) -> Any:
    module = Watching(kind, automatic, **options)
    before = [p.detach().clone() for p in module.parameters()]
    strategy = {"budget_s": 0.3, "remeasure": True}
    trainer = fit(module, _loader(), max_steps=-1, max_epochs=1, strategy=strategy)
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    return CALLS, FOUND, module.steps, moved, trainer.global_step


@pytest.mark.parametrize("automatic", [True, False])
def test_hooks_come_in_the_order_of_lightning_and_optimizers_once(automatic):
    for calls, found, steps, moved, made in in_ranks(2, _run, AdamW, automatic):
        first = ["setup", "configure_model", "configure_optimizers", "training_step"]
        assert list(dict.fromkeys(calls)) == [*first, "on_fit_start"]
        assert all(calls.count(hook) == 1 for hook in (*first[:3], "on_fit_start"))
        assert steps == made == 3 and all(moved)
        # steps that are measured find the user's own
        assert len(found) > 3 and set(found) == {(AdamW, 0.25)}


def _planned(kind: Any, options: dict[str, Any]) -> tuple[list[Problem], Any, bool]:
    """The problems that were solved, when the plan lets units update, and whether all trained."""
    problems: list[Problem] = []
    solve = prepare.solve

    def noting(problem: Problem) -> Any:
        problems.append(problem)
        return solve(problem)

    prepare.solve = noting
    module = Watching(kind, **options)
    before = module.net[0][0].weight.detach().clone()
    try:
        trainer = fit(module, _loader(), strategy={"budget_s": 0.3, "remeasure": True})
    finally:
        prepare.solve = solve
    moved = not torch.equal(before, module.net[0][0].weight)
    return problems, trainer.strategy.plan.early_update, moved


@pytest.mark.parametrize(
    ("kind", "options", "each_bytes", "is_early"),
    [
        (AdamW, {}, 8, True),
        (AdamW, {"amsgrad": True}, 12, True),
        (Adagrad, {}, 4, True),  # whose state exists from the beginning
        (SGD, {}, 0, True),
        (Muon, {}, 8, None),  # not known, and not element-wise
    ],
)
def test_one_plan_is_made_for_what_the_optimizer_holds_and_when_it_may_update(
    kind, options, each_bytes, is_early
):
    (problems, early, moved), (others, *_) = in_ranks(2, _planned, kind, options)
    (problem,) = problems
    assert not others and moved  # rank 0 plans
    assert problem.moment_bytes == each_bytes and early is is_early


def _refused() -> tuple[str, list[str]]:
    with pytest.raises(UnsupportedError) as refused:
        fit(Watching(SparseAdam), _loader(), strategy={"budget_s": 0.3, "remeasure": True})
    return str(refused.value), CALLS


def test_an_optimizer_that_cannot_work_is_refused_before_ranks_are_measured():
    for said, calls in in_ranks(2, _refused):
        assert said.startswith("SparseAdam does not update each parameter by itself: a trial")
        assert calls == ["setup", "configure_model", "configure_optimizers"]
