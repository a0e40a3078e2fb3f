"""Output of the planner: each rank's microbatches and its share of the training state.

A plan has everything that training needs (``CephaloStrategy(plan="plan.yaml")``). The solver's
predictions are for tables and reports. They may be absent, as in a plan written by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import (
    Amount,
    FileRecord,
    ListOf,
    PositiveOrInfinite,
    Record,
    Text,
    YesOrNo,
)
from lightning_cephalo.plan.state_groups import check_groups, fractions_are_even, members_of

_FRACTION_TOLERANCE = 1e-6
_PLAN_AGAIN = "Make the plan again: embedding and head are gathered whole now."
_REMOVED = {
    "vocabulary_sharding": _PLAN_AGAIN,
    "by_node": "Leave it out: slices go straight from rank to rank.",
}
_RENAMED = {"state_groups": "groups"}
_REMOVED_OF_RANKS = {
    "speculated_fraction": "Leave it out: hosts update once the norm is known.",
    "columns_s": _PLAN_AGAIN,
}


def _sizes(field: str, value: Any) -> tuple[int, ...]:
    return tuple(
        records.whole(f"{field}[{index}]", size, minimum=1)
        for index, size in enumerate(records.items(field, value, of="positive whole numbers"))
    )


def _units(field: str, value: Any) -> tuple[int, ...]:
    ends = _sizes(field, value)
    if len(ends) != 2 or ends[0] > ends[1]:
        raise PlanError(f"{field}: expected the first unit and the last one, but got {value!r}.")
    return ends


def _fraction(field: str, value: Any) -> float:
    fraction = records.real(field, value)
    if fraction > 1:
        raise PlanError(
            f"{field}: expected a fraction from 0 to 1, but got {value!r}. Write 0.75, not 75."
        )
    return fraction


@dataclass(frozen=True)
class RankPlan(Record):
    """One rank's part of a step.

    Args:
        microbatch_sizes: samples of each microbatch, in order; sizes may differ, as in (4, 4, 3).
            Empty: no samples.
        state_fraction: share of the training state that this rank holds, 0 to 1.
        name: name of the device, for tables.
        forward_s: predicted time of one unit's forward, summed over this rank's microbatches (F_i).
        backward_s: the same for the backward (B_i).
        tail_s: predicted time of the root over this rank's microbatches, forward and backward.
        memory_bytes: predicted peak memory of this rank, state included.
        capacity_bytes: memory that the plan was allowed to use on this rank.
        recompute: whether this rank recomputes activations inside units; None: the strategy
            decides.
        offload: whether this rank moves boundary activations to host memory.
        host_bytes: predicted host memory of the offloaded boundaries.
        resident_fraction: share of this rank's optimizer state that stays on the device, 0 to 1;
            the rest is in host memory. Whole units are on either side
            (:func:`~lightning_cephalo.plan.state_homes.state_homes`).
        host_update_fraction: share of it that the host's processors update; what is left is copied
            to the device for its update, and back.
        state_host_bytes: predicted host memory of the optimizer state.
        units: the first and the last one of the units, numbered from 1 in the order of the forward,
            that this rank's group holds: a stage of a pipeline. None: all.

    Raises:
        PlanError: a field has an invalid value; the message names it.
    """

    kind = "rank plan"
    named_by = "name"
    removed = _REMOVED_OF_RANKS

    microbatch_sizes: Annotated[tuple[int, ...], _sizes]
    state_fraction: Annotated[float, _fraction]
    name: Text = ""
    forward_s: Amount | None = None
    backward_s: Amount | None = None
    tail_s: Amount | None = None
    memory_bytes: Amount | None = None
    capacity_bytes: PositiveOrInfinite | None = None
    recompute: YesOrNo | None = None
    offload: YesOrNo = False
    host_bytes: Amount | None = None
    resident_fraction: Annotated[float, _fraction] = 1.0
    host_update_fraction: Annotated[float, _fraction] = 0.0
    state_host_bytes: Amount | None = None
    units: Annotated[tuple[int, ...], _units] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resident_fraction + self.host_update_fraction > 1 + _FRACTION_TOLERANCE:
            raise PlanError(
                f"{self._where()}resident_fraction {self.resident_fraction:g} and"
                f" host_update_fraction {self.host_update_fraction:g} sum to more than 1: they are"
                " parts of the same optimizer state."
            )
        if self.offload and self.recompute is False:
            raise PlanError(
                f"{self._where()}offload: true goes with recompute: true only: activations that "
                f"are kept inside the units hold what enters them. Leave one of the two out."
            )

    def _where(self) -> str:
        return f"RankPlan {self.name!r}: " if self.name else "RankPlan."

    @property
    def moves_state(self) -> bool:
        """Whether any optimizer state lives in host memory."""
        return self.resident_fraction < 1

    @property
    def batch_size(self) -> int:
        """Samples of this rank in one step."""
        return sum(self.microbatch_sizes)


@dataclass(frozen=True)
class Plan(FileRecord):
    """One :class:`RankPlan` per rank, and the solver's predictions for the whole step.

    Args:
        ranks: one :class:`RankPlan` per rank, in rank order. Fractions sum to 1 within 1e-6, with
            ``groups`` in each group, and at least one rank takes a sample.
        step_s: predicted time of one step.
        bound_s: lower bound of ``step_s``: no plan that :func:`~lightning_cephalo.plan.solve`
            chooses among is faster.
        gap: how far ``bound_s`` is below the fastest step that was found, as a fraction of that
            step; 0 when they are equal. ``step_s`` may exceed that step by a thousandth, for
            headroom.
        solve_s: seconds that the solver took.
        backend: name of the solver.
        reshard_after_forward: True: units are freed after the forward and gathered again in the
            backward. False: they stay gathered in between. None: the strategy decides.
        padded: whether the slices of equal shares are padded to equal sizes where that lets them
            travel in faster collectives, in more memory. None: the strategy decides.
        early_update: whether the predictions count on units that are updated inside the backward.
            None: they do not say.
        groups: hybrid sharding: the group of every rank, such as its node. Each group holds the
            whole state, or that of its ``units``. Empty: all ranks hold it together.

    Raises:
        PlanError: a field has an invalid value; the message names it.
    """

    kind = "plan"
    removed = _REMOVED
    renamed = _RENAMED

    ranks: Annotated[tuple[RankPlan, ...], ListOf(RankPlan, "a RankPlan", "rank plans")]
    step_s: Amount | None = None
    bound_s: Amount | None = None
    gap: Amount | None = None
    solve_s: Amount | None = None
    backend: Text | None = None
    reshard_after_forward: YesOrNo | None = None
    padded: YesOrNo | None = None
    early_update: YesOrNo | None = None
    groups: Annotated[tuple[int, ...], records.wholes] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.global_batch_size:
            raise PlanError(
                f"Plan: expected at least one sample in all, but all {self.world_size} ranks have "
                f"empty microbatch_sizes. Give at least one rank a microbatch."
            )
        check_groups("groups", self.groups, self.world_size)
        if self.groups and self.moves_state:
            raise PlanError(
                "The plan says groups and resident_fraction, optimizer state in host memory, which"
                " do not go together so far. Leave one of the two out."
            )
        for members in members_of(self.groups, self.world_size):
            units = {self.ranks[rank].units for rank in members}
            if len(units) > 1:
                raise PlanError(
                    f"Plan: expected the same units on all ranks of a group, but the ranks"
                    f" {list(members)} hold {[self.ranks[rank].units for rank in members]}."
                )
        for fractions in self.fractions_of_groups:
            total = math.fsum(fractions)
            if abs(total - 1) > _FRACTION_TOLERANCE:
                where = " in each of groups" if self.groups else ""
                raise PlanError(
                    f"Plan: expected state fractions that sum to 1{where}, but"
                    f" {_listed(fractions)} sum to {total:.9g}. Divide each by their sum."
                )

    @property
    def world_size(self) -> int:
        """Number of ranks that this plan is for."""
        return len(self.ranks)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return sum(rank.batch_size for rank in self.ranks)

    @property
    def has_stages(self) -> bool:
        """Whether any group holds some of the units only."""
        return any(rank.units is not None for rank in self.ranks)

    @property
    def moves_state(self) -> bool:
        """Whether any rank's optimizer state lives in host memory."""
        return any(rank.moves_state for rank in self.ranks)

    @property
    def fractions_of_groups(self) -> list[list[float]]:
        """The shares of the state in each of ``groups``; of all ranks without any."""
        return [
            [self.ranks[rank].state_fraction for rank in members]
            for members in members_of(self.groups, self.world_size)
        ]

    @property
    def shares_are_even(self) -> bool:
        """Whether all ranks hold equal shares of the state, or those of each group do."""
        return all(map(fractions_are_even, self.fractions_of_groups))

    def check(self, *, world_size: int | None = None, global_batch_size: int | None = None) -> None:
        """Check the plan against values that only the run knows; None is not checked.

        Raises:
            PlanError: the number of ranks differs, or the batches do not sum to the global batch.
        """
        if world_size is not None and world_size != self.world_size:
            raise PlanError(
                f"The plan is for {self.world_size} ranks, but this run has {world_size}. "
                f"Start {self.world_size} processes, or plan again for {world_size} ranks."
            )
        if global_batch_size is not None and global_batch_size != self.global_batch_size:
            batches = _listed([rank.batch_size for rank in self.ranks])
            raise PlanError(
                f"Expected batches that sum to the global batch of {global_batch_size}, but the "
                f"plan's {batches} sum to {self.global_batch_size}. Set "
                f"global_batch_size={self.global_batch_size}, or change microbatch_sizes in the "
                f"plan."
            )


def _listed(values: list[Any], most: int = 16) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:most])
    return f"[{shown}{', ...' if len(values) > most else ''}]"
