"""Everything about a run in a YAML file, by Lightning's command line.

python examples/cli.py fit --config examples/cli.yaml
python examples/cli.py fit --config examples/cli.yaml --ckpt_path last.ckpt    # goes on, anywhere

The strategy and its options are part of the file. A checkpoint is the ordinary one: the run goes on
with another plan or number of ranks.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningCLI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Classifier(LightningModule):
    def __init__(self, width: int = 32, depth: int = 3, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Samples(LightningDataModule):
    def __init__(self, samples: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 16, generator=generator)
        y = (x @ torch.randn(16, CLASSES, generator=generator)).argmax(1)
        samples = TensorDataset(x, y)
        return DataLoader(samples, self.batch_size, shuffle=True, generator=generator)


def main(args: ArgsType = None) -> LightningModule:
    return LightningCLI(
        Classifier, Samples, args=args, save_config_kwargs={"overwrite": True}
    ).model


if __name__ == "__main__":
    main()
