"""Contrastive learning, where every sample is compared with all others of the global batch.

python examples/contrastive.py

Two views of a sample belong together (SimCLR, CLIP). The loss is no mean over samples: each pair is
compared with all pairs of the global batch, wherever they are. `loss_over_batch` gives the function
the rows of the whole batch. On one device it only calls the function.
"""

import math

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import loss_over_batch

WIDTH = 32


class Encoder(nn.Module):
    def __init__(self, inputs: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Contrastive(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (normalize(self.encoder(view), dim=-1) for view in batch)
        loss = loss_over_batch(self.contrast, one, other)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def contrast(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the loss of all pairs of the batch; `one` and `other` have a row for each."""
        logits = self.log_scale.exp() * one @ other.T
        pairs = torch.arange(len(one), device=one.device)
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(samples: int = 4096, **options: object) -> Contrastive:
    seed_everything(1)
    module = Contrastive()
    clean = torch.randn(samples, 16)
    views = [clean + 0.1 * torch.randn_like(clean) for _ in range(2)]
    defaults = {"strategy": "cephalo", "devices": "auto", "max_epochs": 5}
    trainer = Trainer(**{**defaults, **options})
    trainer.fit(module, DataLoader(TensorDataset(*views), batch_size=64))
    return module


if __name__ == "__main__":
    main()
