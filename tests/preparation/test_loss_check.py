"""A loss that microbatches would change is found in the first step, and no other is."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks, torchrun_environments
from lightning.pytorch import LightningModule, Trainer
from plans import QUIET, plan_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Planner, loss_over_batch
from lightning_cephalo.preparation.loss_check import Compared

CLASSES = torch.tensor([0, 0, 0, 1])
WEIGHTS = torch.tensor([1.0, 5.0])
LENGTHS = torch.tensor([5, 1, 2, 3])
UNKNOWN = "The loss of a batch was not compared with that of its parts"


def _mean(scores, rows):
    return nn.functional.cross_entropy(scores[:, :2], CLASSES[rows])


def _contrastive(scores, rows):
    return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(rows)))


def _over_batch(scores, rows):
    return loss_over_batch(_contrastive, scores, rows)


def _classes(scores, rows):
    return nn.functional.cross_entropy(scores[:, :2], CLASSES[rows], WEIGHTS)


def _classes_with_weight(scores, rows):
    return {"loss": _classes(scores, rows), "weight": WEIGHTS[CLASSES[rows]].sum()}


def _tokens(scores, rows):
    kept = torch.arange(6) < LENGTHS[rows][:, None]
    return scores.square()[kept].mean()


def _tokens_with_weight(scores, rows):
    return {"loss": _tokens(scores, rows), "weight": LENGTHS[rows].sum()}


def _balanced(scores, rows):
    return _mean(scores, rows) + 0.1 * scores.softmax(1).mean(0).square().sum()


def _undefined(scores, rows):
    """A mean over rows that one of the halves lacks."""
    return scores[rows == 3].square().mean()


def _random(scores, rows):
    return (scores - torch.randn_like(scores)).square().mean()


class _Counting(LightningModule):
    """Draws random numbers, counts in a buffer and in a list, and logs."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
        self.dropout, self.loss = nn.Dropout(0.5), loss
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[str] = []

    def training_step(self, batch, batch_idx):
        self.count += 1.0
        self.seen.append(str(torch.rand(())))  # a number would be warned of
        loss = self.loss(self.dropout(self.blocks(batch[0])), batch[1] % 4)
        self.log("loss", loss["loss"] if isinstance(loss, dict) else loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Remembering(_Counting):
    """Its loss depends on a buffer that the same step has written."""

    def training_step(self, batch, batch_idx):
        self.count += 1.0
        self.seen.append("")
        return self.blocks(batch[0]).square().mean() * (1.0 + self.count)


class _OfTwo(_Counting):
    """Trains on rows of two dataloaders."""

    def training_step(self, batch, batch_idx):
        self.count += 1.0
        self.seen.append("")
        a, b = (self.blocks(batch[key][0]) for key in ("a", "b"))
        return torch.cat([a, b]).square().mean()


CASES = {
    "a mean": (_mean, ((2, 2), (3, 1)), False),
    "a mean that changes with a buffer": (None, ((4,), (4,)), False),
    "one mean of rows of two dataloaders": (None, ((3, 2), (2, 1)), False),
    "contrastive": (_contrastive, ((2, 2), (3, 1)), True),
    "contrastive with a rank without samples": (_contrastive, ((), (4, 4)), True),
    "contrastive of single samples": (_contrastive, ((1,) * 7, (1,)), True),
    "contrastive of one sample each": (_contrastive, ((1,), (1,)), False),
    "over the batch": (_over_batch, ((2, 2), (3, 1)), False),
    "weights of classes": (_classes, ((4,), (4,)), True),
    "weights of classes, returned": (_classes_with_weight, ((4,), (4,)), False),
    "tokens": (_tokens, ((4,), (4,)), True),
    "tokens, returned": (_tokens_with_weight, ((4,), (4,)), False),
    "a balance term": (_balanced, ((4,), (4,)), True),
    "undefined for a half": (_undefined, ((4,), (4,)), True),
    "random": (_random, ((4,), (4,)), False),
}
"""A loss, the microbatches of two ranks, and whether it is found."""


def _fitted(name):
    loss, sizes, _ = CASES[name]
    plan = plan_of(*((own, 0.5) for own in sizes))
    strategy = CephaloStrategy(plan, planner=Planner(verbose=False))
    run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **QUIET)
    torch.manual_seed(5)
    size = plan.global_batch_size // 2
    data: Any = DataLoader(TensorDataset(torch.randn(16, 6), torch.arange(16)), batch_size=size)
    module: Any = _Counting(loss)
    if "buffer" in name:
        module = _Remembering(loss)
    elif "two" in name:
        module, other = _OfTwo(loss), TensorDataset(torch.randn(12, 6))
        data = {"a": data, "b": DataLoader(other, batch_size=size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "The loss of . samples is")
        run.fit(module, data)
    assert module.training and module.dropout.training
    return [str(one.message) for one in caught], len(module.seen), module.count.item()


def _fit_all(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    return {name: _fitted(name) for name in CASES}


def test_losses_that_are_no_mean_over_samples_are_found_and_the_step_is_not_changed():
    ranks = run_ranks(2, _fit_all, torchrun_environments(2), process_group=False)
    for rank, found in enumerate(ranks):
        for name, (_, sizes, is_found) in CASES.items():
            told, steps, count = found[name]
            assert len(told) == (is_found and rank == 0), name
            assert all("weighted mean over parts of" in text for text in told), name
            assert (steps, count) == (2 * len(sizes[rank]), 2.0), name
    (told,) = ranks[0]["contrastive with a rank without samples"][0]
    assert told.startswith("The loss of 4 samples is ") and "parts of 2 and 2 samples" in told
    assert '"weight"' in told and "loss_over_batch(function" in told and "split_batch=" in told


@pytest.mark.parametrize(
    ("whole", "again", "parts", "differs"),
    [
        (1.0, 1.0, 1.0 + 1e-6, False),
        (1.0, 1.0, 1.01, True),
        (-1.0, -1.0, 1.0, True),
        (1.0, 1.2, 2.0, False),  # random
        (0.0, 0.0, 0.0, False),
        (0.0, 0.0, 0.5, True),
        (1.0, 1.0, math.nan, True),
        (math.nan, math.nan, 1.0, False),
    ],
)
def test_a_difference_counts_beyond_rounding_and_chance(whole, again, parts, differs):
    assert Compared(whole, parts, again, (2, 2)).differs() is differs


def test_sums_in_half_may_differ_more():
    assert not Compared(1.0, 1.01, 1.0, (2, 2)).differs(in_half=True)


class _Full(np.ndarray):
    """An array for whose copy there is no memory."""

    def copy(self, *_: Any) -> Any:
        raise MemoryError("planted: no memory")


def _needs_gradients(scores, rows):
    torch.autograd.grad(scores.sum(), scores)  # a penalty on gradients
    return scores.square().mean()


def _fit_what_cannot_be_compared(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    steps = []
    for loss in (_mean, _needs_gradients):
        plan = plan_of(((4,), 0.5), ((4,), 0.5))
        strategy = CephaloStrategy(plan, planner=Planner(verbose=True))
        run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **QUIET)
        module = _Counting(loss)
        if rank and loss is _mean:
            module.table = np.zeros(3).view(_Full)
        rows = TensorDataset(torch.randn(16, 6), torch.arange(16))
        run.fit(module, DataLoader(rows, batch_size=4))
        steps.append(run.global_step)
    return steps


def test_a_loss_that_cannot_be_compared_is_named_in_a_line_and_all_ranks_train(capfd):
    environments = torchrun_environments(2)
    steps = run_ranks(2, _fit_what_cannot_be_compared, environments, process_group=False)
    assert steps == [[2, 2]] * 2
    said = " ".join(capfd.readouterr().out.split())
    assert said.count(UNKNOWN) == said.count("split_batch=") == 2
    assert "MemoryError: planted: no memory" in said and "does not require grad" in said
