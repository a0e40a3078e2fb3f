"""Computes operators on sharded tensors: three kinds, and one refusal.

[Note: operators on rows]
1. *Element-wise*: each rank computes its rows where they are, if all sharded operands have the same
   rows and the others are numbers. Nothing is sent. The result has the same rows.
2. *Reductions* to one number combine the numbers of the ranks that hold rows: ``p.abs().max()``.
   Norms of a list send one message for all. The result is a plain tensor.
3. *Whole reads*, all others, gather the operands, and compute with whole plain tensors on every
   rank. The result is plain. Views (``p[0]``, ``p.view(-1)``) cannot be written.

Only element-wise operators write to sharded tensors. Operands with other rows are gathered, and
cut to the written ones. So are plain operands, which are whole: copies from before sharding, or of
a checkpoint. They may differ between ranks (activations, random numbers), so ranks compare them
first. Ranks also compare what is written to 0-d parameters, of which each has a copy. They do not
compare 0-d tensors that only scale rows (``p.mul_(factor)``): these count as numbers, and a message
for each would make clipping slow. All other writes are refused by name.

Considered: torch's own rules for DTensors. They assume even rows, average means of ranks, give
results with wrong rows, and refuse plain operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.placement import (
    RowsTensor,
    RowsView,
    agreed,
    all_gather_on_mesh,
    as_dtensor,
    in_rows,
    local_part,
    meet_for,
    own_part,
    rows_of,
    whole_of,
)
from lightning_cephalo.sharding.same_values import refuse_different
from lightning_cephalo.sharding.write_guard import LockedRows

# element-wise, though torch does not tag them so
_ELEMENT_WISE = {
    *("clone", "copy_", "empty_like", "fill", "fill_", "full_like", "masked_fill_", "ones_like"),
    *("zero_", "zeros_like", "_to_copy"),
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
}
_NOT_ELEMENT_WISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum", "equal"}
# applied to their results for parts, they give the result for the whole
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    **{"all": torch.all, "any": torch.any, "max": torch.amax, "min": torch.amin},
    **{"mean": torch.sum, "sum": torch.sum},
}
_NORMS = ("linalg_vector_norm", "_foreach_norm")
# means, and norms of parts, have at least its precision
_LEAST = torch.float32


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose operands include sharded tensors, or views of them."""
    call = _Call(func, args, kwargs)
    if any(isinstance(local_part(tensor), LockedRows) for tensor in call.tensors):
        return call.run(local_part)  # raises: a step is running
    call.refuse()
    if call.name in {"alias", "detach", "lift_fresh"} and isinstance(args[0], RowsTensor):
        # the same local tensor, so that both count their writes together
        return as_dtensor(local_part(args[0]), args[0]._spec)
    if call.kind.is_element_wise:
        return _element_wise(call)
    return _reduced(call) if call.is_reduction else _read_whole(call)


# -- what an operator is ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What an operator's schema tells."""

    is_element_wise: bool
    is_view: bool
    names: tuple[str, ...]
    written: tuple[str, ...]


@cache
def _kind_of(func: Any) -> _Kind:
    name, schema = func.overloadpacket.__name__, func._schema
    aliases = {each.name: each.alias_info for each in schema.arguments if each.alias_info}
    written = tuple(name for name, alias in aliases.items() if alias.is_write)
    is_tagged = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return _Kind(
        is_element_wise=(name in _ELEMENT_WISE or (is_tagged and not is_random))
        and name not in _NOT_ELEMENT_WISE
        and (not written or len(schema.returns) < 2),
        is_view=len(written) < len(aliases),
        names=tuple(each.name for each in schema.arguments),
        written=written,
    )


class _Call:
    """An operator and its operands."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name, self.kind = str(func.overloadpacket.__name__), _kind_of(func)
        self.arguments = {**dict(zip(self.kind.names, args, strict=False)), **kwargs}
        self.tensors = _tensors_in((args, kwargs))
        self.written = _tensors_in([self.arguments.get(name) for name in self.kind.written])

    def run(self, place: Callable[[Tensor], Tensor]) -> Any:
        """Return what the operator gives for its placed operands."""
        args, kwargs = pytree.tree_map_only(Tensor, place, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def refuse(self) -> None:
        """Raise for DTensors that the user has made, and for writes that are not element-wise."""
        for tensor in self.tensors:
            if isinstance(tensor, DTensor) and not isinstance(tensor, RowsTensor):
                raise UnsupportedError(
                    f"{self.name}() combines a sharded parameter with a DTensor that is not made"
                    f" from it, with the placements {tensor.placements}. Make it from the"
                    " parameter, as in `parameter.clone()`, or pass it whole, as a plain tensor."
                )
        refused = (RowsView,) if self.kind.is_element_wise else (RowsView, DTensor)
        if any(isinstance(one, refused) for one in self.written):
            self.refuse_write()

    def refuse_write(self) -> None:
        """Raise: what is written would not reach the rows of other ranks."""
        raise UnsupportedError(
            f"{self.name}() writes to a view of a sharded tensor, or to all rows together, but each"
            " rank holds some of them. Only element-wise operators on the tensor itself can write,"
            " such as `parameter.mul_(2)`. Write to parameters in a hook, in `with"
            " lightning_cephalo.writable_parameters(module): ...`, where they are whole. Of a"
            " gradient, compute a whole one and assign it: `parameter.grad = gradient`."
        )

    @property
    def is_reduction(self) -> bool:
        """Whether it reduces tensors to one number each, some of these in rows."""
        tensors, dim = self.tensors, self.arguments.get("dim")
        in_rows = any(rows_of(tensor) is not None for tensor in tensors)
        is_known = self.name in _REDUCTIONS or self.name in _NORMS
        if not is_known or not in_rows or not all(tensor.numel() for tensor in tensors):
            return False
        if self.name == "_foreach_norm":
            return True
        dims = [dim] if isinstance(dim, int) else list(dim or range(tensors[0].ndim))
        return (
            len(tensors) == len(self.func._schema.returns) == 1
            and {d % tensors[0].ndim for d in dims} == set(range(tensors[0].ndim))
            and not self.arguments.get("keepdim")
            and (self.name != "mean" or tensors[0].is_floating_point())
        )


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- 1. element-wise --------------------------------------------------------------------------


def _element_wise(call: _Call) -> Any:
    """Compute rows where they are or are written; collective if operands lie elsewhere."""
    values = [*call.args, *call.kwargs.values()]
    lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)]
    lists = [held for held in lists if len(held) == len(lists[0])]
    # foreach and fused operators compute each index by itself
    groups = list(zip(*lists, strict=True)) if lists else [call.tensors]
    homes = [_home_of(group, call) for group in groups]
    pairs = [(one, home) for group, home in zip(groups, homes, strict=True) for one in group]
    compared = [
        (one, home)
        for one, home in pairs
        # a number only scales rows
        if home is not None
        and not isinstance(one, DTensor | RowsView)
        and (one.ndim or rows_of(home) is None)
    ]
    sent = [one for one, home in pairs if not _is_at(one, home)]
    meet_for(call.name, [*sent, *(home for _, home in compared)])
    if compared:
        refuse_different([one for one, _ in compared], compared[0][1], call.name)

    def placed(value: Any) -> Any:
        if any(value is held for held in lists):
            return [_placed(one, home) for one, home in zip(value, homes, strict=True)]
        return _placed(value, None if lists else homes[0]) if isinstance(value, Tensor) else value

    args = [placed(value) for value in call.args]
    computed = call.func(*args, **{name: placed(value) for name, value in call.kwargs.items()})
    for tensor in call.written:
        local = local_part(tensor)
        # below autograd, where operators come here, nothing else counts it
        if isinstance(tensor, DTensor) and not local.is_inference():
            torch.autograd.graph.increment_version(local)
    if call.written:
        return call.written[0] if call.func._schema.returns else None
    shown = [
        one if home is None else pytree.tree_map_only(Tensor, partial(in_rows, like=home), one)
        for one, home in zip(computed if lists else [computed], homes, strict=True)
    ]
    return shown if lists else shown[0]


def _home_of(operands: Sequence[Tensor], call: _Call) -> DTensor | None:
    """Return the operand in whose rows is computed; None: whole tensors, on every rank."""
    written = {id(tensor) for tensor in call.written}
    changed = [operand for operand in operands if id(operand) in written]
    sharded = [one for one in changed or operands if isinstance(one, DTensor)]
    home = max(sharded, key=lambda one: rows_of(one) is not None, default=None)
    if home is None:
        return None
    rows = rows_of(home)
    if changed:
        if not all(isinstance(one, DTensor) and rows_of(one) == rows for one in changed):
            call.refuse_write()
        return home
    # a plain number only scales rows; what it gives with another number is a plain one
    is_local = all(
        _is_at(one, home) if isinstance(one, DTensor) else rows is not None and not one.ndim
        for one in operands
    )
    return home if is_local else None


def _is_at(operand: Tensor, home: DTensor | None) -> bool:
    """Return whether nothing is sent for an operand."""
    rows = rows_of(operand)
    if rows is None or home is None:
        return rows is None
    return rows == rows_of(home) and operand.ndim == home.ndim


def _placed(operand: Tensor, home: DTensor | None) -> Tensor:
    """Return the values of an operand that its home needs; collective unless they are there."""
    if home is not None and isinstance(operand, DTensor) and _is_at(operand, home):
        return local_part(operand)
    values = whole_of(operand)
    if home is None or not home.ndim or values.ndim < home.ndim or len(values) != len(home):
        return values
    return own_part(values, home)


# -- 2. reductions ----------------------------------------------------------------------------


def _reduced(call: _Call) -> Any:
    """Return what the numbers of the ranks that hold rows give together; collective.

    Of a list, it is a number for each tensor, from one message of all ranks.
    """
    tensors, dtype = call.tensors, call.arguments.get("dtype")
    is_norm, is_mean = call.name in _NORMS, call.name == "mean"
    if is_norm:
        order = call.arguments.get("ord", 2)
        # counts of elements that are not zero add up
        part, join = partial(_norm, order=order), partial(_norm, order=order or 1)
    else:
        summed = torch.promote_types(dtype or tensors[0].dtype, _LEAST) if is_mean else dtype
        options = {} if summed is None else {"dtype": summed}
        part = join = partial(_REDUCTIONS[call.name], **options)
    like = next(t for t in tensors if isinstance(t, DTensor) and rows_of(t) is not None)
    meet_for(call.name, [like])
    values = [whole_of(t) if rows_of(t) is None else local_part(t).detach() for t in tensors]
    device = local_part(like).device
    # a rank without rows sends a number of the right dtype, which is left out
    parts = [part(v if v.numel() else v.new_zeros(1)).to(device) for v in values]
    sent = parts[0].dtype if len(parts) == 1 else torch.float64
    own = torch.stack([each.to(sent) for each in parts])
    mesh = like.device_mesh
    numbers = all_gather_on_mesh(own, [len(own)] * mesh.size(), mesh).view(-1, len(own))
    holders = [
        [mesh.get_local_rank()] if rows is None else [r for r, n in enumerate(rows.sizes) if n]
        for rows in map(rows_of, tensors)
    ]
    joined = [join(numbers[ranks, index]) for index, ranks in enumerate(holders)]
    found = list(agreed(torch.stack(joined), mesh).unbind())
    if is_norm or is_mean:
        divisor = tensors[0].numel() if is_mean else 1
        pairs = zip(found, values, strict=True)
        found = [(n / divisor).to(v.device, dtype or v.dtype.to_real()) for n, v in pairs]
    return found if call.name == "_foreach_norm" else found[0]


def _norm(values: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(values, order, dtype=torch.promote_types(values.dtype, _LEAST))


# -- 3. whole reads ---------------------------------------------------------------------------


def _read_whole(call: _Call) -> Any:
    """Gather the operands, and run the operator on every rank; collective."""
    meet_for(call.name, [tensor for tensor in call.tensors if rows_of(tensor) is not None])
    # one plain tensor for each operand: it may be read and written
    plain = {id(tensor): whole_of(tensor) for tensor in call.tensors}
    computed = call.run(lambda tensor: plain[id(tensor)])
    if call.kind.is_view and isinstance(call.args[0], DTensor | RowsView):
        return pytree.tree_map_only(Tensor, partial(RowsView, call.args[0]), computed)
    return computed
