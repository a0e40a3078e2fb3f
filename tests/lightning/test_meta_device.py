"""Models made on the meta device in configure_model get one set of values, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from cases import Cases
from common import Block, Net, assert_same_tensors, by_plan, in_ranks, loader, trainer, values_of
from lightning.pytorch import LightningModule
from torch import nn
from zoo import ZOO

TOLERANCE = 1e-5
CLOSE = {"rtol": TOLERANCE, "atol": TOLERANCE}


class _Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(3), persistent=False)

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.shift.fill_(0.25)

    def forward(self, x):
        return x * self.weight + self.shift.sum()


class _Scaled(nn.Module):
    """A block with everything that modules of torch initialise themselves."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class OnMeta(Net):
    """Net with everything made late, on the meta device; ``device`` "cpu": made at once."""

    def __init__(self, device="meta"):
        LightningModule.__init__(self)
        self.save_hyperparameters()
        self.losses, self.made_on, self.before = [], device, None
        self.hparams["optimizer"] = "adamw"
        self.head = None

    def configure_model(self):
        if self.head is not None:
            return
        torch.manual_seed(3)
        with torch.device(self.made_on):
            self.inputs = nn.Linear(5, 6)
            self.blocks = nn.ModuleList(_Scaled(6) for _ in range(3))
            self.head = nn.Linear(6, 6)
            self.outputs = nn.Linear(6, 6)
            self.outputs.weight = self.head.weight
            self.gain = _Gain()
        self.inputs.bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.gain(self.outputs(torch.tanh(self.head(x))).sum(1, keepdim=True))

    def on_fit_start(self):
        assert all(not p.is_meta for p in [*self.parameters(), *self.buffers()])
        self.before = {
            name: parameter.detach().full_tensor().clone()
            for name, parameter in self.named_parameters()
        }


def _fit(plan, saved, path, epochs=1):
    model = OnMeta()
    runs = trainer(plan, max_epochs=epochs)
    resume = {"ckpt_path": saved, "weights_only": True} if saved else {}
    runs.fit(model, loader(14), loader(8), **resume)
    runs.save_checkpoint(path)
    return model.before, model.losses, values_of(model)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The file of one rank's first epoch, and what came of that epoch."""
    path = tmp_path_factory.mktemp("first") / "first.ckpt"
    return path, by_plan("one", _fit, None, path)


def test_values_do_not_depend_on_the_plan_and_training_goes_on_from_them(first, tmp_path):
    plans = ("3:1", "three")
    runs = [first[1], *(by_plan(plan, _fit, None, tmp_path / "a.ckpt") for plan in plans)]
    for before, losses, values in runs[1:]:
        assert_same_tensors(before, runs[0][0], 0.0)
        torch.testing.assert_close(losses, runs[0][1], **CLOSE)
        assert_same_tensors(values, runs[0][2], TOLERANCE)
    before = runs[0][0]
    assert torch.equal(before["blocks.1.norm.weight"], torch.ones(6)) and before["gain.weight"] == 1
    # a Linear's values lie within the bound that its own initialisation draws from
    assert 0.1 < before["blocks.1.up.weight"].abs().max() <= 6**-0.5
    assert not torch.equal(before["blocks.1.up.weight"], before["blocks.0.up.weight"])


def test_a_checkpoint_fills_a_model_on_meta_in_fit(first, tmp_path):
    path, (before, _, values) = first
    loaded, losses, _ = by_plan("three", _fit, path, tmp_path / "second.ckpt", 2)
    assert_same_tensors(loaded, {name: values[name] for name in loaded}, 0.0)
    assert any(not torch.equal(before[name], values[name]) for name in before)
    _, whole, _ = by_plan("one", _fit, None, tmp_path / "whole.ckpt", 2)
    torch.testing.assert_close(losses, whole[2:], **CLOSE)


def _validate(plan, path):
    runs = trainer(plan)
    model = OnMeta()
    runs.validate(model, loader(16), ckpt_path=path, weights_only=True, verbose=False)
    tied = model.head.weight is model.outputs.weight
    return float(runs.callback_metrics["val"]), values_of(model), tied


def test_a_checkpoint_fills_a_model_on_meta_in_validate(first):
    path, (_, _, values) = first
    loss, loaded, tied = by_plan("three", _validate, path)
    wanted, _, _ = by_plan("one", _validate, path)
    assert_same_tensors(loaded, values, 0.0)
    assert tied
    assert loss == pytest.approx(wanted, rel=TOLERANCE)


class _PartlyLoaded(OnMeta):
    strict_loading = False

    def on_load_checkpoint(self, checkpoint):
        for name in ("blocks.0.up.bias", "head.bias", "gain.weight"):
            del checkpoint["state_dict"][name]


def _fit_partly(plan, saved):
    model = _PartlyLoaded()
    trainer(plan, max_epochs=1, limit_train_batches=0).validate(
        model, loader(16), ckpt_path=saved, weights_only=True, verbose=False
    )
    return values_of(model)


def test_what_a_checkpoint_lacks_is_initialised_and_what_it_has_is_kept(first):
    path, (_, _, values) = first
    loaded = by_plan("3:1", _fit_partly, path)
    missing = {"blocks.0.up.bias", "head.bias", "gain.weight"}
    for name, value in values.items():
        if name in missing:
            assert loaded[name].isfinite().all() and not torch.equal(loaded[name], value), name
        else:
            assert torch.equal(loaded[name], value), name


class _WithoutReset(OnMeta):
    def configure_model(self):
        super().configure_model()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block(6) for _ in range(3))
            self.gain.weight = nn.Parameter(torch.empty(()))
            self.blocks[1].own = nn.Parameter(torch.empty(6))


def _fit_without_reset(plan):
    try:
        trainer(plan).fit(_WithoutReset(), loader(), loader(8))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it trained"


def test_a_module_that_cannot_initialise_itself_is_named_on_every_rank():
    for kind, message in in_ranks(2, _fit_without_reset, "3:1"):
        assert kind == "RuntimeError"
        assert message.startswith("Block has parameters or buffers on the meta device")
        assert "reset_parameters()" in message and "ckpt_path" in message


class _HuggingFace(LightningModule):
    def __init__(self, name):
        super().__init__()
        self.name, self.model, self.losses = name, None, []

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(3)
            with torch.device("meta"):
                self.model = ZOO[self.name][0]()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit_hugging_face(plan, name):
    torch.manual_seed(9)
    model = _HuggingFace(name)
    batch = ZOO[name][1](16)
    rows = [{key: value[index] for key, value in batch.items()} for index in range(16)]
    trainer(plan).fit(model, torch.utils.data.DataLoader(rows, batch_size=8))
    return model.losses, values_of(model)


NAMES = ("llama tied", "gpt2", "bert")
HUGGING_FACE = Cases(
    {(plan, name): (plan, _fit_hugging_face, name) for plan in ("one", "3:1") for name in NAMES}
)


@pytest.mark.parametrize("name", NAMES)
def test_a_hugging_face_model_on_meta_is_initialised_by_its_own_rules(name):
    losses, values = HUGGING_FACE["one", name][0]
    other_losses, other_values = HUGGING_FACE["3:1", name][0]
    torch.testing.assert_close(other_losses, losses, **CLOSE)
    assert_same_tensors(other_values, values, 1e-4)
    matrices = [value for key, value in values.items() if value.ndim == 2 and "weight" in key]
    # transformers draws with a standard deviation of 0.02; what torch itself draws is 10 times that
    assert all(0.005 < float(matrix.std()) < 0.04 for matrix in matrices)
    norms = [value for key, value in values.items() if "norm" in key.lower() and "weight" in key]
    assert (norms and all(abs(float(norm.mean()) - 1) < 0.05 for norm in norms)) or name == "gpt2"
