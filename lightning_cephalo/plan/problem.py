"""What there is to plan for: how fast every rank is, how much it holds, and the work of one step.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes. Curves are indexed by microbatch size
minus one: ``forward_s[3]`` is the time of one unit for one microbatch of four samples.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Literal

from lightning_cephalo.common.records import (
    Amount,
    AmountOrInfinite,
    Count,
    Curve,
    FileRecord,
    ListOf,
    OneOf,
    PositiveOrInfinite,
    Record,
    Text,
    equally_long,
)

_CURVES = ("forward_s", "backward_s", "tail_s", "compute_bytes")
_KEPT_CURVES = ("kept_backward_s", "kept_compute_bytes")


@dataclass(frozen=True)
class RankProfile(Record):
    """One rank, measured.

    The four curves have one entry per microbatch size 1, 2, ... and the same length; ranks may
    differ in length. Empty curves are legal: such a rank can hold state but takes no samples.
    Lists, tuples and arrays are taken.

    Args:
        name: for tables and messages, such as ``"A6000"``; ranks that differ in nothing else are
            planned as equal.
        forward_s: one unit, one microbatch, forward.
        backward_s: one unit, one microbatch, backward, with recompute where it happens.
        tail_s: the root unit (embedding, head, loss) for one microbatch, forward and backward
            together.
        compute_bytes: peak beside the state while a microbatch of that size runs.
        capacity_bytes: what this rank may hold in all; ``math.inf`` for no limit.
        kept_backward_s: ``backward_s`` when activations inside the unit are kept instead of
            recomputed. Empty: recomputation is not this rank's to choose. Given, the plan says
            which, and ``backward_s`` and ``compute_bytes`` are those with recomputation.
        kept_compute_bytes: ``compute_bytes`` beside ``kept_bytes`` of the problem, likewise.
        host_capacity_bytes: host memory for boundary activations; 0: they stay on the device.
        offload_bytes_per_s: rate of copies between device and host, each way.

    Raises:
        PlanError: NaN, infinite or negative entries, curves of different lengths, no capacity.
    """

    kind = "rank profile"
    named_by = "name"
    leaves_out_defaults = True

    name: Text
    forward_s: Curve
    backward_s: Curve
    tail_s: Curve
    compute_bytes: Curve
    capacity_bytes: PositiveOrInfinite
    _: KW_ONLY
    kept_backward_s: Curve = ()
    kept_compute_bytes: Curve = ()
    host_capacity_bytes: AmountOrInfinite = 0.0
    offload_bytes_per_s: PositiveOrInfinite = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = _KEPT_CURVES if self.kept_backward_s or self.kept_compute_bytes else ()
        equally_long(
            self._where(),
            {curve: getattr(self, curve) for curve in (*_CURVES, *kept)},
            remedy="Profile the same sizes for all.",
        )

    def _where(self) -> str:
        return f"rank {self.name!r}: "

    @property
    def largest_microbatch_size(self) -> int:
        """The largest profiled microbatch size; 0 when this rank can take no samples."""
        return len(self.forward_s)


@dataclass(frozen=True)
class Problem(FileRecord):
    """All that :func:`~lightning_cephalo.plan.solve` needs to know of one training step.

    Args:
        ranks: one :class:`RankProfile` per rank, in rank order.
        units: how many repeated units the model has.
        gather_s: time to gather one unit's parameters from uneven shards.
        reduce_s: time to reduce one unit's gradients into uneven shards.
        state_bytes: parameters, gradients and optimizer state of the whole model, all of it
            sharded.
        global_batch_size: samples of one step, over all ranks.
        boundary_bytes: kept per sample and per unit boundary while the step runs.
        optimizer_s: the optimizer's own time in a step.
        gathered_bytes: full buffers (root, unit in use, unit prefetched, full gradients) that every
            rank holds beside its shard, whatever the plan.
        minimum_microbatch_size: no microbatch is smaller (batch norm); a rank may still take no
            samples.
        equal_microbatches: every rank runs the same number of microbatches (modules with
            collectives of their own).
        step_overhead_s: what a step costs beside all of this.
        even_gather_s: ``gather_s`` when all ranks hold equal shares; None: the same.
        even_reduce_s: ``reduce_s`` when all ranks hold equal shares; None: the same.
        root_gather_s: gather of the root unit, before anything is computed.
        root_reduce_s: reduce of the root unit, after everything.
        fill_s: what has nothing to hide behind: the first unit's gather and the last one's reduce.
            A simulation plays it out and leaves this out.
        kept_bytes: kept per sample and unit, beside the boundary, on ranks that do not recompute.
        microbatch_bytes: kept of every microbatch until its backward, whatever its samples (weights
            that autocast has cast, and keeps for the backward).
        reshard_after_forward: whether units are given back after the forward and gathered again in
            the backward; False: they stay gathered in between; "auto": as the plan says.
        unresharded_bytes: what every rank holds beside ``gathered_bytes`` where they stay.

    Raises:
        PlanError: a field is not what is expected; the message names it.
    """

    kind = "problem"

    ranks: Annotated[tuple[RankProfile, ...], ListOf(RankProfile, "a RankProfile", "rank profiles")]
    units: Count
    _: KW_ONLY
    gather_s: Amount = 0.0
    reduce_s: Amount = 0.0
    state_bytes: Amount
    global_batch_size: Count
    boundary_bytes: Amount = 0.0
    optimizer_s: Amount = 0.0
    gathered_bytes: Amount = 0.0
    minimum_microbatch_size: Count = 1
    equal_microbatches: Annotated[bool, OneOf((True, False), "True or False")] = False
    step_overhead_s: Amount = 0.0
    even_gather_s: Amount | None = None
    even_reduce_s: Amount | None = None
    root_gather_s: Amount = 0.0
    root_reduce_s: Amount = 0.0
    fill_s: Amount = 0.0
    kept_bytes: Amount = 0.0
    microbatch_bytes: Amount = 0.0
    reshard_after_forward: Annotated[
        bool | Literal["auto"], OneOf((True, False, "auto"), "True, False or 'auto'")
    ] = True
    unresharded_bytes: Amount = 0.0

    @property
    def fixed_bytes(self) -> float:
        """What every rank holds beside its share of the state, whatever its samples."""
        unresharded = self.unresharded_bytes if self.reshard_after_forward is False else 0.0
        return self.gathered_bytes + unresharded

    @property
    def reshard_choices(self) -> tuple[bool, ...]:
        """What a plan may choose for ``reshard_after_forward``; the first is the default."""
        asked = self.reshard_after_forward
        return (True, False) if asked == "auto" else (asked,)

    def resharding(self, reshard_after_forward: bool) -> Problem:
        """This problem with that choice made."""
        return replace(self, reshard_after_forward=reshard_after_forward)
