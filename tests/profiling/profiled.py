"""What the profiling tests share: a small GPT as a LightningModule, profiled in forked ranks.

Emulated devices run on virtual time that the ranks share. There the products of matrices take what
the speeds say, and all else a nanosecond here and there; so nothing depends on this machine.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from byte_gpt import ByteGPT, ByteLanguageModel
from common import in_ranks as in_ranks_of_real_time
from launch import SOON_S, RankFailure
from lightning.pytorch import LightningModule, Trainer
from plans import quiet_strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from virtual_time import SharedTime, VirtualHost

from lightning_cephalo.emulation import Emulation
from lightning_cephalo.plan import Problem
from lightning_cephalo.preparation import prepare as planning

__all__ = [
    "GPT",
    "SOON_S",
    "BatchNormNet",
    "ByteLanguageModel",
    "RankFailure",
    "fit",
    "in_ranks",
    "loader",
    "measured_by",
    "profile",
]


class GPT(LightningModule):
    """Predicts the next byte."""

    def __init__(self, width: int = 32, depth: int = 2, context: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = ByteGPT(width, depth, heads=4, context=context)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = F.cross_entropy(self.network(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(samples: int = 64, context: int = 16, batch_size: int = 4) -> DataLoader:
    tokens = torch.randint(0, 256, (samples, context), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


class _Folders:
    """Gives all ranks the same folder for each of their fits, to share its time in."""

    def __init__(self) -> None:
        self.parent = Path()
        self._count = itertools.count()

    def next(self) -> Path:
        folder = self.parent / str(next(self._count))
        folder.mkdir(exist_ok=True)
        return folder


_folders = _Folders()


def in_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 450.0
) -> list[Any]:
    """As of ``common``, for ranks that call ``fit``; all of them equally often."""
    with tempfile.TemporaryDirectory() as folder:
        _folders.parent = Path(folder)
        return in_ranks_of_real_time(world_size, function, *args, timeout_s=timeout_s)


def fit(
    module: LightningModule,
    data: Any,
    *,
    world_size: int = 2,
    speeds: tuple[float, ...] | None = None,
    capacity_bytes: tuple[int | None, ...] | None = None,
    total_flops_per_s: float = 1e13,
    is_time_shared: bool = True,
    strategy: dict[str, Any] | None = None,
    emulation: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Train in this rank with a quiet Trainer; every rank calls it.

    ``is_time_shared`` says whether emulated ranks wait for each other in collectives; it costs a
    fifth more, and only who looks at times needs it.
    """
    callbacks = list(options.pop("callbacks", []))
    host = VirtualHost(tick_s=1e-9)
    is_emulated = speeds is not None or capacity_bytes is not None
    if is_emulated:
        speeds = speeds or (1.0,) * world_size
        emulated = Emulation(
            speeds, capacity_bytes, total_flops_per_s, host.clock, **emulation or {}
        )
        callbacks.insert(0, emulated)
    chosen = {"timeout": timedelta(minutes=30), **(strategy or {})}
    options = {"max_steps": 1, "logger": False, "num_sanity_val_steps": 0, **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=quiet_strategy(**chosen),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with ExitStack() as stack:
        if is_emulated and is_time_shared:
            stack.enter_context(SharedTime(host, _folders.next()))
        trainer.fit(module, data)
    return trainer


class _Measured(Exception):
    """A fit has measured its problem, and ends."""


def profile(module: LightningModule, data: Any, **options: Any) -> Problem:
    """The problem that ``fit`` measures; nothing is planned by it."""
    problems: list[Problem] = []

    def ends(measure: Callable[..., Problem], arguments: dict[str, Any]) -> Problem:
        problems.append(measure(**arguments))
        raise _Measured

    with measured_by(ends), suppress(_Measured):
        fit(module, data, **options)
    return problems[0]


@contextmanager
def measured_by(
    measured: Callable[[Callable[..., Problem], dict[str, Any]], Problem],
) -> Iterator[None]:
    """Call a function, with the one that measures a job, in place of that one."""
    measure = planning.measure
    planning.measure = lambda **arguments: measured(measure, arguments)
    try:
        yield
    finally:
        planning.measure = measure


class NormalisedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class BatchNormNet(LightningModule):
    """Two blocks with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(NormalisedBlock() for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
