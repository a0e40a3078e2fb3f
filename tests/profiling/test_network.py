"""Which way slices take is chosen by the times of both, and remembered with them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from launch import run_ranks
from torch import nn

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.sharded_model import ShardedModel, UnitOptions
from lightning_cephalo.profiling.memory_model import state_bytes
from lightning_cephalo.profiling.network import measure_network
from lightning_cephalo.ranks.groups import Groups

NODES = (0, 0, 7)
PLENTY = 1e9


UNIT_BYTES = 4 * (8 * 8 + 8)


def _model(node_rank: int, reduce_dtype: torch.dtype | None = None) -> ShardedModel:
    return ShardedModel(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]),
        Groups.create(timedelta(seconds=100), node_rank),
        accelerator_of(torch.device("cpu")),
        fractions=[0.5, 0.3, 0.2],
        units=UnitOptions(types=(nn.Linear,)),
        compute_dtype=None,
        recompute=False,
        reduce_dtype=reduce_dtype,
    )


def _chosen(
    rank: int, nodes: tuple[int, ...], by_node_s: float, capacity_bytes: float
) -> tuple[bool, float, tuple[int, ...], float, float]:
    model, now_s = _model(nodes[rank]), 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += by_node_s if model.routing.goes_by_node else 1.0
        return now_s

    times = measure_network(model, clock, capacity_bytes)
    assert times.by_node is model.routing.goes_by_node
    gradients, received = _reducing(model)
    return times.by_node, times.gather_s, model.routing.nodes, gradients, received


def _reducing(model: ShardedModel) -> tuple[float, float]:
    """Return what full gradients take, and what ranks receive into, in units."""
    gradients = model.gathered_gradient_bytes / UNIT_BYTES
    # in addition to parameters, gradients and two moments
    received = (state_bytes(model) - 4 * 3 * UNIT_BYTES) / UNIT_BYTES
    return gradients, received


def _rounding(rank: int) -> list[tuple[float, float]]:
    return [_reducing(_model(0, dtype)) for dtype in (None, torch.float32, torch.bfloat16)]


def test_gradients_that_travel_as_bfloat16_count_half_and_with_their_copy_and_sum() -> None:
    for plain, same, rounded in run_ranks(3, _rounding):
        assert plain == same == (2.0, 3.0)
        assert rounded == (2.0 + 0.5, 3 * 0.5 + 1.0)


@pytest.mark.parametrize(
    ("nodes", "by_node_s", "capacity_bytes", "by_node"),
    [
        (NODES, 0.5, PLENTY, True),
        (NODES, 0.99, PLENTY, False),  # no more than noise
        (NODES, 0.5, 3000, False),  # no room for the summands of relays
        ((0, 0, 0), 0.5, PLENTY, False),
        ((0, 1, 2), 0.5, PLENTY, False),
    ],
    ids=["faster", "noise", "no room", "one node", "one rank each"],
)
def test_slices_go_by_node_where_that_takes_less_time_and_fits(
    nodes, by_node_s, capacity_bytes, by_node
):
    for found in run_ranks(3, _chosen, nodes, by_node_s, capacity_bytes):
        chosen, gather_s, numbered, gradients, received = found
        assert chosen is by_node
        assert gather_s == (by_node_s if by_node else 1.0)
        assert numbered == tuple(nodes.index(node) for node in nodes)
        # relays hold the summands of a unit; the shares of two others arrive, else of three ranks
        assert (gradients, received) == ((3, 2) if by_node else (2, 3))
