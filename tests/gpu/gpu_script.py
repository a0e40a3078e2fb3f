"""Trains a small model as told on the command line and writes its losses: run by test_gpu.py."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan

GLOBAL_BATCH = 8
NO_SYNCS_IN = (3, 4, 5)


class Model(pl.LightningModule):
    def __init__(self, layers: int, no_syncs: bool = False) -> None:
        super().__init__()
        self.no_syncs = no_syncs
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(32, 1)
        self.losses: list[torch.Tensor] = []
        self.reserved_bytes: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.layers(x)).mean(1), y)
        self.log("loss", loss, sync_dist=not self.no_syncs)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.no_syncs and self.trainer.global_step in NO_SYNCS_IN and self.on_gpu:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *args):
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self.losses.append(self.trainer.callback_metrics["loss"].clone())
        self.reserved_bytes.append(torch.cuda.memory_reserved() if self.on_gpu else 0)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy(options: argparse.Namespace) -> pl.strategies.Strategy | str:
    if options.solve:
        return CephaloStrategy(
            global_batch_size=GLOBAL_BATCH,
            process_group_backend=options.backend,
            planner=Planner(verbose=False),
        )
    if options.plan is None:
        return "auto"
    ranks = tuple(
        RankPlan(tuple(sizes), fraction, offload=options.offload)
        for sizes, fraction in json.loads(options.plan)
    )
    return CephaloStrategy(
        plan=Plan(ranks, reshard_after_forward=not options.stay),
        global_batch_size=GLOBAL_BATCH,
        recompute=not options.keep,
        process_group_backend=options.backend,
        planner=Planner(verbose=False),
        record=options.folder if options.trace else None,
    )


def precision_of(options: argparse.Namespace) -> dict:
    if options.precision != "16-mixed":
        return {"precision": options.precision}
    # torch's own scale to begin with overflows with or without us: no first step would be compared
    scaler = torch.amp.GradScaler(options.accelerator, init_scale=2.0**13)
    return {"plugins": [MixedPrecision("16-mixed", "cuda", scaler)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--plan", help="[[microbatch sizes, state fraction], ...]")
    parser.add_argument("--backend")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--share-one-device", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--stay", action="store_true", help="units, gathered")
    parser.add_argument("--solve", action="store_true", help="measure and solve for the plan")
    parser.add_argument("--clip", type=float, help="norm of the gradients")
    parser.add_argument("--no-syncs", action="store_true", help="some steps raise where they wait")
    parser.add_argument("--epochs", type=int, default=2, help="of four steps")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, 32, generator=generator)
    data = TensorDataset(x, x.sum((1, 2))[:, None] / 10)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = ranks
    if options.share_one_device:
        # a rank takes the device at its own place: give all places the same one
        devices = 1
        os.environ["LOCAL_RANK"] = "0"
        # NCCL refuses one device twice in a host, and so takes each rank for a host of its own
        os.environ["NCCL_HOSTID"] = f"rank {os.environ.get('RANK', '0')}"
    trainer = pl.Trainer(
        strategy=strategy(options),
        accelerator=options.accelerator,
        devices=devices,
        **precision_of(options),
        gradient_clip_val=options.clip,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(options.layers, options.no_syncs)
    trainer.fit(model, DataLoader(data, batch_size=GLOBAL_BATCH))
    said = {
        "losses": [float(loss) for loss in model.losses],
        "device": str(trainer.strategy.root_device),
    }
    if isinstance(trainer.strategy, CephaloStrategy):
        measured = trainer.strategy.report.ranks
        said["busy_s"] = [rank.busy_s for rank in measured]
        said["waiting_s"] = [rank.waiting_s for rank in measured]
        said["held"] = [asdict(rank) for rank in trainer.strategy.report.memory]
        said["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        said["reserved_bytes"] = model.reserved_bytes
    (options.folder / f"{trainer.global_rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
