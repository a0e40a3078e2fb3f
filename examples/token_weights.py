"""Fine-tuning of low-rank adapters (LoRA), with a loss that is a mean over tokens.

python examples/token_weights.py

The weights of the model are frozen; each linear layer of a block learns a low-rank addition. Lines
differ in length, so ranks and microbatches differ in their numbers of tokens. The step returns its
number as `"weight"`: the gradient is that of the mean over all tokens of the global batch.
"""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

WIDTH, PADDING = 32, 0


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank addition that learns."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True).requires_grad_(False)
        self.out = Adapted(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(x)[0])


class Tuned(LightningModule):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH, padding_idx=PADDING).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = Adapted(nn.Linear(WIDTH, 256))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        targets = batch[:, 1:]
        loss = cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return {"loss": loss, "weight": (targets != PADDING).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3)


def collated(lines: list[bytes]) -> Tensor:
    """Lines as bytes, padded to the longest."""
    rows = [torch.tensor(list(line)) for line in lines]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def main(**options: object) -> LightningModule:
    seed_everything(1)
    model = Tuned()
    lines = [line for line in Path(__file__).read_bytes().splitlines() if len(line) > 2]
    trainer = Trainer(**{"strategy": "cephalo", "max_epochs": 10, **options})
    trainer.fit(model, DataLoader(lines, batch_size=8, collate_fn=collated, shuffle=False))
    return model


if __name__ == "__main__":
    main()
