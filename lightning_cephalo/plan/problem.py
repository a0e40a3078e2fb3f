"""What there is to plan for: how fast every rank is, how much it holds, and the work of one step.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes. Curves are indexed by microbatch size
minus one: ``forward_s[3]`` is the time of one unit for one microbatch of four samples.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError

_CURVES = ("forward_s", "backward_s", "tail_s", "compute_bytes")
_KEPT_CURVES = ("kept_backward_s", "kept_compute_bytes")


@dataclass(frozen=True)
class RankProfile:
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

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    tail_s: tuple[float, ...]
    compute_bytes: tuple[float, ...]
    capacity_bytes: float
    _: KW_ONLY
    kept_backward_s: tuple[float, ...] = ()
    kept_compute_bytes: tuple[float, ...] = ()
    host_capacity_bytes: float = 0.0
    offload_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        records.text("RankProfile.name", self.name)
        where = f"rank {self.name!r}"
        for curve in (*_CURVES, *_KEPT_CURVES):
            field = f"{where}: {curve}"
            entries = records.items(field, getattr(self, curve), of="numbers")
            checked = tuple(
                records.real(f"{field} at microbatch size {size}", entry)
                for size, entry in enumerate(entries, start=1)
            )
            object.__setattr__(self, curve, checked)
        kept = _KEPT_CURVES if self.kept_backward_s or self.kept_compute_bytes else ()
        lengths = {curve: len(getattr(self, curve)) for curve in (*_CURVES, *kept)}
        if len(set(lengths.values())) > 1:
            came = ", ".join(f"{curve} {length}" for curve, length in lengths.items())
            raise PlanError(
                f"{where}: expected one entry per microbatch size in every curve, "
                f"but got lengths {came}. Profile the same sizes for all."
            )
        capacity = records.real(
            f"{where}: capacity_bytes", self.capacity_bytes, above_minimum=True, infinite=True
        )
        object.__setattr__(self, "capacity_bytes", capacity)
        host = records.real(
            f"{where}: host_capacity_bytes", self.host_capacity_bytes, infinite=True
        )
        object.__setattr__(self, "host_capacity_bytes", host)
        rate = records.real(
            f"{where}: offload_bytes_per_s",
            self.offload_bytes_per_s,
            above_minimum=True,
            infinite=True,
        )
        object.__setattr__(self, "offload_bytes_per_s", rate)

    @property
    def largest_microbatch_size(self) -> int:
        """The largest profiled microbatch size; 0 when this rank can take no samples."""
        return len(self.forward_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for YAML and JSON; infinities become ``"inf"``, and options
        that the rank does not have are left out.
        """
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        }
        for name, value in data.items():
            if isinstance(value, tuple):
                data[name] = list(value)
            elif isinstance(value, float) and math.isinf(value):
                data[name] = "inf"
        return data

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "rank profile") -> RankProfile:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys."""
        fields = dataclasses.fields(cls)
        return cls(
            **records.mapping(
                where,
                data,
                known=[field.name for field in fields],
                required=[field.name for field in fields if field.default is dataclasses.MISSING],
            )
        )


@dataclass(frozen=True)
class Problem:
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

    ranks: tuple[RankProfile, ...]
    units: int
    _: KW_ONLY
    gather_s: float = 0.0
    reduce_s: float = 0.0
    state_bytes: float
    global_batch_size: int
    boundary_bytes: float = 0.0
    optimizer_s: float = 0.0
    gathered_bytes: float = 0.0
    minimum_microbatch_size: int = 1
    equal_microbatches: bool = False
    step_overhead_s: float = 0.0
    even_gather_s: float | None = None
    even_reduce_s: float | None = None
    root_gather_s: float = 0.0
    root_reduce_s: float = 0.0
    fill_s: float = 0.0
    kept_bytes: float = 0.0
    microbatch_bytes: float = 0.0
    reshard_after_forward: bool | Literal["auto"] = True
    unresharded_bytes: float = 0.0

    def __post_init__(self) -> None:
        ranks = records.items("Problem.ranks", self.ranks, of="RankProfile")
        for index, rank in enumerate(ranks):
            if not isinstance(rank, RankProfile):
                raise PlanError(
                    f"Problem.ranks[{index}]: expected a RankProfile, "
                    f"but got {records.shortened(rank)}."
                )
        if not ranks:
            raise PlanError("Problem.ranks: expected at least one RankProfile, but got none.")
        object.__setattr__(self, "ranks", ranks)
        for name in ("units", "global_batch_size", "minimum_microbatch_size"):
            value = records.whole(f"Problem.{name}", getattr(self, name), minimum=1)
            object.__setattr__(self, name, value)
        for name in (
            "gather_s",
            "reduce_s",
            "state_bytes",
            "boundary_bytes",
            "optimizer_s",
            "gathered_bytes",
            "step_overhead_s",
            "root_gather_s",
            "root_reduce_s",
            "fill_s",
            "kept_bytes",
            "microbatch_bytes",
            "unresharded_bytes",
        ):
            object.__setattr__(self, name, records.real(f"Problem.{name}", getattr(self, name)))
        for name in ("even_gather_s", "even_reduce_s"):
            even_s = records.optional_real(f"Problem.{name}", getattr(self, name))
            object.__setattr__(self, name, even_s)
        if not isinstance(self.equal_microbatches, bool):
            raise PlanError(
                f"Problem.equal_microbatches: expected True or False, "
                f"but got {self.equal_microbatches!r}."
            )
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and reshard != "auto":
            raise PlanError(
                f"Problem.reshard_after_forward: expected True, False or 'auto', "
                f"but got {reshard!r}."
            )

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
        return dataclasses.replace(self, reshard_after_forward=reshard_after_forward)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for YAML and JSON; what is None is left out."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        }
        data["ranks"] = [rank.to_dict() for rank in self.ranks]
        return data

    @classmethod
    def from_dict(cls, data: Any, *, source: str | None = None) -> Problem:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys, naming
        ``source``.
        """
        what = f"{records.in_source(source)}problem"
        fields = dataclasses.fields(cls)
        values = records.mapping(
            what,
            data,
            known=[field.name for field in fields],
            required=[field.name for field in fields if field.default is dataclasses.MISSING],
        )
        ranks = records.items(f"{what}: ranks", values["ranks"], of="rank profiles")
        values["ranks"] = [
            RankProfile.from_dict(rank, where=f"{what}: ranks[{index}]")
            for index, rank in enumerate(ranks)
        ]
        return records.built(cls, values, source)

    def to_yaml(self) -> str:
        """This problem as YAML text."""
        return files.dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, content: str, *, source: str | None = None) -> Problem:
        """Inverse of :meth:`to_yaml`. Raises PlanError, naming ``source``."""
        return cls.from_dict(
            files.parse_yaml(content, what="a problem", source=source), source=source
        )

    def to_json(self) -> str:
        """This problem as JSON text."""
        return files.dump_json(self.to_dict())

    @classmethod
    def from_json(cls, content: str, *, source: str | None = None) -> Problem:
        """Inverse of :meth:`to_json`. Raises PlanError, naming ``source``."""
        return cls.from_dict(
            files.parse_json(content, what="a problem", source=source), source=source
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write YAML or JSON by the suffix; the file is replaced whole or not at all."""
        target = Path(path)
        as_json = files.format_of(target) == "json"
        files.write_text(target, self.to_json() if as_json else self.to_yaml())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Problem:
        """Read what :meth:`save` wrote. Raises PlanError naming the file."""
        source = Path(path)
        read = cls.from_json if files.format_of(source) == "json" else cls.from_yaml
        return read(files.read_text(source, what="a problem"), source=str(source))
