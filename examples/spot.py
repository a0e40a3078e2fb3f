"""Training on machines that may be taken away, and goes on as if nothing had happened.

python -m lightning_cephalo.run --nproc-per-node 2 examples/spot.py

Each rank prints its process. Kill one from another terminal, or all of them: `kill -9 4711`. After
about two seconds the ranks go on at the last step that each has kept in the host's memory. Steps
since then are repeated: with ``recover=True`` one at most. Losses are those of a run that nobody
interrupts. No line of a script is needed for it.

With a storage the training outlives all hosts. Give a folder or a URL for fsspec, kill the launcher
and all ranks, and start it again, on this host or another:

python -m lightning_cephalo.run --nproc-per-node 2 examples/spot.py s3://bucket/run

Hosts may come and go. Start this on each. If the host of the endpoint is taken away, the others
wait until another one is started at its address. ``copies=1`` keeps rows of a host on another one,
so that nothing is read from the storage if it is taken away:

python -m lightning_cephalo.run --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint na:29400 \\
    --rdzv-id spot examples/spot.py s3://bucket/run
"""

import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Recovery

WIDTH = 32


class Regressor(LightningModule):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        loss = mse_loss(self.head(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Shows(Callback):
    """Prints which processes train, and the loss of every 20th step."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        rank, process, step = trainer.global_rank, os.getpid(), trainer.global_step
        print(f"rank {rank} begins at step {step}; to kill it: kill -9 {process}\n", end="")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(self.pause_s)  # a step of this model is too short to aim at
        if trainer.is_global_zero and trainer.global_step % 20 == 0:
            print(
                f"step {trainer.global_step}: loss {trainer.callback_metrics['loss']:.4f}\n", end=""
            )


def main(
    storage: str | None = None, samples: int = 2048, pause_s: float = 0.05, **options: Any
) -> LightningModule:
    seed_everything(1, verbose=False)
    x = torch.randn(samples, WIDTH)
    data = TensorDataset(x, torch.sin(x).sum(1, keepdim=True))
    model = Regressor()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    strategy: Any = "cephalo"
    if storage is not None:
        strategy = CephaloStrategy(
            recover=Recovery(copies=int(hosts > 1), storage=storage, storage_every_s=10.0)
        )
    callbacks = [Shows(pause_s), *options.pop("callbacks", [])]
    defaults = {"strategy": strategy, "accelerator": "cpu", "devices": ranks, "max_epochs": 60}
    defaults["num_nodes"] = hosts
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(**{**defaults, **quiet, **options}, callbacks=callbacks)
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=False))
    return model


if __name__ == "__main__":
    main(*sys.argv[1:2])
