"""What the planner takes a step's clipping and update to cost, against what they do cost."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from launch import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_time import VirtualHost

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.emulated.operators import tensors_in
from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling import optimizer_time as timing
from lightning_cephalo.profiling.optimizer_time import optimizer_time
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.sharding.placement import local_part


class _Block(nn.Module):
    def __init__(self, vectors: int, numel: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(vectors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(vector.mean() for vector in self.vectors)


class _Net(nn.Module):
    def __init__(self, vectors: int, numel: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(vectors, numel) for _ in range(4))


def sharded_model(vectors, numel, shares=(0.5, 0.5)):
    sharded = ShardedModel(
        _Net(vectors, numel),
        Groups.create(timedelta(seconds=100)),
        accelerator_of(torch.device("cpu")),
        fractions=list(shares),
    )
    for unit in sharded.units:
        unit.arm()
        unit.start_reduce(1.0)
        unit.wait_reduce()
    return sharded


class _Operators(TorchDispatchMode):
    """Lets every operator take a time of its own, and one for each byte that it touches."""

    OPERATOR_S, BYTE_S = 1e-6, 1e-10

    def __init__(self, host: VirtualHost) -> None:
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        touched = sum(tensor.nbytes for tensor in tensors_in([*args, result]))
        self.host.run(self.OPERATOR_S + self.BYTE_S * touched)
        return result


def _timed(rank, vectors, numel, shares):
    sharded = sharded_model(vectors, numel, shares)
    host = VirtualHost()
    with _Operators(host):
        told = optimizer_time(sharded, host.now)
    parameters = list(sharded.module.parameters())
    assert all(parameter.grad is None for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    times = []
    with _Operators(host):
        for _ in range(3):
            start_s = host.now_s
            with local_update(optimizer):
                optimizer.step()
            times.append(host.now_s - start_s)
    rows = sum(local_part(parameter).numel() for parameter in parameters)
    return told, rows, times[-1]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2)])
@pytest.mark.parametrize(("vectors", "numel"), [(60, 50), (1, 2_000_000)])
def test_the_time_told_is_that_of_the_step_by_number_and_by_size_of_its_tensors(
    vectors, numel, shares
):
    found = run_ranks(2, _timed, vectors, numel, shares)
    assert found[0][0].overhead_s == found[1][0].overhead_s
    for told, rows, took_s in found:
        told_s = told.overhead_s + rows / told.parameters_per_s
        assert told_s == pytest.approx(took_s, rel=0.05)


def _on_slow_rank(rank):
    sharded, host = sharded_model(1, 2_000_000, (0.5, 0.5)), VirtualHost()
    operators = _Operators(host)
    operators.BYTE_S = operators.BYTE_S * (3 if rank else 1)
    with operators:
        return optimizer_time(sharded, host.now)


def test_every_rank_has_the_rate_of_its_device_and_equal_ranks_the_slowest():
    (overhead_s, fast), (other_s, slow) = run_ranks(2, _on_slow_rank)
    assert overhead_s == other_s
    assert fast == pytest.approx(3 * slow, rel=0.02)
    rank = RankProfile("a", [1.0], [1.0], [1.0], [1.0], 1000.0, updated_parameters_per_s=fast)
    alike = merge_equal_ranks([rank, replace(rank, updated_parameters_per_s=slow)])
    assert [each.updated_parameters_per_s for each in alike] == [slow, slow]
    apart = [rank, replace(rank, name="b", updated_parameters_per_s=slow)]
    assert merge_equal_ranks(apart) == apart


def _full(rank):
    sharded, host = sharded_model(1, 1000, (0.5, 0.5)), VirtualHost()

    class Full(_Operators):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if rank and function is torch.ops.aten.zeros_like.default:  # gradients and moments
                raise torch.OutOfMemoryError("full")
            return super().__torch_dispatch__(function, types, args, kwargs)

    with Full(host):
        return optimizer_time(sharded, host.now)


def test_a_rank_that_is_full_takes_the_times_of_the_others():
    found, other = run_ranks(2, _full)
    assert found == other and found.overhead_s > 0
    assert found.parameters_per_s < math.inf


def _with_clipping(rank):
    sharded, host = sharded_model(6, 20), VirtualHost()
    clipped = []

    def clip(parameters, largest):
        clipped.append({parameter.grad is not None for parameter in parameters})
        host.run(0.02 * (rank + 1))

    timing.clip_by_norm = clip
    with _Operators(host):
        bare_s = optimizer_time(sharded, host.now).overhead_s
        told_s = optimizer_time(sharded, host.now, clip_value=1.0).overhead_s
    no_gradients = all(parameter.grad is None for parameter in sharded.module.parameters())
    return told_s - bare_s, set().union(*clipped), no_gradients


def test_clipping_is_timed_with_gradients_that_are_gone_afterwards():
    for more_s, had_gradients, no_gradients in run_ranks(2, _with_clipping):
        assert more_s == pytest.approx(0.04, rel=0.01)
        assert had_gradients == {True} and no_gradients
