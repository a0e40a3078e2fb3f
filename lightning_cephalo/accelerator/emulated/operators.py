"""Describes operators for an emulated device: their kind, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
)


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator that hold for all arguments.

    ``makes_storage``: its results may be new memory (a view or an in-place operator makes none).
    ``adopts``: its result is new to torch although it shares the memory of its argument.
    ``moves_data``: it reads or writes elements. ``composite``: it only calls other operators,
    which are dispatched on their own except under ``torch.inference_mode``.
    """

    makes_storage: bool
    adopts: bool
    moves_data: bool
    composite: bool
    collective: bool
    waits: bool
    flops: Callable[..., int] | None


def describe(function: Any) -> Operator:
    """Describes an operator overload, or a higher-order operator, from its schema.

    A higher-order operator (control flow) is opaque: its FLOPs come from torch's formula, if any,
    and the operators inside it are not seen.
    """
    packet = getattr(function, "_overloadpacket", function)
    flops = {**flop_registry, **_unregistered()}.get(packet)
    if not isinstance(function, torch._ops.OpOverload):
        return Operator(True, False, True, False, False, False, flops)
    returns = function._schema.returns
    aliased = bool(returns) and all(value.alias_info is not None for value in returns)
    writes = any(
        value.alias_info is not None and value.alias_info.is_write
        for value in function._schema.arguments
    )
    name = function._schema.name.rpartition("::")[2]
    waits = name == "wait_tensor"
    adopts = name == "lift_fresh"  # makes a tensor from Python data, but is declared as a view
    return Operator(
        makes_storage=not aliased or adopts,
        adopts=adopts,
        moves_data=writes or not (aliased or name.startswith(("empty", "new_empty"))),
        composite=flops is None
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ),
        collective=function.namespace in _COLLECTIVE_NAMESPACES and not waits,
        waits=waits,
        flops=flops,
    )


class FlopCounter:
    """Counts FLOPs (a multiply and an add are two) of single operators, cached by shape.

    torch's own counter walks the arguments as a tree on every call. This costs more than a small
    operator.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def count(
        self, function: Any, formula: Callable[..., int], args: Any, kwargs: Any, result: Any
    ) -> int:
        """Returns the FLOPs of one call. Passes on errors of ``formula`` on unknown shapes."""
        key = (function, _signature(args), *kwargs, _signature(tuple(kwargs.values())))
        try:
            return self._known[key]
        except KeyError:
            flops = int(formula(*args, **kwargs, out_val=result))
            self._known[key] = flops
            return flops
        except TypeError:  # an argument that cannot be hashed, such as a symbolic size
            return int(formula(*args, **kwargs, out_val=result))


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in an operator's arguments or results, also in nested lists and tuples.

    Operators nest nothing else.
    """
    found: list[Tensor] = []
    _collect(value, found)
    return found


def bytes_in(value: Any) -> int:
    """Returns the bytes of all elements of the tensors in ``value``, shared memory or not."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple([_signature(item) for item in value])
    return value


def _unregistered() -> dict[Any, Callable[..., int]]:
    # torch's registry has the CUDA attention operators but not the CPU ones, and lacks the experts'
    # products. This is a separate table because register_flop_formula would change every other
    # counter in the process.
    aten = torch.ops.aten
    return {
        aten._grouped_mm: _grouped_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }


def _grouped_flops(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    # Rows are divided among groups, so every row of `left` multiplies one matrix. In the gradient
    # of the matrices, columns are divided.
    if left.ndim == 2 and right.ndim == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    return 2 * out_val.numel() * left.shape[-1]


def _attention_forward_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # scores = query key^T, result = scores value; counts the query's heads, even if keys have fewer
    scores, result = _attention_products(query.shape, key.shape, value.shape)
    return scores + result


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # computes the scores again, then the gradients of value, scores, query and key
    scores, result = _attention_products(query.shape, key.shape, value.shape)
    return 3 * scores + 2 * result


def _attention_products(
    query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> tuple[int, int]:
    batch, heads, query_length, width = query
    pairs = 2 * batch * heads * query_length * key[-2]
    return pairs * width, pairs * value[-1]
