"""Two networks against each other: manual optimization with two optimizers.

python examples/gan.py

The generator learns to draw points on a circle. Nothing but `strategy="cephalo"` differs from a
script for one device.
"""

import math

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

NOISE, WIDTH = 8, 64


class Network(nn.Module):
    """A stack of equal blocks, which become units."""

    def __init__(self, inputs: int, outputs: int, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def loss_of(logits: Tensor, is_real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


class Gan(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Network(NOISE, 2), Network(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, noise = batch
        generating, discriminating = self.optimizers()
        fake = self.generator(noise)

        self.toggle_optimizer(discriminating)
        loss = loss_of(self.discriminator(real), True)
        loss = loss + loss_of(self.discriminator(fake.detach()), False)
        self.manual_backward(loss)
        self.clip_gradients(discriminating, 1.0, "norm")
        discriminating.step()
        discriminating.zero_grad()
        self.untoggle_optimizer(discriminating)
        self.log("discriminator", loss, prog_bar=True, sync_dist=True)

        self.toggle_optimizer(generating)
        loss = loss_of(self.discriminator(fake), True)
        self.manual_backward(loss)
        generating.step()
        generating.zero_grad()
        self.untoggle_optimizer(generating)
        self.log("generator", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        ]


def circle(samples: int) -> TensorDataset:
    """Points on a circle, and noise to draw others from."""
    angle = 2 * math.pi * torch.rand(samples)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), torch.randn(samples, NOISE))


def main(samples: int = 4096, **options: object) -> LightningModule:
    seed_everything(1)
    model = Gan()
    trainer = Trainer(**{"strategy": "cephalo", "max_epochs": 4, **options})
    trainer.fit(model, DataLoader(circle(samples), batch_size=64, drop_last=True))
    return model


if __name__ == "__main__":
    main()
