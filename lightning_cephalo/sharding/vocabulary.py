"""Finds the layers whose parameters have one row for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_cephalo.sharding.discovery import Owner, UnitMembers


@dataclass(frozen=True)
class VocabularyParameter:
    """A table of an embedding, of a head, or of both (tied).

    Attributes:
        index: Its place among the parameters of the root unit.
        owners: The layers that hold it.
    """

    index: int
    owners: tuple[Owner, ...]


def vocabulary_of(root: UnitMembers) -> tuple[VocabularyParameter, ...]:
    """Return the parameters of the root unit that can stay cut along the vocabulary.

    The vocabulary is the largest number of rows of a ``torch.nn.Embedding`` outside of the blocks.
    All such embeddings of as many rows count, and the ``torch.nn.Linear`` of as many outputs. A
    parameter that anything else holds too does not: that needs it whole. Nor does one of a layer
    with a forward of its own, of its class or on the instance.

    Args:
        root: The root unit.
    """
    tables = [
        VocabularyParameter(index, owners)
        for index, (_, owners) in enumerate(root.parameters)
        if all(_is_table(owner) for owner in owners)
    ]
    rows = [root.parameters[each.index][0].shape[0] for each in tables]
    embedded = [
        count
        for each, count in zip(tables, rows, strict=True)
        if any(isinstance(owner.module, nn.Embedding) for owner in each.owners)
    ]
    largest = max(embedded, default=0)
    return tuple(t for t, count in zip(tables, rows, strict=True) if count == largest > 0)


def heads_of(root: UnitMembers) -> tuple[tuple[str, nn.Linear], ...]:
    """Return name and layer of the heads of the root unit, whatever its embeddings compute.

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
        and _is_table(owner)
        and owner.module.weight.shape[0] == largest
    )


def modules_of(parameters: Sequence[VocabularyParameter]) -> list[tuple[str, nn.Module, int]]:
    """Return name, layer, and number of its parameter, of all layers that hold one."""
    found = {
        id(owner.module): (owner.name.rpartition(".")[0], owner.module, number)
        for number, parameter in enumerate(parameters)
        for owner in parameter.owners
    }
    return list(found.values())


def _is_table(owner: Owner) -> bool:
    module = owner.module
    if owner.attribute != "weight" or "forward" in vars(module):
        return False
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return plain and type(module).forward is nn.Embedding.forward
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
