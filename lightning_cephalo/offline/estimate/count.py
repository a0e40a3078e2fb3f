"""Counts the operators, bytes and memory of a module on fake tensors.

This needs no data, no device, and no memory for the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cephalo.accelerator.emulated.operators import bytes_in, describe, tensors_in


@dataclass
class Tally:
    """Running sums: FLOPs, bytes moved by operators without FLOPs, and the number of operators."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    operators: int = 0


@dataclass(frozen=True)
class UnitCount:
    """The counts of one unit for one batch: its forward, its backward (without recompute), memory.

    Memory is in bytes and excludes the unit's input, parameters and their gradients.
    """

    forward: Tally
    backward: Tally
    saved_bytes: float
    peak_bytes: float


class Counter(TorchDispatchMode):
    """Tallies operators and the bytes of live storages inside the block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.live_bytes = 0.0
        self.peak_bytes = 0.0
        self._paused = False
        self._known: set[int] = set()
        self._operators: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # "prim" operators query a fake tensor and do no work
        if self._paused or getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = describe(func)
            if func is torch.ops.aten._grouped_mm.default:
                operator = replace(operator, flops=_grouped_flops)
            self._operators[func] = operator
        if operator.composite:
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if operator.flops is not None:
            self.tally.flops += operator.flops(*args, **kwargs, out_val=result)
        elif operator.moves_data:
            self.tally.moved_bytes += bytes_in((args, tuple(kwargs.values()))) + bytes_in(result)
        self.tally.operators += operator.moves_data or operator.flops is not None
        if operator.makes_storage:
            seen = {_key(tensor) for tensor in tensors_in(args)}
            for tensor in tensors_in(result):
                if _key(tensor) not in seen:
                    self._born(tensor)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators pass uncounted inside the block."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _born(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        size = float(storage.nbytes())
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        finalize(storage, self._died, key, size)

    def _died(self, key: int, size: float) -> None:
        self._known.discard(key)
        self.live_bytes -= size


class ZeroValues(TorchDispatchMode):
    """Returns 0 when code reads the value of a fake tensor.

    Initialisers check whether any value is out of bounds (``trunc_normal_``). Their result does not
    matter here.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


class FusedAttention(TorchFunctionMode):
    """Removes dropout of attention weights, for which torch has no fused kernel on CPUs.

    Devices have one. It saves the same tensors as the CPU kernel without dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def unit_stubs(
    units: list[nn.Module], outside: Counter
) -> Iterator[tuple[list[UnitCount], dict[int, Tensor]]]:
    """Replace the forwards of units by stubs that count; yield the calls, and inputs to keep.

    Each kind of call is counted once, on its own. A stub returns fresh leaf tensors, as the code
    between units sees them as outputs of a unit. Inputs are by storage, for the backward.
    """
    calls: list[UnitCount] = []
    kept: dict[int, Tensor] = {}  # alive, so no other tensor gets their keys
    seen: dict[Any, tuple[UnitCount, Any]] = {}

    def stub(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        shapes = tuple(tuple(parameter.shape) for parameter in unit.parameters())

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    kept.setdefault(_key(leaf), leaf)
            signature = (type(unit), shapes, str(spec), tuple(map(_signature, leaves)))
            if signature not in seen:
                with outside.paused():
                    seen[signature] = _count_unit(unit, forward, leaves, spec)
            count, outputs = seen[signature]
            calls.append(count)
            return pytree.tree_map_only(Tensor, _leaf_like, outputs)

        return call

    for unit in units:
        unit.forward = stub(unit, unit.forward)
    try:
        yield calls, kept
    finally:
        for unit in units:
            del unit.forward


def _count_unit(
    unit: nn.Module, forward: Callable[..., Any], leaves: list[Any], spec: Any
) -> tuple[UnitCount, Any]:
    own = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    with torch.enable_grad(), set_aside_gradients(unit), Counter() as counter:
        args, kwargs = pytree.tree_unflatten(own, spec)
        outputs = forward(*args, **kwargs)
        ahead, counter.tally = counter.tally, Tally()
        wanted = [leaf for leaf in pytree.tree_leaves(outputs)
                  if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
        saved = counter.live_bytes - bytes_in(wanted)
        gradients = [torch.empty_like(leaf) for leaf in wanted]
        if wanted:
            torch.autograd.backward(wanted, gradients)
        count = UnitCount(ahead, counter.tally, max(0.0, saved), counter.peak_bytes)
    return count, pytree.tree_map_only(Tensor, lambda leaf: leaf.detach(), outputs)


@contextmanager
def set_aside_gradients(module: nn.Module) -> Iterator[None]:
    """Give all parameters a gradient buffer to add to inside the block, as the strategy does.

    The buffers are counted elsewhere, so new gradients count only until they are added.
    """
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.grad = None


def _grouped_flops(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    # Matrix products of experts, which torch's registry lacks. Rows are divided among groups, so
    # every row of `left` multiplies one matrix. In the gradient of the matrices, columns are
    # divided.
    if left.ndim == 2 and right.ndim == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    return 2 * out_val.numel() * left.shape[-1]


def _leaf_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).requires_grad_(tensor.is_floating_point())


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
