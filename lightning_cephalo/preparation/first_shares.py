"""Chooses the shares of the state that ranks hold while they are measured, before any plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from lightning_cephalo.plan.state_groups import even_shares, members_of
from lightning_cephalo.sharding.discovery import UnitMembers

if TYPE_CHECKING:
    from lightning_cephalo.preparation.job import Job

# of ranks that count as alike: equal slices travel faster
_ALIKE = 0.9


def first_shares(
    job: Job, units: Sequence[UnitMembers], compute_dtype: torch.dtype | None = None
) -> list[float]:
    """Return those of a given plan, or by memory, with room for full units."""
    if job.plan is not None:
        return [rank.state_fraction for rank in job.plan.ranks]
    gradients = [_bytes_of(members, None, trained=True) for members in units]
    held_bytes = sum(_bytes_of(members, None) for members in units)
    # one from each rank, for a rank's rows of the unit that is reduced
    held_bytes += sum(gradients) if job.keeps_gradients else len(job.limits) * max(gradients)
    full, *others = [
        _bytes_of(members, compute_dtype) + _bytes_of(members, compute_dtype, trained=True)
        for members in units
    ]
    # at a step's peak: the root unit and the two largest others
    gathered_bytes = full + sum(sorted(others, reverse=True)[:2])
    room = [own.device.capacity_bytes for own in job.limits]
    shares = _by(room, job.state_groups)
    pairs = zip(shares, room, strict=True)
    if all(gathered_bytes + share * held_bytes < capacity for share, capacity in pairs):
        return shares
    left = [max(0.0, capacity - gathered_bytes) for capacity in room]
    for members in members_of(job.state_groups, len(room)):
        if not any(left[rank] for rank in members):
            return shares  # it fits nowhere, as the measurement will say
    return _by(left, job.state_groups)


def _by(room: Sequence[float], state_groups: Sequence[int]) -> list[float]:
    if math.isinf(max(room)) or min(room) > _ALIKE * max(room):
        return list(even_shares(state_groups, len(room)))
    shares = [0.0] * len(room)
    for members in members_of(state_groups, len(room)):
        total = sum(room[rank] for rank in members)
        for rank in members:
            shares[rank] = room[rank] / total
    return shares


def _bytes_of(
    members: UnitMembers, compute_dtype: torch.dtype | None, *, trained: bool = False
) -> float:
    return sum(
        parameter.numel() * (compute_dtype or parameter.dtype).itemsize
        for parameter, _ in members.parameters
        if not is_lazy(parameter) and (parameter.requires_grad or not trained)
    )
