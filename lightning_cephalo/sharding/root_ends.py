"""Finds the ends of the root unit: large layers before the first unit, and behind the last one.

[Note: ends of the root unit]
Most of a language model's root unit is its embedding and its head. A step needs the embedding at
its beginning only, and the head between forward and backward only. So a step gathers the *last
layers* while the last unit computes, and frees them when the backward begins. It frees the *first
layers* when all microbatches have passed them. They are embeddings alone, whose backward needs no
parameters: nothing is gathered twice.

Definition order says where layers stand; a step finds out whether that is where they are used.
Code that uses them elsewhere ends the step with an error on all ranks, before anything is lost. All
later steps, and this one again, then gather the root unit as one (``execution/ends_policy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_cephalo.sharding.discovery import Owner, UnitMembers

# Of such parameters the rows have another dtype, which code may read while they are away.
_HALF = (torch.float16, torch.bfloat16)
# Ends that are smaller than this share of a unit are not worth collectives of their own.
SMALLEST_SHARE = 0.25


@dataclass(frozen=True)
class RootEnds:
    """Parameters at the ends of the root unit, by their places among its parameters."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


NO_ENDS = RootEnds()
"""The root unit is gathered as one."""


def ends_of(
    module: nn.Module, members: Sequence[UnitMembers], *, smallest_share: float = SMALLEST_SHARE
) -> RootEnds:
    """Return the ends of a model's root unit.

    ::

        ends_of(llama, find_units(llama))    # RootEnds(first=(0,), last=(1, 2)): norm and head

    A parameter that stands at both ends (tied weights) belongs to none.

    Args:
        smallest_share: Least parameters of an end, as a share of an average unit's.
    """
    root, *units = members
    if not units:
        return NO_ENDS
    order = {id(inner): place for place, inner in enumerate(module.modules())}
    places = [order[id(inner)] for unit in units for inner in unit.module.modules()]
    begin, end = min(places), max(places)
    sizes = [parameter.numel() for parameter, _ in root.parameters]
    least = smallest_share * sum(p.numel() for unit in units for p, _ in unit.parameters)
    least /= len(units)

    def large(found: list[int]) -> tuple[int, ...]:
        return tuple(found) if found and sum(sizes[index] for index in found) >= least else ()

    first, last = [], []
    for index, (parameter, owners) in enumerate(root.parameters):
        own = [order[id(owner.module)] for owner in owners]
        if parameter.dtype in _HALF:
            continue
        if max(own) < begin and all(map(_is_embedding, owners)):
            first.append(index)
        elif min(own) > end:
            last.append(index)
    return RootEnds(large(first), large(last))


def _is_embedding(owner: Owner) -> bool:
    module = owner.module
    if not isinstance(module, nn.Embedding) or "forward" in vars(module):
        return False
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return plain and owner.attribute == "weight" and type(module).forward is nn.Embedding.forward
