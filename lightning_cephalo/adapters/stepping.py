"""Lets an optimizer's own step update other tensors than its parameters.

:func:`shown` puts them in place of the parameters, and state that belongs to them in place of the
parameters' state. It serves rows of DTensors (``optimizer.py``), whole parameters of one owner
(``owned_update.py``) and rows in host memory (``host_update.py``). Where no hook may see a step, a
copy of the optimizer runs it (:func:`copy_of`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator.torch_versions import state_of_constructor
from lightning_cephalo.sharding.placement import local_part

# No TorchFunctionMode sees a call inside. Private: torch has no public way to suspend a mode that
# is not the innermost one.
without_torch_functions = torch._C.DisableTorchFunction

Pairs = Sequence[Sequence[tuple[Tensor, Tensor]]]
"""By parameter group, parameters and what stands for each; others are not updated."""
Translation = Callable[[str, Tensor, Tensor], Tensor]
"""Translates a tensor of state, by its name and its parameter."""


@contextmanager
def shown(
    optimizer: Optimizer,
    pairs: Pairs,
    outside: Translation,
    staged: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
) -> Iterator[None]:
    """Let an optimizer find other tensors in ``param_groups`` and ``state``.

    State that is there shows its rows, or what is ``staged`` for them by the parameter's id and the
    entry's name. ``outside`` translates what the step has made.
    """
    held = [list(group["params"]) for group in optimizer.param_groups]
    state, inner = optimizer.state, defaultdict[Any, Any](dict)
    optimizer.state = inner
    inner.update(_common(state))
    before: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of what stands for a tensor

    def enter(name: str, parameter: Tensor, value: Tensor) -> Tensor:
        rows = staged.get((id(parameter), name))
        found = local_part(value) if rows is None else rows
        before[id(found)] = found, value
        return found

    def leave(name: str, parameter: Tensor, value: Tensor) -> Tensor:
        _, there = before.get(id(value), (None, None))
        return outside(name, parameter, value) if there is None else there

    for group, own in zip(optimizer.param_groups, pairs, strict=True):
        # in place: an optimizer may hold the list itself
        group["params"][:] = [tensor for _, tensor in own]
        for parameter, tensor in own:
            if parameter in state:
                # the same dict: a step may have looked it up before its closure
                inner[tensor] = _translated(state[parameter], parameter, enter)
    # torch's own optimizers write in place; one view per tensor would cost them time
    tensors = () if is_torchs(optimizer) else chain.from_iterable(pairs)
    memory = [(tensor, tensor.detach()) for _, tensor in tensors]
    try:
        yield
    finally:
        optimizer.state = state
        state.update(_common(inner))
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"][:] = parameters
        for parameter, tensor in chain.from_iterable(pairs):
            if tensor in inner:
                state[parameter] = _translated(inner[tensor], parameter, leave)
        for tensor, own_memory in memory:
            if tensor.data_ptr() != own_memory.data_ptr():  # after `p.data = p.data - update`
                own_memory.copy_(tensor.detach())
                tensor.data = own_memory


def _translated(entries: Any, parameter: Tensor, translation: Translation) -> Any:
    for name, value in entries.items():
        entries[name] = pytree.tree_map_only(Tensor, partial(translation, name, parameter), value)
    return entries


def _common(state: Any) -> dict[Any, Any]:
    """Return the entries of a state that belong to no parameter."""
    return {key: entries for key, entries in state.items() if not isinstance(key, Tensor)}


def copy_of(
    optimizer: Optimizer,
    members: Sequence[Sequence[Tensor]],
    state: Mapping[Tensor, Any] | None = None,
    *,
    on_host: bool = False,
) -> Optimizer:
    """Return a copy of an optimizer that has no hooks, and holds other parameters by group.

    ``state`` None: that of the constructor. ``on_host``: whether it holds tensors of the host.
    """
    # the steps of torch's own change no object that is an attribute, which may be the user's
    own = (lambda value: value) if is_torchs(optimizer) else copy.deepcopy
    made: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            made.__dict__[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):
            made.__dict__[name] = own(value)
    made.param_groups = []
    for group, parameters in zip(optimizer.param_groups, members, strict=False):
        options = {name: own(value) for name, value in group.items() if name != "params"}
        if on_host:
            options = pytree.tree_map_only(Tensor, lambda value: value.cpu(), options)
        made.param_groups.append({"params": list(parameters), **options})
    made.state = defaultdict(dict, state or {})
    for tensor in chain.from_iterable(members) if state is None else ():
        if entries := state_of_constructor(optimizer, tensor):
            made.state[tensor] = entries
    return cast(Optimizer, made)


def step_without_hooks(optimizer: Optimizer, *closure: Callable[[], Any]) -> Any:
    """Run the step of an optimizer's class."""
    update: Any = type(optimizer).step
    # Private: below the hooks of instances, and torch's own for profilers
    while vars(update).get("hooked", False):
        update = update.__wrapped__
    return update(optimizer, *closure)


def step_is_replaced(optimizer: Optimizer) -> bool:
    """Return whether an instance has another ``step`` than its class, not only a scheduler's."""
    replaced = vars(optimizer).get("step")
    # schedulers wrap it to notice its calls
    is_schedulers = getattr(replaced, "_wrapped_by_lr_sched", False)
    wrapped = getattr(replaced, "__wrapped__", None)
    return replaced is not None and not (is_schedulers and wrapped is type(optimizer).step)


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, and no subclass."""
    return type(optimizer).__module__.startswith("torch.optim")


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
