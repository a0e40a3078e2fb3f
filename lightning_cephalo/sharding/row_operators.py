"""Computes operators on sharded tensors as on whole ones.

[Note: operators on rows]
1. Element-wise operators compute each rank's rows where they are, if all operands have the same
   rows, or are numbers. Nothing is sent. The result has the same rows.
2. Reductions to one number combine the numbers of the ranks that hold rows: ``p.abs().max()``. One
   number per rank is sent. The result is a plain tensor. Norms of a list send one message for all.
3. Everything else gathers the operands, and computes with whole plain tensors on every rank. The
   result is plain. What is written to a sharded tensor is cut to its rows again. A view
   (``p[0]``, ``p.view(-1)``) is a :class:`RowsView`, through which the tensor can be written. So
   are ``.data`` and ``.detach()`` of a view.

Plain operands are whole tensors: copies of parameters from before sharding, of ``copy.deepcopy``,
of a checkpoint. An operator with both kinds gives a plain result by rule 3. If it writes to the
sharded tensor, each rank takes its rows of the plain one. Then ranks compare what they would write,
since tensors may differ between ranks (activations, random numbers). They also compare what is
written to 0-d parameters, of which each rank has a copy. They do not compare 0-d tensors that only
scale rows (``p.mul_(factor)``): these count as numbers, and a message for each would make clipping
slow.

Considered: torch's own rules for DTensors. They assume even rows, average means of ranks, give
results with wrong rows, and refuse plain operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.placement import (
    WHOLE_MODEL,
    Rows,
    RowsTensor,
    agreed,
    as_dtensor,
    local_part,
    meet_of,
    own_part,
    read_only,
    refuse_dlpack,
    row_spec,
    rows_of,
    whole_of,
)
from lightning_cephalo.sharding.same_values import of_all_ranks, refuse_different
from lightning_cephalo.sharding.write_guard import LockedRows

# element-wise, though torch does not tag them so
_ELEMENT_WISE = {
    *("alias", "clone", "copy_", "detach", "fill", "fill_", "lift_fresh", "masked_fill_"),
    *("empty_like", "full_like", "ones_like", "zero_", "zeros_like", "_to_copy"),
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
}
_SAME_MEMORY = {"alias", "detach", "lift_fresh"}
_NOT_ELEMENT_WISE = {"equal", "_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}
# applied to their results for parts, they give the result for the whole
_COMBINING = {
    *("all", "amax", "amin", "any", "linalg_vector_norm", "max", "min", "nansum", "prod", "sum"),
}
_EVERY_RANK = (
    "Each rank holds some rows, so every rank must compute it at the same place: not behind `if"
    f" trainer.is_global_zero` or @rank_zero_only. {WHOLE_MODEL}"
)
# norms of parts have at least its precision
_LEAST = torch.float32


# no tensor has this version
_EXPIRED = -1


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose operands include sharded tensors, or views of them."""
    args, kwargs = pytree.tree_map_only(DTensor, _adopted, (args, kwargs))
    call = _Call(func, args, kwargs)
    call.refuse_locked()
    if call.name in _SAME_MEMORY:
        return _same_memory(call)
    if call.kind.combines and _reduces_all(call):
        return _combined(call)
    if _has_norms(call):
        return _norms(call)
    if call.kind.is_element_wise:
        return _element_wise(call)
    return _of_whole_tensors(call)


def meet_for(doing: str, tensors: Iterable[Tensor]) -> None:
    """Wait until all ranks have come to communicate about sharded tensors."""
    for tensor in tensors:
        meet = meet_of(tensor)
        if meet is not None:
            meet(f"computing {doing} of a sharded tensor", _EVERY_RANK)
            return


def _same_memory(call: _Call) -> Tensor:
    """Return the operand without its graph; what is written to the result reaches the rows."""
    operand = call.args[0]
    if isinstance(operand, RowsView):
        return RowsView(operand.gathered, call.func(operand.shown))
    # the same local tensor, so that both count their writes together
    return as_dtensor(local_part(operand), operand._spec)


def cut_gradients(parameters: Iterable[Tensor]) -> None:
    """Cut the whole gradients that a user's own backward has left; collective if there are any.

    ::

        parameter.square().sum().backward()    # in a hook: a plain gradient of all rows
        cut_gradients([parameter])             # this rank's rows

    Raises:
        UnsupportedError: On every rank, if a gradient differs between ranks.
    """
    left = [
        parameter
        for parameter in parameters
        if isinstance(parameter, DTensor)
        and parameter.grad is not None
        and not isinstance(parameter.grad, DTensor)
    ]
    if not left:
        return
    meet_for("the gradient", left)
    whole = [_plain(cast(Tensor, parameter.grad)) for parameter in left]
    refuse_different(whole, left[0], "backward")
    for parameter, gradient in zip(left, whole, strict=True):
        mesh, placement = parameter.device_mesh, parameter.placements[0]
        own = own_part(gradient, parameter).clone()
        parameter.grad = as_dtensor(own, row_spec(mesh, placement, parameter.shape, own.dtype))


class _Gathered:
    """The whole values of a sharded tensor, which all views that share their memory show."""

    def __init__(self, base: DTensor, whole: Tensor) -> None:
        self.base, self.whole = base, whole
        self._version = _version(base)

    @property
    def is_current(self) -> bool:
        """Whether the tensor was written through its views only."""
        return _version(self.base) == self._version

    def expire(self) -> None:
        """Let no view be used until :meth:`keep`."""
        self._version = _EXPIRED

    def keep(self) -> None:
        """Copy what was written to the values into the rows."""
        _write(self.base, self.whole)
        self._version = _version(self.base)


class RowsView(Tensor):
    """A view of a sharded tensor (``p[0]``, ``p.T``): whole values, which can be written.

    A write to it, or to a view of it (``p[0].data``), reaches the rows. It is valid until the
    tensor is written in another way than through views of the same gathered values.
    """

    gathered: _Gathered
    _shown: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gathered: _Gathered, values: Tensor) -> RowsView:
        # torch insists: a view of a tensor from outside of inference mode is one from outside
        with torch.inference_mode(gathered.base.is_inference()):
            view = Tensor._make_wrapper_subclass(
                cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
            )
        view.gathered, view._shown = gathered, values
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(func, tuple(args), dict(kwargs or {}))

    @property
    def shown(self) -> Tensor:
        """The values, as a plain tensor."""
        if not self.gathered.is_current:
            raise UnsupportedError(
                f"A view of a sharded tensor, of shape {tuple(self.shape)}, is used after a write"
                " to the tensor, which it does not show. Take the view again after the write, for"
                " example `parameter.view(-1)`."
            )
        return self._shown

    def numpy(self, **options: Any) -> Any:
        """Return the values as an array that cannot be written."""
        return read_only(self.shown.numpy(**options))

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.shown.tolist()

    def __array__(self, *args: Any) -> Any:
        return self.numpy().__array__(*args)

    def __dlpack__(self, **options: Any) -> Any:
        refuse_dlpack(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shown.clone().__reduce_ex__(protocol)


def _version(base: DTensor) -> int:
    local = local_part(base)
    return 0 if local.is_inference() else local._version


# -- what an operator is ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What is known of an operator."""

    is_element_wise: bool
    combines: bool
    is_view: bool
    is_random: bool
    written: tuple[tuple[int, str], ...]
    returned: tuple[tuple[int, str] | None, ...]


@cache
def _kind_of(func: Any) -> _Kind:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    aliases = [argument.alias_info for argument in arguments]
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    written = [
        ((index, argument.name), alias.before_set)
        for index, (argument, alias) in enumerate(zip(arguments, aliases, strict=True))
        if alias is not None and alias.is_write
    ]
    # torch says no names of memory for lists; operators that write to lists return nothing
    memory = {name: place for place, names in written for name in names}
    returned = tuple(
        next((memory[name] for name in alias.before_set if name in memory), None) if alias else None
        for alias in (result.alias_info for result in func._schema.returns)
    )
    returns_new = bool(written) and None in returned
    tagged = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    return _Kind(
        is_element_wise=(name in _ELEMENT_WISE or (tagged and not is_random))
        and name not in _NOT_ELEMENT_WISE
        and not returns_new,
        combines=name in (*_COMBINING, "mean") and len(func._schema.returns) == 1,
        is_view=any(alias is not None and not alias.is_write for alias in aliases),
        is_random=is_random,
        written=tuple(place for place, _ in written),
        returned=returned,
    )


class _Call:
    """An operator and its operands."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind = _kind_of(func)
        leaves = pytree.tree_leaves((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        leaves = pytree.tree_leaves([self._argument(*place) for place in self.kind.written])
        self.written = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def name(self) -> str:
        """Name of the operator for messages, such as "mean"."""
        return str(self.func.overloadpacket.__name__)

    @property
    def may_differ(self) -> bool:
        """Whether each rank may compute something else for the whole tensor."""
        return self.kind.is_random or any(_is_plain(tensor) for tensor in self.tensors)

    def refuse_locked(self) -> None:
        """Raise if the parameters cannot be used now: a step is running."""
        if any(isinstance(local_part(tensor), LockedRows) for tensor in self.tensors):
            args, kwargs = pytree.tree_map_only(Tensor, local_part, (self.args, self.kwargs))
            self.func(*args, **kwargs)  # raises

    def run(self, place: Callable[[Tensor], Tensor]) -> Any:
        """Return what the operator gives for its placed operands."""
        args, kwargs = pytree.tree_map_only(Tensor, place, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def in_place(self, computed: Any) -> Any:
        """Return the written operands in place of the results that are what was written to them.

        Other results stay: an operator may write to some operands and return something new.
        """
        if not self.kind.returned:
            return computed
        results = computed if isinstance(computed, tuple) else (computed,)
        found = tuple(
            result if place is None else self._argument(*place)
            for result, place in zip(results, self.kind.returned, strict=True)
        )
        return found if isinstance(computed, tuple) else found[0]

    def _argument(self, index: int, name: str) -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)


def _adopted(tensor: DTensor) -> DTensor:
    """Return the tensor itself, or one that ``DTensor.from_local`` has made of rows."""
    if isinstance(tensor, RowsTensor):
        return tensor
    placement = tensor.placements[0]
    fits = isinstance(placement, Replicate)
    if isinstance(placement, Rows):
        first, end = placement.rows[tensor.device_mesh.get_local_rank()]
        shape = (end - first, *tensor.shape[1:])
        fits = tensor.shape[0] == placement.rows[-1][1] and local_part(tensor).shape == shape
    if not fits or len(tensor.placements) > 1:
        raise UnsupportedError(
            f"A DTensor of shape {tuple(tensor.shape)} with the placements {tensor.placements} is"
            " combined with a sharded parameter, whose rows it does not have. Make it from the"
            " parameter, as in `parameter.clone()`, or pass shape=parameter.shape and"
            " stride=parameter.stride() to DTensor.from_local()."
        )
    return as_dtensor(local_part(tensor), tensor._spec)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ranks may hold different values of it."""
    return not isinstance(tensor, DTensor | RowsView)


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of all rows; collective if they are sharded."""
    if isinstance(tensor, DTensor):
        return whole_of(tensor)
    return tensor.shown if isinstance(tensor, RowsView) else tensor


def _write(tensor: DTensor, whole: Tensor) -> None:
    local_part(tensor).copy_(own_part(whole, tensor))
    _count_write(tensor)


def _count_write(tensor: Tensor) -> None:
    """Raise the version of rows; below autograd, where operators come here, none does."""
    local = local_part(tensor)
    if isinstance(tensor, DTensor) and not local.is_inference():
        torch.autograd.graph.increment_version(local)


# -- 1. element-wise --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Home:
    """Where operands of one element-wise computation come together."""

    tensor: DTensor | None
    shape: torch.Size

    @property
    def rows(self) -> Rows | None:
        """The rows of the result, if it is sharded."""
        return None if self.tensor is None else rows_of(self.tensor)

    def has(self, operand: Tensor) -> bool:
        """Return whether an operand is there, so that nothing is sent for it."""
        rows = rows_of(operand)
        if rows is None:
            return True
        return self.rows == rows and self.tensor is not None and operand.ndim == len(self.shape)

    def place(self, operand: Tensor) -> Tensor:
        """Return the values of an operand that are needed there; collective unless it is there."""
        if self.tensor is None or self.rows is None:
            return _plain(operand)
        if isinstance(operand, DTensor) and self.has(operand):
            return local_part(operand)
        values = _plain(operand)
        is_broadcast = values.ndim < len(self.shape) or len(values) != self.shape[0]
        if values.ndim == 0 or is_broadcast:
            return values
        return own_part(values, self.tensor)

    def wrap(self, computed: Any) -> Any:
        """Return computed rows as a sharded tensor."""
        if self.tensor is None or not isinstance(computed, Tensor):
            return computed
        spec = self.tensor._spec
        shape = self.tensor.shape[:1] + computed.shape[1:]
        if shape != self.tensor.shape or computed.dtype != self.tensor.dtype:
            placement = self.tensor.placements[0]
            spec = row_spec(self.tensor.device_mesh, placement, shape, computed.dtype)
        return as_dtensor(computed, spec)


def _home_of(operands: Sequence[Tensor], written: set[int]) -> _Home:
    shape = operands[0].shape
    if any(operand.shape != shape for operand in operands):
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    changed = [operand for operand in operands if id(operand) in written]
    sharded = [one for one in changed or operands if isinstance(one, DTensor)]
    in_rows = [one for one in sharded if rows_of(one) is not None]
    if not changed:
        plain = [operand for operand in operands if not isinstance(operand, DTensor)]
        # a plain number only scales rows; what it gives with another number is a plain one
        if any(one.ndim for one in plain) or (plain and not in_rows):
            return _Home(None, shape)
        in_rows = [one for one in in_rows if one.ndim == len(shape) and one.shape[0] == shape[0]]
        if not in_rows and any(rows_of(one) is not None for one in sharded):
            return _Home(None, shape)
    return _Home(next(iter(in_rows or sharded), None), shape)


def _element_wise(call: _Call) -> Any:
    values = [*call.args, *call.kwargs.values()]
    lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)]
    written = {id(tensor) for tensor in call.written}
    if lists:  # foreach and fused operators compute each index by itself
        count = len(lists[0])
        groups = [[held[i] for held in lists if len(held) == count] for i in range(count)]
    else:
        groups = [call.tensors]
    homes = [_home_of(group, written) for group in groups]
    _bring_together(call, list(zip(groups, homes, strict=True)))

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _plain(value) if lists else homes[0].place(value)
        if any(value is held for held in lists) and len(value) == len(homes):
            return [home.place(one) for home, one in zip(homes, value, strict=True)]
        return value

    args = [placed(value) for value in call.args]
    kwargs = {name: placed(value) for name, value in call.kwargs.items()}
    computed = call.func(*args, **kwargs)
    _keep_views(call)
    for tensor in call.written:
        _count_write(tensor)
    if call.written:
        return call.in_place(computed)
    if lists:
        return [home.wrap(one) for home, one in zip(homes, computed, strict=True)]
    return pytree.tree_map_only(Tensor, homes[0].wrap, computed)


def _bring_together(call: _Call, groups: Sequence[tuple[Sequence[Tensor], _Home]]) -> None:
    """Meet if operands must be sent, and refuse writes that differ between ranks; collective."""
    sent = [one for group, home in groups for one in group if not home.has(one)]
    cut = [
        (one, home)
        for group, home in groups
        if home.tensor is not None
        for one in group
        # a number only scales rows
        if _is_plain(one) and (one.ndim or home.rows is None)
    ]
    if sent or cut:
        meet_for(call.name, [*sent, *(home.tensor for _, home in cut if home.tensor is not None)])
    if cut and cut[0][1].tensor is not None:
        refuse_different([one for one, _ in cut], cut[0][1].tensor, call.name)


# -- 2. reductions ----------------------------------------------------------------------------


def _arguments(call: _Call) -> dict[str, Any]:
    names = [argument.name for argument in call.func._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _reduces_all(call: _Call) -> bool:
    """Return whether it reduces one tensor in rows to one number, by parts."""
    arguments = _arguments(call)
    tensor = arguments["self"]
    if len(call.tensors) != 1 or rows_of(tensor) is None or arguments.get("keepdim"):
        return False
    if not tensor.numel() or arguments.get("ord") == 0:  # a norm that counts
        return False
    dim = arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or range(tensor.ndim))
    return {d % tensor.ndim for d in dims} == set(range(tensor.ndim))


def _combined(call: _Call) -> Tensor:
    """Return a reduction of the results of the ranks that hold rows; collective."""
    arguments = _arguments(call)
    tensor = arguments["self"]
    rows = rows_of(tensor)
    assert rows is not None
    is_mean = call.name == "mean"
    reduce = torch.ops.aten.sum.dim_IntList if is_mean else call.func
    options = {name: value for name, value in arguments.items() if name != "self"}
    if is_mean:
        options = {"dtype": options.get("dtype"), "dim": None}
    local = local_part(tensor).detach()
    # a rank without rows sends a number of the right dtype, which is left out
    own = local if len(local) else local.new_zeros((1,) * local.ndim)
    meet_for(call.name, [tensor])
    numbers = of_all_ranks(reduce(own, **options).reshape(1), tensor)
    held = torch.tensor([end > first for first, end in rows.rows], device=numbers.device)
    if "dim" in options:
        options["dim"] = 0 if isinstance(options["dim"], int) else [0]
    result = agreed(reduce(numbers[held], **options), tensor.device_mesh)
    return result / tensor.numel() if is_mean else result


def _norms(call: _Call) -> list[Tensor]:
    """Return the norm of each tensor of a list, from one message of all ranks; collective."""
    arguments = {"ord": 2, "dtype": None, **_arguments(call)}
    order, tensors = arguments["ord"], arguments["self"]
    like = next(tensor for tensor in tensors if rows_of(tensor) is not None)
    meet_for(call.name, [like])
    values = [local_part(tensor).detach() for tensor in tensors]
    device = local_part(like).device
    # a rank without rows sends a number, which is left out
    parts = [_norm(v, order).to(device) if v.numel() else v.new_zeros(()) for v in values]
    own = torch.stack([part.to(device, torch.float64) for part in parts])
    numbers = of_all_ranks(own, like).view(-1, len(tensors))
    norms = []
    for index, tensor in enumerate(tensors):
        rows = rows_of(tensor)
        norm = parts[index]
        if rows is not None:
            held = torch.tensor([size > 0 for size in rows.sizes], device=device)
            # counts of elements that are not zero add up
            norm = _norm(numbers[held, index], order or 1)
        norms.append(norm.to(device, torch.float64))
    same = agreed(torch.stack(norms), like.device_mesh).unbind()
    return [
        norm.to(value.device, arguments["dtype"] or value.dtype.to_real())
        for norm, value in zip(same, values, strict=True)
    ]


def _norm(values: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(values, order, dtype=torch.promote_types(values.dtype, _LEAST))


def _has_norms(call: _Call) -> bool:
    """Return whether it takes norms of tensors that have them, some of these in rows."""
    tensors = call.args[0] if call.name == "_foreach_norm" else ()
    return any(rows_of(tensor) is not None for tensor in tensors) and all(
        tensor.numel()
        and (tensor.is_floating_point() or tensor.is_complex())
        and not isinstance(tensor, RowsView)
        for tensor in tensors
    )


# -- 3. everything else -----------------------------------------------------------------------


def _of_whole_tensors(call: _Call) -> Any:
    """Gather the operands, run the operator on every rank, and keep what it writes; collective."""
    sharded = [tensor for tensor in call.tensors if isinstance(tensor, DTensor)]
    written = [tensor for tensor in call.written if isinstance(tensor, DTensor)]
    may_differ = bool(written) and call.may_differ
    if may_differ or any(rows_of(tensor) is not None for tensor in sharded):
        meet_for(call.name, sharded)
    # one plain tensor for each operand, so that a write and its result are the same memory
    plain = {id(tensor): _plain(tensor) for tensor in call.tensors}
    for tensor in written:
        if may_differ and rows_of(tensor) is None:
            plain[id(tensor)] = plain[id(tensor)].clone()  # this rank's copy, until all agree
    computed = call.run(lambda tensor: plain[id(tensor)])
    if may_differ:
        refuse_different([plain[id(one)] for one in written], written[0], call.name)
    for tensor in written:
        _write(tensor, plain[id(tensor)])
    _keep_views(call)
    if call.written:
        return call.in_place(computed)
    if not call.kind.is_view:
        return computed
    base = call.args[0]
    if isinstance(base, RowsView):
        return pytree.tree_map_only(Tensor, lambda v: RowsView(base.gathered, v), computed)
    if rows_of(base) is None:
        return computed  # of a copy that each rank holds: a view of that copy
    gathered = _Gathered(base, plain[id(base)])
    return pytree.tree_map_only(Tensor, lambda v: RowsView(gathered, v), computed)


def _keep_views(call: _Call) -> None:
    """Let what an operator has written to views reach the rows; collective if it may differ."""
    views = [tensor for tensor in call.written if isinstance(tensor, RowsView)]
    if views and call.may_differ:
        base = views[0].gathered.base
        meet_for(call.name, [base])
        values = [view.shown for view in views]
        for view in views:
            view.gathered.expire()  # until it is kept: it holds what may be refused
        refuse_different(values, base, call.name)
    for view in views:
        view.gathered.keep()
