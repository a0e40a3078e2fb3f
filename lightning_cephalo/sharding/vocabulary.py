"""Finds embeddings, and heads with one output for each token of the vocabulary."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from lightning_cephalo.sharding.discovery import Owner, UnitMembers


def heads_of(root: UnitMembers) -> tuple[tuple[str, nn.Linear], ...]:
    """Return name and layer of the heads of the root unit.

    They are the ``torch.nn.Linear`` of as many outputs as the largest ``torch.nn.Embedding`` has
    rows. One with a forward of its own, of its class or on the instance, is not.

    Args:
        root: The root unit.
    """
    weights = [owner for _, owners in root.parameters for owner in owners]
    weights = [owner for owner in weights if owner.attribute == "weight"]
    embeddings = [o.module for o in weights if isinstance(o.module, nn.Embedding)]
    largest = max((each.num_embeddings for each in embeddings), default=0)
    return tuple(
        (owner.name.rpartition(".")[0], owner.module)
        for owner in weights
        if isinstance(owner.module, nn.Linear)
        and is_table(owner)
        and owner.module.weight.shape[0] == largest
    )


def is_table(owner: Owner) -> bool:
    """Whether a plain ``torch.nn.Embedding`` or ``torch.nn.Linear`` holds its weight there."""
    module = owner.module
    if owner.attribute != "weight" or "forward" in vars(module):
        return False
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return plain and type(module).forward is nn.Embedding.forward
    return _is_linear(module)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
