"""A loss that microbatches would change is found before training, and no other is."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks, torchrun_environments
from lightning.pytorch import LightningModule, Trainer
from plans import GLOBAL_BATCH, QUIET, plan_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Planner, loss_over_batch
from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.install import install
from lightning_cephalo.profiling.additivity import LossOfParts, compared, warn_if_any_differs
from lightning_cephalo.ranks.groups import Groups

CLASSES = torch.tensor([0, 0, 0, 1])
WEIGHTS = torch.tensor([1.0, 5.0])
LENGTHS = torch.tensor([5, 1, 2, 3])


class _Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x):
        return self.norm(self.dropout(self.blocks(x)))


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


def _slightly_balanced(scores, rows):
    """The term is no mean over samples, and moves the loss by less than 1e-4 of it."""
    return 1.0 + _mean(scores, rows) + 2e-3 * scores.softmax(1).mean(0).square().sum()


def _undefined(scores, rows):
    """A mean over rows that one of the halves lacks."""
    return scores[rows == 3].square().mean()


def _spread(scores, rows):
    """A variance over samples, which a single one lacks."""
    return scores.square().mean() + scores.std(0).mean()


def _random(scores, rows):
    return (scores - torch.randn_like(scores)).square().mean()


def _fails(scores, rows):
    raise ValueError("boom")


def _fails_on_rank_one(scores, rows):
    if torch.distributed.get_rank():
        raise ValueError("boom")
    return scores.mean()


def _nothing(scores, rows):
    return None


def _centred(module, x, rows):
    """Depends on a buffer that the same step has written."""
    scores = module(x)
    module.centre.mul_(0.5).add_(scores.mean(0), alpha=0.5)
    return (scores - module.centre).square().mean()


LOSSES = {
    _mean: False,
    _centred: True,
    _contrastive: True,
    _over_batch: False,
    _classes: True,
    _classes_with_weight: False,
    _tokens: True,
    _tokens_with_weight: False,
    _balanced: True,
    _slightly_balanced: True,
    _undefined: True,
    _spread: True,
    _random: False,
    _fails: None,
    _fails_on_rank_one: None,
    _nothing: False,  # a step that trains nothing
}
"""Whether each is found; None: it fails."""


def _ours_is_no_error():
    """All others stay errors, but for those that the project's settings name."""
    warnings.filterwarnings("always", "The loss of . samples is")


def _warned(rank):
    module = _Scores()
    model = ShardedModel(
        module,
        Groups.create(timedelta(seconds=100)),
        accelerator_of(torch.device("cpu")),
        fractions=[0.7, 0.3],
        units=[nn.Linear],
    )
    install(model.executor)
    x, rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(4)), torch.arange(4)
    parts = [((x[:2], rows[:2]), 2), ((x[2:], rows[2:]), 2)]
    said = {}
    for loss in LOSSES:

        def step(batch, loss=loss):
            return loss(module, *batch) if loss is _centred else loss(module(batch[0]), batch[1])

        with warnings.catch_warnings(record=True) as caught:
            _ours_is_no_error()
            try:
                found = compared(
                    *(model, step, nullcontext, ((x, rows), 4), parts),
                    repeated=BatchLayout().repeated,
                )
            except (ValueError, TypeError, RemoteRankError) as error:
                said[loss.__name__] = [str(error)]
            else:
                warn_if_any_differs([(), found[rank]], in_half=False)
                said[loss.__name__] = [str(warning.message) for warning in caught]
        assert module.training and module.dropout.training
    return said


def test_losses_that_are_no_mean_over_samples_are_found():
    for said in run_ranks(2, _warned):
        found = {name: any("weighted mean over parts" in s for s in said[name]) for name in said}
        assert found == {loss.__name__: bool(wanted) for loss, wanted in LOSSES.items()}
        for loss in (loss for loss, wanted in LOSSES.items() if wanted is None):
            assert said[loss.__name__], "every rank fails together"
        (contrastive,) = said["_contrastive"]
        assert contrastive.startswith("The loss of 4 samples is ")
        assert "parts of 2 and 2 samples" in contrastive
        assert '"weight"' in contrastive and "loss_over_batch(function" in contrastive


@pytest.mark.parametrize(
    ("whole", "again", "parts", "differs"),
    [
        (1.0, 1.0, 1.0 + 1e-6, False),
        (1.0, 1.0, 1.01, True),
        (-1.0, -1.0, 1.0, True),
        (1.0, 1.2, 2.0, False),  # random
        (0.0, 0.0, 0.0, False),
        (0.0, 0.0, 0.5, True),
    ],
)
def test_a_difference_counts_beyond_rounding_and_chance(whole, again, parts, differs):
    assert LossOfParts(whole, parts, (2, 2), again).differs() is differs


@pytest.mark.parametrize(
    ("parts", "evenly", "noise", "again", "differs"),
    [
        (1.0 + 3e-5, 1.0 + 3e-5, 1e-7, 1.0, True),
        (1.0 + 3e-5, 1.0 + 1e-7, 1e-7, 1.0, False),  # kernels for other sizes round otherwise
        (1.0 + 1e-7, 1.0 + 3e-5, 1e-7, 1.0, False),
        (1.0 + 3e-5, 1.0 + 3e-5, 1e-5, 1.0, False),  # copies alone move the loss nearly as much
        (1.0 + 3e-5, 1.0 + 3e-5, 1e-7, 1.0 + 9e-6, False),  # so does chance
        (1.0 + 3e-5, None, 0.0, None, False),  # no copies
    ],
)
def test_a_small_term_counts_beyond_what_copies_and_chance_change(
    parts, evenly, noise, again, differs
):
    found = LossOfParts(1.0, parts, (2, 2), again, evenly=evenly, noise=noise)
    assert found.differs() is differs
    assert not found.differs(in_half=True)


class _Trained(LightningModule):
    def __init__(self, loss) -> None:
        super().__init__()
        self.net, self.loss = _Scores(), loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1] % 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_measured(rank, environments, loss, verbose=False):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    strategy = CephaloStrategy(
        global_batch_size=GLOBAL_BATCH,
        planner=Planner(verbose=verbose, budget_s=30, remeasure=True),
    )
    run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, **QUIET)
    rows = TensorDataset(torch.randn(16, 6), torch.arange(16))
    with warnings.catch_warnings(record=True) as caught:
        _ours_is_no_error()
        run.fit(_Trained(loss), DataLoader(rows, batch_size=GLOBAL_BATCH))
    return len(caught)


def _fit_both(rank, environments):
    return [_fit_measured(rank, environments, loss) for loss in (_contrastive, _mean)]


@pytest.mark.filterwarnings("ignore:The layers .* are batch normalisation")
def test_a_measured_job_is_checked_before_it_trains():
    environments = torchrun_environments(2)
    contrastive, mean = zip(
        *run_ranks(2, _fit_both, environments, process_group=False), strict=True
    )
    assert contrastive == (1, 0)
    assert mean == (0, 0)


def _needs_gradients(scores, rows):
    torch.autograd.grad(scores.sum(), scores)  # a penalty on gradients
    return scores.square().mean()


@pytest.mark.filterwarnings("ignore:The layers .* are batch normalisation")
def test_a_job_that_cannot_be_checked_says_so_and_trains(capfd):
    environments = torchrun_environments(2)
    run_ranks(2, _fit_measured, environments, _needs_gradients, True, process_group=False)
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("The loss of a batch was not compared with that of its parts") == 1
    assert "does not require grad" in said


class _Counting(_Trained):
    """Draws random numbers, counts in a buffer and in a list, and logs."""

    def __init__(self, loss) -> None:
        super().__init__(loss)
        self.net.norm = nn.Identity()  # it would refuse a single sample
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[str] = []

    def training_step(self, batch, batch_idx):
        self.count += 1.0
        self.seen.append(str(torch.rand(())))  # a number would be warned of
        self.log("loss", loss := super().training_step(batch, batch_idx), sync_dist=True)
        return loss


def _reduced(scores, rows):
    torch.distributed.all_reduce(scores.detach().mean())
    return scores.square().mean()


GIVEN = {
    "no mean": (_contrastive, ((2, 2), (3, 1)), True),
    "a mean": (_mean, ((2, 2), (3, 1)), False),
    "a rank without samples": (_contrastive, ((), (4, 4)), True),
    "microbatches of one sample": (_contrastive, ((1,) * 7, (1,)), True),
    "one sample each": (_contrastive, ((1,), (1,)), False),
    "over the batch": (_over_batch, ((2, 2), (3, 1)), False),
    "a collective": (_reduced, ((3, 1), (2, 2)), False),
    "a collective, and ranks that differ": (_reduced, ((3,), (1,)), False),
}
"""A loss, the microbatches of two ranks, and whether it is found in the first step."""


class _Full(np.ndarray):
    """An array for whose copy there is no memory."""

    def copy(self, *_: Any) -> Any:
        raise MemoryError("planted: no memory")


def _fit_where_one_rank_is_full(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    strategy = CephaloStrategy(plan_of(((2, 2), 0.5), ((4,), 0.5)), planner=Planner(verbose=True))
    run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **QUIET)
    rows = TensorDataset(torch.randn(16, 6), torch.arange(16))
    module = _Counting(_mean)
    if rank:
        module.table = np.zeros(3).view(_Full)
    run.fit(module, DataLoader(rows, batch_size=4))
    return run.global_step


def test_where_one_rank_cannot_be_checked_no_rank_waits_and_all_train(capfd):
    environments = torchrun_environments(2)
    steps = run_ranks(2, _fit_where_one_rank_is_full, environments, process_group=False)
    assert steps == [2, 2]
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("The loss of a batch was not compared with that of its parts") == 1
    assert "MemoryError: planted: no memory" in said


def _fit_given(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    said = {}
    for name, (loss, sizes, _) in GIVEN.items():
        plan = plan_of(*((own, 0.5) for own in sizes))
        strategy = CephaloStrategy(plan, planner=Planner(verbose=False))
        run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **QUIET)
        torch.manual_seed(5)
        rows = TensorDataset(torch.randn(16, 6), torch.arange(16))
        module = _Counting(loss)
        with warnings.catch_warnings(record=True) as caught:
            _ours_is_no_error()
            run.fit(module, DataLoader(rows, batch_size=plan.global_batch_size // 2))
        drawn = len(module.seen), module.count.item()
        said[name] = [str(warning.message) for warning in caught], drawn
    return said


@pytest.mark.filterwarnings("ignore:The layers .* are batch normalisation")
def test_the_first_step_of_a_given_plan_is_checked_and_not_changed():
    ranks = run_ranks(2, _fit_given, torchrun_environments(2), process_group=False)
    for rank, said in enumerate(ranks):
        for name, (_, sizes, found) in GIVEN.items():
            told, (steps, count) = said[name]
            assert [("mean over parts" in each) for each in told] == [True] * (
                found and not rank
            ), name
            assert steps == 2 * len(sizes[rank]), name
            assert count == 2.0, name
    (told,), _ = ranks[0]["a rank without samples"]
    assert "parts of 2 and 2 samples" in told


class _OfTwo(LightningModule):
    """Trains on rows of two dataloaders."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(6, 6), loss

    def training_step(self, batch, batch_idx):
        return self.loss(*(self.net(batch[key][0]) for key in ("a", "b")))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _mean_of_each(a, b):
    return a.square().mean() + 0.5 * b.square().mean()


def _mean_of_all(a, b):
    return torch.cat([a, b]).square().mean()


def _mean_of_each_over_batch(a, b):
    return loss_over_batch(_mean_of_each, a, b)


OF_TWO = {
    "a last batch that is divided otherwise": (_mean_of_each, (3, 2), 12, True),
    "the same of small microbatches": (_mean_of_each, (2, 2, 1), 12, True),
    "the same rows of both": (_mean_of_each, (3, 2), 16, False),
    "one mean of all rows": (_mean_of_all, (2, 2, 1), 12, False),
    "over the batch": (_mean_of_each_over_batch, (3, 2), 12, False),
}
"""A loss, microbatches, rows of the second dataloader, and whether the loss is found."""


def _fit_of_two(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    said = {}
    for name, (loss, first, count, _) in OF_TWO.items():
        torch.manual_seed(5)
        rows = {key: TensorDataset(torch.randn(n, 6)) for key, n in (("a", 16), ("b", count))}
        loaders = {key: DataLoader(own, batch_size=4) for key, own in rows.items()}
        strategy = CephaloStrategy(
            plan_of((first, 0.5), ((2, 1), 0.5)), planner=Planner(verbose=False)
        )
        run = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, **QUIET)
        with warnings.catch_warnings(record=True) as caught:
            _ours_is_no_error()
            run.fit(_OfTwo(loss), loaders)
        said[name] = ["adds means over several dataloaders" in str(one.message) for one in caught]
    return said


@pytest.mark.filterwarnings("ignore:No repeated block")
def test_a_sum_of_means_is_found_if_dataloaders_are_not_always_divided_alike():
    first, second = run_ranks(2, _fit_of_two, torchrun_environments(2), process_group=False)
    assert first == {name: [True] * found for name, (*_, found) in OF_TWO.items()}
    assert not any(second.values())
