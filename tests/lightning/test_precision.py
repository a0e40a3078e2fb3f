"""Precision, clipping, accumulation and freezing against one device with the same settings."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, in_ranks, loader, run_ranks, trainer, values_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from plans import PLANS
from torch.distributed.tensor import DTensor

from lightning_cephalo import CephaloStrategy, Plan, Planner

TOLERANCE = 1e-5
CLOSE = {"rtol": TOLERANCE, "atol": TOLERANCE}


class Watched(Net):
    """Notes what its parameters, activations and gradients look like in a step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        inner = self.blocks[0].down
        hook = inner.register_forward_hook(
            lambda module, args, output: self.seen.update(
                input=batch[0].dtype, weight=module.weight.dtype, output=output.dtype
            )
        )
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen["gradient"] = self.blocks[0].down.weight.grad.dtype
        self.seen["master"] = self.blocks[0].down.weight.dtype


def _fit(plan, options, strategy_options=None, samples=30):
    model = Watched()
    runs = trainer(plan, strategy_options, max_epochs=1, **options)
    runs.fit(model, loader(samples), loader(8))
    return model.losses, values_of(model), model.seen, float(runs.callback_metrics["val"])


@cache
def _one_device(**options):
    return on_one_device(_fit, options)


def _fitted(case):
    """What rank 0 gives in one of the cases that FITS lists below."""
    return FITS[case][0]


FULL = [("three", "32-true"), ("3:1", "64-true")]


@pytest.mark.parametrize(("plan", "precision"), FULL)
def test_full_precision_equals_one_device(plan, precision):
    # doubles leave only the order of summation, which is 1e-12 of a value here
    tolerance = 1e-12 if precision == "64-true" else TOLERANCE
    losses, values, seen, val = _fitted((plan, precision))
    wanted_losses, wanted, wanted_seen, wanted_val = _one_device(precision=precision)
    torch.testing.assert_close(losses, wanted_losses, rtol=tolerance, atol=1e-6)
    assert_same_tensors(values, wanted, tolerance)
    assert seen == wanted_seen
    assert val == pytest.approx(wanted_val, rel=1e-6)


# bfloat16 keeps 8 bits, so that a rounding is off by up to 2^-9 = 0.2 % of a value. Gradients of a
# microbatch are rounded where those of the whole batch would be, at each of about ten operations in
# a row: 2 % of a loss is what they may come to, and all that is asked of the losses of 4 steps.
BFLOAT16 = 2e-2


def test_bf16_mixed_keeps_full_precision_weights_and_follows_one_device():
    losses, values, seen, val = _fitted(("bf16-mixed", True))
    wanted_losses, wanted, wanted_seen, wanted_val = _one_device(precision="bf16-mixed")
    torch.testing.assert_close(losses, wanted_losses, rtol=BFLOAT16, atol=0.0)
    assert val == pytest.approx(wanted_val, rel=BFLOAT16)
    assert {name: v.dtype for name, v in values.items()} == {n: v.dtype for n, v in wanted.items()}
    assert seen == wanted_seen
    assert seen["output"] is torch.bfloat16 and seen["gradient"] is torch.float32


def _fit_rounding(plan, dtype):
    model = Watched()
    runs = trainer(plan, {"reduce_dtype": dtype}, max_epochs=1, accumulate_grad_batches=2)
    runs.fit(model, loader(30), loader(8))
    return model.losses, model.seen["gradient"]


def test_gradients_that_travel_as_bfloat16_are_rounded_once_and_summed_in_full_precision():
    exact, _ = _fitted("sums of float32")
    losses, dtype = _fitted("sums of bfloat16")
    assert dtype is torch.float32
    # a rounding takes up to 2^-9 of a value
    assert losses[0] == exact[0] and losses != exact
    torch.testing.assert_close(losses, exact, rtol=2**-9, atol=0.0)


RECOMPUTED = ("bf16-mixed", "bf16-true", "32-true")


@pytest.mark.parametrize("precision", RECOMPUTED)
def test_recompute_changes_nothing_in_any_precision(precision):
    runs = [_fitted((precision, recompute)) for recompute in (True, False)]
    assert runs[0][0] == runs[1][0]
    assert_same_tensors(runs[0][1], runs[1][1], 0.0)


def _recomputing(name, chosen):
    ranks = zip(PLANS[name].ranks, chosen, strict=True)
    plan = Plan(tuple(replace(rank, recompute=own) for rank, own in ranks))
    runs = Trainer(
        strategy=CephaloStrategy(plan=plan, global_batch_size=8, planner=Planner(verbose=False)),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Watched()
    used = []
    model.on_train_batch_start = lambda *_: used.append(
        runs.strategy.session.model.executor.recompute
    )
    runs.fit(model, loader(16), loader(8))
    return model.losses, set(used)


def test_a_plan_chooses_recomputation_rank_by_rank():
    mixed = FITS["recomputed by one rank"]
    assert [used for _, used in mixed] == [{True}, {False}]
    by_strategy = FITS["recomputed as the strategy says"]
    assert [used for _, used in by_strategy] == [{True}, {True}]
    assert mixed[0][0] == by_strategy[0][0]


def test_bf16_true_computes_in_bfloat16_and_updates_in_full_precision():
    losses, values, seen, val = _fitted(("three", "bf16-true"))
    # one device updates bfloat16 weights, which loses small updates: its losses are no reference
    # for ours, those of full-precision weights are
    wanted_losses, wanted, _, wanted_val = _one_device(precision="bf16-mixed")
    torch.testing.assert_close(losses, wanted_losses, rtol=BFLOAT16, atol=0.0)
    assert val == pytest.approx(wanted_val, rel=BFLOAT16)
    assert seen["input"] is seen["weight"] is seen["output"] is torch.bfloat16
    assert seen["master"] is seen["gradient"] is torch.float32
    assert {name: v.dtype for name, v in values.items()} == {n: v.dtype for n, v in wanted.items()}


BY_NORM = {"gradient_clip_val": 0.3}


CLIPPED_OR_ACCUMULATED = {
    "by norm": ("3:1", BY_NORM),
    "by norm, no data": ("no data", BY_NORM),
    "by value": ("3:1", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "three batches": ("no data", {"accumulate_grad_batches": 3}),
    "two batches, clipped": (
        "3:1",
        {"accumulate_grad_batches": 2, "precision": "64-true", **BY_NORM},
    ),
}


@pytest.mark.parametrize("case", CLIPPED_OR_ACCUMULATED)
def test_clipping_and_accumulating_equal_one_device(case):
    # 30 samples are 4 batches, the last of 6: of three accumulated ones the last group has one
    losses, values, _, _ = _fitted(case)
    wanted_losses, wanted, _, _ = _one_device(**CLIPPED_OR_ACCUMULATED[case][1])
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted, TOLERANCE)


def test_clipping_in_the_tests_above_does_clip():
    assert _one_device(**BY_NORM)[0] != _one_device()[0]


class _Scheduled(Net):
    def __init__(self, interval):
        super().__init__("sgd")
        self.interval, self.rates = interval, []

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.interval == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"},
            }
        if self.interval == "step":
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)
        else:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


def _fit_scheduled(plan, interval):
    model = _Scheduled(interval)
    trainer(plan, max_epochs=3, limit_train_batches=2).fit(model, loader(), loader(8))
    return model.rates, model.losses


INTERVALS = ("step", "epoch", "plateau")


@pytest.mark.parametrize("interval", INTERVALS)
def test_learning_rates_are_scheduled_as_on_one_device(interval):
    rates, losses = _fitted(interval)
    wanted_rates, wanted_losses = on_one_device(_fit_scheduled, interval)
    assert rates == wanted_rates
    assert interval == "plateau" or len(set(rates)) > 2
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)


class _Freezes(Callback):
    """Freezes one block's weights after an epoch, thaws them and another's after the next."""

    def on_train_epoch_start(self, trainer, pl_module):
        epoch = trainer.current_epoch
        pl_module.blocks[0].requires_grad_(epoch != 1)
        pl_module.inputs.requires_grad_(epoch != 1)
        pl_module.head.weight.requires_grad_(epoch != 2)


class _Thawed(Net):
    def configure_optimizers(self):
        # everything is given to the optimizer, so that what is thawed later is there
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def _fit_freezing(plan):
    model = _Thawed()
    runs = trainer(plan, max_epochs=4, limit_train_batches=2, callbacks=[_Freezes()])
    runs.fit(model, loader(), loader(8))
    return model.losses, values_of(model)


@pytest.fixture(scope="module")
def frozen_on_one_device():
    return on_one_device(_fit_freezing)


@pytest.mark.parametrize("plan", ["three", "no data"])
def test_freezing_and_thawing_between_epochs_equals_one_device(plan, frozen_on_one_device):
    losses, values = _fitted((plan, "freezing"))
    wanted_losses, wanted = frozen_on_one_device
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted, TOLERANCE)


class _WithBackbone(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(True)

    @property
    def backbone(self):
        return self.blocks

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=1e-2, momentum=0.9)


def _fit_finetuning(plan):
    model = _WithBackbone()
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    runs = trainer(plan, max_epochs=3, limit_train_batches=2, callbacks=[unfreeze])
    runs.fit(model, loader(), loader(8))
    return model.losses, values_of(model), len(runs.optimizers[0].param_groups)


def test_a_backbone_that_is_thawed_by_lightnings_callback_trains_on():
    losses, values, groups = _fitted("a thawed backbone")
    wanted_losses, wanted, wanted_groups = on_one_device(_fit_finetuning)
    assert groups == wanted_groups == 2
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    assert_same_tensors(values, wanted, TOLERANCE)


def _scale_steps(rank, overflowing, make):
    """Three updates by a scaler, one rank of which overflows in the second, and what came of it."""
    from datetime import timedelta

    from lightning_cephalo.accelerator import accelerator_of
    from lightning_cephalo.adapters.optimizer import local_update
    from lightning_cephalo.adapters.precision import RanksGradScaler
    from lightning_cephalo.execution.sharded_model import ShardedModel
    from lightning_cephalo.ranks.groups import Groups

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    sharded = ShardedModel(
        model,
        Groups.create(timedelta(seconds=100)),
        accelerator_of(torch.device("cpu")),
        fractions=[0.75, 0.25],
    )
    optimizer = make(model.parameters())
    scaler = RanksGradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.zeros(()))  # as the precision plugin does before every backward
    notes = []
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, scaler.get_scale() * 2.0)
        if step == 1 and rank == overflowing:
            local = [p.grad.to_local() for p in model.parameters() if p.grad.to_local().numel()]
            local[0].view(-1)[0] = float("inf")
        before = [p.detach().to_local().clone() for p in model.parameters()]
        scaler.unscale_(optimizer)
        held = [p.grad.to_local() for p in model.parameters() if p.grad.to_local().numel()]
        gradients = [float(gradient.min()) for gradient in held]
        with local_update(optimizer):  # as the strategy has it
            scaler.step(optimizer)
        scaler.update()
        after = [p.detach().to_local() for p in model.parameters()]
        moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True) if len(pair[0])]
        notes.append((moved, gradients if step != 1 else None, scaler.get_scale()))
    sharded.abandon()
    return notes


SCALED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),  # looks for overflows in a kernel
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),  # over DTensors
}


def _scale_all(rank):
    return {
        (overflowing, name): _scale_steps(rank, overflowing, make)
        for overflowing in (0, 1)
        for name, make in SCALED.items()
    }


@pytest.fixture(scope="module")
def scaled():
    return run_ranks(2, _scale_all)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_update(overflowing, name, scaled):
    for rank, found in enumerate(scaled):
        notes = found[overflowing, name]
        (first, gradients, scale), (second, _, scale_after), (third, again, last) = notes
        assert first and all(first), rank
        assert set(gradients) == {2.0} == set(again)
        assert not any(second)
        assert all(third)
        # halved by the overflow, and not yet grown again
        assert (scale, scale_after, last) == (8.0, 4.0, 4.0)


class _Hooked(Net):
    """Notes in every hook of a step whether the optimizer and its state are in DTensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def configure_optimizers(self):
        (optimizer,), schedules = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self._note("before the step", optimizer))
        optimizer.register_step_post_hook(lambda *_: self._note("after the step", optimizer))
        return [optimizer], schedules

    def on_before_optimizer_step(self, optimizer):
        assert all(isinstance(p.grad, DTensor) for p in self.parameters() if p.grad is not None)
        self._note("before the update", optimizer)

    def _note(self, when, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(any(p is own for own in self.parameters()) for p in parameters)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        assert all(isinstance(m, DTensor) for m in moments if m.ndim)
        self.seen.append((when, len(optimizer.state) > 0))


def _fit_hooked(plugin, path):
    model = _Hooked()
    runs = trainer("3:1", plugins=[plugin], gradient_clip_val=0.5, limit_train_batches=2)
    runs.fit(model, loader(), loader(8))
    runs.save_checkpoint(path)
    return model.seen


@pytest.mark.filterwarnings("error::UserWarning")  # of schedulers that count no step
@pytest.mark.parametrize("scaled", [True, False])
def test_hooks_of_a_step_see_dtensors_with_and_without_a_gradient_scaler(tmp_path, scaled):
    # a scale at which nothing overflows: Lightning's own first one makes it skip steps
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler) if scaled else Precision()
    seen = in_ranks(2, _fit_hooked, plugin, tmp_path / "saved.ckpt")[0]
    # with a scaler Lightning runs the backward first, and then the step without it
    order = ["before the step", "before the update"]
    order = [*(reversed(order) if scaled else order), "after the step"]
    assert [when for when, _ in seen] == order * 2
    assert [filled for _, filled in seen] == [False, False, True, True, True, True]
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert ("scale" in saved.get("MixedPrecision", {})) is scaled


class _UsersPrecision(Precision):
    """Of which it is not known what it does."""


def test_a_users_own_precision_plugin_stays_as_it_is():
    strategy = CephaloStrategy()
    for plugin, clips in ((MixedPrecision("bf16-mixed", "cpu"), True), (_UsersPrecision(), False)):
        strategy.precision_plugin = plugin
        assert strategy.precision_plugin is plugin
        for copied in (plugin, pickle.loads(pickle.dumps(plugin))):
            assert copied.precision == plugin.precision
            assert ("clip_grad_by_norm" in vars(copied)) is clips
    assert isinstance(CephaloStrategy().precision_plugin, Precision)


class Scales(Net):
    """Notes with what gradient the backward of every loss begins."""

    scales: list[str]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:
            # a number would be warned of
            loss.register_hook(lambda gradient: self.scales.append(str(float(gradient))))
        return loss


def scales_of(plan, origin):
    module = Scales()
    module.scales = []
    run = trainer(plan, max_steps=3)
    if origin == "solved":
        run.strategy._options = replace(run.strategy._options, plan=None)
    run.fit(module, loader(), loader(8))
    own = run.strategy.plan.ranks[run.global_rank].microbatch_sizes
    # what profiling has run comes before
    return [float(scale) for scale in module.scales[len(module.scales) - 3 * len(own) :]], own


@pytest.mark.parametrize("origin", ["given", "solved"])
def test_losses_of_the_first_step_are_scaled_as_those_of_later_ones(origin):
    """Gradients are as large as those of one device: in fp16 larger ones overflow."""
    for scales, sizes in FITS[origin]:
        # of 8 samples in all
        assert sorted(scales) == sorted(3 * [size / 8 for size in sizes])


FITS = Cases(
    {
        **{(plan, kind): (plan, _fit, {"precision": kind}) for plan, kind in FULL},
        ("three", "bf16-true"): ("three", _fit, {"precision": "bf16-true"}),
        "sums of float32": ("three", _fit_rounding, torch.float32),
        "sums of bfloat16": ("three", _fit_rounding, torch.bfloat16),
        **{
            (kind, again): ("3:1", _fit, {"precision": kind}, {"recompute": again})
            for kind in RECOMPUTED
            for again in (True, False)
        },
        "recomputed by one rank": ("3:1", _recomputing, (True, False)),
        "recomputed as the strategy says": ("3:1", _recomputing, (None, None)),
        **{case: (plan, _fit, given) for case, (plan, given) in CLIPPED_OR_ACCUMULATED.items()},
        **{interval: ("three", _fit_scheduled, interval) for interval in INTERVALS},
        **{(plan, "freezing"): (plan, _fit_freezing) for plan in ("three", "no data")},
        "a thawed backbone": ("three", _fit_finetuning),
        **{origin: ("3:1", scales_of, origin) for origin in ("given", "solved")},
    }
)
