"""Updates inside the backward: bit by bit those at its end, in less memory, where exact."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import (
    Block,
    Net,
    assert_same_optimizer_state,
    assert_same_tensors,
    in_ranks,
    loader,
    trainer,
)
from lightning.pytorch import Callback, Trainer, utilities
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from plans import PLANS, QUIET
from torch import Tensor, nn

from lightning_cephalo.adapters.early_update import late_by_job, late_by_optimizer
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.sharding.placement import local_part


class _Gated(Block):
    """Has a parameter that no sample uses, and one that not all microbatches use."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.never, self.some = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.some if len(x) == 2 else x)


class Partly(Net):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(_Gated(6) for _ in range(3))
        self.blocks[1].up.weight.requires_grad_(False)


class Held(Callback, Observer):
    """Counts the bytes of reduced gradients, in the step and behind it, and notes the updates."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.most = self.between = self.lent = 0

    def _now(self) -> int:
        shards = [flat.gradient.own for flat in self.flats if flat.gradient.own is not None]
        return sum(shard.nbytes for shard in shards)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.model = model = trainer.strategy.session.model
        self.flats = model.flats
        self.whole = sum(flat.shard.nbytes for flat in self.flats if flat.trainable)
        root = [flat for flat in model.units[0].flats if flat.trainable]
        self.of_root = sum(flat.shard.nbytes for flat in root)
        model.executor.link.attach(self)

    def before(self, instruction: Instruction) -> None:
        self.most = max(self.most, self._now())
        pools = self.model.gradient_pools
        self.lent = max(self.lent, sum(len(pool.buffers) for pool in pools))
        if instruction.operation is Operation.UPDATE:
            self.updates.append(instruction.unit)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.between = max(self.between, self._now())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.late = trainer.strategy.session.job.late
        named = pl_module.named_parameters()
        self.values = {name: p.full_tensor().detach().clone() for name, p in named}
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


CLIP = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


def _fitted(plan: str, early: Any, optimizer: str, callbacks: Any = (), **options: Any) -> Held:
    module, held = Partly(optimizer), Held()
    options = {"limit_val_batches": 0, **options}
    runs = trainer(plan, {"early_update": early}, callbacks=[held, *callbacks], **options)
    runs.fit(module, loader(), loader(8))
    return held


def _assert_same_state(found: Any, wanted: Any) -> None:
    if wanted:  # rank 0 has it
        assert_same_optimizer_state(found, wanted, 0.0)


def _early_and_late(plans: list[str]) -> None:
    for plan in plans:
        for optimizer in ("adamw", "sgd"):
            early, late = (_fitted(plan, way, optimizer) for way in ("auto", False))
            assert early.late == "" and late.late == "early_update=False"
            assert early.updates == [3, 2, 1, -1] * 4 and late.updates == [-1] * 4
            assert_same_tensors(early.values, late.values, 0.0)
            _assert_same_state(early.state, late.state)
            # of every byte of rows, late updates hold one of gradients at any time
            assert late.between == late.most == late.whole
            assert early.between == 0
            # reduced gradients of units stay in full ones, of which there are no more
            assert early.most == early.of_root
            assert early.lent == late.lent


@pytest.mark.parametrize(
    "plans", [["3:1", "no data"], pytest.param(["three"], marks=pytest.mark.slow)]
)
def test_units_are_updated_in_the_backward_bit_by_bit_as_at_its_end_and_hold_no_gradients(plans):
    in_ranks(len(PLANS[plans[0]].ranks), _early_and_late, plans)


class Experts(Partly):
    """Its ranks use other layers, all of them at the end."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.blocks = nn.ModuleList(_Chosen(6) for _ in range(3))


class _Chosen(nn.Module):
    """One layer for each rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.experts[dist.get_rank() % 2](x))


class Left(Held):
    """Counts the bytes of gradients that stay to the end of a backward."""

    left = 0

    def before(self, instruction: Instruction) -> None:
        super().before(instruction)
        if instruction.operation is Operation.FREE and instruction.unit == 0:
            flats = [flat for unit in self.model.units[2:] for flat in unit.flats]
            faces = [face for flat in flats for face in flat.gradient.reduced.faces]
            left = sum(local_part(face).nbytes for face in faces if face is not None)
            self.left = max(self.left, left)


def _of_experts() -> int:
    found = []
    for early in ("auto", False):
        held = Left()
        options = {"callbacks": [held], "limit_val_batches": 0}
        runs = trainer("3:1", {"early_update": early, "units": [_Chosen]}, **options)
        runs.fit(Experts(), loader(), loader(8))
        found.append(held)
    early, late = found
    assert early.updates[:3] == [3, 2, 1] and late.left > 0
    assert_same_tensors(early.values, late.values, 0.0)
    _assert_same_state(early.state, late.state)
    return early.left


def test_gradients_of_layers_that_only_other_ranks_use_do_not_stay():
    assert in_ranks(2, _of_experts) == [0, 0]


class Made(Partly):
    """Has the optimizer that is given."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.requires_grad])


class Replaces(Callback):
    """Puts other objects in place of the state, between two steps: other values, and fewer."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        (optimizer,) = trainer.optimizers
        if index == 1:
            for entries in optimizer.state.values():
                for name, value in list(entries.items()):
                    entries[name] = value * 2 if isinstance(value, Tensor) else value
        if index == 2:
            optimizer.state.pop(pl_module.blocks[0].up.weight, None)


OPTIMIZERS = (
    partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    partial(torch.optim.AdamW, lr=1e-2, fused=True),
    partial(torch.optim.NAdam, lr=1e-2),
    partial(torch.optim.ASGD, lr=1e-2),
    partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    partial(torch.optim.Rprop, lr=1e-2),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
)


def _of_optimizers() -> None:
    for make in OPTIMIZERS:
        found = []
        for early in ("auto", False):
            held = Held()
            callbacks = [held, Replaces()]
            runs = trainer("3:1", {"early_update": early}, callbacks=callbacks, limit_val_batches=0)
            runs.fit(Made(make), loader(), loader(8))
            found.append(held)
        early, late = found
        assert early.late == "", early.late
        assert_same_tensors(early.values, late.values, 0.0)
        _assert_same_state(early.state, late.state)


def test_early_updates_follow_what_replaces_the_state():
    in_ranks(2, _of_optimizers)


class Registers(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda *_: None)


class Reads(Callback):
    """Reads gradients through an object, where nobody sees it before."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        self.read(trainer, pl_module)


def _read(trainer: Any, pl_module: Any) -> None:
    gradient = pl_module.blocks[0].up.bias.grad
    assert gradient is not None and gradient.shape == (18,)
    with pytest.raises(UnitUseError, match=r"'blocks.0.up.bias' is used .* after its update"):
        gradient.norm()
    with pytest.raises(UnitUseError, match="early_update=False"):
        pl_module.clip_gradients(trainer.optimizers[0], 1.0, "norm")
    with pytest.raises(UnitUseError, match="early_update=False"):
        utilities.grad_norm(pl_module, 2)
    pl_module.zero_grad()
    assert pl_module.blocks[0].up.bias.grad is None


def _in_the_middle() -> None:
    late = _fitted("3:1", False, "adamw")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hooked = _fitted("3:1", "auto", "adamw", [Registers()])
    said = [str(w.message) for w in caught if "follow the backward" in str(w.message)]
    assert len(said) == 1 and said[0].startswith(
        "Updates of this step and later ones follow the backward: hooks of AdamW."
    )
    assert hooked.late == "" and hooked.updates == [-1] * 4
    read = _fitted("3:1", "auto", "adamw", [Reads(_read)])
    assert read.updates[0] == 3
    for found in (hooked, read):
        assert_same_tensors(found.values, late.values, 0.0)
        _assert_same_state(found.state, late.state)


def test_a_step_with_hooks_is_late_and_a_gradient_that_is_gone_is_refused_by_name():
    in_ranks(2, _in_the_middle)


# -- failures -----------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ValueError("this rank's own")


class Breaks(Net):
    """Raises in the backward of its first unit, on rank 1, in the second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            self.blocks[0].register_forward_hook(lambda block, i, outputs: _Raises.apply(outputs))


class Saves(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint("never.ckpt")


def _broken(early: Any) -> tuple[str, list[str], int]:
    options = {"callbacks": [Saves()] if early else [], "limit_val_batches": 0}
    runs, held = trainer("3:1", {"early_update": early}, **options), Held()
    runs.callbacks.append(held)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runs.fit(Breaks(), loader(), loader(8))
        except Exception as failure:
            said = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
            warned = [str(each.message) for each in caught]
            return f"{type(failure).__name__}: {said}", warned, held.lent
    raise AssertionError("nothing was raised")


def _broken_both_ways() -> Any:
    late = _broken(False)  # first: where a checkpoint is refused the process cannot go on
    return _broken("auto"), late


def test_an_error_between_two_updates_says_on_all_ranks_that_weights_are_half_updated(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (other, other_late), (own, own_late) = in_ranks(2, _broken_both_ways)
    half = "Weights are half-updated: this step had updated 3 of 4 units. Continue from the last"
    assert own[0].startswith("ValueError: this rank's own\n") and half in own[0]
    assert other[0].startswith("RemoteRankError: Rank 1 failed while running the backward:")
    assert half in other[0]
    # also a rank that has failed gives the memory of its gradients back
    assert own[2] == other[2] == own_late[2] == other_late[2]
    for _, said, _ in (own, other):
        refusals = [text for text in said if "a checkpoint in on_exception() is refused" in text]
        assert len(refusals) == 1 and "weights are half-updated" in refusals[0]
    assert not list(tmp_path.iterdir())
    assert own_late[0] == "ValueError: this rank's own" and "half" not in other_late[0]


# -- when updates are late ------------------------------------------------------------------------


class _AfterBackward(Net):
    def on_after_backward(self) -> None:
        """Reads gradients."""


class _OptimizerStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class _Clips(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Clips in its own way."""


class _ZeroGrad(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class _BeforeZeroGrad(Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        """Reads gradients."""


class _BeforeStep(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        """Reads gradients."""


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "late"),
    [
        (Net, {}, ""),
        (Net, CLIP, "gradient clipping"),
        (Net, {"precision": "bf16-mixed"}, ""),
        (Net, {"gradient_clip_val": 1.0}, "gradient clipping"),
        (Net, {"accumulate_grad_batches": 4}, "gradients of 4 batches add up"),
        (
            Net,
            {"callbacks": [GradientAccumulationScheduler({1: 2})]},
            "GradientAccumulationScheduler",
        ),
        (Net, {"callbacks": [StochasticWeightAveraging(0.1)]}, ""),
        (Net, {"detect_anomaly": True}, ""),
        (Net, {"callbacks": [_BeforeZeroGrad()]}, "_BeforeZeroGrad.on_before_zero_grad()"),
        (Net, {"callbacks": [_BeforeStep()]}, "_BeforeStep.on_before_optimizer_step()"),
        (_AfterBackward, {}, "_AfterBackward.on_after_backward()"),
        (_OptimizerStep, {}, "_OptimizerStep.optimizer_step()"),
        (_Clips, {}, "_Clips.configure_gradient_clipping()"),
        (_ZeroGrad, {}, "_ZeroGrad.optimizer_zero_grad()"),
        (_Manual, {}, "manual optimization"),
    ],
)
def test_what_needs_gradients_later_is_named(module, options, late):
    runs = Trainer(accelerator="cpu", devices=1, **QUIET, **options)
    assert late_by_job(TrainerView(runs), module()).startswith(late)
    assert bool(late_by_job(TrainerView(runs), module())) is bool(late)


def test_loss_scaling_is_named():
    runs = Trainer(accelerator="cpu", devices=1, **QUIET)
    runs.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    assert late_by_job(TrainerView(runs), Net()) == "loss scaling"


class _Own(torch.optim.AdamW):
    """Might do anything."""


def test_optimizers_that_cannot_be_updated_by_units_are_named():
    def reason(make: Any, change: Any = lambda optimizer: None) -> str:
        optimizer = make([nn.Parameter(torch.ones(3, 3))], lr=0.1)
        change(optimizer)
        return late_by_optimizer(optimizer)

    assert reason(torch.optim.AdamW) == reason(torch.optim.SGD) == ""
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    assert reason(torch.optim.AdamW, schedule) == ""
    assert reason(torch.optim.LBFGS) == "LBFGS is none of torch's element-wise optimizers"
    assert reason(torch.optim.Adafactor) == "Adafactor is none of torch's element-wise optimizers"
    assert reason(_Own) == "_Own is none of torch's element-wise optimizers"
    for hook in ("register_step_pre_hook", "register_step_post_hook"):
        added = reason(torch.optim.SGD, lambda o, hook=hook: getattr(o, hook)(lambda *_: None))
        assert added == "hooks of SGD"
    replaced = reason(torch.optim.SGD, lambda o: setattr(o, "step", lambda closure: closure()))
    assert replaced == "SGD.step is replaced"


@pytest.mark.parametrize("value", [True, None, "late"])
def test_no_other_value_than_auto_and_false_is_taken(value):
    from lightning_cephalo import CephaloStrategy, Planner

    with pytest.raises(ValueError, match="early_update: expected 'auto' or False"):
        CephaloStrategy(planner=Planner(early_update=value))
