"""Gathers whole parameters in hooks, for code that reads or writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.sharding.collectives import all_gather_rows, everyone
from lightning_cephalo.sharding.flat import show_in
from lightning_cephalo.sharding.placement import full_parameter, local_part, own_part
from lightning_cephalo.sharding.write_guard import GatheredParameter, LockedRows


@dataclass(frozen=True)
class _Place:
    """A place where a module holds a sharded parameter, and the whole one shown there."""

    module: nn.Module
    attribute: str
    sharded: nn.Parameter
    full: nn.Parameter


@contextmanager
def writable_parameters(*modules: nn.Module) -> Iterator[None]:
    """Show whole parameters in a ``with`` block, and keep what the block writes to them.

    For code in hooks that reads or writes weights: an average of a student's weights in a teacher,
    a copy to a target network, clipped weights. The same code works on one device and under other
    strategies, where parameters are whole anyway::

        def on_train_batch_start(self, batch, batch_idx):
            with torch.no_grad(), lightning_cephalo.writable_parameters(self.teacher, self.student):
                for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                    t.data.mul_(0.99).add_(s.data, alpha=0.01)

    The parameters have full precision and no gradients. Every rank holds all of them until the
    block ends; name small modules, one after another, if they do not fit. Every rank must run the
    block, and must write the same values: each rank keeps its own rows of them. If the block
    raises, nothing is written.

    Args:
        modules: The modules whose parameters are shown whole, with all their submodules.

    Raises:
        UnitUseError: Inside of a step, where parameters are in use, or if the block replaces a
            parameter or changes its shape.
    """
    places = _gathered(modules)
    for place in places:
        show_in(place.module, place.attribute, place.full)
    try:
        yield
        _keep(places)
    finally:
        for place in places:
            show_in(place.module, place.attribute, place.sharded)


def _gathered(modules: tuple[nn.Module, ...]) -> list[_Place]:
    owners = {id(owner): owner for module in modules for owner in module.modules()}
    held = [
        (owner, attribute, parameter)
        for owner in owners.values()
        for attribute, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor | GatheredParameter)
    ]
    _refuse_use([parameter for _, _, parameter in held])
    full: dict[int, nn.Parameter] = {}
    places: list[_Place] = []
    for owner, attribute, sharded in held:
        if id(sharded) not in full:
            full[id(sharded)] = full_parameter(sharded)
        places.append(_Place(owner, attribute, sharded, full[id(sharded)]))
    return places


def _refuse_use(parameters: list[nn.Parameter]) -> None:
    """Raise on every rank if a parameter is in use on any; collective, outside of microbatches."""
    used = [local_part(parameter) for parameter in parameters]
    in_use = [p for p in used if isinstance(p, GatheredParameter | LockedRows)]
    why = f"the parameter {in_use[0].full_name!r} is in use" if in_use else ""
    inside = any(isinstance(p, LockedRows) or p.guard.is_closed for p in in_use)
    flags = [bool(in_use)]
    # ranks run different numbers of microbatches: in one of them no rank may communicate
    if parameters and not inside and dist.get_world_size() > 1:
        flag = torch.tensor([bool(in_use)], device=parameters[0].device, dtype=torch.uint8)
        ones = [1] * dist.get_world_size()
        flags = all_gather_rows(flag, ones, everyone()).bool().tolist()
    if any(flags):
        why = why or f"rank {flags.index(True)} uses parameters"
        raise UnitUseError(
            f"writable_parameters() is called inside of a step, where {why} and ranks run different"
            " numbers of microbatches. Call it in on_train_batch_start(), on_after_backward(),"
            " on_before_optimizer_step() or on_train_batch_end()."
        )


def _keep(places: list[_Place]) -> None:
    """Copy this rank's rows of the whole parameters into the sharded ones."""
    for place in places:
        is_there = place.module._parameters.get(place.attribute) is place.full
        if not is_there or place.full.shape != place.sharded.shape:
            raise UnitUseError(
                f"The parameter {place.attribute!r} of {type(place.module).__name__} is replaced or"
                f" reshaped in writable_parameters(): it has the shape {tuple(place.full.shape)},"
                f" expected {tuple(place.sharded.shape)} in the same memory. Write into it instead:"
                " `parameter.copy_(values)`."
            )
    with torch.no_grad():
        for place in places:
            assert isinstance(place.sharded, DTensor)
            local_part(place.sharded).copy_(own_part(place.full.detach(), place.sharded))
