"""Makes ordinary Lightning checkpoints from shards, and shards from ordinary checkpoints.

A checkpoint holds plain full tensors under the user's names, as a single-device run writes it. It
does not depend on the plan or the number of ranks. Tensors are gathered one at a time to the CPU of
rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.scope import parameters_of
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel, to_full
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.materialise import on_cpu
from lightning_cephalo.sharding.placement import Rows, as_dtensor, local_part, own_part

Placed = Callable[[Tensor, Tensor], Tensor]
"""Returns what a rank holds of a full tensor of a parameter's state, where that state lives."""


def full_state_dict(module: nn.Module, wanted: bool) -> dict[str, Any]:
    """Return ``module.state_dict()`` with full tensors; collective.

    Unless ``wanted`` they are on the meta device: hooks that rename or remove some run everywhere.
    """
    seen: dict[int, Any] = {}
    result: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in seen:  # tied weights are written as one tensor, as torch does
                full = to_full(value, wanted)
                if full is None:
                    full = torch.empty(value.shape, dtype=value.dtype, device="meta")
                seen[id(value)] = full
            value = seen[id(value)]
        result[name] = value
    return result


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load full tensors into a model, sharded or not; every rank has all of ``state``."""
    _make_room(module, state)
    parameters = {**dict(module.named_parameters(remove_duplicate=False))}
    sharded = {
        name: rows_like(parameters[name], value)
        if name in parameters and isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }
    with torch.no_grad():
        module.load_state_dict(sharded, strict=strict)


def _make_room(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Replace parameters and buffers on the meta device by CPU tensors, if ``state`` has them.

    torch would load nothing into meta tensors. Tensors that ``state`` lacks stay on meta, to be
    initialised when the model is sharded. Tied weights stay tied.
    """
    places = [
        (f"{prefix}.{name}" if prefix else name, table, name)
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for table in (inner._parameters, inner._buffers)
        for name in table
    ]
    room: dict[int, Tensor] = {}
    for full_name, table, name in places:
        value = table[name]
        if value is not None and value.is_meta and full_name in state and id(value) not in room:
            room[id(value)] = on_cpu(value)
    for table, name, made in [(t, n, room.get(id(t[n]))) for _, t, n in places]:
        if made is not None:
            table[name] = made


def rows_like(parameter: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """Return this rank's rows of a full tensor, if ``parameter`` is sharded and shapes agree."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    placement = parameter.placements[0]
    if not isinstance(placement, Rows | Replicate):
        raise TypeError(f"Expected a parameter in rows or replicated, got {placement}.")
    local, value = local_part(parameter), own_part(value, parameter)
    dtype = local.dtype if value.is_floating_point() else value.dtype
    # a copy, so that the rows do not keep the full tensor alive
    mine = value.detach().to(device or local.device, dtype, copy=True).contiguous()
    return as_dtensor(mine, parameter._spec)


def full_optimizer_state(optimizer: Optimizer, wanted: bool) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with full tensors; collective; empty unless ``wanted``."""
    state = optimizer.state_dict()
    if not _is_torchs(state):
        full_state = pytree.tree_map_only(DTensor, partial(to_full, wanted=wanted), state)
        return full_state if wanted else {}
    full = pytree.tree_map_only(Tensor, partial(to_full, wanted=wanted), state["state"])
    return {**state, "state": full} if wanted else {}


def _is_torchs(state: Mapping[str, Any]) -> bool:
    """Return whether a state dict has torch's format; that of Lightning's no-optimizer is empty."""
    return "state" in state and "param_groups" in state


def load_full_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], placed: Placed = rows_like
) -> None:
    """Load an optimizer state of full tensors; every rank has all of ``state``."""
    if not _is_torchs(state):
        optimizer.load_state_dict(dict(state))
        return
    groups = zip(state["param_groups"], optimizer.param_groups, strict=False)
    parameters = {
        number: parameter
        for saved, group in groups
        for number, parameter in zip(saved["params"], group["params"], strict=False)
    }
    rest: dict[Any, Any] = {}
    held: dict[Tensor, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        rest[number] = whole = dict(entries.items())  # once: all ranks read a kept step together
        parameter = parameters.get(number)
        if isinstance(parameter, DTensor):
            own = {
                # a step count has the shape of a 0-d parameter, but is a plain number on every rank
                name: value
                if name == "step"
                else pytree.tree_map_only(Tensor, partial(placed, parameter), value)
                for name, value in whole.items()
            }
            # torch would copy rows to the device; numbers it places as the optimizer needs them
            rest[number] = {name: value for name, value in own.items() if not _is_cut(value)}
            held[parameter] = own
    optimizer.load_state_dict({**state, "state": rest})
    for parameter, own in held.items():
        numbers = optimizer.state[parameter]
        optimizer.state[parameter] = {
            name: value if _is_cut(value) else numbers[name] for name, value in own.items()
        }


def _is_cut(value: Any) -> bool:
    """Return whether an entry of state has tensors of which ranks hold rows."""
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value))


def whole_checkpoint(
    checkpoint: Mapping[str, Any], wanted: bool, control: ControlGroup
) -> dict[str, Any]:
    """Return a checkpoint with full tensors on the CPU in place of sharded ones; collective.

    Callbacks and hooks put sharded tensors into it: averages of weights, masks. Ranks that do not
    need it get an empty dict.
    """
    leaves, tree = pytree.tree_flatten(dict(checkpoint))
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    shapes = control.gather(tuple(tuple(tensor.shape) for tensor in sharded))
    if any(row != shapes[0] for row in shapes):
        counts = [len(row) for row in shapes]
        raise UnsupportedError(
            f"The ranks put different sharded tensors into the checkpoint: {counts} of them on rank"
            " 0 and up. Each rank holds some rows, so every rank must put them in:"
            " on_save_checkpoint() and state_dict() of a callback run on every rank, and must not"
            " depend on the rank."
        )
    if not sharded:
        return dict(checkpoint)
    full: dict[int, Any] = {}
    for tensor in sharded:
        if id(tensor) not in full:  # what is one tensor stays one in the file
            full[id(tensor)] = to_full(tensor, wanted)
    if not wanted:
        return {}
    return pytree.tree_unflatten([full.get(id(leaf), leaf) for leaf in leaves], tree)


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
