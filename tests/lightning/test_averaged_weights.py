"""Averages of weights: callbacks of Lightning, of torch and of users, as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import on_one_device
from common import Net, assert_same_tensors, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

TOLERANCE = 1e-5


class _Averaged(Net):
    """Changes a floating-point buffer every step, and keeps what validation logs."""

    def __init__(self, swa: bool = False) -> None:
        super().__init__()
        self.swa = swa
        self.validated: list[float] = []

    def on_train_batch_start(self, batch, batch_idx) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.blocks[0].scale.add_(0.01)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics.get("val", 0.0)))

    def configure_optimizers(self):
        # decoupled from the schedule of each step: SWA has one of its own, of each epoch
        return (
            torch.optim.SGD(self.parameters(), lr=1e-2)
            if self.swa
            else super().configure_optimizers()
        )


CALLBACKS = {
    "mean": lambda: WeightAveraging(),
    "parameters alone": lambda: WeightAveraging(use_buffers=False),
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "EMA": lambda: EMAWeightAveraging(decay=0.6, use_buffers=True),
    "SWA": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1),
}


class _IsSharded(Callback):
    """Notes what the average is in the middle of training, and which tags it has."""

    def __init__(self, callback) -> None:
        self.callback = callback

    def setup(self, *args, **kwargs) -> None:
        self._parameters()[-1].tag = "last"

    def on_train_batch_end(self, *args) -> None:
        self.sharded = all(isinstance(parameter, DTensor) for parameter in self._parameters())
        self.tags = self.found_tags()

    def found_tags(self):
        return [getattr(parameter, "tag", "") for parameter in self._parameters()]

    def _parameters(self):
        return list(self.callback._average_model.parameters())


def _fit(plan, name, folder, resume=None):
    callback = CALLBACKS[name]()
    model, watch = _Averaged(swa=name == "SWA"), _IsSharded(callback)
    run = trainer(plan, max_epochs=3 if resume else 2, callbacks=[callback, watch])
    run.fit(model, loader(28), loader(8), ckpt_path=resume)
    path = folder / f"{name} of {plan} from {resume is not None}.ckpt"
    run.save_checkpoint(path)
    assert watch.sharded == (plan is not None)
    assert watch.tags == watch.found_tags()
    if name != "SWA":  # it calls to(), which makes new parameters of sharded ones
        assert [tag for tag in watch.tags if tag] == ["last"]
    values = {key: value.clone() for key, value in values_of(callback._average_model).items()}
    return model.validated, values_of(model), values


def _fit_all(plan, folder, resume=None):
    return {
        name: _fit(plan, name, folder, resume and folder / f"{name} of {resume} from False.ckpt")
        for name in CALLBACKS
    }


def _same(found, wanted):
    for name, (validated, values, averages) in wanted.items():
        assert found[name][0] == pytest.approx(validated, rel=1e-4), name
        assert_same_tensors(found[name][1], values, TOLERANCE)
        assert_same_tensors(found[name][2], averages, TOLERANCE)


def _same_files(folder, plan, resumed):
    for name in CALLBACKS:
        found, wanted = (
            torch.load(folder / f"{name} of {of} from {resumed}.ckpt", weights_only=True)
            for of in (plan, None)
        )
        assert found.keys() == wanted.keys() | {"cephalo_data_order"}
        for key in ("state_dict", "current_model_state", "averaging_state"):
            if key in wanted:
                assert_same_tensors(found[key], wanted[key], TOLERANCE)
        for callback, state in wanted["callbacks"].items():
            assert found["callbacks"][callback].keys() == state.keys()
            if "average_model_state" in state:
                averages = found["callbacks"][callback]["average_model_state"]
                assert_same_tensors(averages, state["average_model_state"], TOLERANCE)


@pytest.mark.slow
def test_lightnings_callbacks_average_validate_save_and_resume_as_on_one_device(tmp_path):
    wanted = on_one_device(_fit_all, tmp_path)
    for found in in_ranks(3, _fit_all, "three", tmp_path):
        _same(found, wanted)
    _same_files(tmp_path, "three", False)
    wanted = on_one_device(_fit_all, tmp_path, "None")
    for found in in_ranks(2, _fit_all, "3:1", tmp_path, "three"):
        _same(found, wanted)
    _same_files(tmp_path, "3:1", True)


class _Shadow(Callback):
    """A user's average: plain lines over ``named_parameters``, used in validation.

    Args:
        hook: Where it copies the weights: before sharding, or after.
        average: How it averages.
        by_data: Whether it swaps by ``p.data.copy_``.
    """

    def __init__(self, hook, average, by_data) -> None:
        self.average, self.by_data = average, by_data
        self.shadow = {}
        setattr(self, hook, self._start)

    def _start(self, trainer, module, stage=None) -> None:
        if not self.shadow:
            self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.average(self.shadow, dict(module.named_parameters()))

    @torch.no_grad()
    def on_validation_start(self, trainer, module) -> None:
        self.kept = {n: p.detach().clone() for n, p in module.named_parameters()}
        self._show(module, self.shadow)

    @torch.no_grad()
    def on_validation_end(self, trainer, module) -> None:
        self._show(module, self.kept)

    def _show(self, module, values) -> None:
        for name, parameter in module.named_parameters():
            (parameter.data if self.by_data else parameter).copy_(values[name])

    @property
    def state_key(self) -> str:
        return f"shadow {self.average.__name__}"

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state) -> None:
        self.shadow = dict(state["shadow"])


def _by_mul_add(shadow, parameters):
    for name, parameter in parameters.items():
        shadow[name].mul_(0.8).add_(parameter.detach(), alpha=0.2)


def _by_foreach(shadow, parameters):
    torch._foreach_lerp_(list(shadow.values()), [p.data for p in parameters.values()], 0.2)


def _by_assignment(shadow, parameters):
    for name, parameter in parameters.items():
        shadow[name] = shadow[name] * 0.8 + parameter.detach() * 0.2


class _EmaOfTimm(nn.Module):
    """What timm's ModelEmaV3 does: a copy, and one foreach operator over its state."""

    def __init__(self, model, decay: float = 0.7) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model) -> None:
        own, other = self.module.state_dict().values(), model.state_dict().values()
        pairs = [(a, b) for a, b in zip(own, other, strict=True) if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 1.0 - self.decay)


class _Models(Callback):
    """Averages that are models, made before sharding."""

    def setup(self, trainer, module, stage) -> None:
        self.models = [
            AveragedModel(module, use_buffers=True),
            AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7)),
            AveragedModel(module, avg_fn=get_ema_avg_fn(0.7), use_buffers=True),
            _EmaOfTimm(module),
        ]

    def on_train_batch_end(self, trainer, module, *_) -> None:
        for model in self.models:
            getattr(model, "update_parameters", getattr(model, "update", None))(module)


class _Taught(_Averaged):
    """Its teacher is a part of it: rows of one shape that are cut at other places."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks[0]).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5).requires_grad_(False)

    def on_train_batch_end(self, *args) -> None:
        super().on_train_batch_end(*args)
        with torch.no_grad():
            for own, other in zip(
                self.teacher.parameters(), self.blocks[0].parameters(), strict=True
            ):
                own.lerp_(other, 0.3)

    def on_train_end(self) -> None:
        update_bn(loader(10), nn.Sequential(self.norm, self.inputs))


_SHADOWS = (
    ("setup", _by_mul_add, True),
    ("on_fit_start", _by_foreach, False),
    ("on_fit_start", _by_assignment, True),
)


def _fit_own(plan, folder, resume=None):
    # the last swaps first: each validates with another average
    shadows = [_Shadow(*given) for given in _SHADOWS]
    models, model = _Models(), _Taught()
    run = trainer(plan, max_epochs=2 if resume else 1, callbacks=[*shadows, models])
    run.fit(model, loader(28), loader(8), ckpt_path=resume and folder / f"{resume}.ckpt")
    run.save_checkpoint(folder / f"{plan}.ckpt")
    return model.validated, values_of(model), [values_of(one) for one in models.models]


@pytest.mark.filterwarnings("ignore:The layers .'norm'. .1 in all. are batch normalisation")
def test_averages_that_users_write_are_those_of_one_device_and_their_files_too(tmp_path):
    for plan, ranks, resume in (("three", 3, None), ("3:1", 2, "three")):
        wanted = on_one_device(_fit_own, tmp_path, resume and "None")
        for validated, values, models in in_ranks(ranks, _fit_own, plan, tmp_path, resume):
            assert validated == pytest.approx(wanted[0], rel=1e-4)
            assert_same_tensors(values, wanted[1], TOLERANCE)
            for found, expected in zip(models, wanted[2], strict=True):
                assert_same_tensors(found, expected, TOLERANCE)
        files = [
            torch.load(tmp_path / f"{of}.ckpt", weights_only=True)["callbacks"]
            for of in (plan, None)
        ]
        assert files[0].keys() == files[1].keys() and len(files[1]) == len(_SHADOWS)
        for key, state in files[1].items():
            assert_same_tensors(files[0][key]["shadow"], dict(state["shadow"]), TOLERANCE)


class _Normalised(Net):
    """Its statistics are those of its samples, and change no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.norm(batch[0])
        return super().training_step(batch, batch_idx)


def _fit_normalised(plan):
    model, average = _Normalised(), EMAWeightAveraging(decay=0.6, use_buffers=True)
    trainer(plan, callbacks=[average]).fit(model, loader(24), loader(8))
    values = {key: value.clone() for key, value in values_of(average._average_model).items()}
    return values.pop("module.norm.running_var"), values


@pytest.mark.filterwarnings("ignore:The layers .'norm'. .1 in all. are batch normalisation")
def test_buffers_of_batch_normalisation_are_averaged_as_the_model_holds_them():
    _, wanted = on_one_device(_fit_normalised)
    (variance, values), (other, its) = in_ranks(2, _fit_normalised, "3:1")
    assert_same_tensors(values, wanted, TOLERANCE)
    assert_same_tensors(its, wanted, TOLERANCE)
    assert torch.equal(variance, other)  # that of microbatches, on all ranks
