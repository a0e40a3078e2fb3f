"""Callbacks see the same outputs of a step on every rank, whether it has samples or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Net, by_plan, in_ranks, loader, trainer
from lightning.pytorch import Callback
from plans import plan_of
from recording import make_trainer

from lightning_cephalo import Plan


class Returns(Net):
    """Returns what users return in addition to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        error = (self(batch[0]) - batch[1]).detach()
        return {
            "loss": loss,
            "error": error.abs().mean(),
            "rows": error,
            "ready": float(error.abs().mean()),
            "names": ["a", "b"],
            "constant": torch.arange(3),
        }


class Reads(Callback):
    """Reads outputs as a user does; on one device the means are those of the whole batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        assert not outputs["loss"].requires_grad
        assert outputs["names"] == ["a", "b"] and outputs["constant"].tolist() == [0, 1, 2]
        self.seen.append(
            {
                "loss": float(outputs["loss"]),
                "error": float(outputs["error"]),
                "ready": outputs["ready"],
                "rows": outputs["rows"].shape,
                "dtype": outputs["error"].dtype,
            }
        )


def fit(plan: str | Plan | None, kind: type[Net]) -> tuple[list[Any], list[float]]:
    reads, losses = Reads(), Losses()
    callbacks = [reads] if kind is Returns else []
    options: dict[str, Any] = {"callbacks": [*callbacks, losses]}
    if isinstance(plan, Plan):
        made = make_trainer(plan, {"start_method": "popen", "global_batch_size": 8}, **options)
    else:
        made = trainer(plan, **options)
    made.fit(kind(), loader(13), loader(8))
    return reads.seen, losses.seen


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.seen.append(float(loss.detach()))


def test_a_rank_without_samples_has_the_keys_and_the_means_of_another():
    (wanted, losses) = by_plan(None, fit, Returns)
    (with_samples, _), (without, before_backward) = in_ranks(2, fit, "no data", Returns)
    assert len(without) == 2
    for own, other, one in zip(without, with_samples, wanted, strict=True):
        for key in ("loss", "error"):
            assert own[key] == pytest.approx(one[key], rel=1e-5) == other[key]
        assert own["ready"] == pytest.approx(other["ready"])
        assert own["rows"] == (1, 1) and own["dtype"] == other["dtype"]
    assert before_backward == pytest.approx(losses, rel=1e-5)


def test_a_loss_alone_stays_one_and_is_that_of_the_first_rank_with_samples():
    ((_, losses),) = [by_plan(None, fit, Net)]
    plan = plan_of(((2, 1), 0.6), ((5,), 0.4), ((), 0.0))
    found = [seen for _, seen in in_ranks(3, fit, plan, Net)]
    assert found[2] == found[0]
    assert found[0] != pytest.approx(losses, rel=1e-5)  # those of its own samples, as under DDP
