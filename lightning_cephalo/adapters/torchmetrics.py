"""Finds the torchmetrics objects of a module, and synchronises their states between ranks.

torchmetrics gathers each element of a list by itself. Ranks run different numbers of microbatches
and evaluation steps here, so they hold different numbers of elements, and the process group would
abort. So lists travel whole, with the shape and dtype of each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_gather_rows


def metrics_of(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    """Return the names and objects of the torchmetrics that a module holds."""
    return [(name, inner) for name, inner in module.named_modules() if isinstance(inner, Metric)]


def synchronise_lists(control: ControlGroup, inside_step: Callable[[], bool]) -> Callable[[], None]:
    """Let all metrics synchronise lists of different lengths; return a function that ends it.

    Overrides ``Metric._sync_dist``, since ``dist_sync_fn`` gets single tensors.

    Args:
        control: Messages between ranks.
        inside_step: Returns whether a step runs, in which not all ranks may come.
    """
    before = Metric._sync_dist

    def sync(
        metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None
    ) -> None:
        own_way = dist_sync_fn is not gather_all_tensors or process_group or metric.process_group
        if own_way or inside_step():
            return before(metric, dist_sync_fn, process_group)
        states = {name: getattr(metric, name) for name in metric._reductions}
        looks = control.gather({name: _look(state) for name, state in states.items()})
        joined = [name for name in states if _are_lists([look[name] for look in looks])]
        found = _gathered({name: states[name] for name in joined}, looks, control)
        known = metric._reductions
        metric._reductions = {name: how for name, how in known.items() if name not in joined}
        try:
            for name in metric._reductions:
                _take_shape(metric, name, [look[name] for look in looks])
            before(metric, dist_sync_fn, process_group)
        finally:
            metric._reductions = known
        device = torch.device("cpu") if metric.compute_on_cpu else metric.device
        for name, elements in found.items():
            here, how = [element.to(device) for element in elements], known[name]
            setattr(metric, name, how(here) if here and callable(how) else here)
        return None

    kind: Any = Metric
    kind._sync_dist = sync
    return partial(setattr, kind, "_sync_dist", before)


def _look(state: Any) -> Any:
    """Return the shape of a tensor, or those of a list's tensors with dtypes; else None."""
    if isinstance(state, Tensor):
        return tuple(state.shape)
    if not all(isinstance(element, Tensor) for element in state):
        return None
    return [(element.dtype, tuple(element.shape)) for element in state]


def _are_lists(looks: Sequence[Any]) -> bool:
    return all(isinstance(look, list) for look in looks)


def _gathered(
    states: dict[str, list[Tensor]], looks: Sequence[dict[str, Any]], control: ControlGroup
) -> dict[str, list[Tensor]]:
    """Return the elements of all ranks, rank by rank, for each list; collective."""
    own = [_bytes_of(element) for elements in states.values() for element in elements]
    described = [[(name, *each) for name in states for each in look[name]] for look in looks]
    sizes = [sum(_nbytes(dtype, shape) for _, dtype, shape in rank) for rank in described]
    found: dict[str, list[Tensor]] = {name: [] for name in states}
    if not sum(map(len, described)):
        return found
    local = torch.cat([torch.empty(0, dtype=torch.uint8), *own])
    rest = all_gather_rows(local, sizes, control.group)
    for name, dtype, shape in (each for rank in described for each in rank):
        part, rest = rest.tensor_split([_nbytes(dtype, shape)])
        # a view of another dtype needs an aligned start
        found[name].append(part.clone().view(dtype).reshape(shape))
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _take_shape(metric: Metric, name: str, shapes: Sequence[Any]) -> None:
    """Give a number that was never updated the shape that updates give it on other ranks."""
    state = getattr(metric, name)
    if isinstance(state, Tensor) and state.numel() == 1:
        largest = max(shapes, key=math.prod)
        if largest != tuple(state.shape):
            setattr(metric, name, state.reshape(()).expand(largest).clone())
