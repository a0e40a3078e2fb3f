"""Builds a :class:`~lightning_cephalo.plan.Problem` for a cluster without access to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Literal

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.analytic import compute_bytes as peak_bytes
from lightning_cephalo.offline.estimate.analytic import curves_of, find_efficiency
from lightning_cephalo.offline.estimate.cluster import Cluster, ClusterRank
from lightning_cephalo.offline.estimate.devices import Device
from lightning_cephalo.plan import KeptCurves, Links, Problem, RankProfile, StateBytes
from lightning_cephalo.plan.curves import Curves, CurveTable, cached_tables
from lightning_cephalo.plan.state_groups import groups_by_node

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork

# fp32 parameter, gradient and Adam's two moments
STATE_BYTES_PER_PARAMETER = 16
# the same without the gradient, which an early update does not hold
EARLY_STATE_BYTES_PER_PARAMETER = 12
# Adam reads all four values and writes all except the gradient
OPTIMIZER_BYTES_PER_PARAMETER = 28
GRADIENT_BYTES = 4
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
# Larger microbatches are no faster per sample, and the solver's time grows with their number.
LARGEST_MICROBATCH_SIZE = 64
# Fraction of the PCIe rate that copies from pinned memory reach: assumed, not measured.
COPY_EFFICIENCY = 0.8
MOMENT_BYTES_PER_PARAMETER, PARAMETER_BYTES = 8, 4
# What the host's memory reads and writes for each parameter that the host updates: Adam's bytes,
# and half of the copies. Fitted to published logs of updates by hosts.
HOST_UPDATE_BYTES_PER_PARAMETER = 30


@dataclass(frozen=True)
class Estimate:
    """A problem, and the curves of each rank, which name the source of its times."""

    problem: Problem
    sources: tuple[Curves, ...]
    broken_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choices:
    """How a model is trained, and what its plan may choose.

    ``choose_recompute`` comes before ``recompute``. ``allow_offload`` moves boundary activations to
    hosts.
    """

    recompute: bool = True
    choose_recompute: bool = False
    allow_offload: bool = False
    optimizer_offload: bool | Literal["auto"] = False
    early_update: bool = False
    hybrid_sharding: bool = False

    @property
    def offloads(self) -> bool:
        """Whether boundaries may move: units that keep all activations have none."""
        return self.allow_offload and (self.recompute or self.choose_recompute)


def build_problem(
    cluster: Cluster,
    work: ModelWork,
    *,
    global_batch_size: int,
    tables: Sequence[CurveTable] = (),
    cache_folder: str | PathLike[str] | None = None,
    choices: Choices = Choices(),
) -> Estimate:
    """Build the planning problem of this model on this cluster."""
    hybrid = choices.hybrid_sharding
    if hybrid and len(cluster.nodes) < 2:
        raise PlanError(
            "Hybrid sharding needs a cluster of at least two nodes that each hold the whole state, "
            "but this one has one. Describe the nodes and between_nodes in cluster.yaml."
        )
    groups = groups_by_node([rank.node for rank in cluster.ranks]) if hybrid else ()
    cached = cached_tables(cache_folder)
    known = curves_by_device(cluster, work, global_batch_size, (*cached.tables, *tables))
    gathered = gathered_bytes(work)
    recomputes = choices.recompute or choices.choose_recompute
    kept_always = work.boundary_bytes + (0.0 if recomputes else work.kept_bytes)

    @functools.cache  # equal ranks have one profile: checking thousands takes seconds
    def profile(rank: ClusterRank) -> RankProfile:
        offloads = choices.offloads and rank.host_memory_bytes > 0
        found = rank_profile(
            rank.device,
            known[rank.device],
            work,
            capacity_bytes=cluster.capacity_bytes(rank.device),
            recompute=recomputes,
            choose_recompute=choices.choose_recompute,
            fixed_bytes=gathered,
            # boundaries that can be offloaded do not limit the microbatch size
            sample_bytes=0.0 if offloads else kept_always * work.units,
        )
        bandwidth = find_efficiency(rank.device, "fp32").bandwidth
        copy_bytes_per_s = COPY_EFFICIENCY * rank.device.pcie_bytes_per_s
        # state that is copied is read here and written there, or the other way round
        state_bytes_per_s = min(copy_bytes_per_s, rank.host_bytes_per_s / 2)
        return replace(
            found,
            host_capacity_bytes=rank.host_memory_bytes * (1 - cluster.reserve),
            offload_bytes_per_s=copy_bytes_per_s,
            updated_parameters_per_s=bandwidth
            * rank.device.bandwidth_bytes_per_s
            / OPTIMIZER_BYTES_PER_PARAMETER,
            host_updated_parameters_per_s=rank.host_bytes_per_s / HOST_UPDATE_BYTES_PER_PARAMETER,
            to_device_bytes_per_s=state_bytes_per_s,
            to_host_bytes_per_s=state_bytes_per_s,
        )

    # Cuts lie between rows, so even shares of the state are rarely even slices.
    gather_of = functools.partial(cluster.gather_s, hybrid=hybrid)
    reduce_of = functools.partial(cluster.reduce_s, hybrid=hybrid)
    compute, inner = COMPUTE_BYTES[work.dtype], _inner_root(work)
    # embeddings are priced with the inner root
    last, root = work.last_parameters, work.root_parameters - work.last_parameters
    largest = max(work.largest_unit_parameters, inner, work.first_parameters, last)
    # what each group sends of a rank's slice arrives there in a row of its own
    received = GRADIENT_BYTES * largest * len(set(groups))

    def links(parameters: float) -> Links:
        return Links(gather_of(compute * parameters), reduce_of(GRADIENT_BYTES * parameters))

    of_unit = links(work.unit_parameters)
    # buffers of full parameters beyond the gathered ones, if units stay gathered
    others = work.units * work.unit_parameters - min(2, work.units) * work.largest_unit_parameters
    problem = Problem(
        ranks=tuple(profile(replace(rank, node=0)) for rank in cluster.ranks),
        units=work.units,
        links=of_unit,
        root_links=links(root),
        last_links=links(last) if last else Links(),
        fill_s=of_unit.both_s,
        # with one reduce's receive buffer, as the profiler counts it (NCCL)
        state=StateBytes(
            STATE_BYTES_PER_PARAMETER * work.parameters + GRADIENT_BYTES * largest + received
        ),
        global_batch_size=global_batch_size,
        boundary_bytes=kept_always,
        kept_bytes=work.kept_bytes if choices.choose_recompute else 0.0,
        gathered_bytes=gathered,
        reshard_after_forward="auto",
        unresharded_bytes=compute * max(0.0, others),
        # the gradient of a head is reduced before the first block's
        early_state=StateBytes(
            EARLY_STATE_BYTES_PER_PARAMETER * work.parameters + 2 * GRADIENT_BYTES * last,
            reducing_bytes=GRADIENT_BYTES * max(0.0, largest - 2 * last) + received,
            updating_bytes=GRADIENT_BYTES * _held_in_updates(work) + received,
        ),
        optimizer_offload=False if hybrid else choices.optimizer_offload,
        unit_parameters=(
            round(work.root_parameters),
            *(round(work.unit_parameters) for _ in range(work.units)),
        ),
        moment_bytes=MOMENT_BYTES_PER_PARAMETER,
        element_bytes=PARAMETER_BYTES,
        offloads_boundaries=choices.offloads,
        groups=groups,
    )
    return Estimate(
        problem.with_early_update() if choices.early_update else problem,
        tuple(known[rank.device] for rank in cluster.ranks),
        cached.broken,
    )


def curves_by_device(
    cluster: Cluster, work: ModelWork, global_batch_size: int, tables: Sequence[CurveTable]
) -> dict[Device, Curves]:
    """Return each device's curves, from the first table that has them, or from its datasheet."""
    longest = max(1, min(global_batch_size, LARGEST_MICROBATCH_SIZE))
    return {
        device: curves_of(device, work, longest, tables)
        for device in dict.fromkeys(rank.device for rank in cluster.ranks)
    }


def _inner_root(work: ModelWork) -> float:
    """Return the parameters of the root unit without embeddings and heads."""
    return work.root_parameters - work.first_parameters - work.last_parameters


def _held_in_updates(work: ModelWork) -> float:
    """Return the elements of gradients, and of what torch's update makes.

    The last unit is updated while the root unit is reduced, and then the root unit. Heads count all
    the time.
    """
    root, last = _inner_root(work), work.last_parameters
    unit = max(work.largest_unit_parameters, work.first_parameters, last)
    return max(0.0, max(2 * unit + max(unit, 2 * root), 3 * root) - 2 * last)


def gathered_bytes(work: ModelWork) -> float:
    """Return the most bytes of full buffers that every rank holds at the same time.

    These are the root and two units of the largest size, with parameters in the compute dtype and
    gradients in fp32. Embeddings and heads count when they are there.
    """
    compute, both = COMPUTE_BYTES[work.dtype], COMPUTE_BYTES[work.dtype] + GRADIENT_BYTES
    first, last = work.first_parameters, work.last_parameters
    units = min(2, work.units) * work.largest_unit_parameters
    at_the_loss = both * last + compute * units
    # one of the two is reduced at the beginning of the backward, the other one at its end
    in_the_backward = GRADIENT_BYTES * max(first, last) + both * units
    return both * _inner_root(work) + max(compute * (first + units), at_the_loss, in_the_backward)


def rank_profile(
    device: Device,
    curves: Curves,
    work: ModelWork,
    *,
    capacity_bytes: float,
    recompute: bool = True,
    choose_recompute: bool = False,
    fixed_bytes: float = 0.0,
    sample_bytes: float = 0.0,
) -> RankProfile:
    """Return the profile of one device, with the microbatch sizes that fit."""
    sizes = range(1, curves.largest_microbatch_size + 1)
    kept_backward = tuple(
        max(0.0, b - f) for f, b in zip(curves.forward_s, curves.backward_s, strict=True)
    )
    kept_peaks = tuple(peak_bytes(work, size, recompute=False) for size in sizes)
    backward, peaks = curves.backward_s, curves.compute_bytes
    if not recompute:
        backward, peaks = kept_backward, kept_peaks
    room = capacity_bytes - fixed_bytes
    fits = sum(peaks[size - 1] + sample_bytes * size <= room for size in sizes)
    found = RankProfile(
        device.name,
        curves.forward_s,
        backward,
        curves.tail_s,
        peaks,
        capacity_bytes,
        kept=KeptCurves(kept_backward, kept_peaks) if choose_recompute else None,
    )
    return found.up_to(fits)
