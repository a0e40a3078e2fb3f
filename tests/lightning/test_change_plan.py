"""Plans that change in the middle of training: losses, samples and state stay one device's."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any

import pytest
import torch
from common import (
    Net,
    assert_same_optimizer_state,
    assert_same_tensors,
    in_ranks,
    loader,
    values_of,
)
from lightning.pytorch import Callback, Trainer
from plans import GLOBAL_BATCH, QUIET, plan_of
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, Planner
from lightning_cephalo.common.errors import (
    PlanError,
    RemoteRankError,
    TooLittleMemoryError,
    UnsupportedError,
)

TOLERANCE = 1e-6


def _with_recompute(plan: Plan, recompute: bool) -> Plan:
    return replace(plan, ranks=tuple(replace(r, recompute=recompute) for r in plan.ranks))


A = plan_of(((2, 2), 0.5), ((2, 2), 0.5))
B = plan_of(((3, 3), 0.9), ((2,), 0.1), stay_gathered=True)
C = _with_recompute(plan_of(((), 0.0), ((4, 4), 1.0)), False)
D = plan_of(((1, 2, 2), 0.3), ((3,), 0.7))
SHARES = plan_of(((2, 2), 0.8), ((2, 2), 0.2))


class Records(Net):
    """Keeps what each step sees."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.samples: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def on_train_batch_start(self, batch, batch_idx) -> None:
        super().on_train_batch_start(batch, batch_idx)
        strategy = self.trainer.strategy
        lacks = isinstance(strategy, CephaloStrategy) and strategy.session.batches.are_lacking
        self.samples.append([] if lacks else batch[2].tolist())  # a repeated sample


class Changes(Callback):
    """Requests plans behind steps of the whole training, and notes which one each step follows."""

    def __init__(self, plans: dict[int, Plan]) -> None:
        self.plans = plans
        self.followed: list[Plan] = []

    def on_before_zero_grad(self, trainer, module, optimizer) -> None:
        if isinstance(trainer.strategy, CephaloStrategy):
            self.followed.append(trainer.strategy.plan)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done in self.plans:
            trainer.strategy.change_plan(self.plans[done])


def _loader(samples: int = 60, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 5, generator=generator)
    data = TensorDataset(x, torch.sin(x).sum(1, keepdim=True), torch.arange(samples))
    shuffled = torch.Generator().manual_seed(11)
    return DataLoader(data, GLOBAL_BATCH, shuffle=True, generator=shuffled, **options)


def _fit(
    plan: Plan | None,
    plans: dict[int, Plan],
    folder=None,
    *,
    optimizer: str = "adamw",
    workers: int = 0,
    accumulate: int = 1,
    resume=None,
    epochs: int = 3,
    callback: Callback | None = None,
    clip: float | None = 1.0,
    kind: str = "",
):
    """Losses, samples, weights and optimizer state of three epochs of eight steps."""
    # workers are processes, which daemons may not start
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    model, changes = Records(optimizer), Changes(plans)
    options = {**QUIET, "max_epochs": epochs, "accumulate_grad_batches": accumulate}
    common = {
        "accelerator": "cpu",
        "callbacks": [changes, *([callback] if callback else [])],
        "gradient_clip_val": clip,
    }
    strategy = "auto"
    if plan is not None:
        strategy = CephaloStrategy(
            plan=plan, global_batch_size=GLOBAL_BATCH, planner=Planner(verbose=False)
        )
    devices = 1 if plan is None else len(plan.ranks)
    run = Trainer(strategy=strategy, devices=devices, **options, **common)
    data = _loader(num_workers=workers)
    if "stream" in kind:
        size = GLOBAL_BATCH // devices
        data = DataLoader(Generates(data.dataset, workers), size, num_workers=workers)
    if "ready" in kind:
        data = DataLoader(Batches(data.dataset), None)
    run.fit(model, data, loader(8), ckpt_path=resume)
    name = f"{plan is None}-{optimizer}-{workers}-{accumulate}-{epochs}-{len(plans)}-{kind}.ckpt"
    path = folder / name
    run.save_checkpoint(path)
    return model.losses, model.samples, changes.followed, path


CASES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD with workers": {"optimizer": "sgd", "workers": 2},
    "accumulation": {"accumulate": 2},
    "stream": {"kind": "stream"},
    "ready batches": {"kind": "ready"},
    "stream with workers": {"kind": "stream", "workers": 1},
}


class Generates(IterableDataset):
    """Yields all samples in their order, whoever reads."""

    def __init__(self, data: TensorDataset, workers: int = 0) -> None:
        self.data = data
        assert workers < 2

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Batches(IterableDataset):
    """Yields the same as ready batches."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[at : at + GLOBAL_BATCH] for at in range(0, 60, GLOBAL_BATCH))


class Competes(Callback):
    """Lets a plan change by itself, and asks for others while that one waits."""

    def __init__(self) -> None:
        self.taken: list[bool] = []
        self.late: list[str] = []
        self.said: list[str] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        strategy = trainer.strategy
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if not isinstance(strategy, CephaloStrategy) or done not in (1, 2, 10):
            return
        if done < 10:  # at 2, ranks have loaded batches of the plan that waits, with workers
            self.taken.append(
                strategy._training.changes.request(D if done == 1 else C, by_user=False)
            )
            try:
                strategy.change_plan(B if done == 1 else D)
            except UnsupportedError as error:
                self.late.append(str(error))
            self.taken.append(strategy._training.changes.request(A, by_user=False))
            return
        model = strategy.session.model
        if trainer.global_rank:  # a plan for which this rank has no room
            model.bytes_to_move = lambda *_: 2**60
        try:
            strategy.change_plan(C)
        except (TooLittleMemoryError, RemoteRankError) as error:
            self.said.append(f"{type(error).__name__}: {error}")
        vars(model).pop("bytes_to_move", None)


def _compete(plan, folder):
    found = []
    for workers in (0, 2):
        competes = Competes()
        losses, samples, followed, _ = _fit(
            plan, {}, folder, workers=workers, epochs=2, callback=competes
        )
        found.append((losses, samples, followed, competes))
    return found


def test_the_users_plan_replaces_one_whose_batches_are_not_loaded_and_needs_room(tmp_path):
    wanted = in_ranks(1, _compete, None, tmp_path)[0]
    first, second = in_ranks(2, _compete, A, tmp_path)
    for workers, (one, own, other) in enumerate(zip(wanted, first, second, strict=True)):
        assert own[0] == pytest.approx(one[0], abs=TOLERANCE)
        assert other[0] == pytest.approx(one[0], abs=TOLERANCE)
        assert _joined([own[1], other[1]]) == _joined([one[1]])
        followed = [plan for plan, _ in groupby(own[2])]
        assert followed == ([A, B] if workers else [A, B, D])
        assert own[3].late == other[3].late and len(own[3].late) == workers
        assert all("Call it again from that batch on" in said for said in own[3].late)
        assert own[3].taken == other[3].taken == [True, False, not workers, False]
        assert C not in followed
        # and one for which a rank has no room is refused on every rank, before anything moves
        assert own[3].said[0].startswith("RemoteRankError: Rank 1 failed while looking for memory")
        assert other[3].said[0].startswith("TooLittleMemoryError: Rank 1 needs ")


def _fit_all(plan, plans, cases, folder):
    return [_fit(plan, plans, folder, **options) for options in cases.values()]


def _joined(samples_of_ranks):
    return [list(chain.from_iterable(step)) for step in zip(*samples_of_ranks, strict=True)]


FEW = {name: CASES[name] for name in ("accumulation", "stream", "stream with workers")}


@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)])
def test_training_by_four_plans_in_turn_is_that_of_one_device(cases, tmp_path):
    plans = {3: B, 9: C, 17: D}
    wanted = in_ranks(1, _fit_all, None, {}, cases, tmp_path)[0]
    first, second = in_ranks(2, _fit_all, A, plans, cases, tmp_path)
    for case, one, own, other in zip(cases, wanted, first, second, strict=True):
        losses, samples, _, path = one
        assert own[0] == pytest.approx(losses, abs=TOLERANCE), case
        assert other[0] == pytest.approx(losses, abs=TOLERANCE), case
        assert _joined([own[1], other[1]]) == _joined([samples]), case
        followed = [own[2].count(plan) for plan in (A, B, C, D)]
        assert own[2] == other[2] and min(followed) >= 2, case
        found, expected = (torch.load(each, weights_only=True) for each in (own[3], path))
        assert_same_tensors(found["state_dict"], expected["state_dict"], 1e-5)
        states = found["optimizer_states"][0], expected["optimizer_states"][0]
        assert_same_optimizer_state(*states, 1e-5)


def _shares_alone(folder):
    def trained(plans):
        # the norm of gradients is a sum in another order
        losses, _, followed, path = _fit(A, plans, folder, epochs=1, clip=None)
        return losses, len(set(map(id, followed))), path

    kept, moved = trained({}), trained({3: SHARES})
    return kept, moved


def test_other_shares_alone_change_no_bit(tmp_path):
    for kept, moved in in_ranks(2, _shares_alone, tmp_path):
        assert kept[0] == moved[0] and (kept[1], moved[1]) == (1, 2)
    found, wanted = (torch.load(path, weights_only=True) for path in (moved[2], kept[2]))
    assert_same_tensors(found["state_dict"], wanted["state_dict"], 0.0)
    assert_same_optimizer_state(found["optimizer_states"][0], wanted["optimizer_states"][0], 0.0)


class Saves(Callback):
    """Saves behind a step, in the middle of an epoch."""

    def __init__(self, path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _resumes(folder):
    path = folder / "middle.ckpt"
    whole = _fit(A, {2: B}, folder, workers=1, epochs=2, callback=Saves(path, 5))
    again = _fit(D, {7: A}, folder, workers=1, epochs=2, resume=path)
    return whole[:2], again[:2], again[2]


@pytest.mark.slow
def test_a_run_is_resumed_behind_a_change_by_another_plan_that_changes_too(tmp_path):
    ranks = in_ranks(2, _resumes, tmp_path)
    for whole, again, followed in ranks:
        assert again[0] == pytest.approx(whole[0][5:], abs=TOLERANCE)
        assert followed[0] == D and followed[-1] == A
    whole, again = (_joined([rank[i][1] for rank in ranks]) for i in (0, 1))
    assert again == whole[5:]


# -- what cannot change -----------------------------------------------------------------------


class Asks(Callback):
    """Asks for plans behind the first step, and keeps what is said."""

    def __init__(self, *plans) -> None:
        self.plans, self.said = plans, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx:
            return
        for plan in self.plans:
            try:
                trainer.strategy.change_plan(plan[trainer.global_rank])
            except (PlanError, RemoteRankError, UnsupportedError) as error:
                self.said.append(f"{type(error).__name__}: {error}")


class Divided(Generates):
    """Divides itself between ranks."""

    def __iter__(self):
        return islice(super().__iter__(), int(os.environ["RANK"]), None, 2)


def _asked(kind: str):
    three = plan_of(((2,), 0.5), ((2,), 0.5), ((4,), 0.0))
    seven = plan_of(((3, 2), 0.5), ((2,), 0.5))
    bad = [(three, three), (seven, seven), (A, SHARES), ("none.yaml", SHARES)]
    asks = Asks(*(bad if kind == "map" else [(B, B), (SHARES, SHARES)]))
    strategy = CephaloStrategy(
        plan=A, global_batch_size=GLOBAL_BATCH, planner=Planner(verbose=False)
    )
    data = _loader()
    if kind == "divided":
        data = DataLoader(Divided(data.dataset), 4)
    model = Net()
    given = {"devices": 2, "accelerator": "cpu", "use_distributed_sampler": kind != "divided"}
    run = Trainer(strategy=strategy, callbacks=[asks], max_steps=4, **given, **QUIET)
    run.fit(model, data, loader(8))
    return asks.said, run.strategy.plan, model.losses


def _asked_all():
    with pytest.raises(RuntimeError, match="works only while fit"):
        CephaloStrategy().change_plan(A)
    return {kind: _asked(kind) for kind in ("map", "divided")}


def test_a_plan_that_cannot_be_followed_is_refused_on_every_rank_and_the_old_one_stays():
    first, second = in_ranks(2, _asked_all)
    for said, others in ((first["map"][0], ""), (second["map"][0], "RemoteRankError")):
        assert "The plan is for 3 ranks, but this run has 2" in said[0]
        assert "sum to the global batch of 8" in said[1]
        assert "none.yaml" in said[2] and said[2].startswith(others)
    assert first["map"][1] == A
    for said, plan, _ in (first["divided"], second["divided"]):
        assert len(said) == 1 and "a stream of its own" in said[0]
        assert "may change shares" in said[0] and plan == SHARES
    assert first["divided"][2] == pytest.approx(second["divided"][2])


class Swaps(Callback):
    """Replaces the optimizer, and asks for other shares inside of an accumulation."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 3:
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)]
        if batch_idx in (5, 9) and isinstance(trainer.strategy, CephaloStrategy):
            trainer.strategy.change_plan(SHARES if batch_idx == 5 else A)


def _swapped(plan: Plan | None, early: Any):
    data, model = DataLoader(Generates(_loader(96).dataset), GLOBAL_BATCH), Net()
    strategy: Any = "auto"
    if plan is not None:
        data = DataLoader(data.dataset, GLOBAL_BATCH // 2)
        strategy = CephaloStrategy(
            plan=plan,
            global_batch_size=GLOBAL_BATCH,
            planner=Planner(verbose=False, early_update=early),
        )
    options = {**QUIET, "accumulate_grad_batches": 4, "max_epochs": 1}
    devices = 1 if plan is None else 2
    Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", callbacks=[Swaps()], **options
    ).fit(model, data, loader(8))
    return values_of(model)


def test_gradients_that_add_up_and_the_state_of_a_new_optimizer_move_too():
    wanted = _swapped(None, False)
    for found in in_ranks(2, _swapped, A, False):
        assert_same_tensors(found, wanted, TOLERANCE)
