"""Gives numbers that steps store on modules the values of one device, on all ranks.

``self.seen += 1`` runs once per microbatch, and not at all on a rank without samples. So each
microbatch starts from the step's values. After it all ranks have, of floats, the mean over samples,
and of integers that are equal, that value: a counter has counted one step. Of other integers each
rank keeps that of its last microbatch, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_reduce, communicates

if TYPE_CHECKING:
    from lightning_cephalo.execution.module_state import ModuleState

Row = tuple[Any, float]
"""A number, and over how many samples it is a mean; for one that lies in a tensor its dtype."""


class ModuleNumbers:
    def __init__(self, state: ModuleState, control: ControlGroup, accelerator: Accelerator) -> None:
        self._state, self._control, self._accelerator = state, control, accelerator
        self._told: set[str] = set()

    def combine(self) -> None:
        """Give all ranks the numbers that the step has stored on modules; collective."""
        own, tensors = self._state.numbers()
        said = self._control.gather((own, self._state.differing))
        rows = [of_rank for of_rank, _ in said]
        values = combined(rows)
        dtypes = {name: v for name, v in values.items() if isinstance(v, torch.dtype)}
        if dtypes:
            device = self._accelerator.device
            plain = {name: torch.tensor(v) for name, (v, _) in own.items() if is_number(v)}
            weight = next((weight for _, weight in own.values()), 0.0)
            means = mean_tensors(list(dtypes), {**plain, **tensors}, weight, device).unbind()
            for (name, dtype), mean in zip(dtypes.items(), means, strict=True):
                values[name] = mean.to(device, dtype)
        differing = {name for _, of_rank in said for name in of_rank} | different_integers(rows)
        # nothing better can be said of these than what the rank has
        values.update({name: v for name, (v, _) in own.items() if name in differing})
        self._state.take_numbers(values)
        new = sorted(differing - self._told)
        self._told |= differing
        if new and self._control.rank == 0:
            warn_of_integers(new)


def different_integers(rows: Sequence[Mapping[str, Row]]) -> set[str]:
    """Return the names of integers that are not the same on all ranks that have them."""
    found: dict[str, set[Any]] = {}
    for row in rows:
        for name, (value, _) in row.items():
            found.setdefault(name, set()).add(value)
    return {
        name
        for name, values in found.items()
        if len(values) > 1 and all(type(value) is int for value in values)
    }


def is_number(value: Any) -> bool:
    """Whether a value is a plain number; flags, which say that code has run, are not."""
    return type(value) in (int, float)


def is_scalar(value: Any) -> bool:
    """Whether a value is a floating-point tensor without a dimension."""
    return type(value) is Tensor and not value.ndim and value.is_floating_point()


def mean_number(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of numbers of which one is a float; the last one of others."""
    if all(value == values[0] for value in values) or float not in map(type, values):
        return values[-1]
    pairs = zip(values, weights, strict=True)
    return sum(float(value) * weight for value, weight in pairs) / sum(weights)


def combined(rows: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    """Return the numbers of a step by name, of tensors the dtype, from those of every rank."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name, said in row.items():
            found.setdefault(name, []).append(said)
    values = {}
    for name, of_ranks in found.items():
        numbers, weights = zip(*of_ranks, strict=True)
        dtypes = [value for value in numbers if isinstance(value, torch.dtype)]
        values[name] = dtypes[0] if dtypes else mean_number(numbers, weights)
    return values


def mean_tensors(
    names: Sequence[str], own: Mapping[str, Tensor], weight: float, device: torch.device
) -> Tensor:
    """Return the means of 0-d tensors over the samples of all ranks that have them; collective."""
    like = torch.empty(0, device=device)
    where = device if communicates(like, None) else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.float64, device=where)
    values = [
        own[name].detach().to(where, torch.float64) if name in own else zero for name in names
    ]
    weights = [zero + weight if name in own else zero for name in names]
    total = torch.cat([torch.stack(values) * torch.stack(weights), torch.stack(weights)])
    if torch.distributed.is_initialized():
        all_reduce(total).wait()
    sums, counts = total.chunk(2)
    return sums / counts


def warn_of_integers(names: Sequence[str]) -> None:
    warnings.warn(
        f"Microbatches leave different values in {', '.join(map(repr, sorted(names)))}, which"
        " training_step stores on the module. On one device it does so once a step, from the whole"
        " batch; here each rank keeps that of its last microbatch. Write such counts in"
        " on_train_batch_end, where every rank runs the code once a step, or use a buffer that"
        " CephaloStrategy(summed_buffers=[...]) names.",
        stacklevel=2,
    )
