"""What the ranks of these tests train, on whatever device they are told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from plans import GLOBAL_BATCH, QUIET, plan_of, quiet_strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, chunked_cross_entropy, loss_over_batch
from lightning_cephalo.plan import Plan

STEPS = 3


class Encoder(pl.LightningModule):
    """Three transformer layers and a head.

    Args:
        dropout: Of the layers; 0 where results are compared.
        weighted: Samples without a target do not count, and the step returns how many do.
        logs_host_values: The step also logs a tensor in host memory.
        logged: Arguments for logging the loss.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        weighted: bool = False,
        logs_host_values: bool = False,
        **logged: Any,
    ) -> None:
        super().__init__()
        self.weighted, self.logs_host_values = weighted, logs_host_values
        torch.manual_seed(1)
        layer = [nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in "abc"]
        self.layers = nn.Sequential(*layer)
        self.head = nn.Linear(16, 1)
        self.logged = {"sync_dist": True, **logged}
        self.losses: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.logs_host_values:
            self.log("samples", torch.tensor(1.0))
        if not self.weighted:
            loss = self._loss(batch)
            self.log("loss", loss, **self.logged)
            return loss
        x, y = batch
        counts = ~y.isnan()
        errors = (self.head(self.layers(x)).mean(1) - y.nan_to_num()) ** 2
        loss = (errors * counts).sum() / counts.sum()  # 0/0 where no sample has a target
        self.log("loss", loss, **self.logged)
        return {"loss": loss, "weight": counts.sum()}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validated", self._loss(batch), sync_dist=True)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.layers(x)).mean(1), y)

    def on_train_batch_end(self, *_: Any) -> None:
        if "loss" in self.trainer.callback_metrics:
            self.losses.append(self.trainer.callback_metrics["loss"].clone())

    def on_validation_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["validated"].clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam makes steps of full size of rounding noise where gradients are zero
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class TwoLosses(Encoder):
    """Updates the head by a loss of its own, then everything, with manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        whole, head = self.optimizers()
        features = self.layers(x)
        head.zero_grad()
        self.manual_backward((self.head(features.detach()).mean(1) - y).abs().mean())
        self.clip_gradients(head, 0.5, "norm")
        head.step()
        loss = nn.functional.mse_loss(self.head(features).mean(1), y)
        whole.zero_grad()
        self.manual_backward(loss)
        whole.step()
        self.log("loss", loss, **self.logged)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9),
            torch.optim.SGD(self.head.parameters(), lr=0.05),
        ]


class OverBatch(Encoder):
    """Compares every sample with all others of the batch."""

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return loss_over_batch(self._spread, self.head(self.layers(x)).mean(1), y > 0)

    def _spread(self, rows: Tensor, is_kept: Tensor) -> Tensor:
        apart = (rows[:, None] - rows).square() * is_kept
        return apart.mean() + self.head.bias.square().sum()


class Tokens(Encoder):
    """Reads samples as tokens, and predicts them; the head has the embedding's table and a bias."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embed = nn.Embedding(23, 16)
        self.head = nn.Linear(16, 23)
        self.head.weight = self.embed.weight

    def _loss(self, batch: list[Tensor]) -> Tensor:
        tokens = (batch[0].sum(2) * 4).long().remainder(23)
        hidden = self.layers(self.embed(tokens))
        return chunked_cross_entropy(self.head, hidden, tokens, label_smoothing=0.1, chunk_tokens=3)


class PaddingSeen(pl.Callback):
    """Bytes of padded slices after a step: gathers and reduces, held and counted on."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        model = trainer.strategy.session.model
        counted = model.padded_bytes()
        self.held = [model.padding.gathers.held_bytes, model.padding.reduces.held_bytes]
        self.counted = [counted.gathers, counted.reduces]


class ChangesPlan(pl.Callback):
    """Changes the plan behind the second step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.strategy.change_plan(self.plan)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert trainer.strategy.plan == self.plan


class ArraysSeen(pl.Callback):
    """Whether parameters that a hook moves to the host are whole there, as arrays and tensors."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.are_whole = True
        for parameter in module.parameters():
            whole, moved = parameter.full_tensor().detach().cpu(), parameter.detach().cpu()
            for found in (torch.tensor(moved.numpy()), moved.full_tensor(), moved + 0 * whole):
                self.are_whole &= found.device.type == "cpu" and torch.equal(found, whole)


def data(samples: int = GLOBAL_BATCH * STEPS, without_target: int = 0) -> DataLoader:
    """Batches of the global size, whose first samples have no target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 5, 16, generator=generator)
    y = x.sum((1, 2))[:, None] / 10
    y[torch.arange(samples) % GLOBAL_BATCH < without_target] = torch.nan
    return DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH)


def strategy(plan: Plan | None, **options: Any) -> CephaloStrategy:
    """A quiet strategy; without a plan it measures and solves."""
    return quiet_strategy(plan=plan, global_batch_size=GLOBAL_BATCH, **options)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer on this node's ranks."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    given = {"accelerator": "gpu", "devices": devices, **QUIET, **options}
    return pl.Trainer(strategy=strategy, **given)


def half(accelerator: str, scale: float) -> MixedPrecision:
    """16-mixed with a scale to begin with."""
    return MixedPrecision("16-mixed", accelerator, torch.amp.GradScaler(accelerator, scale))


def train(
    rank: int,
    environments: list[dict[str, str]],
    ranks: list[tuple[tuple[int, ...], float]] | str | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """Train and return losses and a digest of the weights.

    Args:
        rank: This rank.
        environments: What the launcher gives to each rank.
        ranks: The plan's ranks; "solve": measured and solved; None: Lightning alone, on one device.
        given: Under "plan", "strategy", "trainer", "model" and "data" options for each of them;
            "accelerators": the kind of each rank's device;
            "scale" of 16-mixed; "compile" with this backend; "resume" from this checkpoint, and
            "save" one; "padding" to look at that of the slices; "arrays" to look at parameters on
            the host; "change" to a plan of these ranks behind the second step;
            "manual" for manual optimization; "over_batch" for a loss over the batch;
            "tokens" for a language model.
    """
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = dict(given.get("trainer", {}))
    if "accelerators" in given:
        options["accelerator"] = given["accelerators"][rank]
    if "change" in given:
        options["callbacks"] = [ChangesPlan(plan_of(*given["change"]))]
    if "scale" in given:
        options["plugins"] = [half("cuda", given["scale"])]
    if ranks is None:
        chosen: Any = "auto"
    elif ranks == "solve":
        chosen = strategy(None, **given.get("strategy", {}))
    else:
        plan = plan_of(*ranks, **given.get("plan", {}))
        chosen = strategy(plan, **given.get("strategy", {}))
    kinds = {"manual": TwoLosses, "over_batch": OverBatch, "tokens": Tokens}
    kind = next((kinds[name] for name in kinds if name in given), Encoder)
    model = kind(**given.get("model", {}))
    if "compile" in given:
        for layer in model.layers:
            layer.compile(backend=given["compile"])
    padding, arrays = PaddingSeen(), ArraysSeen()
    asked = {"padding": padding, "arrays": arrays}
    callbacks = [callback for name, callback in asked.items() if name in given]
    callbacks.extend(options.pop("callbacks", ()))
    used = trainer(chosen, **options, callbacks=callbacks)
    loaders = [data(**given.get("data", {}))]
    if "val_check_interval" in options:
        loaders.append(data(GLOBAL_BATCH + 3))
    used.fit(model, *loaders, ckpt_path=given.get("resume"))
    if "save" in given:
        used.save_checkpoint(given["save"])
    found = {
        "losses": [float(loss) for loss in model.losses],
        "validated": [float(loss) for loss in model.validated],
        "weights": float(sum(parameter.double().abs().sum() for parameter in model.parameters())),
        "device": str(used.strategy.root_device),
        "folder": sorted(path.name for path in Path(given["folder"]).iterdir())
        if "folder" in given
        else [],
    }
    if "padding" in given:
        found["padding"] = padding.held, padding.counted
    if "arrays" in given:
        found["arrays"] = arrays.are_whole
    scaler = getattr(used.precision_plugin, "scaler", None)
    if scaler is not None:
        found["scale"] = scaler.get_scale()
    return found
