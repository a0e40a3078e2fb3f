"""Optimizer state in host memory beside averages, schedules, other ranks, and restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from common import (
    Net,
    RankFailure,
    assert_same_optimizer_state,
    assert_same_tensors,
    in_ranks,
    loader,
    values_of,
)
from killing import Kill, assert_repeated, fit, told_by
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from plans import PLANS
from test_moved_state import moved, trainer

from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.program import Instruction, Operation


class Scheduled(Net):
    """A schedule changes rates and moments of two groups, one of them with more state."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.validated: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "amsgrad": True},
        ]
        chosen = torch.optim.AdamW(groups, lr=1e-2, fused=self.fused)
        cycle = torch.optim.lr_scheduler.OneCycleLR(chosen, [1e-2, 2e-2], total_steps=20)
        return [chosen], [{"scheduler": cycle, "interval": "step"}]


class Averages(Callback):
    """A user's average, which stands in for the weights in validation."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.values = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.values[name].mul_(0.8).add_(parameter.detach(), alpha=0.2)

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.values[name])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.host_bytes = trainer.strategy.session.moved.host_bytes

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.copy_(self.kept[name])


def _trained(plan: Plan, fused: bool, path: Path, begun: Path | None) -> Any:
    model, average = Scheduled(fused), EMAWeightAveraging(decay=0.6, use_buffers=True)
    own = Averages()
    options = {"max_epochs": 4 if begun else 2, "limit_train_batches": 2, "limit_val_batches": 1}
    run = trainer(plan, "auto", callbacks=[average, own], **options)
    run.fit(model, loader(), loader(8), ckpt_path=begun)
    run.save_checkpoint(path)
    own_plan = plan.ranks[torch.distributed.get_rank()]
    assert (own.host_bytes > 0) is (own_plan.moves_state and own_plan.state_fraction > 0)
    state = run.strategy.optimizer_state(run.optimizers[0])
    return model.validated, values_of(model), values_of(average._average_model), state


# plan, resident fraction and that which the host updates, whether the device's updates are fused
CASES = [("3:1", (0.4, 0.0), False), ("3:1", (0.0, 1.0), True)]
RESUMED = [("three", (0.0, 0.0), False), ("three", (0.5, 0.5), True)]


def _run(cases: Any, folder: Path, is_resumed: bool) -> None:
    for index, (name, parts, fused) in enumerate(cases):
        found = {}
        for kind, plan in (("resident", PLANS[name]), ("moved", moved(name, *parts))):
            path = folder / f"{kind} {index}.ckpt"
            end = folder / f"end of {kind} {index}.ckpt"
            begun, saved = (path, end) if is_resumed else (None, path)
            found[kind] = _trained(plan, fused, saved, begun)
        validated, values, averages, state = found["moved"]
        assert validated == found["resident"][0] and validated
        assert_same_tensors(values, found["resident"][1], 0.0)
        assert_same_tensors(averages, found["resident"][2], 0.0)
        if state:  # rank 0 has it
            assert_same_optimizer_state(state, found["resident"][3], 0.0)


@pytest.mark.slow
def test_averages_schedules_and_other_ranks_find_the_state_that_they_know(tmp_path):
    in_ranks(2, _run, CASES, tmp_path, False)
    in_ranks(3, _run, RESUMED, tmp_path, True)


# -- restarts -------------------------------------------------------------------------------------


class KillBetweenUpdates(Callback, Observer):
    """Kills a rank in a backward that has updated some units."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer = trainer
        trainer.strategy.session.model.executor.link.attach(self)

    def before(self, instruction: Instruction) -> None:
        is_here = (self.trainer.global_rank, self.trainer.global_step) == (self.rank, self.step)
        if is_here and instruction.operation is Operation.UPDATE and instruction.unit == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_goes_on_with_state_that_lives_elsewhere(tmp_path, monkeypatch):
    rest = ({"max_epochs": 2}, 0.2)
    wanted = in_ranks(2, fit, "3:1", tmp_path / "whole", [], *rest)
    starts = [(0.0, KillBetweenUpdates(1, 3)), (0.6, Kill(0, 7, "on_train_batch_start"))]
    for resident, kill in starts:
        monkeypatch.setitem(PLANS, "3:1", moved("3:1", resident))
        with pytest.raises(RankFailure, match="died without a result"):
            in_ranks(2, fit, "3:1", tmp_path / "killed", [kill], *rest)
    found = in_ranks(2, fit, "3:1", tmp_path / "killed", [], *rest)
    for rank in (0, 1):
        told, whole = told_by(tmp_path / "killed", rank), told_by(tmp_path / "whole", rank)
        assert_repeated(told, len(starts) + 1)
        assert [step for step in told if step not in whole] == []
        assert_same_tensors(found[rank], wanted[rank], 0.0)
