"""Every row of the table of refusals: what triggers it, and what its message says on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from cases import Cases
from common import Net, loader, trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, ModelPruning
from lightning.pytorch.plugins import (
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_cephalo.adapters.refusals import ROWS, Situation, When, compiled_steps_of_optimizers
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError


class Refused(Net):
    """It must not train a step."""

    def __init__(self, *layers, optimizers=None, is_manual=False):
        super().__init__()
        self.layers, self.make = nn.Sequential(*layers), optimizers
        self.automatic_optimization = not is_manual

    def training_step(self, batch, batch_idx):
        raise AssertionError("it trained")

    test_step = training_step

    def configure_optimizers(self):
        return super().configure_optimizers() if self.make is None else self.make(self)


class Interrupted(Net):
    """A run that ends so leaves its shards."""

    def on_train_batch_start(self, batch, batch_idx):
        raise KeyboardInterrupt


def with_shards():
    model = Interrupted()
    with pytest.raises(SystemExit):  # Lightning's answer to a KeyboardInterrupt
        trainer("3:1").fit(model, loader(), loader(8))
    return model


def with_hook():
    model = Refused()
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


class HooksLater(Refused):
    def on_train_start(self):
        for parameter in self.blocks[0].parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())


class OwnBackward(Refused):
    def backward(self, loss):
        loss.backward(retain_graph=True)


class PluginScales(Precision):
    def backward(self, tensor, model, *args, **kwargs):
        super().backward(3 * tensor, model, *args, **kwargs)


class Activated(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input).relu()


class Doubled(nn.SyncBatchNorm):
    def forward(self, input):
        return super().forward(2 * input)


def compiled():
    block = nn.Sequential(nn.BatchNorm1d(3))
    block._compiled_call_impl = block.forward  # as `block.compile()` does
    return block


class Pulls(Refused):
    def training_step(self, dataloader_iter):
        raise AssertionError("it trained")


class PullsInTest(Refused):
    def test_step(self, dataloader_iter):
        raise AssertionError("it ran")


class Compiled(torch.optim.SGD):
    @torch.compile(backend="eager")
    def step(self, closure=None):
        return super().step(closure)


def compiled_step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def copied(module):
    return torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in module.parameters()], lr=0.1)


class MakesItsOptimizerEarly(Refused):
    def __init__(self):
        super().__init__(optimizers=lambda module: module.early)
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)


def optimizer(kind, **options):
    return lambda: Refused(optimizers=lambda module: kind(module.parameters(), **options))


def _fit(plan, make, options, function="fit"):
    model = make()
    with pytest.raises((UnsupportedError, RemoteRankError)) as refused:
        runs = trainer(plan, **options)
        if function == "fit":
            runs.fit(model, loader(), loader(8))
        elif function == "test":
            runs.test(model, loader())
        else:
            model.batch_size, model.train_dataloader, model.val_dataloader = 2, loader, loader
            Tuner(runs).scale_batch_size(model)
    return str(refused.value)


SYNC = "layers_that_cannot_meet"
# of each case the row, the module, options of the Trainer, and words of the message
CASES = {
    "shards": ("shards_of_an_earlier_run", with_shards, {}, ("Make a new model", "ckpt_path")),
    "hook": (
        "hooks_of_parameters",
        with_hook,
        {},
        ("['blocks.0.up.weight'] (1 in all)", "on_after_backward()"),
    ),
    "later hooks": (
        "hooks_of_parameters",
        HooksLater,
        {},
        ("'blocks.0.up.weight', 'blocks.0.up.bias'", "on_after_backward()"),
    ),
    "own backward": (
        "own_backward",
        OwnBackward,
        {},
        ("OwnBackward has a backward() of its own", "on_after_backward()"),
    ),
    "backward of a plugin": (
        "own_backward",
        Refused,
        {"plugins": PluginScales()},
        ("The plugin PluginScales has a backward() of its own", "manual_backward"),
    ),
    "own forward": (
        SYNC,
        lambda: Refused(nn.BatchNorm1d(3), Activated(3)),
        {"sync_batchnorm": True},
        ("['Activated layers.1'] (1 in all)",),
    ),
    "subclass of SyncBatchNorm": (
        SYNC,
        lambda: Refused(Doubled(3)),
        {},
        ("['Doubled layers.0'] (1 in all)",),
    ),
    "manual layers to be synchronised": (
        SYNC,
        lambda: Refused(nn.SyncBatchNorm(3), nn.BatchNorm1d(3), is_manual=True),
        {"sync_batchnorm": True},
        ("optimizes manually", "['SyncBatchNorm layers.0', 'BatchNorm1d layers.1'] (2 in all)"),
    ),
    "compiled SyncBatchNorm": (
        SYNC,
        lambda: Refused(compiled()),
        {"sync_batchnorm": True},
        ("['BatchNorm1d layers.0.0'] (1 in all)",),
    ),
    "metric": (
        "metrics_that_synchronise_inside_a_step",
        lambda: Refused(torchmetrics.MeanSquaredError(dist_sync_on_step=True)),
        {},
        ("dist_sync_on_step=True: ['layers.0'] (1 in all)", "Leave it out"),
    ),
    "metric of a test": (
        "metrics_that_synchronise_inside_a_step",
        lambda: Refused(torchmetrics.MeanSquaredError(dist_sync_on_step=True)),
        {},
        ("dist_sync_on_step=True: ['layers.0'] (1 in all)", "Leave it out"),
        "test",
    ),
    "precision of FSDP": (
        "precision_plugins_of_other_strategies",
        Refused,
        {"plugins": FSDPPrecision("bf16-true")},
        ("FSDPPrecision", "bf16-true"),
    ),
    "precision of DeepSpeed": (
        "precision_plugins_of_other_strategies",
        Refused,
        {"plugins": DeepSpeedPrecision("32-true")},
        ("DeepSpeedPrecision", "bf16-true"),
    ),
    "pruning": (
        "callbacks_that_change_the_training",
        Refused,
        {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        ("ModelPruning", "Remove it", "writable_parameters"),
    ),
    "copied parameters": (
        "optimizers_of_others",
        lambda: Refused(optimizers=copied),
        {},
        ("SGD holds", "in configure_optimizers()"),
    ),
    "optimizer made in __init__": (
        "optimizers_of_others",
        MakesItsOptimizerEarly,
        {},
        ("such as in __init__()", "in configure_optimizers()"),
    ),
    "compiled class": (
        "compiled_steps_of_optimizers",
        optimizer(Compiled, lr=0.1),
        {},
        ("Compiled.step is compiled", "fused=True"),
    ),
    "compiled step": (
        "compiled_steps_of_optimizers",
        lambda: Refused(optimizers=compiled_step),
        {},
        ("SGD.step is compiled", "fused=True"),
    ),
    "step that pulls": (
        "steps_that_pull_batches",
        Pulls,
        {},
        ("training_step has the argument dataloader_iter", "training_step(self, batch, batch_idx)"),
    ),
    "test that pulls": (
        "steps_that_pull_batches",
        PullsInTest,
        {},
        ("test_step has the argument dataloader_iter",),
        "test",
    ),
    "batch size": (
        "callbacks_that_change_the_training",
        Refused,
        {"callbacks": [BatchSizeFinder()]},
        ("BatchSizeFinder", "global_batch_size", "cephalo plan"),
    ),
    "batch size by a tuner": (
        "callbacks_that_change_the_training",
        Refused,
        {},
        ("Tuner.scale_batch_size", "global_batch_size", "cephalo plan"),
        "scale_batch_size",
    ),
}
FITS = Cases({name: ("3:1", _fit, make, *rest[:1], *rest[2:])
              for name, (_, make, *rest) in CASES.items()})  # fmt: skip


# Lightning's own, of steps that are refused
@pytest.mark.filterwarnings("ignore:You are using the .dataloader_iter. step flavor")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_named_on_every_rank_before_training(case):
    name, words = CASES[case][0], CASES[case][3]
    remedy = next(remedy for find, remedy, _ in ROWS if find.__name__ == name)
    for message in FITS[case]:
        for part in (*words, remedy):
            assert part in message, message


def test_every_row_has_a_case():
    assert {name for name, *_ in CASES.values()} == {find.__name__ for find, *_ in ROWS}


class BitsandbytesPrecision(MixedPrecision):
    """A user's own, which only has the name."""


@pytest.mark.parametrize(
    "precision", [HalfPrecision("bf16-true"), BitsandbytesPrecision("bf16-mixed", "cpu")]
)
def test_classes_of_the_users_are_not_refused_by_their_names(precision):
    user = type("ModelPruning", (Callback,), {})()
    strategy = SimpleNamespace(world_size=2)
    found = SimpleNamespace(precision_plugin=precision, callbacks=[user], strategy=strategy)
    model = Refused(nn.SyncBatchNorm(3), nn.BatchNorm1d(1), torchmetrics.MeanSquaredError())
    situation = Situation(TrainerView(found), model)
    rows = [find for find, _, when in ROWS if When.OPTIMIZERS not in when]
    assert [find.__name__ for find in rows if find(situation)] == []


def test_a_step_that_torch_never_compiles_is_not_refused():
    torch.compile(lambda: None, backend="eager")  # it marks them
    chosen = torch.optim.LBFGS(Refused().parameters())
    assert compiled_steps_of_optimizers(Situation(None, None, (chosen,))) is None
