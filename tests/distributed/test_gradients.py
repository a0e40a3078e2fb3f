"""Gradients, losses and updates equal those of one device: the test that matters most."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from harness import (
    ALLOCATIONS,
    Allocation,
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import RankFailure, run_ranks
from zoo import ZOO, build, hugging_face_loss


@pytest.fixture(scope="module", autouse=True)
def models_imported_before_forking():
    """transformers imports a model's code on first use, seconds in every forked rank."""
    for name in ZOO:
        build(name, 1)


def compare(
    rank: int, name: str, allocation: Allocation, recompute: bool, reshard: bool = True
) -> dict[str, float]:
    model, batch = build(name, batch_size_of(allocation))
    single = copy.deepcopy(model)
    executor = make_executor(model, allocation.fractions, recompute, reshard=reshard)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    single_adamw = torch.optim.AdamW([p for p in single.parameters() if p.requires_grad], lr=1e-3)
    parts = microbatches_of(batch, allocation, rank)
    errors = {"gradient": 0.0, "loss": 0.0, "norm": 0.0, "parameters": 0.0}
    for _ in range(3):
        loss = torch.tensor(sharded_step(executor, model, hugging_face_loss, parts))
        torch.distributed.all_reduce(loss)
        expected = hugging_face_loss(single, batch)
        expected.backward()
        errors["loss"] = max(errors["loss"], abs(float(loss / expected.detach()) - 1))
        found = full_gradients(model)
        wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
        errors["gradient"] = max(errors["gradient"], relative_error(found, wanted))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        single_norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        errors["norm"] = max(errors["norm"], abs(float(norm.full_tensor() / single_norm) - 1))
        adamw.step()
        single_adamw.step()
        adamw.zero_grad()
        single_adamw.zero_grad()
    errors["parameters"] = relative_error(
        {key: parameter.full_tensor() for key, parameter in model.named_parameters()},
        {key: parameter.detach() for key, parameter in single.named_parameters()},
    )
    return errors


def _compare_all(rank: int, name: str, plans: list[str]) -> dict[tuple[str, bool], dict]:
    cases = itertools.product(plans, (True, False))
    return {(p, again): compare(rank, name, ALLOCATIONS[p], again) for p, again in cases}


@functools.cache
def _errors(name: str, world_size: int) -> list[dict] | RankFailure:
    """All plans of one number of ranks in one fork, which is most of the time of a case."""
    plans = [key for key, plan in ALLOCATIONS.items() if plan.world_size == world_size]
    try:
        return run_ranks(world_size, _compare_all, name, plans)
    except RankFailure as failure:
        return failure


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "kept"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("name", ZOO)
def test_three_clipped_adamw_steps_equal_one_device(name, allocation, recompute):
    found = _errors(name, ALLOCATIONS[allocation].world_size)
    if isinstance(found, RankFailure):
        raise found
    for errors in (of_rank[allocation, recompute] for of_rank in found):
        assert errors["gradient"] <= 1e-5
        assert errors["loss"] <= 1e-5
        assert errors["norm"] <= 1e-5
        assert errors["parameters"] <= 1e-4, errors  # AdamW divides by tiny second moments


def _compare_mixed(rank: int, name: str) -> dict[str, float]:
    return compare(rank, name, ALLOCATIONS["3:1"], recompute=rank == 0)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_ranks_choose_recomputation_each_for_itself(name):
    for errors in run_ranks(2, _compare_mixed, name):
        assert errors["gradient"] <= 1e-5
        assert errors["loss"] <= 1e-5


def _compare_gathered(rank: int, name: str) -> list[dict[str, float]]:
    allocation = ALLOCATIONS["3:1"]
    return [compare(rank, name, allocation, again, reshard=False) for again in (True, False)]


@pytest.mark.parametrize("name", ZOO)
def test_units_that_stay_gathered_change_nothing(name):
    for of_rank in run_ranks(2, _compare_gathered, name):
        for errors in of_rank:
            assert errors["gradient"] <= 1e-5
            assert errors["loss"] <= 1e-5
            assert errors["norm"] <= 1e-5
            assert errors["parameters"] <= 1e-4
