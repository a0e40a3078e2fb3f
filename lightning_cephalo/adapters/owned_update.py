"""Runs an optimizer's own step on whole parameters, each on the rank that owns it.

After the closure the owners get the rows of parameters and gradients (``sharding/owners.py``), and
the optimizer finds the plain parameters that its rank owns. Each is one object for the whole
training, as optimizers may keep something under its identity. State stays on the owner; all ranks
see the same entries: tensors as DTensors whose rows lie on the owner, else equal values. If an
update depends on the whole model, one rank owns everything, and only that rank runs the step. The
others run the closure together with it, and leave their own ``step`` at its first closure.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters.scope import known_scope
from lightning_cephalo.adapters.unchanged import changed_options, kept_options
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.owners import Owners, on_owner
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.same_values import cut_gradients

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class _Held:
    """Stands for a tensor of the owner's state in messages."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _StepElsewhere(BaseException):
    """Ends a step on a rank that only follows; no user's ``except Exception`` catches it."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome


class OwnedUpdate:
    """The updates of an optimizer on whole parameters; lives as long as the optimizer."""

    def __init__(
        self, optimizer: Optimizer, owners: Owners, control: ControlGroup, single: bool
    ) -> None:
        self._optimizer, self._owners, self._control = optimizer, owners, control
        self._single = single
        self._runs = not single or owners.largest == control.rank
        self._whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._meanwhile = ExitStack()
        self._shown: list[list[Tensor]] | None = None
        # options of the groups where the step began; empty outside of a step
        self._before: list[dict[str, Any]] = []
        self._state: Any = None
        self._faces: dict[Tensor, dict[str, Any]] = {}
        # state between two evaluations of a closure: the dict, and what it held
        self._unfinished: dict[Tensor, tuple[dict[str, Any], dict[str, Any]]] = {}
        owners.assign(self.parameters())

    def follow(self, fractions: Sequence[float]) -> None:
        """Give parameters the owners of other shares, with their state, in place; collective.

        Call it between two steps. Optimizers that are not torch's keep their owners: they may hold
        what belongs to a parameter elsewhere than in their state, under the parameter's identity.
        """
        if known_scope(self._optimizer) is None:
            return
        rank, parameters = self._control.rank, self.parameters()
        old, new = self._owners, Owners(fractions, rank, self._single)
        old.assign(parameters)  # groups may have come since the last step
        new.assign(parameters)
        self._owners, self._runs = new, not self._single or new.largest == rank
        state = self._optimizer.state
        for parameter in parameters:
            if new.of(parameter) == old.of(parameter):
                continue
            self._whole.pop(parameter, None)
            if parameter in state:
                entries = state[parameter]  # the same dict, which hooks may hold
                moved = self.loaded(_whole_of(entries), parameter)
                entries.clear()
                entries.update(moved)

    def parameters(self) -> list[DTensor]:
        """Return the optimizer's parameters in the order of its groups."""
        groups = self._shown or [group["params"] for group in self._optimizer.param_groups]
        return cast("list[DTensor]", list(itertools.chain.from_iterable(groups)))

    # -- a step -------------------------------------------------------------------------------

    def wrapped(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        """Return a closure that also brings the parameters to their owners; collective."""
        self._before, self._unfinished = [], {}  # of a step that was left in the middle

        def closure_and_collect() -> Any:
            if self._shown is not None:
                self._go_on()
            outcome = closure() if closure is not None else None
            self.show()
            if not self._runs:
                self._follow(closure)
                raise _StepElsewhere(outcome)
            return outcome

        return closure_and_collect

    def _go_on(self) -> None:
        """Give all ranks the parameters at which the closure is evaluated once more."""
        if not self._single:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} evaluates its closure several times a step, and"
                " ranks may do so differently often. Use"
                " a form of it that evaluates its closure once a step."
            )
        self._control.broadcast(True, self._owners.largest)
        state = self._optimizer.state
        self._unfinished = {
            key: (entries, dict(entries))
            for key, entries in state.items()
            if isinstance(key, Tensor)
        }
        self._hide()

    def _follow(self, closure: Callable[[], Any] | None) -> None:
        """Do what the running rank asks for, until its step is over."""
        while self._control.broadcast(None, self._owners.largest):
            self._hide()
            assert closure is not None
            closure()
            self.show()
        self.finish(None)

    def show(self) -> None:
        """Put whole parameters in place of DTensors; collective."""
        optimizer, owners = self._optimizer, self._owners
        parameters = self.parameters()
        owners.assign(parameters)  # groups may have come since the last step
        whole = self._rooms(parameters)
        cut_gradients(parameters)
        with torch.no_grad():
            owners.collect(parameters, [local_part(p) for p in parameters], whole)
            graded = [i for i, p in enumerate(parameters) if p.grad is not None]
            gradients = [None if whole[i] is None else whole[i].grad for i in graded]
            owners.collect(
                [parameters[i] for i in graded],
                [local_part(cast(Tensor, parameters[i].grad)) for i in graded],
                gradients,
            )
        # private, as in adapters/optimizer.py: no mode of the user sees the exchange
        self._meanwhile.enter_context(torch._C.DisableTorchFunction())
        self._shown = [list(group["params"]) for group in optimizer.param_groups]
        # a step that evaluates its closure again has perhaps written options before
        self._before = self._before or list(map(kept_options, optimizer.param_groups))
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        for key, entries in self._state.items():
            if not isinstance(key, DTensor):
                optimizer.state[key] = entries
            elif key in self._whole:
                # the same dict: a step may have looked it up before its closure
                self._faces[key] = dict(entries)
                entries.update(pytree.tree_map_only(Tensor, local_part, self._faces[key]))
                optimizer.state[self._whole[key]] = entries
        for whole_key, (entries, values) in self._unfinished.items():
            entries.clear()
            entries.update(values)
            optimizer.state[whole_key] = entries
        self._unfinished = {}
        for group, held in zip(optimizer.param_groups, self._shown, strict=True):
            # in place: an optimizer may hold the list itself
            group["params"][:] = [self._whole[p] for p in held if owners.owns(p)]

    def _rooms(self, parameters: list[DTensor]) -> list[Any]:
        """Return memory for the whole parameters that this rank owns; collective."""
        failure: Exception | None = None
        rooms: list[Any] = []
        try:
            rooms = [self._room(parameter) for parameter in parameters]
        except Exception as error:
            failure = error
        if self._control.any(failure is not None):
            name = type(self._optimizer).__name__
            doing = f"making room for the whole parameters of {name}"
            self._control.raise_if_any_failed(failure, doing)
        return rooms

    def _room(self, parameter: DTensor) -> Tensor | None:
        if not self._owners.owns(parameter):
            return None
        if parameter not in self._whole:
            values = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=local_part(parameter).device
            )
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

    def _hide(self) -> None:
        """Give all ranks their rows, and put the DTensors back; collective."""
        common = common_state(self._optimizer.state)
        self.restore()
        _set_common(self._optimizer.state, common)
        parameters = self.parameters()
        whole = [self._whole.get(p) if self._owners.owns(p) else None for p in parameters]
        with torch.no_grad():
            self._owners.spread(
                parameters,
                [None if each is None else each.detach() for each in whole],
                [local_part(p).detach() for p in parameters],
            )

    def finish(self, failure: BaseException | None) -> None:
        """End a step that has begun: new values, state and options for all ranks; collective."""
        if self._shown is None:
            return
        optimizer, control = self._optimizer, self._control
        if self._single and self._runs:
            control.broadcast(False, self._owners.largest)
        by_whole = {key: _copied(entries) for key, entries in optimizer.state.items()}
        doing, message = f"updating by {type(optimizer).__name__}", None
        if failure is None:
            try:
                message = self._message()
            except Exception as error:
                doing, failure = "reading the optimizer's state", error
        try:
            messages = control.gather(message)
            if any(each is None for each in messages):
                control.raise_if_any_failed(failure, doing)
        except BaseException:
            self.restore()
            self._free([])
            raise
        finally:
            self._before = []
        self._hide()
        self._take_options(messages)
        self._take_state(messages, by_whole)
        self._free(by_whole.values())

    def restore(self) -> None:
        """Put the DTensors back, with the state of the last step; no communication."""
        if self._shown is None:
            return
        optimizer, shown = self._optimizer, self._shown
        self._shown = None
        optimizer.state, self._state = self._state, None
        for parameter, entries in self._faces.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(entries)
        self._faces = {}
        for group, held in zip(optimizer.param_groups, shown, strict=True):
            group["params"][:] = held
        self._meanwhile.close()

    def _free(self, states: Any) -> None:
        """Free the memory of whole parameters, unless state shares it."""
        leaves = [leaf for leaf in pytree.tree_leaves(list(states)) if isinstance(leaf, Tensor)]
        shared = {local_part(leaf).untyped_storage()._cdata for leaf in leaves}
        for whole in self._whole.values():
            whole.grad = None
            if whole.untyped_storage()._cdata not in shared:
                whole.untyped_storage().resize_(0)

    # -- what all ranks know ------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        """Return what this rank's step has made of options and state, without the tensors."""
        optimizer = self._optimizer
        assert self._shown is not None
        if not self._runs:
            return {"options": {}, "state": {}, "common": None}
        options = {
            index: {
                name: pytree.tree_map_only(Tensor, _on_host, group[name])
                for name in changed_options(group, before)
                if name in group
            }
            for index, (group, before) in enumerate(
                zip(optimizer.param_groups, self._before, strict=True)
            )
            if group["params"]
        }
        state = {
            index: pytree.tree_map(self._told, optimizer.state[self._whole[p]])
            for index, p in enumerate(self.parameters())
            if self._owners.owns(p) and self._whole[p] in optimizer.state
        }
        common = None
        if self._owns_any():
            common = {
                key: pytree.tree_map(self._value, entries)
                for key, entries in common_state(optimizer.state).items()
            }
        return {"options": options, "state": state, "common": common}

    def _owns_any(self) -> bool:
        return any(self._owners.owns(parameter) for parameter in self.parameters())

    def _value(self, leaf: Any) -> Any:
        """Return what stands for a leaf of common state: a tensor travels whole."""
        told = self._told(leaf)
        return _on_host(leaf) if isinstance(told, _Held) else told

    def _told(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and type(leaf) in (Tensor, nn.Parameter) and not leaf.is_sparse:
            return _Held(tuple(leaf.shape), leaf.dtype) if leaf.ndim else _on_host(leaf)
        if isinstance(leaf, _PLAIN):
            return leaf
        raise UnsupportedError(
            f"{type(self._optimizer).__name__} keeps a {type(leaf).__name__} in its state, which"
            " other ranks and checkpoints cannot hold: expected tensors, numbers and containers of"
            " them. Use an optimizer with such state, or strategy='ddp'."
        )

    def _take_options(self, messages: list[dict[str, Any]]) -> None:
        """Give every rank what the first owner has written to the options of a group."""
        for index, group in enumerate(self._optimizer.param_groups):
            writers = (rank for rank, each in enumerate(messages) if index in each["options"])
            first = next(writers, self._control.rank)
            if first != self._control.rank:  # it keeps its own objects
                for name, value in messages[first]["options"][index].items():
                    group[name] = _where(group.get(name), value)

    def _take_state(self, messages: list[dict[str, Any]], by_whole: Any) -> None:
        state, rank = self._optimizer.state, self._control.rank
        for index, parameter in enumerate(self.parameters()):
            owner = self._owners.of(parameter)
            told = messages[owner]["state"].get(index)
            if told is None:
                state.pop(parameter, None)
                continue
            own = by_whole[self._whole[parameter]] if owner == rank else None
            entries = _shown_state(told, own, state.get(parameter, {}), parameter, owner)
            # the same dict, which hooks may hold
            state[parameter].clear()
            state[parameter].update(entries)
        told_common = [each["common"] for each in messages if each["common"] is not None]
        if told_common and not (self._runs and self._owns_any()):
            _set_common(state, told_common[0])

    def loaded(self, entries: Any, parameter: DTensor) -> Any:
        """Return saved state of whole tensors as this rank shows it, on the right device."""
        owner = self._owners.of(parameter)

        def place(value: Tensor) -> Tensor:
            if not value.ndim or isinstance(value, DTensor):
                return value
            dtype = parameter.dtype if value.is_floating_point() else value.dtype
            meta = torch.empty(value.shape, dtype=dtype, device="meta")
            own = None
            if owner == self._owners.rank:
                # a copy, so that the loaded file's memory is free
                own = value.detach().to(local_part(parameter).device, dtype, copy=True).contiguous()
            return on_owner(own, owner, parameter, meta)

        return pytree.tree_map_only(Tensor, place, entries)

    def adopt_state(self) -> None:
        """Bring state that exists in rows to the owners; collective."""
        state = self._optimizer.state
        for parameter in self.parameters():
            if parameter in state:
                state[parameter] = self.loaded(_whole_of(state[parameter]), parameter)


@contextmanager
def following(optimizer: Optimizer) -> Iterator[None]:
    """While active, ``optimizer.step`` returns where it is left for a step of another rank."""
    before = vars(optimizer).get("step")
    step = optimizer.step

    @functools.wraps(step)
    def step_or_follow(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except _StepElsewhere as end:
            # private: torch runs these behind a step's body, which was left
            hooks = (
                optimizer._optimizer_step_post_hooks,
                torch_optimizer._global_optimizer_post_hooks,
            )
            for hook in itertools.chain.from_iterable(each.values() for each in hooks):
                hook(optimizer, args, kwargs)
            return end.outcome

    optimizer.step = step_or_follow  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]


def _shown_state(told: Any, own: Any, held: Any, parameter: DTensor, owner: int) -> Any:
    """Return state as every rank shows it."""
    leaves, spec = pytree.tree_flatten(told)
    owns = pytree.tree_leaves(own) if own is not None else [None] * len(leaves)
    faces, before = pytree.tree_flatten(held)
    if before != spec:
        faces = [None] * len(leaves)
    made = []
    for leaf, value, face in zip(leaves, owns, faces, strict=True):
        if not isinstance(leaf, _Held):
            made.append(leaf if value is None else value)
        elif (
            isinstance(face, DTensor)
            and face.shape == leaf.shape
            and face.dtype == leaf.dtype
            and (value is None or local_part(face) is value)
        ):
            made.append(face)
        else:
            meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            made.append(on_owner(value, owner, parameter, meta))
    return pytree.tree_unflatten(made, spec)


def _whole_of(entries: Any) -> Any:
    """Return state with whole tensors in place of DTensors; collective."""
    return pytree.tree_map_only(DTensor, lambda value: value.full_tensor().detach(), dict(entries))


def _on_host(tensor: Tensor) -> Tensor:
    # a message holds the whole memory of a tensor: that of a view may be large
    return tensor.detach().cpu().clone()


def _copied(entries: Any) -> Any:
    return dict(entries) if isinstance(entries, dict) else entries


def common_state(state: Any) -> dict[Any, Any]:
    """Return the entries of a state that belong to no parameter."""
    return {key: entries for key, entries in state.items() if not isinstance(key, Tensor)}


def _set_common(state: Any, common: dict[Any, Any]) -> None:
    """Let a state have these entries, and no others, that belong to no parameter."""
    for key in common_state(state).keys() - common.keys():
        del state[key]
    state.update(common)


def _where(held: Any, value: Any) -> Any:
    """Return options of another rank with their tensors on the device of those held here."""
    devices = [leaf.device for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]
    if not devices:
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(devices[0]), value)
