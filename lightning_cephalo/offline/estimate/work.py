"""Counts the work and memory that a model needs, by running it on fake tensors.

This needs no data, no device, and no memory for the tensors. The model is built, divided into units
as the strategy divides it, and run forward and backward for batches of one and two samples. These
give the linear dependence on the batch. Half precision is counted as the strategy gathers it:
parameters and activations in that dtype. Operators that autocast runs in fp32 are not considered.
Counts are exact for the operators that torch runs on a CPU; a device may choose other kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cephalo.accelerator.emulated.memory_tracker import MemoryTracker
from lightning_cephalo.accelerator.emulated.operators import Operator, bytes_in
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.sharding.discovery import UnitKind, find_units

TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class Linear:
    """``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return the value for a microbatch of ``samples``."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class Pass:
    """The work of one pass over one microbatch; bytes are moved by operators without FLOPs."""

    flops: Linear
    moved_bytes: Linear
    operators: float


@dataclass(frozen=True)
class ModelWork:
    """The work of one model at one dtype and sequence length.

    Units that differ are averaged (T5's encoder and decoder layers).
    """

    model: str
    dtype: str
    sequence_length: int
    units: int
    unit_parameters: float
    largest_unit_parameters: float
    root_parameters: float
    forward: Pass
    backward: Pass
    tail: Pass
    boundary_bytes: float
    kept_bytes: float
    unit_peak_bytes: Linear
    root_peak_bytes: Linear
    first_parameters: float = 0.0
    last_parameters: float = 0.0

    @property
    def parameters(self) -> float:
        """Parameters of the whole model."""
        return self.units * self.unit_parameters + self.root_parameters


def count_work(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module, int], Tensor],
    *,
    model: str,
    dtype: str,
    sequence_length: int,
) -> ModelWork:
    """Count the work and memory that a model needs."""
    if dtype not in TORCH_DTYPES:
        raise PlanError(f"dtype: expected one of {', '.join(TORCH_DTYPES)}, but got {dtype!r}.")
    with FakeTensorMode():
        try:
            with _ZeroValues():
                module = build().train()
                # as training finds them: weights compute in another dtype than they have
                ends = find_units(module)
                _cast(module, TORCH_DTYPES[dtype])
            units = find_units(module, with_ends=False)
            for parameter in module.parameters():
                # Gradients are added to a buffer, as the strategy does. It is counted elsewhere.
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            blocks = [unit.module for unit in units[1:]]
            one, two = (_count(module, blocks, run, samples) for samples in (1, 2))
        except PlanError:
            raise
        except Exception as error:  # of the model's own code
            raise PlanError(
                f"{model}: expected a model that runs without values (on fake tensors), but got "
                f"{reason_of(error)}. Change its options, measure it on a device, or give a table."
            ) from error
        sizes = [sum(p.numel() for p, _ in unit.parameters) for unit in units]
        first, last = (
            sum(p.numel() for unit in ends if unit.kind is kind for p, _ in unit.parameters)
            for kind in (UnitKind.EMBEDDING, UnitKind.HEAD)
        )
    calls = len(one.calls)
    whole = one.calls == [_UnitCount()]  # no unit was found or called: the root is the whole model
    return ModelWork(
        model=model,
        dtype=dtype,
        sequence_length=sequence_length,
        units=calls,
        unit_parameters=0.0 if whole else sum(sizes[1:]) / calls,
        largest_unit_parameters=max(sizes[1:], default=0),
        root_parameters=sum(sizes) if whole else sizes[0],
        forward=_mean_pass([c.forward for c in one.calls], [c.forward for c in two.calls]),
        backward=_mean_pass([c.backward for c in one.calls], [c.backward for c in two.calls]),
        tail=_mean_pass([one.tail], [two.tail]),
        boundary_bytes=(two.boundary_bytes - one.boundary_bytes) / calls,
        kept_bytes=sum(b.saved_bytes - a.saved_bytes
                       for a, b in zip(one.calls, two.calls, strict=True)) / calls,
        unit_peak_bytes=_linear(*(max(c.peak_bytes for c in of.calls) for of in (one, two))),
        root_peak_bytes=_linear(one.root_peak_bytes, two.root_peak_bytes),
        first_parameters=first,
        last_parameters=last,
    )  # fmt: skip


def reason_of(error: Exception) -> str:
    """Return the kind of an error and what it says, in one line without its full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


@dataclass
class _Tally:
    """Running sums: FLOPs, bytes moved by operators without FLOPs, and the number of operators."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    operators: int = 0


@dataclass(frozen=True)
class _UnitCount:
    """One call of a unit; its memory excludes its input, its parameters and their gradients."""

    forward: _Tally = field(default_factory=_Tally)
    backward: _Tally = field(default_factory=_Tally)
    saved_bytes: float = 0.0
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class _Count:
    """The counts of one batch."""

    calls: list[_UnitCount]
    tail: _Tally
    boundary_bytes: float
    root_peak_bytes: float


class _Counter(MemoryTracker):
    """Tallies operators on fake tensors, too."""

    counts_fake = True

    def __init__(self) -> None:
        super().__init__()
        self.tally = _Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # "prim" operators query a fake tensor and do no work
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _after(
        self, function: Any, operator: Operator, args: Any, kwargs: Any, result: Any
    ) -> None:
        if operator.flops is not None:
            self.tally.flops += operator.flops(*args, **kwargs, out_val=result)
        elif operator.moves_data:
            self.tally.moved_bytes += bytes_in((args, tuple(kwargs.values()))) + bytes_in(result)
        self.tally.operators += operator.moves_data or operator.flops is not None


class _ZeroValues(TorchDispatchMode):
    """Returns 0 where an initialiser reads a value of a fake tensor, as ``trunc_normal_`` does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """Removes dropout of attention weights, for which torch has no fused kernel on CPUs.

    Devices have one. It saves the same tensors as the CPU kernel without dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            func = _without_dropout
        return func(*args, **(kwargs or {}))


def _without_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any,
    **named: Any,
) -> Any:  # fmt: skip
    return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *more, **named)


def _count(
    module: nn.Module,
    units: Sequence[nn.Module],
    run: Callable[[nn.Module, int], Tensor],
    samples: int,
) -> _Count:
    with _FusedAttention(), _Counter() as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model's advice for real runs
        with _stubs(units, counter) as (calls, inputs):
            loss = run(module, samples)
        loss.backward()
        boundary_bytes = bytes_in(list(inputs.values()))
    root_peak_bytes = max(0, counter.peak_bytes - boundary_bytes)
    return _Count(calls or [_UnitCount()], counter.tally, boundary_bytes, root_peak_bytes)


@contextmanager
def _stubs(
    units: Sequence[nn.Module], outside: _Counter
) -> Iterator[tuple[list[_UnitCount], dict[int, Tensor]]]:
    """Replace the forwards of units by stubs that count; yield the calls, and inputs to keep.

    Each kind of call is counted once, on its own. A stub returns fresh leaf tensors, as the code
    between units sees them as outputs of a unit. Inputs are by storage, for the backward.
    """
    calls: list[_UnitCount] = []
    inputs: dict[int, Tensor] = {}  # alive, so no other tensor gets their keys
    seen: dict[Any, tuple[_UnitCount, Any]] = {}

    def stub(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        shapes = tuple(parameter.shape for parameter in unit.parameters())

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    inputs.setdefault(leaf.untyped_storage()._cdata, leaf)
            signature = (type(unit), shapes, str(spec), tuple(map(_signature, leaves)))
            if signature not in seen:
                with outside.paused():
                    seen[signature] = _count_unit(forward, args, kwargs)
            count, outputs = seen[signature]
            calls.append(count)
            return pytree.tree_map_only(
                Tensor,
                lambda own: torch.empty_like(own).requires_grad_(own.is_floating_point()),
                outputs,
            )

        return call

    for unit in units:
        unit.forward = stub(unit, unit.forward)
    try:
        yield calls, inputs
    finally:
        for unit in units:
            del unit.forward


def _count_unit(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_UnitCount, Any]:
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), (args, kwargs)
    )
    with torch.enable_grad(), _Counter() as counter:
        outputs = forward(*args, **kwargs)
        ahead, counter.tally = counter.tally, _Tally()
        ends = [leaf for leaf in pytree.tree_leaves(outputs)
                if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
        saved_bytes = counter.current_bytes - bytes_in(ends)
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(leaf) for leaf in ends])
        count = _UnitCount(ahead, counter.tally, max(0, saved_bytes), counter.peak_bytes)
    return count, pytree.tree_map_only(Tensor, Tensor.detach, outputs)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)


def _mean_pass(one: Sequence[_Tally], two: Sequence[_Tally]) -> Pass:
    def linear(name: str) -> Linear:
        return _linear(*(sum(getattr(tally, name) for tally in of) / len(of) for of in (one, two)))

    operators = sum(tally.operators for tally in one) / len(one)
    return Pass(linear("flops"), linear("moved_bytes"), operators)


def _linear(one: float, two: float) -> Linear:
    return Linear(fixed=max(0.0, 2 * one - two), per_sample=max(0.0, two - one))


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast like ``module.to(dtype)``, which torch refuses for fake tensors. Ties stay."""
    made: dict[int, Any] = {}
    for inner in module.modules():
        tensors: dict[str, Any]
        for tensors in (inner._parameters, inner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in made:
                    cast = tensor.detach().to(dtype)
                    if isinstance(tensor, nn.Parameter):
                        cast = nn.Parameter(cast, tensor.requires_grad)
                    made[id(tensor)] = cast
                tensors[name] = made[id(tensor)]
