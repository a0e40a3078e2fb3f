"""``copy.deepcopy`` of the module in hooks, and what users do with the copy."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import Cases, on_one_device
from common import (
    Net,
    assert_same_tensors,
    by_plan,
    dataset,
    in_ranks,
    loader,
    look_soon,
    trainer,
    values_of,
)
from launch import RankFailure
from lightning.pytorch import Callback
from torch.optim.swa_utils import AveragedModel

from lightning_cephalo.common.errors import UnsupportedError

TOLERANCE = 1e-5


def by_parameters(averaged, module):
    for own, parameter in zip(averaged.parameters(), module.parameters(), strict=True):
        own.lerp_(parameter, 0.25)


def by_data(averaged, module):
    for own, parameter in zip(averaged.parameters(), module.parameters(), strict=True):
        own.data = own.data * 0.75 + parameter.data * 0.25


def by_state_dicts(averaged, module):
    state = module.state_dict()
    for name, value in averaged.state_dict().items():
        if value.is_floating_point():
            value.copy_(0.75 * value + 0.25 * state[name].detach())


def by_foreach(averaged, module):
    own = list(averaged.parameters())
    torch._foreach_mul_(own, 0.75)
    torch._foreach_add_(own, list(module.parameters()), alpha=0.25)


AVERAGES = (by_parameters, by_data, by_state_dicts, by_foreach)


class Averages(Callback):
    """An average as users write it: copied at the start, updated after steps, used to validate."""

    def __init__(self, average) -> None:
        self.average = average
        self.outputs = []

    def on_train_start(self, trainer, pl_module):
        self.averaged = copy.deepcopy(pl_module).eval().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.average(self.averaged, pl_module)

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer, pl_module):
        self.outputs.append(self.averaged(dataset(3).tensors[0]))

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["averaged"] = self.averaged.state_dict()

    @torch.no_grad()
    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.averaged.state_dict())


def fit_averaging(plan, average, folder):
    callback, model = Averages(average), Net()
    run = trainer(plan, max_epochs=2, limit_train_batches=1, callbacks=[callback])
    run.fit(model, loader(14), loader(8))
    run.save_checkpoint(folder / f"{plan}.ckpt")
    assert not any("__deepcopy__" in vars(module) for module in model.modules())
    copied = callback.averaged
    assert type(copied.blocks[0]).forward == copied.blocks[0].forward.__func__
    assert not copied._forward_pre_hooks and not copied.head._forward_hooks
    return (
        callback.outputs,
        values_of(copied),
        values_of(model),
        copy.deepcopy(copied)(dataset(3).tensors[0]),
    )


def test_an_average_written_by_hand_is_that_of_one_device(tmp_path):
    plan, average = "three", by_parameters
    outputs, averaged, values, after = by_plan(plan, fit_averaging, average, tmp_path)
    wanted_outputs, wanted, wanted_values, wanted_after = on_one_device(
        fit_averaging, average, tmp_path
    )
    torch.testing.assert_close(outputs, wanted_outputs, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(after, wanted_after, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_tensors(averaged, wanted, TOLERANCE)
    assert_same_tensors(values, wanted_values, TOLERANCE)
    assert len(outputs) == 2
    saved = torch.load(tmp_path / f"{plan}.ckpt", weights_only=True)["averaged"]
    assert all(type(value) is torch.Tensor for value in saved.values())
    assert_same_tensors(saved, dict(wanted), TOLERANCE)


def fit_with_every_average(plan):
    callbacks = [Averages(average) for average in AVERAGES]
    for callback in callbacks:
        callback.on_train_end = lambda *_: None
    trainer(plan, callbacks=callbacks, limit_val_batches=0).fit(Net(), loader(14), loader(8))
    return [values_of(callback.averaged) for callback in callbacks]


def test_every_way_to_write_the_average_gives_the_same():
    wanted = on_one_device(fit_with_every_average)
    for found in FITS["every average"]:
        for values, expected in zip(found, wanted, strict=True):
            assert_same_tensors(values, expected, TOLERANCE)


class AveragesByTorch(Callback):
    def on_fit_start(self, trainer, pl_module):
        self.averaged = AveragedModel(pl_module, use_buffers=False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.averaged.update_parameters(pl_module)


def fit_with_torchs_average(plan):
    callback = AveragesByTorch()
    trainer(plan, callbacks=[callback]).fit(Net(), loader(14), loader(8))
    return values_of(callback.averaged.module)


def test_torchs_averaged_model_works_in_hooks():
    wanted = on_one_device(fit_with_torchs_average)
    assert_same_tensors(FITS["torch's average"][0], wanted, TOLERANCE)


class Teaches(Net):
    """Trains against a slowly moving copy of a part of itself, which is a part of itself, too."""

    def on_fit_start(self) -> None:
        self.target = copy.deepcopy(self.blocks[0]).requires_grad_(False)

    def loss(self, batch):
        x = self.inputs(batch[0])
        with torch.no_grad():
            target = self.target(x)
        return super().loss(batch) + (self.blocks[0](x) - target).square().mean()

    def on_train_batch_end(self, *args) -> None:
        super().on_train_batch_end(*args)
        with torch.no_grad():
            for own, parameter in zip(
                self.target.parameters(), self.blocks[0].parameters(), strict=True
            ):
                own.mul_(0.5).add_(parameter, alpha=0.5)


def fit_with_target(plan):
    model = Teaches()
    trainer(plan).fit(model, loader(), loader(8))
    return model.losses, values_of(model)


def test_a_copied_part_of_the_model_teaches_it():
    losses, values = FITS["a part"][0]
    wanted_losses, wanted = on_one_device(fit_with_target)
    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    assert_same_tensors(values, wanted, TOLERANCE)


class CopiesEverywhere(Callback):
    """Copies in every hook in which all ranks are at the same place."""

    def __init__(self) -> None:
        self.kept = []

    def on_validation_end(self, trainer, pl_module):
        self.kept.append(values_of(copy.deepcopy(pl_module)))

    def on_before_backward(self, trainer, pl_module, loss):
        self.on_validation_end(trainer, pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.on_validation_end(trainer, pl_module)


def fit_copying(plan, dtype="32-true"):
    callback, model = CopiesEverywhere(), Net()
    trainer(plan, {"reshard_after_forward": False}, callbacks=[callback], precision=dtype).fit(
        model, loader(14), loader(8)
    )
    return callback.kept, values_of(model)


def test_a_copy_has_writable_parameters_wherever_it_is_made():
    kept, values = FITS["everywhere"][0]
    wanted_kept, wanted = on_one_device(fit_copying)
    assert len(kept) == len(wanted_kept) == 6
    for found, expected in zip(kept, wanted_kept, strict=True):
        assert_same_tensors(found, expected, TOLERANCE)
    assert_same_tensors(values, wanted, TOLERANCE)


def test_a_copy_on_one_rank_alone_is_refused_by_name_and_all_ranks_end():
    class CopiesOnRankZero(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.is_global_zero:
                copy.deepcopy(pl_module)

    def fit():
        look_soon()
        with pytest.raises((UnsupportedError, RuntimeError)) as refused:
            trainer("3:1", callbacks=[CopiesOnRankZero()]).fit(Net(), loader(), loader(8))
        return str(refused.value)

    alone, other = in_ranks(2, fit)
    assert "copy.deepcopy()" in alone and "every rank must make it" in alone
    assert other.startswith("Rank 0 (process") and ") failed: UnsupportedError" in other


def test_a_copy_inside_a_step_is_refused_by_name():
    class CopiesInside(Net):
        def training_step(self, batch, batch_idx):
            copy.deepcopy(self)

    def fit():
        trainer("3:1").fit(CopiesInside(), loader(), loader(8))

    with pytest.raises(RankFailure, match=r"inside a step.*on_train_batch_start"):
        in_ranks(2, fit)


class KeepsTheBest(Callback):
    """Keeps a state dict, as users do who have no checkpoints, and goes back to it."""

    def on_fit_start(self, trainer, pl_module):
        self.trainer = trainer
        (copied,) = copy.deepcopy(trainer.callbacks)  # with trainer, strategy and module
        pairs = zip(
            copied.trainer.lightning_module.parameters(), pl_module.parameters(), strict=True
        )
        assert all(torch.equal(found, parameter) for found, parameter in pairs)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.kept = copy.deepcopy(pl_module.state_dict())
            self.tagged = copy.deepcopy(list(pl_module.parameters()))

    def on_train_end(self, trainer, pl_module):
        assert not torch.equal(pl_module.inputs.weight, self.kept["inputs.weight"])
        assert all(isinstance(each, torch.nn.Parameter) for each in self.tagged)
        assert torch.equal(self.tagged[0], self.kept["gain"])
        pl_module.load_state_dict(self.kept)


def fit_keeping(plan):
    model = Net()
    run = trainer(plan, callbacks=[KeepsTheBest()], limit_val_batches=0)
    run.fit(model, loader(22), loader(8))
    return values_of(model)


def test_callbacks_are_copied_and_a_copied_state_dict_keeps_its_values_and_is_loaded_again():
    assert_same_tensors(FITS["state dict"][0], on_one_device(fit_keeping), TOLERANCE)


FITS = Cases(
    {
        "every average": ("3:1", fit_with_every_average),
        "torch's average": ("3:1", fit_with_torchs_average),
        "a part": ("3:1", fit_with_target),
        "everywhere": ("3:1", fit_copying),
        "state dict": ("3:1", fit_keeping),
    }
)
