"""Two ranks with memories 3:1, and a model that even sharding cannot hold there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from profiled import ByteLanguageModel, in_ranks
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.emulation import EmulatedDevice, Emulation, active_device

CONTEXT, STEPS = 32, 4


@dataclass(frozen=True)
class Size:
    """Of the model, and of what two ranks hold.

    Attributes:
        depth: Number of blocks.
        capacities_bytes: Of each rank.
    """

    depth: int
    capacities_bytes: tuple[int, int]


# 20 and 5 MB of state
LARGE, SMALL = Size(24, (21_000_000, 7_000_000)), Size(6, (7_200_000, 2_400_000))


@dataclass(frozen=True)
class Outcome:
    """How training ended on one rank.

    Attributes:
        steps: Made.
        peak_bytes: Most bytes alive at once while training; of what fitted.
        failure: The kind of error, "" if there was none.
        message: Of the error.
        state_fraction: This rank's share of the state.
        predicted_bytes: The plan's figure for the peak; None without a plan.
    """

    steps: int
    peak_bytes: int
    failure: str
    message: str
    state_fraction: float
    predicted_bytes: float | None = None


class _Peak(Callback):
    device: EmulatedDevice | None = None
    peak_bytes = 0

    def on_train_start(self, *_: Any) -> None:
        self.device = active_device()
        assert self.device is not None
        self.device.reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.device is not None:
            self.peak_bytes = self.device.peak_bytes

    on_exception = on_train_batch_end


def model(depth: int) -> ByteLanguageModel:
    """About 0.8 MB of state in each block."""
    torch.manual_seed(1)
    return ByteLanguageModel(width=64, depth=depth, heads=4, context=CONTEXT)


def trained(strategy: Any, samples_per_rank: int, size: Size) -> Outcome:
    """Train in this rank; every rank calls it."""
    emulation = Emulation((1.0, 1.0), size.capacities_bytes, total_flops_per_s=1e13)
    peak = _Peak()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[emulation, peak],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    tokens = torch.randint(0, 256, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=samples_per_rank)
    failure = message = ""
    try:
        trainer.fit(model(size.depth), data)
    except Exception as raised:  # out of memory on one rank, a lost connection on the other
        failure, message = type(raised).__name__, str(raised)
    fraction, predicted = 0.5, None
    plan = getattr(strategy, "plan", None)
    if plan is not None:
        part = plan.ranks[trainer.global_rank]
        fraction, predicted = part.state_fraction, part.memory_bytes
    return Outcome(trainer.global_step, peak.peak_bytes, failure, message, fraction, predicted)


def under_even_sharding(size: Size) -> list[Outcome]:
    """Outcomes of both ranks under Lightning's own even sharding (FSDP2).

    With a single sample per rank, as it keeps activations: it is the state that has no room.
    """

    def rank() -> Outcome:
        return trained(
            ModelParallelStrategy(
                data_parallel_size=2,
                tensor_parallel_size=1,
                save_distributed_checkpoint=False,
                timeout=timedelta(seconds=30),
            ),
            samples_per_rank=1,
            size=size,
        )

    return in_ranks(2, rank)


def under_cephalo(size: Size) -> list[Outcome]:
    """Outcomes of both ranks under cephalo."""
    return in_ranks(
        2,
        lambda: trained(
            CephaloStrategy(planner=Planner(verbose=False), timeout=timedelta(seconds=100)), 4, size
        ),
    )
