"""Steps that change the batch that they get train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, dataset, trainer, values_of
from lightning.pytorch import Trainer
from plans import GLOBAL_BATCH, QUIET
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, default_collate

from lightning_cephalo import CephaloStrategy, Planner


class Rebinds(Net):
    """Scales what a dict holds, as code does that turns bytes into numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"] = batch["x"] / 2.0
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class Pops(Net):
    """Takes the labels out of the batch, and passes on the rest."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = batch.pop("y")
        loss = mse_loss(self(**batch), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class InPlace(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"].sub_(0.1).mul_(2.0)
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class PopsManually(Pops):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        batch["x"].mul_(0.5)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def named(rows: Any) -> dict[str, Tensor]:
    x, y = default_collate(rows)
    return {"x": x, "y": y}


def fit(plan: str | None, kind: type[Any]) -> Any:
    model = kind()
    if plan == "measured":
        strategy = CephaloStrategy(
            planner=Planner(verbose=False, budget_s=1.0, remeasure=True),
            global_batch_size=GLOBAL_BATCH,
        )
        fitting = Trainer(accelerator="cpu", strategy=strategy, devices=2, **QUIET)
    else:
        fitting = trainer(plan)
    fitting.fit(model, DataLoader(dataset(16), batch_size=GLOBAL_BATCH, collate_fn=named))
    return model.losses, values_of(model)


def measured(_: str, kind: type[Any]) -> Any:
    return fit("measured", kind)


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

KINDS = (Rebinds, Pops, InPlace, PopsManually)
FITS = Cases(
    {
        **{("3:1", kind): ("3:1", fit, kind) for kind in KINDS if kind is not PopsManually},
        **{("whole", kind): ("whole", fit, kind) for kind in KINDS},
        **{("measured", kind): ("even", measured, kind) for kind in KINDS},
    }
)


@pytest.mark.parametrize(("plan", "kind"), list(FITS.cases))
def test_it_trains_as_on_one_device(plan, kind):
    wanted_losses, wanted = on_one_device(fit, kind)
    for losses, values in FITS[(plan, kind)]:
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert_same_tensors(values, wanted, 1e-5)
