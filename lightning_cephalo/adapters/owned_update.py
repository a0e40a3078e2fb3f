"""Runs an optimizer's own step on whole parameters, each on the rank that owns it.

After the closure the owners get the rows of parameters and gradients (``sharding/owners.py``), and
the optimizer finds the plain parameters that its rank owns. Each is one object for the whole
training, as optimizers may keep something under its identity. State stays on the owner; all ranks
see the same entries: tensors as DTensors whose rows lie on the owner, else equal values.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters.scope import parameters_of
from lightning_cephalo.adapters.stepping import Shown
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.owners import Owners, on_owner
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.same_values import cut_gradients

_PLAIN = (bool, int, float, complex, str, type(None))


class OwnedUpdate:
    """The updates of an optimizer on whole parameters; lives as long as the optimizer."""

    def __init__(self, optimizer: Optimizer, owners: Owners, control: ControlGroup) -> None:
        self._optimizer, self._owners, self._control = optimizer, owners, control
        self._whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._shown: Shown | None = None
        self._meanwhile = ExitStack()
        owners.assign(self._parameters())

    def _parameters(self) -> list[DTensor]:
        return cast("list[DTensor]", parameters_of(self._optimizer))

    # -- a step -------------------------------------------------------------------------------

    def before_closure(self) -> None:
        """Refuse a second evaluation, which ranks may make differently often."""
        if self._shown is not None:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} evaluates its closure several times a step, and"
                " ranks may do so differently often. Use a form of it that evaluates its closure"
                " once a step."
            )

    def show(self) -> None:
        """Put whole parameters in place of DTensors; collective."""
        optimizer, owners, parameters = self._optimizer, self._owners, self._parameters()
        owners.assign(parameters)  # groups may have come since the last step
        cut_gradients(parameters)
        doing = f"making room for the whole parameters of {type(optimizer).__name__}"
        whole = self._control.together(doing, lambda: [self._room(p) for p in parameters])
        with torch.no_grad():
            owners.collect(parameters, [local_part(p) for p in parameters], whole)
            graded = [i for i, p in enumerate(parameters) if p.grad is not None]
            owners.collect(
                [parameters[i] for i in graded],
                [local_part(cast(Tensor, parameters[i].grad)) for i in graded],
                [None if whole[i] is None else whole[i].grad for i in graded],
            )
        # private, as in adapters/optimizer.py: no mode of the user sees the exchange
        self._meanwhile.enter_context(torch._C.DisableTorchFunction())
        pairs = [
            [(p, self._whole[p]) for p in group["params"] if owners.owns(p)]
            for group in optimizer.param_groups
        ]
        self._shown = Shown(optimizer, pairs, lambda _, __, value: local_part(value), self._face)

    def _room(self, parameter: DTensor) -> Tensor | None:
        """Return memory for a whole parameter and its gradient, if this rank owns it."""
        if not self._owners.owns(parameter):
            return None
        if parameter not in self._whole:
            device = local_part(parameter).device
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            made = nn.Parameter(values, requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # the user's tags
            self._whole[parameter] = made
        whole = cast(nn.Parameter, self._whole[parameter])
        storage = whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(whole.numel() * whole.element_size())
        whole.requires_grad_(parameter.requires_grad)
        whole.grad = None if parameter.grad is None else torch.empty_like(whole)
        return whole

    def _face(self, name: str, parameter: Tensor, value: Tensor) -> Tensor:
        if not value.ndim or type(value) not in (Tensor, nn.Parameter) or value.is_sparse:
            return value
        return on_owner(value, self._owners.rank, cast(DTensor, parameter), value)

    def finish(self, failure: BaseException | None) -> None:
        """End a step that has begun: new values and state for all ranks; collective."""
        if self._shown is None:
            return
        self.restore()
        doing, message = f"updating by {type(self._optimizer).__name__}", None
        if failure is None:
            try:
                message = self._message()
            except Exception as error:
                doing, failure = "reading the optimizer's state", error
        messages = self._control.gather(message)
        if any(each is None for each in messages):
            self._free()
            self._control.raise_if_any_failed(failure, doing)
        parameters = self._parameters()
        whole = [self._whole[p].detach() if self._owners.owns(p) else None for p in parameters]
        with torch.no_grad():
            rows = [local_part(p).detach() for p in parameters]
            self._owners.spread(parameters, whole, rows)
        self._take(messages)
        self._free()

    def restore(self) -> None:
        """Put the DTensors back; no communication."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.end()
            self._meanwhile.close()

    def _free(self) -> None:
        """Free the memory of whole parameters, unless state shares it."""
        state = self._optimizer.state.values()
        leaves = pytree.tree_leaves([dict(e) if isinstance(e, dict) else e for e in state])
        tensors = [local_part(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        shared = {each.untyped_storage()._cdata for each in tensors if not each.is_sparse}
        for whole in self._whole.values():
            whole.grad = None
            if whole.untyped_storage()._cdata not in shared:
                whole.untyped_storage().resize_(0)

    # -- what all ranks see -------------------------------------------------------------------

    def _message(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the state of what this rank owns, without values, and numbers among options."""
        state, owned, start = {}, {}, 0
        for number, group in enumerate(self._optimizer.param_groups):
            held = {i: p for i, p in enumerate(group["params"], start) if self._owners.owns(p)}
            start += len(group["params"])
            for index, parameter in held.items():
                if parameter in self._optimizer.state:
                    entries = dict(self._optimizer.state[parameter])
                    state[index] = pytree.tree_map(self._without_values, entries)
            if held:
                owned[number] = {n: value for n, value in group.items() if type(value) in _PLAIN}
        return state, owned

    def _without_values(self, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Tensor) and not leaf.ndim:
            return leaf.detach().cpu().clone()
        if isinstance(leaf, _PLAIN):
            return leaf
        raise UnsupportedError(
            f"{type(self._optimizer).__name__} keeps a {type(leaf).__name__} in its state, which"
            " other ranks and checkpoints cannot hold: expected tensors, numbers and containers of"
            " them. Use an optimizer with such state, or strategy='ddp'."
        )

    def _take(self, messages: list[Any]) -> None:
        """Take the state of other ranks' parameters, and options of groups of others alone."""
        state, rank = self._optimizer.state, self._control.rank
        for index, parameter in enumerate(self._parameters()):
            owner = self._owners.of(parameter)
            entries = messages[owner][0].get(index)
            if parameter in state:  # in one order on all ranks, in which checkpoints gather it
                state[parameter] = state.pop(parameter)
            if owner == rank or entries is None:
                continue

            def place(value: Tensor, owner: int = owner, like: DTensor = parameter) -> Tensor:
                return on_owner(None, owner, like, value) if value.ndim else value

            # the same dict, which hooks may hold
            state[parameter].clear()
            state[parameter].update(pytree.tree_map_only(Tensor, place, entries))
        for number, group in enumerate(self._optimizer.param_groups):
            owned = [options[number] for _, options in messages if number in options]
            if owned and number not in messages[rank][1]:
                group.update(owned[0])

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
