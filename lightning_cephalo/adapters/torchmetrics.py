"""Finds the torchmetrics objects of a module, and prepares their states to be synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def metrics_of(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    """Return the names and objects of the torchmetrics that a module holds."""
    return [(name, inner) for name, inner in module.named_modules() if isinstance(inner, Metric)]


def states_of(metrics: Sequence[tuple[str, Metric]]) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of the states of every updated metric; of lists, those of a row."""
    found: dict[str, dict[str, Any]] = {}
    for name, metric in metrics:
        if not metric._update_count:
            continue
        looks = found[name] = {}
        for attribute in metric._reductions:
            state = getattr(metric, attribute)
            if isinstance(state, Tensor):
                looks[attribute] = (None, state.shape)
            elif state and state[0].ndim:
                looks[attribute] = (state[0].dtype, state[0].shape[1:])
    return found


def prepare_states(
    metrics: Sequence[tuple[str, Metric]], everyone: Sequence[dict[str, Any]], idle: bool
) -> None:
    """Prepare metrics for synchronisation that other ranks have updated and this one has not.

    Otherwise torchmetrics sends an empty float tensor of one dimension for an empty list, and a
    state in its initial shape, whatever the other ranks send. The process group then does not raise
    but aborts the process.
    """
    for name, metric in metrics:
        looks = next((looks[name] for looks in everyone if name in looks), None)
        if looks is None or metric._update_count:
            continue
        for attribute, (dtype, shape) in looks.items():
            state = getattr(metric, attribute)
            if isinstance(state, Tensor):
                if state.shape != shape and state.numel() == 1:
                    setattr(metric, attribute, state.reshape(()).expand(shape).clone())
            elif not state and dtype is not None:
                empty = torch.empty((0, *shape), dtype=dtype, device=metric.device)
                setattr(metric, attribute, [empty])
        if idle:
            # otherwise it warns that it was never updated, which is correct on an idle rank
            metric._update_count = 1
