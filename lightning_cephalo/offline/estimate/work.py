"""Counts the work and memory that a model needs, by running it on fake tensors.

The model is built, divided into units as the strategy divides it, and run forward and backward for
batches of one and two samples. These give the linear dependence on the batch. Half precision is
counted as the strategy gathers it: parameters and activations in that dtype. Operators that
autocast runs in fp32 are not considered. Counts are exact for the operators that torch runs on a
CPU; a device may choose other kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cephalo.accelerator.emulated.operators import bytes_in
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.count import (
    Counter,
    FusedAttention,
    Tally,
    UnitCount,
    ZeroValues,
    set_aside_gradients,
    unit_stubs,
)
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
    """The work of one pass over one microbatch."""

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
            with ZeroValues():
                module = build()
                # as training finds them: weights compute in another dtype than they have
                first, last = _parameters_of_ends(module)
                module = _cast(module, TORCH_DTYPES[dtype])
            members = find_units(module, with_ends=False)
            modules = [unit.module for unit in members[1:]]
            one, two = (_count(module, modules, run, samples) for samples in (1, 2))
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise PlanError(
                f"{model}: expected a model that runs without values (on fake tensors), "
                f"but got {type(error).__name__}: {(str(error) or 'no reason').splitlines()[0]}. "
                f"Measure it on a device instead, or give a table."
            ) from error
        sizes = [sum(p.numel() for p, _ in unit.parameters) for unit in members]
    whole = not one.calls  # no unit was found or called: the root is the whole model
    calls = max(1, len(one.calls))
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
        unit_peak_bytes=_linear(*(max((c.peak_bytes for c in of.calls), default=0.0)
                                  for of in (one, two))),
        root_peak_bytes=_linear(one.root_peak_bytes, two.root_peak_bytes),
        first_parameters=first,
        last_parameters=last,
    )  # fmt: skip


@dataclass(frozen=True)
class _Count:
    """The counts of one batch."""

    calls: list[UnitCount]
    tail: Tally
    boundary_bytes: float
    root_peak_bytes: float


def _parameters_of_ends(module: nn.Module) -> tuple[int, int]:
    """Return the parameters of embeddings and of heads."""
    found = find_units(module)
    first, last = (
        sum(p.numel() for unit in found if unit.kind is kind for p, _ in unit.parameters)
        for kind in (UnitKind.EMBEDDING, UnitKind.HEAD)
    )
    return first, last


def _count(
    module: nn.Module,
    units: list[nn.Module],
    run: Callable[[nn.Module, int], Tensor],
    samples: int,
) -> _Count:
    with (
        set_aside_gradients(module),
        FusedAttention(),
        Counter() as counter,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a model's advice for real runs
        with unit_stubs(units, counter) as (calls, kept):
            loss = run(module, samples)
        loss.backward()
        boundary_bytes = bytes_in(list(kept.values()))
    return _Count(
        calls, counter.tally, boundary_bytes, max(0.0, counter.peak_bytes - boundary_bytes)
    )


def _mean_pass(one: list[Tally], two: list[Tally]) -> Pass:
    calls = max(1, len(one))

    def linear(name: str) -> Linear:
        return _linear(*(sum(getattr(tally, name) for tally in of) / calls for of in (one, two)))

    return Pass(
        linear("flops"), linear("moved_bytes"), sum(tally.operators for tally in one) / calls
    )


def _linear(one: float, two: float) -> Linear:
    return Linear(fixed=max(0.0, 2 * one - two), per_sample=max(0.0, two - one))


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast like ``module.to(dtype)``, which torch refuses for fake tensors.

    Tied parameters stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    cast = parameter.detach().to(dtype)
                    made[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
                inner._parameters[name] = made[id(parameter)]
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                inner._buffers[name] = buffer.to(dtype)
    return module.train()
