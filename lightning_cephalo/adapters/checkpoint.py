"""Makes ordinary Lightning checkpoints from shards, and shards from ordinary checkpoints.

A checkpoint holds plain full tensors under the user's names, as a single-device run writes it. It
does not depend on the plan or the number of ranks. Tensors are gathered one at a time to the CPU of
rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.stepping import parameters_of
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import to_full
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.materialise import on_cpu
from lightning_cephalo.sharding.placement import as_dtensor, local_part, own_part


def _full_once(wanted: bool) -> Callable[[Tensor], Tensor]:
    """Return what gives full tensors on the CPU; collective.

    Unless ``wanted`` they are on the meta device. What is one tensor stays one in the file.
    """
    seen: dict[int, Tensor] = {}

    def full(value: Tensor) -> Tensor:
        if id(value) not in seen:
            found = to_full(value, wanted)
            meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
            seen[id(value)] = meta if found is None else found
        return seen[id(value)]

    return full


def full_state_dict(module: nn.Module, wanted: bool) -> dict[str, Any]:
    """Return ``module.state_dict()`` with full tensors; collective.

    Hooks that rename or remove some run everywhere: ranks that do not want them get meta tensors.
    """
    state, full = module.state_dict(keep_vars=True), _full_once(wanted)
    return {name: full(v) if isinstance(v, Tensor) else v for name, v in state.items()}


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load full tensors into a model, sharded or not; every rank has all of ``state``.

    Tensors on the meta device that ``state`` lacks stay there, to be initialised when the model is
    sharded; others get memory, without which torch would load nothing.
    """
    replace_tensors(module, lambda name, v: on_cpu(v) if v.is_meta and name in state else v)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sharded = {
        name: rows_like(parameters[name], value)
        if name in parameters and isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }
    with torch.no_grad():
        module.load_state_dict(sharded, strict=strict)


def replace_tensors(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Put what ``make`` returns in place of parameters and buffers; tied ones stay one."""
    places = [
        (f"{prefix}.{name}" if prefix else name, table, name, value)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for table in (owner._parameters, owner._buffers)
        for name, value in table.items()
        if value is not None
    ]
    made: dict[int, Any] = {}
    for full_name, _, _, value in places:
        if id(value) not in made and (other := make(full_name, value)) is not value:
            made[id(value)] = other
    for _, table, name, value in places:
        table[name] = made.get(id(value), value)


def rows_like(parameter: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return this rank's rows of a full tensor, if ``parameter`` is sharded and shapes agree."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    local, value = local_part(parameter), own_part(value, parameter)
    dtype = local.dtype if value.is_floating_point() else value.dtype
    # a copy, so that the rows do not keep the full tensor alive
    mine = value.detach().to(device or local.device, dtype, copy=True).contiguous()
    return as_dtensor(mine, parameter._spec)


def full_optimizer_state(optimizer: Optimizer, wanted: bool) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with full tensors; collective; empty unless ``wanted``."""
    state = pytree.tree_map_only(Tensor, _full_once(wanted), optimizer.state_dict())
    return state if wanted else {}


def load_full_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    placed: Callable[[Tensor, Tensor], Tensor] = rows_like,
) -> None:
    """Load an optimizer state of full tensors; every rank has all of ``state``.

    ``placed`` returns what a rank holds of a parameter's tensor, where that state lives.
    """
    if "state" not in state:  # of Lightning's stand-in for no optimizer
        optimizer.load_state_dict(dict(state))
        return
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = dict(zip(numbers, parameters_of(optimizer), strict=False))
    held: dict[Any, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        own = held[number] = dict(entries.items())  # once: all ranks read a kept step together
        parameter = parameters.get(number)
        if isinstance(parameter, DTensor):
            place = partial(placed, parameter)
            # a step count has the shape of a 0-d parameter, but is a plain number on every rank
            for name in filter("step".__ne__, own):
                own[name] = pytree.tree_map_only(Tensor, place, own[name])
    # torch would copy rows to the device; numbers it places as the optimizer needs them
    rest = {
        number: {name: value for name, value in own.items() if not _is_cut(value)}
        for number, own in held.items()
    }
    optimizer.load_state_dict({**state, "state": rest})
    for number, parameter in parameters.items():
        if number in held:
            loaded = optimizer.state[parameter]
            whole = {name: loaded.get(name, value) for name, value in held[number].items()}
            optimizer.state[parameter] = whole


def _is_cut(value: Any) -> bool:
    """Return whether an entry of state has tensors of which ranks hold rows."""
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))


def whole_checkpoint(
    checkpoint: Mapping[str, Any], wanted: bool, control: ControlGroup
) -> dict[str, Any]:
    """Return a checkpoint with full tensors in place of sharded ones; collective.

    Callbacks and hooks put sharded ones into it, such as averages. Empty unless ``wanted``.
    """
    leaves = pytree.tree_leaves(dict(checkpoint))
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    shapes = control.gather(tuple(tuple(tensor.shape) for tensor in sharded))
    if any(row != shapes[0] for row in shapes):
        raise UnsupportedError(
            f"The ranks put different sharded tensors into the checkpoint: {list(map(len, shapes))}"
            " of them on rank 0 and up. Each rank holds some rows: put them in on every rank, in"
            " on_save_checkpoint() and state_dict() of callbacks."
        )
    whole = pytree.tree_map_only(DTensor, _full_once(wanted), dict(checkpoint))
    return whole if wanted or not sharded else {}
