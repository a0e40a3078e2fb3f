"""A LightningModule with a ``backward()`` of its own trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, loader, trainer, values_of
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError

TOLERANCE = 1e-5


class Regularized(Net):
    """Runs a backward in a hook, which gives unused parameters their only gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.extra = torch.nn.Parameter(torch.randn(5, 3))
        self.unseen = torch.nn.Parameter(torch.tensor(2.0))

    def on_after_backward(self) -> None:
        held = self.extra.square().sum() + self.blocks[1].down.weight.square().mean()
        (held + self.unseen.square() + self.extra[1:3].sum()).backward()


class Scales(Regularized):
    """Multiplies the loss, and looks at the gradients behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 3).backward(*args, **kwargs)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        self.blocks[0].down.weight.grad.mul_(2.0)


class ByAutograd(Regularized):
    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward([loss], retain_graph=True)


class PluginScales(Precision):
    """A precision plugin of the user's, with a backward of its own."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * 3, model, *args, **kwargs)


def fit(plan: str | None, kind: type[Net], options: dict[str, Any]):
    model = kind()
    trainer(plan, max_epochs=2, **options).fit(model, loader(14), loader(8))
    return model.losses, getattr(model, "norms", []), values_of(model)


OPTIONS: dict[type[Net], dict[str, Any]] = {
    Scales: {"accumulate_grad_batches": 2},
    ByAutograd: {"gradient_clip_val": 2.0},
    Regularized: {"plugins": PluginScales()},
}


FITS = Cases({kind: ("three", fit, kind, options) for kind, options in OPTIONS.items()})


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_own_backward_gives_the_gradients_of_one_device(kind):
    wanted_losses, wanted_norms, wanted = on_one_device(fit, kind, OPTIONS[kind])
    for losses, norms, values in FITS[kind]:
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert norms == pytest.approx(wanted_norms, rel=1e-4)
        assert_same_tensors(values, wanted, TOLERANCE)


class Twice(Net):
    def backward(self, loss: Tensor) -> None:
        loss.backward()
        loss.backward()


class Never(Net):
    def backward(self, loss: Tensor) -> None:
        pass


class OnOneRank(Net):
    def backward(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            loss.backward()


class ByRank(Net):
    def backward(self, loss: Tensor) -> None:
        (loss * (1.0 + self.global_rank)).backward()


class FailsOnOneRank(Net):
    def backward(self, loss: Tensor) -> None:
        if self.global_rank == 1:
            raise UnsupportedError("an error of the user's")
        loss.backward()


REFUSED = {
    Twice: "second backward of the loss",
    Never: "without a backward of the loss",
    OnOneRank: "without a backward of the loss",
    ByRank: "another factor on each rank",
    FailsOnOneRank: "an error of the user's",
}


def fails(plan: str, kind: type[Net]) -> tuple[str, str]:
    with pytest.raises((UnsupportedError, RemoteRankError, RuntimeError)) as refused:
        fit(plan, kind, {})
    return type(refused.value).__name__, str(refused.value)


FAILURES = Cases({kind: ("3:1", fails, kind) for kind in REFUSED})


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_cannot_do_is_refused_by_name_on_all_ranks(kind):
    for name, message in FAILURES[kind]:
        assert REFUSED[kind] in message, (name, message)
        assert name in ("UnsupportedError", "RemoteRankError")
