"""Builds the advisor's problem for a cluster and a model, beside ``estimate/build.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.analytic import find_efficiency
from lightning_cephalo.offline.estimate.build import (
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    OPTIMIZER_BYTES_PER_PARAMETER,
    STATE_BYTES_PER_PARAMETER,
    curves_by_device,
    rank_profile,
)
from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.estimate.network import UNEVEN_FACTOR
from lightning_cephalo.offline.pipeline.problem import Block, PartBytes, PipelineProblem
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.curves import CurveTable, cached_tables

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork


def pipeline_problem(
    cluster: Cluster,
    work: ModelWork,
    whole: Problem,
    *,
    tables: Sequence[CurveTable] = (),
    recompute: bool = True,
    choose_recompute: bool = False,
) -> PipelineProblem:
    """Return the advisor's problem; blocks are the ranks of one device in one node."""
    if len(cluster.nodes) < 2:
        raise PlanError(
            "Pipelines of node groups need a cluster of at least two nodes, but this one has one. "
            "Describe the nodes and between_nodes in cluster.yaml."
        )
    tables = (*cached_tables().tables, *tables)
    curves = curves_by_device(cluster, work, whole.global_batch_size, tables)
    # What else a rank holds depends on its stage: curves go as far as the peak alone fits.
    profiles = {
        device: rank_profile(
            device,
            of_device,
            work,
            capacity_bytes=cluster.capacity_bytes(device),
            recompute=recompute or choose_recompute,
            choose_recompute=choose_recompute,
        )
        for device, of_device in curves.items()
    }
    blocks = tuple(
        Block(
            f"node {node}: {count} × {device.name}",
            node,
            (profiles[device],) * count,
            find_efficiency(device, "fp32").bandwidth * device.bandwidth_bytes_per_s,
        )
        for (node, device), count in Counter((r.node, r.device) for r in cluster.ranks).items()
    )
    compute = COMPUTE_BYTES[work.dtype]

    def bytes_of(parameters: float, largest: float) -> PartBytes:
        return PartBytes(
            compute * parameters,
            GRADIENT_BYTES * parameters,
            STATE_BYTES_PER_PARAMETER * parameters,
            (compute + GRADIENT_BYTES) * largest,
            OPTIMIZER_BYTES_PER_PARAMETER * parameters,
        )

    return PipelineProblem(
        whole,
        blocks,
        cluster.network,
        bytes_of(work.unit_parameters, work.largest_unit_parameters),
        root=bytes_of(work.root_parameters, work.root_parameters),
        crossing_bytes=work.boundary_bytes,
        uneven_factor=UNEVEN_FACTOR,
    )
