"""Runs an optimizer's own step on whole parameters, each on the rank that owns it.

After the closure the owners get the rows of parameters and gradients (``sharding/owners.py``), and
the optimizer finds the plain parameters that its rank owns. Each is one object for the whole
training, as optimizers may keep something under its identity. State stays on the owner; all ranks
see the same entries: tensors as DTensors whose rows lie on the owner, else equal values.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters.stepping import parameters_of, shown, without_torch_functions
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.owners import Owners, on_owner
from lightning_cephalo.sharding.placement import like_parameter, local_part
from lightning_cephalo.sharding.same_values import cut_gradients

_PLAIN = (bool, int, float, complex, str, type(None))


class OwnedUpdate:
    """The updates of an optimizer on whole parameters; lives as long as the optimizer."""

    def __init__(self, optimizer: Optimizer, owners: Owners, control: ControlGroup) -> None:
        self._optimizer, self._owners, self._control = optimizer, owners, control
        self._whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
        owners.assign(self._parameters())

    def _parameters(self) -> list[DTensor]:
        return cast("list[DTensor]", parameters_of(self._optimizer))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show whole parameters in place of DTensors; then all ranks get new values and state.

        Collective, at both ends.
        """
        control, owners, parameters = self._control, self._owners, self._parameters()
        name = type(self._optimizer).__name__
        owners.assign(parameters)  # groups may have come since the last step
        cut_gradients(parameters)
        doing = f"making room for the whole parameters of {name}"
        whole = control.together(doing, lambda: [self._room(p) for p in parameters])
        graded = [i for i, p in enumerate(parameters) if p.grad is not None]
        with torch.no_grad():
            owners.collect(parameters, [local_part(p) for p in parameters], whole)
            owners.collect(
                [parameters[i] for i in graded],
                [local_part(cast(Tensor, parameters[i].grad)) for i in graded],
                [None if whole[i] is None else whole[i].grad for i in graded],
            )
        pairs = [
            [(p, self._whole[p]) for p in group["params"] if owners.owns(p)]
            for group in self._optimizer.param_groups
        ]
        doing, failure, message = f"updating by {name}", None, None
        try:
            with without_torch_functions(), shown(self._optimizer, pairs, self._as_state):
                yield
            doing = "reading the optimizer's state"
            message = self._message()
        except Exception as error:
            failure = error
        messages = control.gather(message)
        if any(each is None for each in messages):
            control.raise_if_any_failed(failure, doing)
        parameters = self._parameters()
        made = [self._whole[p].detach() if owners.owns(p) else None for p in parameters]
        with torch.no_grad():
            owners.spread(parameters, made, [local_part(p).detach() for p in parameters])
        self._take(messages)
        for own in self._whole.values():
            own.grad, own.data = None, own.new_empty(0)

    def _room(self, parameter: DTensor) -> Tensor | None:
        """Return memory for a whole parameter and its gradient, if this rank owns it."""
        if not self._owners.owns(parameter):
            return None
        device = local_part(parameter).device
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        whole = self._whole.setdefault(parameter, like_parameter(values, parameter))
        whole.data = values
        whole.requires_grad_(parameter.requires_grad)
        whole.grad = None if parameter.grad is None else torch.empty_like(whole)
        return cast(Tensor, whole)

    def _as_state(self, name: str, parameter: Tensor, value: Tensor) -> Tensor:
        if not value.ndim or type(value) not in (Tensor, nn.Parameter) or value.is_sparse:
            return value
        return on_owner(value, self._owners.rank, cast(DTensor, parameter), value)

    def _message(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the state of what this rank owns, without values, and numbers among options."""
        state, options, owns = {}, {}, self._owners.owns
        # which ends with the step
        memory = {p.untyped_storage().data_ptr() for p in self._whole.values() if p.numel()}
        without_values = partial(self._without_values, memory)
        for index, parameter in enumerate(self._parameters()):
            if owns(parameter) and parameter in self._optimizer.state:
                entries = dict(self._optimizer.state[parameter])
                state[index] = pytree.tree_map(without_values, entries)
        for number, group in enumerate(self._optimizer.param_groups):
            if any(map(owns, group["params"])):
                options[number] = {n: v for n, v in group.items() if type(v) in _PLAIN}
        return state, options

    def _without_values(self, memory: Container[int], leaf: Any) -> Any:
        kind = type(leaf).__name__
        if isinstance(leaf, DTensor):
            if local_part(leaf).untyped_storage().data_ptr() not in memory:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            kind = "view of a parameter"
        if isinstance(leaf, Tensor) and not leaf.ndim:
            return leaf.detach().cpu().clone()
        if isinstance(leaf, _PLAIN):
            return leaf
        raise UnsupportedError(
            f"{type(self._optimizer).__name__} keeps a {kind} in its state, which other ranks and"
            " checkpoints cannot hold: expected tensors with memory of their own, numbers and"
            " containers of them. Use an optimizer with such state, or strategy='ddp'."
        )

    def _take(self, messages: list[Any]) -> None:
        """Take the state of other ranks' parameters, and options of groups of others alone."""
        state, rank = self._optimizer.state, self._control.rank
        for index, parameter in enumerate(self._parameters()):
            owner = self._owners.of(parameter)
            entries = messages[owner][0].get(index)
            if parameter in state:  # in one order on all ranks, in which checkpoints gather it
                state[parameter] = state.pop(parameter)
            if owner != rank and entries is not None:
                place = partial(self._elsewhere, parameter)
                state[parameter].clear()  # the same dict, which hooks may hold
                state[parameter].update(pytree.tree_map_only(Tensor, place, entries))
        for number, group in enumerate(self._optimizer.param_groups):
            owned = [options[number] for _, options in messages if number in options]
            if owned and number not in messages[rank][1]:
                group.update(owned[0])

    def _elsewhere(self, parameter: DTensor, value: Tensor) -> Tensor:
        owner = self._owners.of(parameter)
        return on_owner(None, owner, parameter, value) if value.ndim else value

    def placed(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return a tensor of a whole parameter's saved state as this rank shows it."""
        if not value.ndim:
            return value
        like, owner = cast(DTensor, parameter), self._owners.of(parameter)
        dtype = like.dtype if value.is_floating_point() else value.dtype
        own = None
        if owner == self._owners.rank:
            # a copy, so that the loaded file's memory is free
            own = value.detach().to(local_part(like).device, dtype, copy=True).contiguous()
        return on_owner(own, owner, like, torch.empty_like(value, dtype=dtype, device="meta"))
