"""Compares tensors that every rank has computed for itself, before rows of them are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.collectives import all_gather_rows, everyone
from lightning_cephalo.sharding.placement import in_rows, local_part, meet_for, own_part, whole_of

# ranks of different devices round differently: how far sums may be apart, in units of rounding
_SAME_ULPS = 64.0
# elements that are in double precision at a time
_PIECE = 2**20
# its multiples, without their whole parts, are spread evenly and never repeat
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def refuse_different(values: Sequence[Tensor], like: DTensor, name: str) -> None:
    """Raise if tensors differ between ranks by more than rounding; collective.

    Ranks compare three numbers of each tensor: its sum, the sum of its magnitudes, and a sum in
    which each place has a weight of its own. So a tensor in another order differs, too.
    """
    own = torch.cat([_sums(value).to(local_part(like).device) for value in values])
    mesh, ones = like.device_mesh, [len(own)] * dist.get_world_size()
    # of all ranks, also where groups of them hold the whole tensor each
    ranks = all_gather_rows(own.to(mesh.device_type), ones, everyone())
    for value, found in zip(values, ranks.view(-1, len(values), 3).cpu().unbind(1), strict=True):
        rounds = value.is_floating_point() or value.is_complex()
        rounding = torch.finfo(value.dtype).eps if rounds else 0.0
        tolerance = _SAME_ULPS * rounding * float(found[0, 1].nan_to_num())
        first = found[:1].expand_as(found)
        if not torch.allclose(found, first, rtol=0.0, atol=tolerance, equal_nan=True):
            raise UnsupportedError(
                f"{name}() writes a tensor of shape {tuple(value.shape)} to a sharded one, but the"
                " tensor differs between ranks. Its sums on them are"
                f" {found[:, 0].tolist()}, and its sums weighted by place {found[:, 2].tolist()}."
                " Each rank would keep its part of another tensor. Average or share it first:"
                " strategy.reduce(tensor) or strategy.broadcast(tensor)."
            )


def cut_gradients(parameters: Iterable[Tensor]) -> None:
    """Cut the whole gradients that a user's own backward has left; collective if there are any.

    ::

        parameter.square().sum().backward()    # in a hook: a plain gradient of all rows
        cut_gradients([parameter])             # this rank's rows

    Raises:
        UnsupportedError: On every rank, if a gradient differs between ranks.
    """
    left = [
        parameter
        for parameter in parameters
        if isinstance(parameter, DTensor)
        and parameter.grad is not None
        and not isinstance(parameter.grad, DTensor)
    ]
    if not left:
        return
    meet_for("the gradient", left)
    whole = [whole_of(cast(Tensor, parameter.grad)) for parameter in left]
    refuse_different(whole, left[0], "backward")
    for parameter, gradient in zip(left, whole, strict=True):
        parameter.grad = in_rows(own_part(gradient, parameter).clone(), parameter)


def _sums(value: Tensor) -> Tensor:
    """Return the three sums of a tensor, in double precision."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    total = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE].to(torch.float64)
        places = torch.arange(len(piece), dtype=torch.float64, device=flat.device)
        weights = places.add_(start + 1).mul_(_GOLDEN).frac_()
        total += torch.stack([piece.sum(), piece.abs().sum(), piece.dot(weights)])
    return total
