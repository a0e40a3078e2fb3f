"""Gives a rank without samples the outputs of a training step that the other ranks have.

Callbacks get the outputs of ``training_step``. A rank without samples has none of its own, nor has
one whose ``training_step`` has returned None for all of them. A callback that reads
``outputs["accuracy"]`` would fail on that rank alone. So it gets what the other ranks agree on:

=====================================  ============================================================
output of the other ranks              on a rank without samples
=====================================  ============================================================
loss, other scalars, Python floats     the mean over the ranks, by their weights
``"weight"``                           0
tensor with one row for each sample    a tensor without rows
anything else                          that of the first rank with samples
=====================================  ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.adapters.logging import ValuesOfRanks


@dataclass(frozen=True)
class _Scalar:
    """A number for each rank, as a tensor of this dtype and shape; no dtype: a Python float."""

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Rows:
    """A tensor with one row for each sample."""

    dtype: torch.dtype
    row: tuple[int, ...]


@dataclass(frozen=True)
class _Outputs:
    """A description of outputs, which travels between processes."""

    parts: dict[str, Any]
    is_loss: bool


class StepOutputs:
    """Completes the outputs of training steps.

    Args:
        ranks: Exchanges numbers between ranks.
        device: This rank's device.
    """

    def __init__(self, ranks: ValuesOfRanks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def of_step(self, result: Any, weight: float, samples: int, losses: Sequence[int]) -> Any:
        """Return the outputs of a step; collective if a rank has no loss in it."""
        if all(losses):
            return result
        control = self._ranks.control
        own = samples if losses[control.rank] else 0
        parts = result if isinstance(result, Mapping) else {"loss": result}
        described = None
        if own:
            kinds = {key: _kind_of(key, value, own) for key, value in parts.items()}
            described = _Outputs(kinds, not isinstance(result, Mapping))
        model = next(outputs for outputs in control.gather(described) if outputs is not None)
        scalars = [key for key, kind in model.parts.items() if isinstance(kind, _Scalar)]
        given = [_double(parts.get(key)) if own else None for key in scalars]
        weights, values = self._ranks.gather(
            [-1.0 if value is None else weight for value in given],
            [torch.zeros((), dtype=torch.float64) if v is None else v for v in given],
        )
        if own:
            return result
        made = {key: self._without_samples(key, kind) for key, kind in model.parts.items()}
        for index, key in enumerate(scalars):
            kind, held = model.parts[key], [row[index] for row in weights]
            made[key] = _as_scalar(_mean(values[:, index], held), kind)
        return made["loss"] if model.is_loss else made

    def _without_samples(self, key: str, kind: Any) -> Any:
        if isinstance(kind, _Rows):
            return torch.empty((0, *kind.row), dtype=kind.dtype, device=self._device)
        if key == "weight":
            return torch.zeros_like(kind) if isinstance(kind, Tensor) else type(kind)(0)
        return kind.to(self._device) if isinstance(kind, Tensor) else kind


def _kind_of(key: str, value: Any, samples: int) -> Any:
    """Return a value's description, or the value itself if it travels as it is."""
    if isinstance(value, float) and key != "weight":
        return _Scalar()
    if not isinstance(value, Tensor) or key == "weight":
        return value.detach().cpu() if isinstance(value, Tensor) else value
    if value.numel() == 1 and (key == "loss" or not value.ndim) and not value.is_complex():
        return _Scalar(value.dtype, tuple(value.shape))
    if value.ndim and len(value) == samples:
        return _Rows(value.dtype, tuple(value.shape[1:]))
    return value.detach().cpu()


def _double(value: Any) -> Tensor | None:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1:
        return None
    return value.detach().double().reshape(())


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of the ranks that have a value; without weight it may be NaN."""
    chosen = [rank for rank, weight in enumerate(weights) if weight > 0]
    if not chosen:
        return values[[rank for rank, weight in enumerate(weights) if weight >= 0]].mean()
    share = torch.tensor([weights[rank] for rank in chosen], dtype=torch.float64)
    known = torch.stack([values[rank] for rank in chosen])
    return (known * share.to(values.device, non_blocking=True)).sum() / float(share.sum())


def _as_scalar(mean: Tensor, kind: _Scalar) -> Any:
    return float(mean) if kind.dtype is None else mean.to(kind.dtype).reshape(kind.shape)
