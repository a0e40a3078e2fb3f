"""Data from a stream, and an average of the weights that validates.

python examples/streaming.py

Every rank reads the whole stream, with the global batch size, and collates its own samples. So a
step has the samples that one device would have. `EMAWeightAveraging` is Lightning's own.
"""

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

WIDTH = 32


class Waves(IterableDataset):
    """Points of sine waves, made on the fly; the same stream on every rank."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.samples):
            x = 6 * torch.rand(1, generator=generator) - 3
            yield x, torch.sin(2 * x)


class Regression(LightningModule):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validated", mse_loss(self(batch[0]), batch[1]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(samples: int = 8192, **options: object) -> LightningModule:
    seed_everything(1)
    model = Regression()
    averaging = EMAWeightAveraging(decay=0.9)
    trainer = Trainer(
        **{"strategy": "cephalo", "max_epochs": 2, "callbacks": [averaging], **options}
    )
    training = DataLoader(Waves(samples, seed=1), batch_size=64)
    trainer.fit(model, training, DataLoader(Waves(256, seed=2), batch_size=64))
    return model


if __name__ == "__main__":
    main()
