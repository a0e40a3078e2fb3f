"""Self-supervised learning with a teacher that follows the student.

python examples/momentum_teacher.py

The student predicts what the teacher makes of another view of the same sample (BYOL). The teacher's
weights are an average of the student's: they are written in a hook, in a block of
`writable_parameters`, which also runs on one device.
"""

import copy

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import writable_parameters

WIDTH = 32


class Encoder(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Bootstrap(LightningModule):
    def __init__(self, momentum: float = 0.99) -> None:
        super().__init__()
        self.momentum = momentum
        self.student, self.predictor = Encoder(), nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = batch
        predicted = normalize(self.predictor(self.student(one)), dim=-1)
        with torch.no_grad():
            wanted = normalize(self.teacher(other), dim=-1)
        loss = 2 - 2 * (predicted * wanted).sum(-1).mean()
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        with torch.no_grad(), writable_parameters(self.teacher, self.student):
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.lerp_(student, 1 - self.momentum)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.student.parameters(), *self.predictor.parameters()]
        return torch.optim.AdamW(trained, lr=1e-3)


def views(samples: int) -> TensorDataset:
    """Two noisy views of each sample."""
    clean = torch.randn(samples, 4) @ torch.randn(4, 16)
    return TensorDataset(*(clean + 0.1 * torch.randn_like(clean) for _ in range(2)))


def main(samples: int = 4096, **options: object) -> LightningModule:
    seed_everything(1)
    model = Bootstrap()
    trainer = Trainer(**{"strategy": "cephalo", "max_epochs": 2, **options})
    trainer.fit(model, DataLoader(views(samples), batch_size=64, drop_last=True))
    return model


if __name__ == "__main__":
    main()
