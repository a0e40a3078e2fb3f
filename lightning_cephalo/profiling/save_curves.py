"""Saves measured curves, so that ``cephalo plan`` can plan for clusters that are not at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.curves import Curves, CurveTable, save_measured

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def remember(
    problem: Problem,
    *,
    model: str,
    parameters: int,
    dtype: torch.dtype | None,
    recompute: bool,
    batch: Any,
) -> str | None:
    """Save the curves of every kind of device in the user's cache."""
    try:
        curves = _curves(problem, recompute)
        if curves:
            name = _NAMES.get(dtype, "fp32") if dtype is not None else "fp32"
            length = _sample_length(batch)
            save_measured(CurveTable(model, name, length, curves, parameters=parameters))
    except Exception as error:  # only one rank saves, and the others go on
        return f"{type(error).__name__}: {error}"
    return None


def _curves(problem: Problem, recompute: bool) -> tuple[Curves, ...]:
    found = {}
    for rank in problem.ranks:
        if not rank.forward_s or rank.name in found:
            continue
        again = [0.0] * len(rank.forward_s) if recompute else rank.forward_s
        found[rank.name] = Curves(
            rank.name,
            rank.forward_s,
            tuple(b + f for b, f in zip(rank.backward_s, again, strict=True)),
            rank.tail_s,
            # the peak differs without recomputation
            rank.compute_bytes if recompute else (),
            source="measured",
            detail=f"on the running job, torch {torch.__version__}",
        )
    return tuple(found.values())


def _sample_length(batch: Any) -> int:
    """Return the length of the first tensor's samples in their first dimension (tokens), or 1."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return max(1, leaf.shape[1]) if leaf.ndim > 1 else 1
    return 1
