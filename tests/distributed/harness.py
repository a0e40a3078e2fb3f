"""Train steps of a model on several ranks by a plan, and on one device, without Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.features.install import install
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import find_units
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.placement import default_mesh, local_part
from lightning_cephalo.sharding.unit import Unit

Loss = Callable[[nn.Module, Any], Tensor]
"""Mean loss of a model over a batch (a dict of tensors with samples along dimension 0)."""


@dataclass(frozen=True)
class Allocation:
    """Microbatch sizes and state share of each rank."""

    microbatches: tuple[tuple[int, ...], ...]
    fractions: tuple[float, ...]

    @property
    def world_size(self) -> int:
        return len(self.fractions)


ALLOCATIONS = {
    "even": Allocation(((2, 2), (2, 2)), (0.5, 0.5)),
    "3:1": Allocation(((3, 3), (2,)), (0.75, 0.25)),
    "3:1:0": Allocation(((2, 2), (3,), (1,)), (0.75, 0.25, 0.0)),
    "no data": Allocation(((3, 2), (3,), ()), (0.3, 0.0, 0.7)),
    "ragged": Allocation(((3, 2, 1), (1, 1)), (0.0, 1.0)),
}


def slice_batch(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {key: value[start:stop] for key, value in batch.items()}


def microbatches_of(
    batch: dict[str, Tensor], allocation: Allocation, rank: int
) -> list[dict[str, Tensor]]:
    start = sum(sum(sizes) for sizes in allocation.microbatches[:rank])
    parts = []
    for size in allocation.microbatches[rank]:
        parts.append(slice_batch(batch, start, start + size))
        start += size
    return parts


_CPU = torch.device("cpu")


@functools.cache
def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Of this rank's executors, one after the other: new ones take as long as a step."""
    return dist.new_group(), dist.new_group(), dist.new_group(backend="gloo")


def make_executor(
    model: nn.Module,
    fractions: Sequence[float],
    recompute: bool,
    *,
    reshard: bool = True,
    device: torch.device = _CPU,
    **discovery: Any,
) -> Executor:
    gather_group, reduce_group, control_group = _groups()
    mesh = default_mesh(device.type)
    context = ShardingContext(device, mesh, gather_group, reduce_group)
    divider = Divider(fractions)
    units = [Unit(members, divider, context) for members in find_units(model, **discovery)]
    executor = Executor(units, ControlGroup(control_group), accelerator_of(device), recompute)
    executor.reshard_after_forward = reshard
    install(executor)
    return executor


def sharded_step(
    executor: Executor,
    model: nn.Module,
    loss_of: Loss,
    parts: Sequence[dict[str, Tensor]],
    weight_of_sample: float = 1.0,
) -> float:
    """One forward and backward; returns this rank's weighted mean loss."""
    calls = []
    for part in parts:
        samples = len(next(iter(part.values())))
        weight = weight_of_sample * samples
        calls.append(
            MicrobatchCall(
                lambda part=part: loss_of(model, part),
                lambda loss, weight=weight: (loss, weight),
                samples=samples,
            )
        )
    outcome = executor.forward(calls)
    pairs = zip(outcome.results, outcome.weights, strict=True)
    loss = sum(float(loss.detach()) * weight for loss, weight in pairs) / outcome.total_weight
    # as the strategy does: results hold the graphs of their losses, and these the last gradients
    del outcome, pairs
    executor.backward()
    return loss


def full_tensors(faces: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Whole tensors of DTensors, in one exchange: one for each is most of a comparison's time."""
    own = {name: local_part(face).numpy() for name, face in faces.items() if face is not None}
    parts: list[dict[str, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    whole: dict[str, Tensor | None] = dict.fromkeys(faces)
    for name, local in own.items():
        face = faces[name]
        if face.placements != (Replicate(),):
            local = np.concatenate([part[name] for part in parts])
        whole[name] = torch.from_numpy(local.copy())
        assert whole[name].shape == face.shape, name
    assert all(part.keys() == own.keys() for part in parts)
    return whole


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return full_tensors({name: parameter.grad for name, parameter in model.named_parameters()})


def relative_error(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Norm of the difference of the whole gradient over its norm; None must meet None."""
    assert found.keys() == expected.keys()
    difference = norm = 0.0
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), f"{name}: {got is None} against {wanted is None}"
        if wanted is not None and got is not None:
            difference += float((got - wanted).detach().abs().double().square().sum())
            norm += float(wanted.abs().double().square().sum())
    return (difference / norm) ** 0.5 if norm else difference**0.5


def batch_size_of(allocation: Allocation) -> int:
    return sum(sum(sizes) for sizes in allocation.microbatches)
