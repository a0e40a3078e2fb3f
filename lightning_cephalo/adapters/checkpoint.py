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
from lightning_cephalo.execution.sharded_model import ShardedModel, to_full
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.materialise import on_cpu
from lightning_cephalo.sharding.placement import as_dtensor, local_part, own_part

Placed = Callable[[Tensor, Tensor], Tensor]
"""Returns what a rank holds of a full tensor of a parameter's state, where that state lives."""


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
    is_late = lambda name, value: value.is_meta and name in state  # noqa: E731
    replace_tensors(module, lambda name, v: on_cpu(v) if is_late(name, v) else v)
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
    optimizer: Optimizer, state: Mapping[str, Any], placed: Placed = rows_like
) -> None:
    """Load an optimizer state of full tensors; every rank has all of ``state``."""
    if "state" not in state:  # of Lightning's stand-in for no optimizer
        optimizer.load_state_dict(dict(state))
        return
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = dict(zip(numbers, parameters_of(optimizer), strict=False))
    held: dict[Any, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        held[number] = dict(entries.items())  # once: all ranks read a kept step together
        parameter = parameters.get(number)
        if isinstance(parameter, DTensor):
            place = partial(placed, parameter)
            # a step count has the shape of a 0-d parameter, but is a plain number on every rank
            held[number] = {
                name: value if name == "step" else pytree.tree_map_only(Tensor, place, value)
                for name, value in held[number].items()
            }
    # torch would copy rows to the device; numbers it places as the optimizer needs them
    rest = {
        number: {name: value for name, value in entries.items() if not _is_cut(value)}
        for number, entries in held.items()
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
            " of them on rank 0 and up. Each rank holds some rows, so every rank must put them in:"
            " on_save_checkpoint() and state_dict() of a callback run on every rank, and must not"
            " depend on the rank."
        )
    whole = pytree.tree_map_only(DTensor, _full_once(wanted), dict(checkpoint))
    return whole if wanted or not sharded else {}


def shard_optimizer(optimizer: Optimizer, model: ShardedModel, placed: Placed) -> None:
    """Let an optimizer that was made before the model was sharded hold the sharded parameters."""
    found = {id(p): model.sharded_in_place_of(p) for p in parameters_of(optimizer)}
    sharded = {key: parameter for key, parameter in found.items() if parameter is not None}
    if not sharded:
        return
    state = optimizer.state_dict() if optimizer.state else None
    _replace_parameters(optimizer, sharded)
    if state is not None:
        load_full_optimizer_state(optimizer, state, placed)


def release_optimizer(optimizer: Optimizer, plain: Mapping[int, Tensor], *, alone: bool) -> None:
    """Let an optimizer hold the plain parameters, by ids of the sharded ones, behind a run.

    Its state stays in rows, with which no run begins. If a rank is ``alone``, its rows are the
    whole state.
    """
    state = dict(optimizer.state)
    _replace_parameters(optimizer, plain)
    for key, entries in state.items():
        if alone:
            entries = pytree.tree_map_only(DTensor, partial(to_full, wanted=True), entries)
        optimizer.state[plain.get(id(key), key)] = entries


def holds_earlier_rows(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state in the rows of an earlier run."""
    plain = [own for key, own in optimizer.state.items() if not isinstance(key, DTensor)]
    return any(map(_is_cut, plain))


def _replace_parameters(optimizer: Optimizer, others: Mapping[int, Tensor]) -> None:
    """Give an optimizer other parameters, by the ids of its own; its state is forgotten."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        # in place: an optimizer may hold the list itself
        group["params"][:] = [others.get(id(p), p) for p in group["params"]]
