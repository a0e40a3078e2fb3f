"""Who does what: per rank the microbatches it runs and the share of the training state it holds.

A plan says enough to start training (``CephaloStrategy(plan="plan.yaml")``). What the solver
predicts rides along for tables and reports and may be absent, as in a plan written by hand.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError

_FRACTION_TOLERANCE = 1e-6
_PREDICTED = ("forward_s", "backward_s", "tail_s", "memory_bytes", "capacity_bytes", "host_bytes")


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a step.

    Args:
        microbatch_sizes: samples of each microbatch, in order; they may differ, as in (4, 4, 3).
            Empty: no samples.
        state_fraction: the share of the training state that this rank holds, 0 to 1.
        name: of the device, for tables.
        forward_s: predicted time of one unit's forward, summed over this rank's microbatches (F_i).
        backward_s: the same for the backward (B_i).
        tail_s: predicted time of the root over this rank's microbatches, forward and backward.
        memory_bytes: predicted peak of this rank, state included.
        capacity_bytes: what the plan was allowed to use.
        recompute: whether this rank recomputes activations inside units; None: as the strategy
            says.
        offload: whether this rank moves boundary activations to host memory.
        host_bytes: predicted host memory of what is offloaded.

    Raises:
        PlanError: a field is not what is expected; the message names it.
    """

    microbatch_sizes: tuple[int, ...]
    state_fraction: float
    name: str = ""
    forward_s: float | None = None
    backward_s: float | None = None
    tail_s: float | None = None
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    recompute: bool | None = None
    offload: bool = False
    host_bytes: float | None = None

    def __post_init__(self) -> None:
        records.text("RankPlan.name", self.name)
        where = f"RankPlan {self.name!r}: " if self.name else "RankPlan."
        sizes = records.items(
            f"{where}microbatch_sizes", self.microbatch_sizes, of="positive whole numbers"
        )
        sizes = tuple(
            records.whole(f"{where}microbatch_sizes[{index}]", size, minimum=1)
            for index, size in enumerate(sizes)
        )
        object.__setattr__(self, "microbatch_sizes", sizes)
        fraction = records.real(f"{where}state_fraction", self.state_fraction)
        if fraction > 1:
            raise PlanError(
                f"{where}state_fraction: expected a fraction from 0 to 1, "
                f"but got {self.state_fraction!r}. Write 0.75, not 75."
            )
        object.__setattr__(self, "state_fraction", fraction)
        for name in ("forward_s", "backward_s", "tail_s", "memory_bytes", "host_bytes"):
            value = records.optional_real(f"{where}{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        for name, others in (("recompute", (None,)), ("offload", ())):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) not in others:
                raise PlanError(
                    f"{where}{name}: expected true or false, but got {getattr(self, name)!r}."
                )
        if self.offload and self.recompute is False:
            raise PlanError(
                f"{where}offload: true goes with recompute: true only: activations that are kept "
                f"inside the units hold what enters them. Leave one of the two out."
            )
        capacity = records.optional_real(
            f"{where}capacity_bytes", self.capacity_bytes, above_minimum=True, infinite=True
        )
        object.__setattr__(self, "capacity_bytes", capacity)

    @property
    def batch_size(self) -> int:
        """Samples of this rank in one step."""
        return sum(self.microbatch_sizes)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for YAML and JSON; what is None or empty is left out."""
        data: dict[str, Any] = {"name": self.name} if self.name else {}
        data["microbatch_sizes"] = list(self.microbatch_sizes)
        data["state_fraction"] = self.state_fraction
        for name in _PREDICTED:
            value = getattr(self, name)
            if value is not None:
                data[name] = "inf" if math.isinf(value) else value
        if self.recompute is not None:
            data["recompute"] = self.recompute
        if self.offload:
            data["offload"] = True
        return data

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "rank plan") -> RankPlan:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys, starting with
        ``where``.
        """
        values = records.mapping(
            where,
            data,
            known=[field.name for field in dataclasses.fields(cls)],
            required=["microbatch_sizes", "state_fraction"],
        )
        try:
            return cls(**values)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Plan:
    """One :class:`RankPlan` per rank, in rank order, and what the solver says of the whole.

    Args:
        ranks: the parts; fractions sum to 1 within 1e-6, and at least one rank takes a sample.
        step_s: predicted time of one step.
        bound_s: no plan of those that :func:`~lightning_cephalo.plan.solve` chooses among is
            faster.
        gap: how far below the fastest step that was found ``bound_s`` is, as a part of it; 0 when
            ``bound_s`` is that step. The plan's own may be longer by a thousandth, for headroom.
        solve_s: how long the solver took.
        backend: what solved it.
        reshard_after_forward: whether units are given back after the forward and gathered again in
            the backward, or (False) stay gathered in between; None: as the strategy says.

    Raises:
        PlanError: a field is not what is expected; the message names it.
    """

    ranks: tuple[RankPlan, ...]
    step_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    solve_s: float | None = None
    backend: str | None = None
    reshard_after_forward: bool | None = None

    def __post_init__(self) -> None:
        ranks = records.items("Plan.ranks", self.ranks, of="RankPlan")
        for index, rank in enumerate(ranks):
            if not isinstance(rank, RankPlan):
                raise PlanError(
                    f"Plan.ranks[{index}]: expected a RankPlan, but got {records.shortened(rank)}."
                )
        if not ranks:
            raise PlanError("Plan.ranks: expected at least one RankPlan, but got none.")
        object.__setattr__(self, "ranks", ranks)
        if not self.global_batch_size:
            raise PlanError(
                f"Plan: expected at least one sample in all, but all {len(ranks)} ranks have empty "
                f"microbatch_sizes. Give at least one rank a microbatch."
            )
        total = math.fsum(rank.state_fraction for rank in ranks)
        if abs(total - 1) > _FRACTION_TOLERANCE:
            raise PlanError(
                f"Plan: expected state fractions that sum to 1, but "
                f"{_listed([rank.state_fraction for rank in ranks])} sum to {total:.9g}. "
                f"Divide each by their sum."
            )
        for name in ("step_s", "bound_s", "gap", "solve_s"):
            value = records.optional_real(f"Plan.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if self.backend is not None:
            records.text("Plan.backend", self.backend)
        if self.reshard_after_forward is not None and not isinstance(
            self.reshard_after_forward, bool
        ):
            raise PlanError(
                f"Plan.reshard_after_forward: expected true or false, "
                f"but got {self.reshard_after_forward!r}."
            )

    @property
    def world_size(self) -> int:
        """How many ranks this plan is for."""
        return len(self.ranks)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return sum(rank.batch_size for rank in self.ranks)

    def check(self, *, world_size: int | None = None, global_batch_size: int | None = None) -> None:
        """Check what only the run knows. None is not checked.

        Raises:
            PlanError: the plan is for another number of ranks, or its batches sum to another global
                batch.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for YAML and JSON; what is None is left out."""
        data: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("step_s", "bound_s", "gap", "solve_s", "backend", "reshard_after_forward")
            if getattr(self, name) is not None
        }
        data["ranks"] = [rank.to_dict() for rank in self.ranks]
        return data

    @classmethod
    def from_dict(cls, data: Any, *, source: str | None = None) -> Plan:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys, naming
        ``source``.
        """
        what = f"{records.in_source(source)}plan"
        values = records.mapping(
            what,
            data,
            known=[field.name for field in dataclasses.fields(cls)],
            required=["ranks"],
        )
        ranks = records.items(f"{what}: ranks", values["ranks"], of="rank plans")
        values["ranks"] = [
            RankPlan.from_dict(rank, where=f"{what}: ranks[{index}]")
            for index, rank in enumerate(ranks)
        ]
        return records.built(cls, values, source)

    def to_yaml(self) -> str:
        """This plan as YAML text."""
        return files.dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, content: str, *, source: str | None = None) -> Plan:
        """Inverse of :meth:`to_yaml`. Raises PlanError, naming ``source``."""
        return cls.from_dict(files.parse_yaml(content, what="a plan", source=source), source=source)

    def to_json(self) -> str:
        """This plan as JSON text."""
        return files.dump_json(self.to_dict())

    @classmethod
    def from_json(cls, content: str, *, source: str | None = None) -> Plan:
        """Inverse of :meth:`to_json`. Raises PlanError, naming ``source``."""
        return cls.from_dict(files.parse_json(content, what="a plan", source=source), source=source)

    def save(self, path: str | PathLike[str]) -> None:
        """Write YAML or JSON by the suffix; the file is replaced whole or not at all."""
        target = Path(path)
        as_json = files.format_of(target) == "json"
        files.write_text(target, self.to_json() if as_json else self.to_yaml())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote, or what a user wrote. Raises PlanError naming the file."""
        source = Path(path)
        read = cls.from_json if files.format_of(source) == "json" else cls.from_yaml
        return read(files.read_text(source, what="a plan"), source=str(source))


def _listed(values: list[Any], most: int = 16) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:most])
    return f"[{shown}{', ...' if len(values) > most else ''}]"
