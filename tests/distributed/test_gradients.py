"""Gradients, losses and updates equal those of one device: the test that matters most."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from harness import (
    ALLOCATIONS,
    Allocation,
    batch_size_of,
    full_gradients,
    full_tensors,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import RankFailure, run_ranks
from torch import Tensor, nn
from zoo import ZOO, build, hugging_face_loss

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.adapters.optimizer import clip_by_norm, local_update
from lightning_cephalo.execution.sharded_model import Dtypes, ShardedModel
from lightning_cephalo.ranks.groups import Groups

STEPS = 3
"""The first finds the order of visits. The others follow it, with updated parameters."""
LARGEST_NORM = 0.5


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@dataclass(frozen=True)
class OneDevice:
    """Training on one device: the model and the batch before, and what came of every step."""

    model: nn.Module
    batch: dict[str, Tensor]
    losses: list[float]
    gradients: list[dict[str, Tensor | None]]
    norms: list[float]
    parameters: dict[str, Tensor]


@functools.cache
def one_device(name: str, samples: int) -> OneDevice:
    untrained, batch = build(name, samples)
    model = copy.deepcopy(untrained)
    optimizer = adamw(model)
    losses, gradients, norms = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = hugging_face_loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        found = {key: parameter.grad for key, parameter in model.named_parameters()}
        gradients.append({k: None if g is None else g.clone() for k, g in found.items()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)))
        optimizer.step()
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}
    return OneDevice(untrained, batch, losses, gradients, norms, parameters)


def compare(
    rank: int,
    name: str,
    allocation: Allocation,
    recompute: bool,
    reshard: bool = True,
) -> dict[str, float]:
    expected = one_device(name, batch_size_of(allocation))
    model = copy.deepcopy(expected.model)
    executor = make_executor(model, allocation.fractions, recompute, reshard=reshard)
    optimizer = adamw(model)
    parts = microbatches_of(expected.batch, allocation, rank)
    errors = {"gradient": 0.0, "loss": 0.0, "norm": 0.0, "parameters": 0.0}
    for step in range(STEPS):
        loss = torch.tensor(sharded_step(executor, model, hugging_face_loss, parts))
        torch.distributed.all_reduce(loss)
        errors["loss"] = max(errors["loss"], abs(float(loss) / expected.losses[step] - 1))
        found = full_gradients(model)
        error = relative_error(found, expected.gradients[step])
        errors["gradient"] = max(errors["gradient"], error)
        # as the strategy does: over DTensors, a first call for each shape is most of a case's time
        norm = clip_by_norm(model.parameters(), LARGEST_NORM)
        errors["norm"] = max(errors["norm"], abs(float(norm) / expected.norms[step] - 1))
        with local_update(optimizer):
            optimizer.step()
        optimizer.zero_grad()
    errors["parameters"] = relative_error(
        full_tensors(dict(model.named_parameters())), expected.parameters
    )
    return errors


@dataclass(frozen=True)
class Case:
    """A plan, and per rank whether it recomputes."""

    plan: str
    recompute: tuple[bool, ...]
    reshard: bool = True

    def __str__(self) -> str:
        modes = ["recompute" if again else "kept" for again in dict.fromkeys(self.recompute)]
        return "-".join([self.plan, *modes, *(() if self.reshard else ("stay gathered",))])


def everywhere(plan: str, recompute: bool, reshard: bool = True) -> Case:
    return Case(plan, (recompute,) * ALLOCATIONS[plan].world_size, reshard)


CASES = [
    *(everywhere(plan, again) for plan in ALLOCATIONS for again in (True, False)),
    *(everywhere("3:1", again, reshard=False) for again in (True, False)),
    Case("3:1", (True, False)),
]


def is_quick(name: str, case: Case) -> bool:
    """Whether `make test` holds this case of the model: half of them, the others are slow.

    It holds every plan with every model, and each mode with every plan and with every model.
    """
    modes = set(case.recompute)
    place = list(ZOO).index(name) + CASES.index(case) // 2
    return len(modes) > 1 or modes == {place % 2 == 0}


def _compare_all(rank: int, name: str, cases: list[Case]) -> dict[Case, dict[str, float]]:
    return {
        case: compare(rank, name, ALLOCATIONS[case.plan], case.recompute[rank], case.reshard)
        for case in cases
    }


@functools.cache
def _errors(name: str, world_size: int, quick: bool) -> list[dict] | RankFailure:
    """All such cases of one number of ranks in one fork, which is most of the time of a case."""
    cases = [
        case
        for case in CASES
        if len(case.recompute) == world_size and is_quick(name, case) == quick
    ]
    for samples in {batch_size_of(ALLOCATIONS[case.plan]) for case in cases}:
        one_device(name, samples)  # once for all ranks; it also imports the model's code
    try:
        return run_ranks(world_size, _compare_all, name, cases)
    except RankFailure as failure:
        return failure


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(
            name,
            case,
            id=f"{name}-{case}",
            marks=() if is_quick(name, case) else pytest.mark.slow,
        )
        for name in ZOO
        for case in CASES
    ],
)
def test_three_clipped_adamw_steps_equal_one_device(name, case):
    found = _errors(name, len(case.recompute), is_quick(name, case))
    if isinstance(found, RankFailure):
        raise found
    for errors in (of_rank[case] for of_rank in found):
        assert errors["gradient"] <= 1e-5
        assert errors["loss"] <= 1e-5
        assert errors["norm"] <= 1e-5
        assert errors["parameters"] <= 1e-4, errors  # AdamW divides by tiny second moments


def _reduced(rank, dtype, reduce_dtype):
    """Return this rank's rows of a reduced gradient, and the sum of what the ranks have sent."""
    model = ShardedModel(
        nn.Sequential(nn.Linear(8, 8)).to(dtype),
        Groups.create(timedelta(seconds=100)),
        accelerator_of(torch.device("cpu")),
        fractions=[0.5, 0.3, 0.2],
        units=[nn.Linear],
        dtypes=Dtypes(reduce=reduce_dtype),
    )
    (flat,) = model.flats
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(flat.contents.numel, generator=generator).to(dtype) for _ in range(3)]
    flat.gradient.arm()
    flat.gradient.armed.memory.whole.copy_(gradients[rank])
    flat.gradient.reduce(flat.cut, 0.5).wait()
    narrow = reduce_dtype if reduce_dtype.itemsize < dtype.itemsize else dtype
    total = sum(gradient.to(narrow).to(dtype) for gradient in gradients) * 0.5
    return flat.gradient.reduced.shard, total, narrow is flat.contents.sent_dtype


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),  # none gets wider
    ],
)
def test_gradients_that_travel_in_another_dtype_are_rounded_once(dtype, reduce_dtype):
    found = run_ranks(3, _reduced, dtype, reduce_dtype)
    assert all(is_sent for _, _, is_sent in found)
    shards, totals, _ = zip(*found, strict=True)
    assert torch.equal(torch.cat(shards), totals[0])
