"""Input of the planner: speed and memory of each rank, and the work of one step.

Names end in their unit of measure: ``_s`` is seconds, ``_bytes`` is bytes. The index of a curve is
the microbatch size minus one: ``forward_s[3]`` is the time of one unit for one microbatch of four
samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

from lightning_cephalo.common.errors import PlanError
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
    wholes,
)
from lightning_cephalo.plan.state_groups import check_groups, fractions_are_even, members_of

_CURVES = ("forward_s", "backward_s", "tail_s", "compute_bytes")
_KEPT_CURVES = ("kept_backward_s", "kept_compute_bytes")
_ROUNDING = 1e-9
_OF_LAST_LAYERS = ("last_gather_s", "last_reduce_s")
_MEASURE_AGAIN = "Measure the job again: embedding and head are gathered whole now."
_IN_TURNS = (
    0.0,
    "Manual optimization runs one microbatch on each rank. Measure again, such as with"
    " CephaloStrategy(planner=Planner(remeasure=True)).",
)
_REMOVED = {
    "disturbance": ("", ""),
    **dict.fromkeys(
        (
            *("vocabulary_sharding", "meeting_forward_s", "meeting_backward_s"),
            *("hidden_bytes", "meeting_bytes"),
        ),
        (0.0, _MEASURE_AGAIN),
    ),
    **dict.fromkeys(("turn_s", "turn_state_bytes"), _IN_TURNS),
    "by_node": (False, _MEASURE_AGAIN),
    "one_microbatch_reason": ("", ""),
    **dict.fromkeys(("may_speculate", "sends_gradients"), (False, "")),
    "equal_microbatches": (False, ""),
    **dict.fromkeys(
        (
            *("hybrid_gather_s", "hybrid_reduce_s", "hybrid_root_gather_s", "hybrid_root_reduce_s"),
            *("hybrid_last_gather_s", "hybrid_last_reduce_s", "hybrid_fill_s"),
        ),
        (0.0, "Set hybrid_sharding: true and give these times as gather_s and so on, or false."),
    ),
}
_REMOVED_OF_RANKS = {
    **dict.fromkeys(
        (
            *("to_device_alone_bytes_per_s", "to_host_alone_bytes_per_s"),
            *("copies_beside_compute", "copies_beside_gathers", "host_memory_bytes_per_s"),
        ),
        (None, ""),
    ),
    "columns_s": (0.0, _MEASURE_AGAIN),
}
_REDUCING_CURVES = ("reducing_compute_bytes", "kept_reducing_compute_bytes")


@dataclass(frozen=True)
class RankProfile(Record):
    """Speed and memory of one rank, by microbatch size.

    The four curves have the same length, with one entry per microbatch size 1, 2, ... Other ranks
    may have curves of another length. A rank with empty curves can hold state but takes no samples.
    Curves may be lists, tuples or arrays.

    Args:
        name: label in tables and messages, such as ``"A6000"``; ranks that differ only in their
            names are planned as equal.
        forward_s: forward time of one unit for one microbatch.
        backward_s: backward time of one unit for one microbatch, including recomputation if there
            is any.
        tail_s: time of the root unit (embedding, head, loss) for one microbatch, forward and
            backward together.
        compute_bytes: peak memory while a microbatch of that size runs, in addition to the state.
        capacity_bytes: memory that this rank may hold in total; ``math.inf`` for no limit.
        kept_backward_s: ``backward_s`` without recomputation, when activations inside the unit are
            retained. Empty: the plan does not choose recomputation for this rank. Otherwise the
            plan chooses, and ``backward_s`` and ``compute_bytes`` are the values with
            recomputation.
        kept_compute_bytes: ``compute_bytes`` without recomputation, in addition to ``kept_bytes``
            of the problem.
        reducing_compute_bytes: ``compute_bytes`` from the first reduce of the backward on, when
            the last unit's work is done. Empty: the same.
        kept_reducing_compute_bytes: the same without recomputation. Empty: ``kept_compute_bytes``.
        host_capacity_bytes: host memory for boundary activations and optimizer state; 0: they stay
            on the device.
        offload_bytes_per_s: copy rate between device and host, in each direction.
        updated_parameters_per_s: parameters that the device updates per second, while all ranks of
            the host update; ``math.inf``: all shares of the state take
            ``Problem.update_overhead_s``.
        host_updated_parameters_per_s: the same of the host's processors, while all ranks of the
            host use theirs; 0: they update none.
        to_device_bytes_per_s: rate of copies to the device while others go to the host, on all
            ranks of the host at once.
        to_host_bytes_per_s: the same in the other direction.

    Raises:
        PlanError: entries are NaN, infinite or negative, curves differ in length, or the capacity
            is not positive.
    """

    kind = "rank profile"
    named_by = "name"
    leaves_out_defaults = True
    removed = _REMOVED_OF_RANKS

    name: Text
    forward_s: Curve
    backward_s: Curve
    tail_s: Curve
    compute_bytes: Curve
    capacity_bytes: PositiveOrInfinite
    _: KW_ONLY
    kept_backward_s: Curve = ()
    kept_compute_bytes: Curve = ()
    reducing_compute_bytes: Curve = ()
    kept_reducing_compute_bytes: Curve = ()
    host_capacity_bytes: AmountOrInfinite = 0.0
    offload_bytes_per_s: PositiveOrInfinite = math.inf
    updated_parameters_per_s: PositiveOrInfinite = math.inf
    host_updated_parameters_per_s: Amount = 0.0
    to_device_bytes_per_s: PositiveOrInfinite = math.inf
    to_host_bytes_per_s: PositiveOrInfinite = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = _KEPT_CURVES if self.kept_backward_s or self.kept_compute_bytes else ()
        reducing = [curve for curve in _REDUCING_CURVES if getattr(self, curve)]
        equally_long(
            self._where(),
            {curve: getattr(self, curve) for curve in (*_CURVES, *kept, *reducing)},
            remedy="Profile the same sizes for all.",
        )

    def _where(self) -> str:
        return f"rank {self.name!r}: "

    @property
    def largest_microbatch_size(self) -> int:
        """Largest profiled microbatch size; 0 when this rank can take no samples."""
        return len(self.forward_s)


@dataclass(frozen=True)
class Problem(FileRecord):
    """Everything that :func:`~lightning_cephalo.plan.solve` needs to know about one step.

    Args:
        ranks: one :class:`RankProfile` per rank, in rank order.
        units: number of repeated units in the model.
        gather_s: time to all-gather one unit's parameters from uneven shards.
        reduce_s: time to reduce-scatter one unit's gradients into uneven shards.
        state_bytes: parameters, gradients and optimizer state of the whole model; all of it is
            sharded.
        reducing_state_bytes: bytes that ranks hold in proportion to their shares of the state, in
            addition to it, from the first reduce of the backward on: what a reduce receives into,
            and the gradient of an early update.
        updating_state_bytes: the same while a unit is updated inside the backward.
        reducing_retained_bytes: bytes retained per sample from then on, over all units, on ranks
            that recompute. None: those of all units but one.
        kept_reducing_retained_bytes: the same on ranks that do not recompute.
        global_batch_size: samples of one step, over all ranks.
        boundary_bytes: bytes retained per sample and unit boundary during the step.
        update_overhead_s: time of the optimizer in a step that every rank takes, whatever its share
            of the state: clipping, and calls. Each rank's rows come in addition, by its
            ``updated_parameters_per_s`` and by ``unit_parameters``.
        gathered_bytes: full buffers (root, unit in use, prefetched unit, full gradients) that every
            rank holds in addition to its shard, whatever the plan.
        minimum_microbatch_size: least size of a microbatch (for batch norm); a rank may still take
            no samples.
        single_microbatch: whether every rank runs exactly one microbatch (for steps that call their
            backwards themselves, and for steps with their own collectives).
        no_idle_ranks: whether every rank has samples, if any such plan fits.
        step_overhead_s: time of a step that no other field covers.
        gather_and_reduce_s: time of one gather and one reduce of units that run beside each other;
            None: as long as one after the other. It is less where they fill a link's two
            directions, and more where they keep each other waiting.
        even_gather_s: ``gather_s`` when all ranks hold equal shares; None: the same.
        even_reduce_s: ``reduce_s`` when all ranks hold equal shares; None: the same.
        even_gather_and_reduce_s: ``gather_and_reduce_s`` when all ranks hold equal shares; None:
            the same.
        padded_bytes: bytes of buffers in which equal shares travel that fast, on every rank: slices
            of rows are not quite equal, and are padded there; 0: they travel as they are.
        root_gather_s: time to gather the root unit and embeddings, before any compute.
        root_reduce_s: time to reduce them, after all other work.
        last_gather_s: time to gather a head that is a unit of its own, which hides behind the last
            units' forward; 0: there is none.
        last_reduce_s: time to reduce it, behind the last unit's backward; the same.
        fill_s: time that no compute hides: the first unit's gather and the last unit's reduce. A
            simulation plays these itself and ignores ``fill_s``.
        kept_bytes: bytes retained per sample and unit, in addition to the boundary, on ranks that
            do not recompute.
        microbatch_bytes: bytes that each microbatch retains until its backward, whatever its size
            (weights that autocast has cast, and keeps for the backward).
        reshard_after_forward: True: units are freed after the forward and gathered again in the
            backward. False: they stay gathered in between. "auto": the plan chooses.
        unresharded_bytes: bytes that every rank holds in addition to ``gathered_bytes`` if units
            stay gathered.
        early_update: whether each unit is updated inside the backward, as soon as its reduce is
            done, so that gradients are never held whole.
        early_state_bytes: ``state_bytes`` of early updates; None: the same.
        early_reducing_state_bytes: ``reducing_state_bytes`` of early updates; None: the same.
        early_updating_state_bytes: ``updating_state_bytes`` of early updates; None: the same.
        unresharded_peak_bytes: what a microbatch may need in addition before the first reduce if
            units stay gathered. Late updates count gradients that are not there yet, and have room.
        has_even_state: whether all ranks hold equal shares of the state. Then it leaves nothing to
            choose, and counts with the bytes that each rank holds whatever its samples.
        unit_update_s: the part of ``update_overhead_s`` of one unit. An early update hides behind
            the collectives of the backward.
        optimizer_offload: whether optimizer state may live in host memory. False: it stays on the
            devices. True: all of it lives there, on ranks with ``host_capacity_bytes``. "auto": the
            plan moves what makes it fit, or the step shorter.
        unit_parameters: trained parameters of each block, behind those of all else. Empty:
            optimizer state cannot move, and shares of it take no time. Their number need not be
            that of ``units``: a step may visit a unit several times.
        moment_bytes: bytes of optimizer state for each, a part of ``state_bytes``.
        element_bytes: bytes of a parameter, and of its gradient.
        offloads_boundaries: whether boundaries may live in host memory, too.
        pins_host_memory: whether host memory comes in powers of two, as pinned memory does. Each
            unit's state lies in one piece, so that it takes more than it needs.
        hybrid_sharding: whether each of ``state_groups`` holds the whole state. Then gathers are
            those of a group, and reduces add up gradients inside of it and across.
        state_groups: the group of every rank, such as its node.

    Raises:
        PlanError: a field has an invalid value; the message names it.
    """

    kind = "problem"
    removed = _REMOVED

    ranks: Annotated[tuple[RankProfile, ...], ListOf(RankProfile, "a RankProfile", "rank profiles")]
    units: Count
    _: KW_ONLY
    gather_s: Amount = 0.0
    reduce_s: Amount = 0.0
    state_bytes: Amount
    global_batch_size: Count
    boundary_bytes: Amount = 0.0
    update_overhead_s: Amount = 0.0
    gathered_bytes: Amount = 0.0
    minimum_microbatch_size: Count = 1
    single_microbatch: Annotated[bool, OneOf((True, False), "True or False")] = False
    no_idle_ranks: Annotated[bool, OneOf((True, False), "True or False")] = False
    step_overhead_s: Amount = 0.0
    gather_and_reduce_s: Amount | None = None
    even_gather_s: Amount | None = None
    even_reduce_s: Amount | None = None
    even_gather_and_reduce_s: Amount | None = None
    padded_bytes: Amount = 0.0
    root_gather_s: Amount = 0.0
    root_reduce_s: Amount = 0.0
    last_gather_s: Amount = 0.0
    last_reduce_s: Amount = 0.0
    fill_s: Amount = 0.0
    kept_bytes: Amount = 0.0
    microbatch_bytes: Amount = 0.0
    reshard_after_forward: Annotated[
        bool | Literal["auto"], OneOf((True, False, "auto"), "True, False or 'auto'")
    ] = True
    unresharded_bytes: Amount = 0.0
    early_update: Annotated[bool, OneOf((True, False), "True or False")] = False
    early_state_bytes: Amount | None = None
    early_reducing_state_bytes: Amount | None = None
    early_updating_state_bytes: Amount | None = None
    unresharded_peak_bytes: Amount = 0.0
    has_even_state: Annotated[bool, OneOf((True, False), "True or False")] = False
    unit_update_s: Amount = 0.0
    reducing_state_bytes: Amount = 0.0
    updating_state_bytes: Amount = 0.0
    reducing_retained_bytes: Amount | None = None
    kept_reducing_retained_bytes: Amount | None = None
    optimizer_offload: Annotated[
        bool | Literal["auto"], OneOf((True, False, "auto"), "True, False or 'auto'")
    ] = False
    unit_parameters: Annotated[tuple[int, ...], wholes] = ()
    moment_bytes: Amount = 0.0
    element_bytes: Amount = 4.0
    offloads_boundaries: Annotated[bool, OneOf((True, False), "True or False")] = True
    pins_host_memory: Annotated[bool, OneOf((True, False), "True or False")] = False
    hybrid_sharding: Annotated[bool, OneOf((True, False), "True or False")] = False
    state_groups: Annotated[tuple[int, ...], wholes] = ()

    @classmethod
    def _without_removed(cls, what: str, data: Any) -> Any:
        is_mapping = isinstance(data, Mapping)
        if is_mapping and data.get("equal_microbatches") and not data.get("single_microbatch"):
            raise PlanError(
                f"{what}: equal_microbatches: True asks for what only earlier versions did. Use"
                " single_microbatch: True, or leave it out."
            )
        return super()._without_removed(what, data)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_moved_state()
        self._check_hybrid()

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, without what only counts with an option that is off."""
        data = super().to_dict()
        if not self.has_last_layers:
            for name in _OF_LAST_LAYERS:
                del data[name]
        if self.hybrid_sharding is False:
            for name in ("hybrid_sharding", "state_groups"):
                data.pop(name, None)
        return data

    @classmethod
    def from_dict(
        cls, data: Any, *, where: str | None = None, source: str | None = None
    ) -> Problem:
        """Return a problem from a mapping; see :meth:`Record.from_dict`.

        Files of earlier versions have ``optimizer_s``: the slowest rank's time with an even share.
        """
        if not isinstance(data, Mapping) or "optimizer_s" not in data:
            return super().from_dict(data, where=where, source=source)
        overhead = {"update_overhead_s": data["optimizer_s"]}
        rest = {name: value for name, value in data.items() if name != "optimizer_s"}
        found = super().from_dict({**overhead, **rest}, where=where, source=source)
        slowest = min(rank.updated_parameters_per_s for rank in found.ranks)
        even_s = found.parameters / len(found.ranks) / slowest
        even_unit_s = even_s * found.unit_part
        return replace(
            found,
            update_overhead_s=max(0.0, found.update_overhead_s - even_s),
            unit_update_s=max(0.0, found.unit_update_s - even_unit_s),
        )

    def _check_hybrid(self) -> None:
        check_groups("state_groups", self.state_groups, len(self.ranks))
        if not self.hybrid_sharding:
            if self.state_groups:
                raise PlanError(
                    "state_groups: expected none with hybrid_sharding: false, where all ranks hold"
                    " the state together. Set hybrid_sharding: true, or leave it out."
                )
            return
        if not self.state_groups:
            raise PlanError(
                "hybrid_sharding: it is True, which needs state_groups: the group of every rank,"
                " such as its node."
            )
        if self.optimizer_offload is not False:
            raise PlanError(
                "hybrid_sharding: it is True, which does not go together with optimizer_offload:"
                f" {self.optimizer_offload} so far. Leave one of the two out."
            )
        of_even = (self.even_gather_s, self.even_reduce_s, self.even_gather_and_reduce_s)
        if of_even != (None,) * 3 or self.padded_bytes:
            raise PlanError(
                "even_gather_s, even_reduce_s, even_gather_and_reduce_s, padded_bytes: expected"
                " none with hybrid_sharding: true, whose shares are equal in groups at most. Leave"
                " them out."
            )

    def _check_moved_state(self) -> None:
        sizes = self.unit_parameters
        if len(sizes) == 1:
            raise PlanError(
                f"unit_parameters: expected those of the root unit and of one or more other units,"
                f" but got one number, {sizes[0]}. Give the root unit's first, 0 if it trains none."
            )
        moments = self.moment_bytes * sum(sizes)
        if moments > self.state_bytes * (1 + _ROUNDING):
            raise PlanError(
                f"moment_bytes: they are a part of state_bytes ({self.state_bytes:.6g}), but"
                f" {self.moment_bytes:g} for each of {sum(sizes)} unit_parameters are"
                f" {moments:.6g}. Give the bytes of one parameter, and parameters of all ranks."
            )

    @property
    def both_s(self) -> float:
        """Seconds of one gather and one reduce of units beside each other; no less than of one."""
        if self.gather_and_reduce_s is None:
            return self.gather_s + self.reduce_s
        return max(self.gather_s, self.reduce_s, self.gather_and_reduce_s)

    @property
    def collectives_s(self) -> tuple[float, float, float]:
        """Seconds of a unit's gather, of its reduce, and of both beside each other."""
        return self.gather_s, self.reduce_s, self.both_s

    @property
    def has_last_layers(self) -> bool:
        """Whether a head is a unit of its own."""
        return self.last_gather_s + self.last_reduce_s > 0

    @property
    def every_rank_runs(self) -> bool:
        """Whether every rank has samples."""
        return self.single_microbatch or self.no_idle_ranks

    @property
    def parameters(self) -> int:
        """Trained parameters of the model, as far as they are known."""
        return sum(self.unit_parameters)

    @property
    def unit_part(self) -> float:
        """The part of an update that is one unit's, in the mean over units but the root."""
        return sum(self.unit_parameters[1:]) / max(self.parameters, 1) / self.units

    @property
    def shares_take_time(self) -> bool:
        """Whether a larger share of the state takes a rank longer to update."""
        rates = (rank.updated_parameters_per_s for rank in self.ranks)
        return self.parameters > 0 and any(map(math.isfinite, rates))

    @property
    def can_move_state(self) -> bool:
        """Whether a plan may keep optimizer state in host memory."""
        movable = self.moment_bytes * self.parameters
        return self.optimizer_offload is not False and movable > 0 and not self.has_even_state

    @property
    def fixed_bytes(self) -> float:
        """Bytes that a rank holds in addition to its share of the state, whatever its samples."""
        unresharded = self.unresharded_bytes if self.reshard_after_forward is False else 0.0
        return self.gathered_bytes + unresharded

    @property
    def states_bytes(self) -> tuple[float, float, float]:
        """What the shares divide: up to the first reduce, from then on, and in early updates."""
        reducing, updating = self.reducing_state_bytes, self.updating_state_bytes
        return self.state_bytes, self.state_bytes + reducing, self.state_bytes + updating

    @property
    def full_state_bytes(self) -> float:
        """The state, with the most that ranks hold in proportion to their shares of it."""
        return max(self.states_bytes)

    @functools.cached_property  # every need of a rank asks
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that holds the whole state; one group of all without hybrid."""
        return members_of(self.active_groups, len(self.ranks))

    def are_even(self, fractions: Sequence[float]) -> bool:
        """Return whether these shares of the state are equal in each of :attr:`groups`."""
        return all(fractions_are_even([fractions[rank] for rank in own]) for own in self.groups)

    @property
    def active_groups(self) -> tuple[int, ...]:
        """``state_groups`` with hybrid sharding; else empty."""
        return self.state_groups if self.hybrid_sharding else ()

    @property
    def reshard_choices(self) -> tuple[bool, ...]:
        """Values that a plan may choose for ``reshard_after_forward``; the first is the default."""
        asked = self.reshard_after_forward
        return (True, False) if asked == "auto" else (asked,)

    def with_even_shares(self) -> Problem:
        """Return this problem as a plan meets it in which all ranks hold equal shares.

        Collectives for uneven shares also work for even ones, which thus never cost more time.
        """
        gather_s = _least(self.gather_s, self.even_gather_s)
        reduce_s = _least(self.reduce_s, self.even_reduce_s)
        both_s = self.gather_and_reduce_s
        if self.even_gather_and_reduce_s is not None:
            both_s = min(self.both_s, self.even_gather_and_reduce_s)
        saved_s = self.gather_s - gather_s + self.reduce_s - reduce_s
        return replace(
            self,
            gather_s=gather_s,
            reduce_s=reduce_s,
            gather_and_reduce_s=both_s,
            fill_s=max(0.0, self.fill_s - saved_s),
            even_gather_s=None,
            even_reduce_s=None,
            even_gather_and_reduce_s=None,
            gathered_bytes=self.gathered_bytes + self.padded_bytes,
            padded_bytes=0.0,
        )

    def with_early_update(self) -> Problem:
        """Return this problem with each unit updated inside the backward."""
        reducing, updating = self.early_reducing_state_bytes, self.early_updating_state_bytes
        return replace(
            self,
            early_update=True,
            state_bytes=_either(self.early_state_bytes, self.state_bytes),
            reducing_state_bytes=_either(reducing, self.reducing_state_bytes),
            updating_state_bytes=_either(updating, self.updating_state_bytes),
            early_state_bytes=None,
            early_reducing_state_bytes=None,
            early_updating_state_bytes=None,
        )

    def with_late_update(self, state_bytes: float) -> Problem:
        """Return this problem with late updates, whose ``state_bytes`` early ones do not tell."""
        return replace(
            self,
            early_update=False,
            state_bytes=state_bytes,
            reducing_state_bytes=0.0,
            updating_state_bytes=0.0,
        )

    def with_moments(self, moment_bytes: float, planned_bytes: float, parameters: int) -> Problem:
        """Return this problem for an optimizer with other bytes of state per trained parameter."""
        more_bytes = (moment_bytes - planned_bytes) * parameters
        early = self.early_state_bytes
        # in one step, as moments are checked to be a part of the state
        return replace(
            self,
            moment_bytes=moment_bytes if self.unit_parameters else self.moment_bytes,
            state_bytes=max(0.0, self.state_bytes + more_bytes),
            early_state_bytes=None if early is None else max(0.0, early + more_bytes),
        )

    def resharding(self, reshard_after_forward: bool) -> Problem:
        """Return this problem with ``reshard_after_forward`` chosen."""
        return replace(self, reshard_after_forward=reshard_after_forward)


def _either(early_bytes: float | None, late_bytes: float) -> float:
    return late_bytes if early_bytes is None else early_bytes


def _least(uneven_s: float, even_s: float | None) -> float:
    return uneven_s if even_s is None else min(even_s, uneven_s)
