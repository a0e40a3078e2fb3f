"""A checkpoint of a cephalo run is that of a single-device run, and either continues the other."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import Cases, on_one_device
from common import (
    Net,
    assert_same_optimizer_state,
    assert_same_tensors,
    by_plan,
    dataset,
    in_ranks,
    loader,
    trainer,
    values_of,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from plans import PLANS

from lightning_cephalo.common.errors import RemoteRankError

# fp32: the sums of a step are taken in another order than on one device, and AdamW divides by the
# root of tiny second moments
TOLERANCE = 1e-5

CLOSE = {"rtol": TOLERANCE, "atol": TOLERANCE}


def _fit_and_save(plan, path, optimizer="adamw", **options):
    model = Net(optimizer)
    runs = trainer(plan, max_epochs=2, **options)
    runs.fit(model, loader(14), loader(8))
    runs.save_checkpoint(path)
    return model.losses, values_of(model)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Per optimizer: file, losses and values of the same training on one device."""
    folder = tmp_path_factory.mktemp("one")
    paths = {optimizer: folder / f"{optimizer}.ckpt" for optimizer in ("adamw", "sgd")}
    return {name: (path, *on_one_device(_fit_and_save, path, name)) for name, path in paths.items()}


SAVED = [
    *((plan, "adamw") for plan in ("one", "3:1", "no state", "no data", "three")),
    *((plan, "sgd") for plan in ("3:1", "no state")),
]


def _path(folder, plan, optimizer):
    return folder / f"{plan} {optimizer}.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_device):
    """The folder of all files, and the trainings that write or read them."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoint = torch.load(one_device["adamw"][0], weights_only=True)
    torch.save({**checkpoint, "optimizer_states": {}}, folder / "without.ckpt")
    cases = {
        (plan, optimizer): (plan, _fit_and_save, _path(folder, plan, optimizer), optimizer)
        for plan, optimizer in SAVED
    }
    cases["during an epoch"] = ("3:1", _fit_saving, folder / "during.ckpt", 6)
    cases["a copy"] = ("3:1", _fit_with_copy)
    cases["without states"] = ("3:1", _fit_with_new_optimizers, folder / "without.ckpt")
    return folder, Cases(cases)


@pytest.mark.parametrize(("plan", "optimizer"), SAVED)
def test_a_checkpoint_after_fit_is_that_of_one_device(trained, one_device, plan, optimizer):
    folder, fits = trained
    losses, values = fits[plan, optimizer][0]
    path, wanted_losses, wanted_values = one_device[optimizer]
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted_values, TOLERANCE)
    _assert_same_checkpoint(_path(folder, plan, optimizer), path)


def _assert_same_checkpoint(found_path, wanted_path, loops=True):
    found = torch.load(found_path, weights_only=True)
    wanted = torch.load(wanted_path, weights_only=True)
    # the order of samples, unless another stage has let Lightning forget the training loaders
    assert (found.pop("cephalo_data_order", None) is not None) == loops
    assert list(found) == list(wanted)
    assert_same_tensors(found["state_dict"], wanted["state_dict"], TOLERANCE)
    assert len(found["optimizer_states"]) == len(wanted["optimizer_states"])
    for state, wanted_state in zip(
        found["optimizer_states"], wanted["optimizer_states"], strict=True
    ):
        assert_same_optimizer_state(state, wanted_state, TOLERANCE)
    for key in ("lr_schedulers", "epoch", "global_step", "hyper_parameters"):
        assert found[key] == wanted[key], key
    if loops:
        assert found["loops"] == wanted["loops"]


class _SaveDuringFit(Callback):
    """Writes a checkpoint in the middle of an epoch, when gradients are still there."""

    def __init__(self, path, step):
        self.path, self.step, self.had_gradients = path, step, False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.had_gradients = any(p.grad is not None for p in pl_module.parameters())
            trainer.save_checkpoint(self.path)


def _fit_saving(plan, path, step):
    model = Net()
    save = _SaveDuringFit(path, step)
    trainer(plan, max_epochs=2, callbacks=[save]).fit(model, loader(), loader(8))
    return model.losses, values_of(model), save.had_gradients


def test_a_checkpoint_during_an_epoch_holds_what_one_device_writes_though_gradients_are_set(
    tmp_path, trained
):
    folder, fits = trained
    losses, values, had = fits["during an epoch"][0]
    wanted_losses, wanted, _ = on_one_device(_fit_saving, tmp_path / "one.ckpt", 6)
    assert had
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted, TOLERANCE)
    _assert_same_checkpoint(folder / "during.ckpt", tmp_path / "one.ckpt")


def _train_an_epoch_more(plan, saved, path, epochs):
    model = Net()
    runs = trainer(plan, max_epochs=epochs)
    resume = {"ckpt_path": saved, "weights_only": True} if saved else {}
    runs.fit(model, loader(), loader(8), **resume)
    runs.save_checkpoint(path)
    return model.losses, values_of(model)


def test_resuming_under_other_plans_and_numbers_of_ranks_continues_the_loss_curve(tmp_path):
    path = tmp_path / "one.ckpt"
    wanted_losses, wanted = on_one_device(_train_an_epoch_more, None, path, 5)
    saved, losses = None, []
    for epochs, plan in enumerate(["3:1", "three", None, "no data", "one"], start=1):
        path = tmp_path / f"{epochs}.ckpt"
        run = on_one_device if plan is None else partial(by_plan, plan)
        more, values = run(_train_an_epoch_more, saved, path, epochs)
        losses += more
        saved = path
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted, TOLERANCE)


def _read_checkpoint_in_one_process(path):
    """What a user does later, on one device and without cephalo."""
    loaded = Net.load_from_checkpoint(path, weights_only=True)
    validated = trainer(None)
    validated.validate(Net(), loader(12), ckpt_path=path, weights_only=True, verbose=False)
    return values_of(loaded), float(validated.callback_metrics["val"])


def test_a_checkpoint_serves_load_from_checkpoint_and_validate_in_a_plain_trainer(
    trained, one_device
):
    folder, fits = trained
    assert fits["3:1", "adamw"]  # is written
    values, loss = _read_checkpoint_in_one_process(_path(folder, "3:1", "adamw"))
    wanted_values, wanted_loss = _read_checkpoint_in_one_process(one_device["adamw"][0])
    assert_same_tensors(values, wanted_values, TOLERANCE)
    assert loss == pytest.approx(wanted_loss, abs=TOLERANCE)


def _stages(plan, path):
    """All stages with one model and one trainer, as a script has them."""
    model = Net()
    runs = trainer(plan, max_epochs=2)
    before = copy.deepcopy(model)
    runs.fit(model, loader(14), loader(8))
    direct = model(dataset(5).tensors[0])
    direct.sum().backward()  # the module is an ordinary one again
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    metrics = {
        "validate": runs.validate(model, loader(8), verbose=False)[0]["val"],
        "test": runs.test(model, loader(8), verbose=False)[0]["val"],
    }
    predictions = torch.cat(runs.predict(model, loader(16)))
    runs.save_checkpoint(path)
    runs.fit_loop.max_epochs = 3
    runs.fit(model, loader(14), loader(8))
    moved = any(
        not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True)
    )
    return {
        "direct": direct.detach(),
        "gradients": gradients,
        "metrics": metrics,
        "predictions": predictions,
        "values": values_of(model),
        "losses": model.losses,
        "moved": moved,
    }


@pytest.fixture(scope="module")
def stages_of_one_device(tmp_path_factory):
    path = tmp_path_factory.mktemp("stages") / "one.ckpt"
    return path, on_one_device(_stages, path)


@pytest.mark.parametrize("plan", ["three", "no data"])
def test_all_stages_follow_one_another_on_the_same_objects(tmp_path, plan, stages_of_one_device):
    world_size = len(PLANS[plan].ranks)
    found = in_ranks(world_size, _stages, plan, tmp_path / "cephalo.ckpt")
    path, wanted = stages_of_one_device
    for one in found:
        torch.testing.assert_close(one["direct"], wanted["direct"], **CLOSE)
        torch.testing.assert_close(one["gradients"], wanted["gradients"], **CLOSE)
        assert one["metrics"] == pytest.approx(wanted["metrics"], abs=TOLERANCE)
        assert_same_tensors(one["values"], wanted["values"], TOLERANCE)
        torch.testing.assert_close(one["losses"], wanted["losses"], **CLOSE)
        assert one["moved"]
    # every sample is predicted once, by one of the ranks
    predictions = torch.cat([one["predictions"] for one in found]).flatten()
    torch.testing.assert_close(
        predictions.sort().values, wanted["predictions"].flatten().sort().values, **CLOSE
    )
    # one device counts other numbers of evaluation batches
    _assert_same_checkpoint(tmp_path / "cephalo.ckpt", path, loops=False)


def _keep_best(plan, folder):
    keep = ModelCheckpoint(folder, filename="{step}", monitor="val", save_top_k=2, save_last=True)
    model = Net("sgd")
    runs = trainer(plan, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    runs.fit(model, loader(14), loader(8))
    return keep.best_model_path, float(keep.best_model_score), sorted(os.listdir(folder))


def test_model_checkpoint_keeps_the_same_best_and_last_files(tmp_path):
    best, score, files = by_plan("three", _keep_best, tmp_path / "cephalo")
    wanted_best, wanted_score, wanted_files = on_one_device(_keep_best, tmp_path / "one")
    assert files == wanted_files and "last.ckpt" in files and len(files) == 3
    assert os.path.basename(best) == os.path.basename(wanted_best)
    assert score == pytest.approx(wanted_score, abs=TOLERANCE)
    for file in files:
        _assert_same_checkpoint(tmp_path / "cephalo" / file, tmp_path / "one" / file)


class _Copies(Callback):
    """Deep-copies the module where averaging callbacks do, and compares at the end."""

    def setup(self, trainer, pl_module, stage):
        self.copy = copy.deepcopy(pl_module)

    def on_train_end(self, trainer, pl_module):
        self.untouched = values_of(self.copy)


def _fit_with_copy(plan):
    copies = _Copies()
    model = Net()
    before = values_of(model)
    trainer(plan, callbacks=[copies]).fit(model, loader(), loader(8))
    return before, copies.untouched


def test_a_copy_of_the_module_made_in_setup_stays_an_ordinary_module(trained):
    before, untouched = trained[1]["a copy"][0]
    assert_same_tensors(untouched, before, 0.0)


class _DiesWhileWriting(Exception):
    pass


def _write_and_read_badly(plan, folder):
    model = Net()
    runs = trainer(plan)
    runs.fit(model, loader(), loader(8))
    runs.save_checkpoint(folder / "kept.ckpt")

    class Unwritable:
        def __reduce__(self):
            raise _DiesWhileWriting

    model.on_save_checkpoint = lambda checkpoint: checkpoint.update(bad=Unwritable())
    with pytest.raises((_DiesWhileWriting, RemoteRankError)) as unwritten:
        runs.save_checkpoint(folder / "kept.ckpt")
    resumed = trainer(plan, max_epochs=2)
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        resumed.fit(Net(), loader(), loader(8), ckpt_path=folder / "cut.ckpt")
    resumed.fit(Net(), loader(), loader(8), ckpt_path=folder / "kept.ckpt", weights_only=True)
    return type(unwritten.value).__name__, resumed.current_epoch


def test_a_checkpoint_that_cannot_be_written_or_read_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "cut.ckpt").write_bytes(b"PK\3\4 and no more")
    found = in_ranks(2, _write_and_read_badly, "3:1", tmp_path)
    assert found == [("_DiesWhileWriting", 2), ("RemoteRankError", 2)]
    assert sorted(os.listdir(tmp_path)) == ["cut.ckpt", "kept.ckpt"]
    assert "state_dict" in torch.load(tmp_path / "kept.ckpt", weights_only=True)


def _rate_found(plan):
    from lightning.pytorch.tuner import Tuner

    model = Net()
    model.lr = 1e-3
    plain = model.configure_optimizers

    def configure_optimizers():
        optimizers, _ = plain()
        for group in optimizers[0].param_groups:
            group["lr"] = model.lr
        return optimizers[0]

    model.configure_optimizers = configure_optimizers
    before = values_of(model)
    runs = trainer(plan, max_epochs=3)
    finder = Tuner(runs).lr_find(
        model, loader(), loader(8), num_training=12, early_stop_threshold=None
    )
    unchanged = all(torch.equal(before[name], value) for name, value in values_of(model).items())
    return finder.results["loss"], unchanged


def test_the_learning_rate_finder_works_and_restores_the_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes its checkpoint to the working directory
    ranks = in_ranks(2, _rate_found, "3:1")
    # every rank is given what rank 0 has seen of its own samples, as under DDP
    assert ranks[0][0] == ranks[1][0]
    assert len(ranks[0][0]) == 12 and all(0 < loss < 100 for loss in ranks[0][0])
    assert all(unchanged for _, unchanged in ranks)
    assert not list(tmp_path.glob("*.ckpt"))


class _WithoutOptimizer(Net):
    def configure_optimizers(self):
        return None


def _fit_without_optimizer(plan, path):
    model = _WithoutOptimizer()
    first = trainer(plan, max_steps=2)
    first.fit(model, loader(), loader(8))
    first.save_checkpoint(path)
    resumed = trainer(plan, max_steps=3)
    resumed.fit(model, loader(), loader(8), ckpt_path=path)
    return model.losses, resumed.global_step


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_module_without_optimizer_is_saved_and_resumed(tmp_path):
    found = by_plan("3:1", _fit_without_optimizer, tmp_path / "cephalo.ckpt")
    wanted = on_one_device(_fit_without_optimizer, tmp_path / "one.ckpt")
    assert found == (pytest.approx(wanted[0], rel=TOLERANCE), wanted[1])
    states = [torch.load(tmp_path / f"{name}.ckpt") for name in ("cephalo", "one")]
    assert states[0]["optimizer_states"] == states[1]["optimizer_states"] == [{}]


class _ChangesTheCheckpoint(Net):
    """Renames, removes and counts what is saved, as users do in this hook."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        del state["gain"]
        state["renamed"] = state.pop("head.weight")
        checkpoint["numel"] = sum(value.numel() for value in state.values())
        kept = {name: value for name, value in state.items() if "blocks" not in name}
        checkpoint["state_dict"] = {**kept, "first": state["blocks.0.up.weight"]}


def _save_changed(plan: str | None, path: Path) -> None:
    ready = trainer(plan, max_steps=2)
    ready.fit(_ChangesTheCheckpoint(), loader(), loader(8))
    ready.save_checkpoint(path)


def test_a_hook_changes_what_is_saved_as_on_one_device(tmp_path):
    in_ranks(1, _save_changed, None, tmp_path / "one.ckpt")
    in_ranks(2, _save_changed, "3:1", tmp_path / "two.ckpt")
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    assert one["numel"] == two["numel"] > 0
    assert list(one["state_dict"]) == list(two["state_dict"])
    assert {"renamed", "first"} < set(two["state_dict"])
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=1e-5, atol=1e-6)


def _fit_with_new_optimizers(plan: str | None, path: Path) -> list[float]:
    model = Net()
    trainer(plan, max_epochs=4).fit(model, loader(14), loader(8), ckpt_path=path)
    return model.losses


def test_a_checkpoint_without_states_of_optimizers_is_resumed_with_new_ones(trained):
    folder, fits = trained
    wanted = on_one_device(_fit_with_new_optimizers, folder / "without.ckpt")
    losses = fits["without states"][0]
    assert losses == pytest.approx(wanted, rel=1e-5) and len(losses) > 0
