"""Steps that return None, and microbatches that skip blocks, are those of one device."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback
from plans import GLOBAL_BATCH, PLANS
from torch import Tensor

SAMPLES = 5 * GLOBAL_BATCH


class Hooks(Callback):
    """Notes which hooks run, and what they see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_zero_grad(self, trainer, module, optimizer) -> None:
        self.seen.append("zero_grad")

    def on_before_backward(self, trainer, module, loss) -> None:
        self.seen.append("backward")

    def on_after_backward(self, trainer, module) -> None:
        self.seen.append("after")

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        has_gradients = any(parameter.grad is not None for parameter in module.parameters())
        self.seen.append(("update", has_gradients))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append((sorted(outputs), trainer.global_step))


class Skips(Net):
    """Skips whole steps on purpose."""

    def __init__(self, skipped: tuple[int, ...]) -> None:
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("share", float(batch_idx in self.skipped), on_step=False, on_epoch=True)
        return None if batch_idx in self.skipped else loss

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def fitted(plan: str | None, make: Any, **options: Any) -> dict[str, Any]:
    hooks, module = Hooks(), make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(plan, callbacks=[hooks], max_epochs=1, **options)
        made.fit(module, loader(SAMPLES))
    told = [str(each.message) for each in caught]
    return {
        "values": values_of(module),
        "hooks": hooks.seen,
        "metrics": {name: float(value) for name, value in made.callback_metrics.items()},
        "told": [text for text in told if "returned `None`" in text],
    }


WHOLE = [
    ((1, 3), {}),
    ((0, 1, 2, 3, 4), {}),
    ((1, 2), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
]


def _whole(plan: str | None) -> list[dict[str, Any]]:
    return [fitted(plan, lambda s=skipped: Skips(s), **options) for skipped, options in WHOLE]


class Decides(Net):
    """Decides by its samples which blocks they pass, and whether they train at all."""

    def __init__(self, *, skips_all: bool = False) -> None:
        super().__init__()
        self.skips_all = skips_all

    def forward(self, x: Tensor) -> Tensor:
        first = float(x[0, 0])
        chosen = [block for at, block in enumerate(self.blocks) if first > 0.8 * at - 1.2]
        x = self.inputs(x)
        for block in reversed(chosen) if float(x[0, 1].detach()) > 1.0 else chosen:
            x = block(x)
        return self.outputs(torch.tanh(self.head(x))).sum(1, keepdim=True) * self.gain

    def part(self, batch: Any) -> Tensor | None:
        return None if self.skips_all and float(batch[0][0, 1]) > 0.0 else self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.part(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class OneDevice(Decides):
    """Makes the same decisions for the microbatches of a plan."""

    def __init__(self, plan: str, *, skips_all: bool = False) -> None:
        super().__init__(skips_all=skips_all)
        self.sizes = [size for rank in PLANS[plan].ranks for size in rank.microbatch_sizes]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        parts = zip(*(values.split(self.sizes) for values in batch), strict=True)
        found = [(self.part(part), len(part[0])) for part in parts]
        kept = [(loss, count) for loss, count in found if loss is not None]
        total = sum(count for _, count in kept)
        return sum(loss * (count / total) for loss, count in kept) if kept else None


def _decided(plan: str | None, like: str) -> list[dict[str, Any]]:
    def make(skips_all: bool) -> Net:
        return Decides(skips_all=skips_all) if plan else OneDevice(like, skips_all=skips_all)

    return [fitted(plan, lambda s=skips_all: make(s)) for skips_all in (False, True)]


def _both(plan: str | None, like: str) -> tuple[Any, Any]:
    return _whole(plan), _decided(plan, like)


@pytest.mark.parametrize("plan", [pytest.param("three", marks=pytest.mark.slow), "no data"])
def test_steps_without_a_loss_and_blocks_that_microbatches_skip_are_those_of_one_device(plan):
    """Whole steps are skipped in one half, and in the other one each microbatch decides."""
    (whole, decided) = in_ranks(1, _both, None, plan)[0]
    partly = r"`training_step` returned `None` for \d of \d microbatches of a step, which trains"
    for rank, of_rank in enumerate(in_ranks(len(PLANS[plan].ranks), _both, plan, plan)):
        for found, one in zip((*of_rank[0], *of_rank[1]), (*whole, *decided), strict=True):
            assert_same_tensors(found["values"], one["values"], 1e-5)
            assert found["hooks"] == one["hooks"]
        for found, one in zip(of_rank[0], whole, strict=True):
            assert found["metrics"] == pytest.approx(one["metrics"])
        # Lightning's own warning, once in a process, on rank 0
        told = [found["told"] for found in (*of_rank[0], *of_rank[1])]
        assert told[:4] == [whole[0]["told"] if not rank else [], [], [], []]
        assert len(whole[0]["told"]) == 1
        assert len(told[4]) == 1 and re.match(partly, told[4][0])
