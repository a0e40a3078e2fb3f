"""Saves measured curves, so that ``cephalo plan`` can plan for clusters that are not at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.curves import Curves, CurveTable, save_measured

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def remember(problem: Problem, model: ShardedModel, batch: Any) -> str | None:
    """Save the curves of every kind of device in the user's cache; return why it failed."""
    try:
        curves = _curves(problem, model.executor.recompute)
        if curves:
            dtype = _NAMES.get(model.compute_dtype or torch.float32, "fp32")
            kind, count = type(model.module).__name__, model.parameter_count
            save_measured(CurveTable(kind, dtype, _sample_length(batch), curves, parameters=count))
    except Exception as error:  # only one rank saves, and the others go on
        return f"{type(error).__name__}: {error}"
    return None


def _curves(problem: Problem, recompute: bool) -> tuple[Curves, ...]:
    found = {}
    for rank in problem.ranks:
        again = rank.forward_s if not recompute else [0.0] * len(rank.forward_s)
        if rank.forward_s and rank.name not in found:
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
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    first = next(leaves, None)
    return 1 if first is None or first.ndim < 2 else max(1, first.shape[1])
