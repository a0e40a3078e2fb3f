"""Copies of the module that are made before it is sharded, and what users do with them."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, by_plan, dataset, in_ranks, loader, trainer, values_of
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
    """An average as users write it: copied in setup(), updated after steps, used to validate."""

    def __init__(self, average) -> None:
        self.average = average
        self.outputs = []

    def setup(self, trainer, pl_module, stage):
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
    averaged = callback.averaged
    after = copy.deepcopy(averaged)(dataset(3).tensors[0])
    return callback.outputs, values_of(averaged), values_of(model), after


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
    def setup(self, trainer, pl_module, stage):
        self.averaged = AveragedModel(pl_module, use_buffers=False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.averaged.update_parameters(pl_module)


def fit_with_torchs_average(plan):
    callback = AveragesByTorch()
    trainer(plan, callbacks=[callback]).fit(Net(), loader(14), loader(8))
    return values_of(callback.averaged.module)


def test_torchs_averaged_model_works():
    wanted = on_one_device(fit_with_torchs_average)
    assert_same_tensors(FITS["torch's average"][0], wanted, TOLERANCE)


class Copies(Net):
    """Copies itself, or a part, in a hook or in the step."""

    def __init__(self, hook, part) -> None:
        super().__init__()
        setattr(self, hook, lambda *_: copy.deepcopy(self if part is None else self.blocks[0]))


@pytest.mark.parametrize(
    ("hook", "part"), [("on_train_start", None), ("on_train_batch_end", 0), ("training_step", 0)]
)
def test_a_copy_of_what_is_sharded_is_refused_by_name(hook, part):
    def fit():
        with pytest.raises(UnsupportedError) as refused:
            trainer("3:1").fit(Copies(hook, part), loader(), loader(8))
        return str(refused.value)

    for message in in_ranks(2, fit):
        assert "copy.deepcopy()" in message and "in setup()" in message


class KeepsTheBest(Callback):
    """Keeps a state dict, as users do who have no checkpoints, and goes back to it."""

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


def test_a_copied_state_dict_keeps_its_values_and_is_loaded_again():
    assert_same_tensors(FITS["state dict"][0], on_one_device(fit_keeping), TOLERANCE)


FITS = Cases(
    {
        "every average": ("3:1", fit_with_every_average),
        "torch's average": ("3:1", fit_with_torchs_average),
        "state dict": ("3:1", fit_keeping),
    }
)
