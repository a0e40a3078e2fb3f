"""Finds the layers whose parameters have one row for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

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


def with_heads_in_root(units: Sequence[UnitMembers]) -> list[UnitMembers]:
    """Return units of which no head is one: only the root unit stays cut along the vocabulary.

    A head that no embedding shares is a unit by its size where the vocabulary has more parameters
    than all blocks (``sharding/blocks.py``).

    Args:
        units: The units as chosen by default, the root unit first.
    """
    root, *others = units
    rows = _vocabulary_size(_tables_of(root))
    heads = [unit for unit in others if rows and _is_head(unit.module, rows)]
    moved = tuple(parameter for head in heads for parameter in head.parameters)
    root = replace(root, parameters=(*root.parameters, *moved))
    return [root, *(unit for unit in others if unit not in heads)]


def vocabulary_of(root: UnitMembers) -> tuple[VocabularyParameter, ...]:
    """Return the parameters of the root unit that can stay cut along the vocabulary.

    The vocabulary is the largest number of rows of a ``torch.nn.Embedding`` outside of the blocks.
    All such embeddings of as many rows count, and the ``torch.nn.Linear`` of as many outputs. A
    parameter that anything else holds too does not: that needs it whole. Nor does one of a layer
    with a forward of its own, of its class or on the instance.

    Args:
        root: The root unit.
    """
    tables = _tables_of(root)
    size = _vocabulary_size(tables)
    return tuple(table for table, rows in tables if rows == size > 0)


def _tables_of(root: UnitMembers) -> list[tuple[VocabularyParameter, int]]:
    """Return what could be a table of the root unit, and its rows."""
    return [
        (VocabularyParameter(index, owners), parameter.shape[0])
        for index, (parameter, owners) in enumerate(root.parameters)
        if all(is_table(owner) for owner in owners)
    ]


def _vocabulary_size(tables: Sequence[tuple[VocabularyParameter, int]]) -> int:
    """Return the rows of the largest embedding; 0: there is none."""
    return max(
        (
            rows
            for table, rows in tables
            if any(isinstance(owner.module, nn.Embedding) for owner in table.owners)
        ),
        default=0,
    )


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
        and is_table(owner)
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


def is_table(owner: Owner) -> bool:
    """Whether a plain ``torch.nn.Embedding`` or ``torch.nn.Linear`` holds its weight there."""
    module = owner.module
    if owner.attribute != "weight" or "forward" in vars(module):
        return False
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return plain and type(module).forward is nn.Embedding.forward
    return _is_linear(module)


def _is_head(module: nn.Module, rows: int) -> bool:
    return _is_linear(module) and "forward" not in vars(module) and module.weight.shape[0] == rows


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
