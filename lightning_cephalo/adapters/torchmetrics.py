"""Finds the torchmetrics objects of a module, and synchronises their states between ranks.

torchmetrics gathers each element of a list by itself. Ranks run different numbers of microbatches
and evaluation steps here, so they hold different numbers of elements, and the process group would
abort. So lists travel whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_cephalo.ranks.control import ControlGroup


def metrics_of(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    """Return the names and objects of the torchmetrics that a module holds."""
    return [(name, inner) for name, inner in module.named_modules() if isinstance(inner, Metric)]


def metrics_within(module: torch.nn.Module, callbacks: Sequence[Any]) -> list[Metric]:
    """Return the torchmetrics of a module and of callbacks, in their attributes and containers."""
    held = [dict(vars(owner)) for owner in (*module.modules(), *callbacks)]
    modules = [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.nn.Module)]
    found = {id(each): each for leaf in (module, *modules) for _, each in metrics_of(leaf)}
    return [*found.values()]


def synchronise_lists(
    metrics: Sequence[Metric],
    control: ControlGroup,
    inside_step: Callable[[], bool],
    at_end: ExitStack,
) -> None:
    """Let metrics synchronise lists of different lengths, until the end.

    ``inside_step`` returns whether a step runs, in which not all ranks may come. Private:
    ``_sync_dist`` of these objects is replaced; ``dist_sync_fn`` gets single tensors.
    """
    for metric in metrics:
        vars(metric)["_sync_dist"] = partial(_synchronise, metric, control, inside_step)
        at_end.callback(vars(metric).pop, "_sync_dist", None)


def _synchronise(
    metric: Metric,
    control: ControlGroup | None,
    inside_step: Callable[[], bool],
    dist_sync_fn: Any = gather_all_tensors,
    process_group: Any = None,
) -> None:
    by_torchmetrics = partial(type(metric)._sync_dist, metric, dist_sync_fn, process_group)
    own_way = dist_sync_fn is not gather_all_tensors or process_group or metric.process_group
    # a copy of a metric has no connection
    if control is None or own_way or inside_step():
        return by_torchmetrics()
    known = metric._reductions
    states = {name: getattr(metric, name) for name in known}
    lists = [name for name, state in states.items() if isinstance(state, list)]
    # the elements of lists in host memory, and the shapes of tensors
    everyone = control.gather(
        {
            name: [each.detach().cpu() for each in state] if name in lists else tuple(state.shape)
            for name, state in states.items()
        }
    )
    for name, state in states.items():
        if name not in lists and state.numel() == 1:
            # a number that was never updated gets the shape that updates give it on other ranks
            shape = max((sent[name] for sent in everyone), key=math.prod)
            setattr(metric, name, state.reshape(()).expand(shape).clone())
    metric._reductions = {name: how for name, how in known.items() if name not in lists}
    try:
        by_torchmetrics()
    finally:
        metric._reductions = known
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    for name in lists:
        found = [element.to(device) for sent in everyone for element in sent[name]]
        how = known[name]
        setattr(metric, name, how(found) if found and callable(how) else found)
    return None
