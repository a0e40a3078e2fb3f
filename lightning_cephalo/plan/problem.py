"""Input of the planner: speed and memory of each rank, and the work of one step.

Names end in their unit of measure: ``_s`` is seconds, ``_bytes`` is bytes. The index of a curve is
the microbatch size minus one: ``forward_s[3]`` is the time of one unit for one microbatch of four
samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

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
    YesOrNo,
    equally_long,
    wholes,
)
from lightning_cephalo.plan.state_groups import check_groups, fractions_are_even, members_of

TIME_CURVES = ("forward_s", "backward_s", "tail_s")
MEMORY_CURVES = ("compute_bytes", "reducing_compute_bytes")
CURVES = (*TIME_CURVES, *MEMORY_CURVES)
_ROUNDING = 1e-9
_OrAuto = Annotated[bool | Literal["auto"], OneOf((True, False, "auto"), "True, False or 'auto'")]
_MEASURE_AGAIN = (
    "Measure the job again, such as with CephaloStrategy(planner=Planner(remeasure=True))."
)
_OF_LINKS = ("gather_s", "reduce_s", "gather_and_reduce_s")
_OF_STATE = {
    "state_bytes": "held_bytes",
    "reducing_state_bytes": "reducing_bytes",
    "updating_state_bytes": "updating_bytes",
}
_RENAMED = {
    **{
        f"{kind}{name}": f"{kind}links.{name}"
        for kind in ("", "even_", "root_", "last_")
        for name in _OF_LINKS
    },
    **{f"{k}{old}": f"{k}state.{new}" for k in ("", "early_") for old, new in _OF_STATE.items()},
    "state_groups": "groups",
    "optimizer_s": "update_overhead_s",
}
_REMOVED = {
    **dict.fromkeys(("disturbance", "one_microbatch_reason", "may_speculate"), ""),
    **dict.fromkeys(("sends_gradients", "equal_microbatches", "hybrid_sharding"), ""),
    **dict.fromkeys(
        ("vocabulary_sharding", "by_node", "turn_s", "turn_state_bytes"), _MEASURE_AGAIN
    ),
    **dict.fromkeys(("meeting_forward_s", "meeting_backward_s", "meeting_bytes"), _MEASURE_AGAIN),
    **dict.fromkeys(("hidden_bytes", "hybrid_gather_s", "hybrid_reduce_s"), _MEASURE_AGAIN),
    **dict.fromkeys(("hybrid_root_gather_s", "hybrid_root_reduce_s"), _MEASURE_AGAIN),
    **dict.fromkeys(("hybrid_last_gather_s", "hybrid_last_reduce_s"), _MEASURE_AGAIN),
    "hybrid_fill_s": _MEASURE_AGAIN,
}
_REMOVED_OF_RANKS = {
    **dict.fromkeys(("to_device_alone_bytes_per_s", "to_host_alone_bytes_per_s"), ""),
    **dict.fromkeys(("copies_beside_compute", "copies_beside_gathers"), ""),
    "host_memory_bytes_per_s": "",
    "columns_s": _MEASURE_AGAIN,
}


@dataclass(frozen=True)
class Links(Record):
    """Seconds of one unit's collectives, which all ranks take part in.

    Args:
        gather_s: time to all-gather the parameters.
        reduce_s: time to reduce-scatter the gradients.
        gather_and_reduce_s: time of one unit's gather beside another one's reduce, no less than of
            one of them: less than their sum where they fill a link's two directions, and more
            where they keep each other waiting. None: their sum.
    """

    kind = "links"

    gather_s: Amount = 0.0
    reduce_s: Amount = 0.0
    gather_and_reduce_s: Amount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather_and_reduce_s is not None:
            longest = max(self.gather_s, self.reduce_s, self.gather_and_reduce_s)
            object.__setattr__(self, "gather_and_reduce_s", longest)

    @property
    def both_s(self) -> float:
        """Seconds of a gather and a reduce beside each other."""
        both_s = self.gather_and_reduce_s
        return self.gather_s + self.reduce_s if both_s is None else both_s

    def or_faster(self, other: Links) -> Links:
        """Return these links with the times of others that are shorter."""
        alone_s = min(self.gather_s, other.gather_s), min(self.reduce_s, other.reduce_s)
        if self.gather_and_reduce_s is other.gather_and_reduce_s is None:
            return Links(*alone_s)
        return Links(*alone_s, min(self.both_s, other.both_s))


@dataclass(frozen=True)
class StateBytes(Record):
    """Bytes that all ranks hold together, each in proportion to its share of the state.

    Args:
        held_bytes: parameters, gradients and optimizer state of the whole model.
        reducing_bytes: what comes in addition from the first reduce of the backward on: what a
            reduce receives into, and the gradient of an early update.
        updating_bytes: the same while a unit is updated inside the backward.
    """

    kind = "state"

    held_bytes: Amount
    reducing_bytes: Amount = 0.0
    updating_bytes: Amount = 0.0

    @property
    def totals_bytes(self) -> tuple[float, float, float]:
        """All bytes up to the first reduce, from then on, and in early updates."""
        held = self.held_bytes
        return held, held + self.reducing_bytes, held + self.updating_bytes

    @property
    def most_bytes(self) -> float:
        """The most bytes of a step."""
        return max(self.totals_bytes)

    def plus(self, more_bytes: float) -> StateBytes:
        """Return the state with so many more bytes all the time."""
        return replace(self, held_bytes=max(0.0, self.held_bytes + more_bytes))


@dataclass(frozen=True)
class KeptCurves(Record):
    """A rank's curves without recomputation, in place of those of the same name.

    Args:
        backward_s: backward time of one unit for one microbatch.
        compute_bytes: peak memory, in addition to the state and to ``kept_bytes`` of the problem.
        reducing_compute_bytes: the same from the first reduce on. Empty: the same all the time.
    """

    kind = "curves without recomputation"

    backward_s: Curve
    compute_bytes: Curve
    reducing_compute_bytes: Curve = ()


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
        reducing_compute_bytes: ``compute_bytes`` from the first reduce of the backward on, when
            the last unit's work is done. Empty: the same.
        kept: the curves without recomputation, when activations inside the unit are retained. Then
            the plan chooses, and the curves above are those with recomputation. None, or empty
            curves: the plan does not choose recomputation for this rank.
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
    removed = _REMOVED_OF_RANKS
    renamed: ClassVar = {f"kept_{name}": f"kept.{name}" for name in ("backward_s", *MEMORY_CURVES)}

    name: Text
    forward_s: Curve
    backward_s: Curve
    tail_s: Curve
    compute_bytes: Curve
    capacity_bytes: PositiveOrInfinite
    _: KW_ONLY
    reducing_compute_bytes: Curve = ()
    kept: KeptCurves | None = None
    host_capacity_bytes: AmountOrInfinite = 0.0
    offload_bytes_per_s: PositiveOrInfinite = math.inf
    updated_parameters_per_s: PositiveOrInfinite = math.inf
    host_updated_parameters_per_s: Amount = 0.0
    to_device_bytes_per_s: PositiveOrInfinite = math.inf
    to_host_bytes_per_s: PositiveOrInfinite = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept is not None and not self.kept.backward_s:
            object.__setattr__(self, "kept", None)
        curves = {name: getattr(self, name) for name in CURVES}
        if self.kept is not None:
            curves |= {f"kept.{name}": curve for name, curve in vars(self.kept).items()}
        given = {k: curve for k, curve in curves.items() if curve or "reducing" not in k}
        equally_long(self._where(), given, remedy="Profile the same sizes for all.")

    def _where(self) -> str:
        return f"rank {self.name!r}: "

    @property
    def largest_microbatch_size(self) -> int:
        """Largest profiled microbatch size; 0 when this rank can take no samples."""
        return len(self.forward_s)

    def curves(self, *, recompute: bool) -> RankProfile | KeptCurves:
        """Return what holds the curves with or without recomputation."""
        return self if recompute or self.kept is None else self.kept

    def changed(
        self, curves: Sequence[str], change: Callable[[tuple[float, ...]], Sequence[float]]
    ) -> RankProfile:
        """Return this profile with some curves changed, those without recomputation as well."""

        def values(record: Record) -> dict[str, Any]:
            return {name: change(vars(record)[name]) for name in curves if name in vars(record)}

        kept = None if self.kept is None else replace(self.kept, **values(self.kept))
        return replace(self, kept=kept, **values(self))

    def up_to(self, size: int) -> RankProfile:
        """Return this profile with microbatches of up to this size."""
        return self.changed(CURVES, lambda curve: curve[:size])


@dataclass(frozen=True)
class Problem(FileRecord):
    """Everything that :func:`~lightning_cephalo.plan.solve` needs to know about one step.

    Args:
        ranks: one :class:`RankProfile` per rank, in rank order.
        units: number of repeated units in the model.
        links: times of a unit's collectives, with uneven shares of the state.
        state: the state of the whole model; all of it is sharded.
        global_batch_size: samples of one step, over all ranks.
        boundary_bytes: bytes retained per sample and unit boundary during the step.
        update_overhead_s: time of clipping and of an update's calls. Each rank's share of the
            state comes in addition, by ``updated_parameters_per_s`` and ``unit_parameters``.
        gathered_bytes: full buffers (root, unit in use, prefetched unit, full gradients) that every
            rank holds in addition to its shard, whatever the plan.
        minimum_microbatch_size: least size of a microbatch (for batch norm); a rank may still take
            no samples.
        single_microbatch: whether every rank runs exactly one microbatch.
        no_idle_ranks: whether every rank has samples, if any such plan fits.
        step_overhead_s: time of a step that no other field covers.
        even_links: ``links`` when all ranks hold equal shares; None: the same.
        padded_bytes: bytes of buffers on every rank in which equal shares travel that fast, padded
            to equal slices; 0: they travel as they are.
        root_links: times of the root unit and embeddings, gathered before any compute and reduced
            after all other work.
        last_links: times of a head that is a unit of its own. Its gather hides behind the last
            units' forward, its reduce behind the last unit's backward. Zero: there is none.
        fill_s: time that no compute hides: the first unit's gather and the last unit's reduce.
        kept_bytes: bytes retained per sample and unit, in addition to the boundary, on ranks that
            do not recompute.
        reducing_retained_bytes: bytes retained per sample from the first reduce on, over all units,
            on ranks that recompute. None: those of all units but one.
        kept_reducing_retained_bytes: the same on ranks that do not recompute.
        microbatch_bytes: bytes that each microbatch retains until its backward, whatever its size
            (weights that autocast has cast, and keeps for the backward).
        reshard_after_forward: True: units are freed after the forward and gathered again in the
            backward. False: they stay gathered in between. "auto": the plan chooses.
        unresharded_bytes: bytes that every rank holds in addition to ``gathered_bytes`` if units
            stay gathered.
        early_update: whether each unit is updated inside the backward, after its reduce.
        early_state: ``state`` of early updates; None: the same.
        unresharded_peak_bytes: what a microbatch may need in addition before the first reduce if
            units stay gathered. Late updates count gradients that are not there yet, and have room.
        has_even_state: whether all ranks hold equal shares of the state, which a plan then cannot
            choose.
        unit_update_s: the part of ``update_overhead_s`` of one unit. An early update hides behind
            the collectives of the backward.
        optimizer_offload: False: optimizer state stays on the devices. True: it lives in host
            memory, on ranks with ``host_capacity_bytes``. "auto": the plan chooses.
        unit_parameters: trained parameters of each block, behind those of all else. Empty:
            optimizer state cannot move, and shares of it take no time. Their number need not be
            that of ``units``: a step may visit a unit several times.
        moment_bytes: bytes of optimizer state for each, a part of ``state``.
        element_bytes: bytes of a parameter, and of its gradient.
        offloads_boundaries: whether boundaries may live in host memory, too.
        pins_host_memory: whether host memory comes in powers of two, as pinned memory does. Each
            unit's state lies in one piece, so that it takes more than it needs.
        groups: hybrid sharding: the group of every rank, such as its node. Each group holds the
            whole state: gathers are those of a group, and reduces add up gradients inside of it
            and across. Empty: all ranks hold it together.

    Raises:
        PlanError: a field has an invalid value; the message names it.
    """

    kind = "problem"
    removed = _REMOVED
    renamed = _RENAMED

    ranks: Annotated[tuple[RankProfile, ...], ListOf(RankProfile, "a RankProfile", "rank profiles")]
    units: Count
    _: KW_ONLY
    links: Links = Links()
    state: StateBytes
    global_batch_size: Count
    boundary_bytes: Amount = 0.0
    update_overhead_s: Amount = 0.0
    gathered_bytes: Amount = 0.0
    minimum_microbatch_size: Count = 1
    single_microbatch: YesOrNo = False
    no_idle_ranks: YesOrNo = False
    step_overhead_s: Amount = 0.0
    even_links: Links | None = None
    padded_bytes: Amount = 0.0
    root_links: Links = Links()
    last_links: Links = Links()
    fill_s: Amount = 0.0
    kept_bytes: Amount = 0.0
    microbatch_bytes: Amount = 0.0
    reshard_after_forward: _OrAuto = True
    unresharded_bytes: Amount = 0.0
    early_update: YesOrNo = False
    early_state: StateBytes | None = None
    unresharded_peak_bytes: Amount = 0.0
    has_even_state: YesOrNo = False
    unit_update_s: Amount = 0.0
    reducing_retained_bytes: Amount | None = None
    kept_reducing_retained_bytes: Amount | None = None
    optimizer_offload: _OrAuto = False
    unit_parameters: Annotated[tuple[int, ...], wholes] = ()
    moment_bytes: Amount = 0.0
    element_bytes: Amount = 4.0
    offloads_boundaries: YesOrNo = True
    pins_host_memory: YesOrNo = False
    groups: Annotated[tuple[int, ...], wholes] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_moved_state()
        self._check_groups()

    @classmethod
    def _of_today(cls, what: str, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("equal_microbatches") and not data.get("single_microbatch"):
            raise PlanError(
                f"{what}: equal_microbatches: True asks for what only earlier versions did. Use"
                " single_microbatch: True, or leave it out."
            )
        if data.get("hybrid_sharding") and not (data.get("state_groups") or data.get("groups")):
            raise PlanError(
                f"{what}: hybrid_sharding: True needs groups, the group of every rank, such as its"
                " node. Give groups, or leave it out."
            )
        for kind, names in (("even_", _OF_LINKS), ("early_", _OF_STATE)):
            if any(data.get(kind + name) is not None for name in names):
                others = {kind + name: data.get(name) for name in names}
                data = {**others, **{k: v for k, v in data.items() if v is not None}}
        return super()._of_today(what, data)

    @classmethod
    def from_dict(
        cls, data: Any, *, where: str | None = None, source: str | None = None
    ) -> Problem:
        """Return a problem from a mapping; see :meth:`Record.from_dict`.

        Files of earlier versions have ``optimizer_s``: the slowest rank's time with an even share.
        """
        found = super().from_dict(data, where=where, source=source)
        if "optimizer_s" not in data:
            return found
        slowest = min(rank.updated_parameters_per_s for rank in found.ranks)
        even_s = found.parameters / len(found.ranks) / slowest
        return replace(
            found,
            update_overhead_s=max(0.0, found.update_overhead_s - even_s),
            unit_update_s=max(0.0, found.unit_update_s - even_s * found.unit_part),
        )

    def _check_groups(self) -> None:
        check_groups("groups", self.groups, len(self.ranks))
        of_even = self.even_links is not None or self.padded_bytes > 0
        if self.groups and (self.optimizer_offload is not False or of_even):
            raise PlanError(
                f"groups: expected none with optimizer_offload: {self.optimizer_offload},"
                " even_links or padded_bytes, which do not go together with hybrid sharding so far."
                " Leave them or the groups out."
            )

    def _check_moved_state(self) -> None:
        sizes = self.unit_parameters
        if len(sizes) == 1:
            raise PlanError(
                f"unit_parameters: expected those of the root unit and of one or more other units,"
                f" but got one number, {sizes[0]}. Give the root unit's first, 0 if it trains none."
            )
        moments = self.moment_bytes * sum(sizes)
        if moments > self.state.held_bytes * (1 + _ROUNDING):
            raise PlanError(
                f"moment_bytes: they are a part of the state ({self.state.held_bytes:.6g}), but"
                f" {self.moment_bytes:g} for each of {sum(sizes)} unit_parameters are"
                f" {moments:.6g}. Give the bytes of one parameter, and parameters of all ranks."
            )

    @property
    def has_last_layers(self) -> bool:
        """Whether a head is a unit of its own."""
        return self.last_links.both_s > 0

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

    @functools.cached_property  # every need of a rank asks
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that holds the whole state; one group of all without groups."""
        return members_of(self.groups, len(self.ranks))

    def are_even(self, fractions: Sequence[float]) -> bool:
        """Return whether these shares of the state are equal in each of :attr:`members`."""
        return all(fractions_are_even([fractions[rank] for rank in own]) for own in self.members)

    @property
    def reshard_choices(self) -> tuple[bool, ...]:
        """Values that a plan may choose for ``reshard_after_forward``; the first is the default."""
        asked = self.reshard_after_forward
        return (True, False) if asked == "auto" else (asked,)

    def with_even_shares(self) -> Problem:
        """Return this problem as a plan meets it in which all ranks hold equal shares.

        Collectives for uneven shares also work for even ones, which thus never cost more time.
        """
        links = self.links if self.even_links is None else self.links.or_faster(self.even_links)
        saved_s = self.links.gather_s - links.gather_s + self.links.reduce_s - links.reduce_s
        return replace(
            self,
            links=links,
            fill_s=max(0.0, self.fill_s - saved_s),
            even_links=None,
            gathered_bytes=self.gathered_bytes + self.padded_bytes,
            padded_bytes=0.0,
        )

    def with_early_update(self) -> Problem:
        """Return this problem with each unit updated inside the backward."""
        state = self.early_state or self.state
        return replace(self, early_update=True, state=state, early_state=None)

    def with_moments(self, moment_bytes: float) -> Problem:
        """Return this problem for an optimizer with other bytes of state per trained parameter."""
        more_bytes = (moment_bytes - self.moment_bytes) * self.parameters
        # in one step, as moments are checked to be a part of the state
        return replace(
            self,
            moment_bytes=moment_bytes,
            state=self.state.plus(more_bytes),
            early_state=self.early_state and self.early_state.plus(more_bytes),
        )

    def resharding(self, reshard_after_forward: bool) -> Problem:
        """Return this problem with ``reshard_after_forward`` chosen."""
        return replace(self, reshard_after_forward=reshard_after_forward)
