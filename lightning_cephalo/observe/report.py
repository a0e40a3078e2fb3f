"""Shows plans, and predictions next to measurements, as tables on the terminal.

Formatting only. A figure that a plan does not predict shows as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_cephalo.common.quantities import (
    ABSENT,
    byte_unit,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
)
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.plan import Plan, RankPlan
from lightning_cephalo.plan.replan import Replan

_MICROBATCHES_IN_FULL = 4
_RANKS_IN_FULL = 24
_KINDS_IN_FULL = 4
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class UnitSize:
    """A unit as tables name it."""

    name: str  # of its module; "" for the root unit
    kind: str  # name of the module's class
    parameters: int  # elements


def units_text(units: Sequence[UnitSize]) -> str:
    """Return the units of a model in one line, the root unit last.

    ::

        units: 12 × Block (model.layers.0 … model.layers.11, 7.1M each), root 38.6M

    The root unit comes first in ``units``. Beyond four kinds only the largest ones are named.
    """
    root, *others = [
        UnitSize(printable(unit.name), printable(unit.kind), unit.parameters) for unit in units
    ]
    kinds: dict[str, list[UnitSize]] = {}
    for unit in others:
        kinds.setdefault(unit.kind, []).append(unit)
    groups = sorted(kinds.values(), key=lambda group: -sum(unit.parameters for unit in group))
    parts = [_group_text(group) for group in groups[:_KINDS_IN_FULL]]
    if groups[_KINDS_IN_FULL:]:
        parts.append(f"{sum(map(len, groups[_KINDS_IN_FULL:]))} of other kinds")
    return f"units: {', '.join([*parts, f'root {format_count(root.parameters)}'])}"


def _group_text(units: Sequence[UnitSize]) -> str:
    sizes = sorted(unit.parameters for unit in units)
    names = _span(units[0].name, " … ", units[-1].name)
    size = _span(format_count(sizes[0]), "–", format_count(sizes[-1]))
    each = " each" if len(units) > 1 else ""
    return f"{len(units)} × {units[0].kind} ({names}, {size}{each})"


def _span(first: str, between: str, last: str) -> str:
    return first if first == last else f"{first}{between}{last}"


def plan_table(
    plan: Plan,
    *,
    units: int | None = None,
    model: Sequence[UnitSize] = (),
    notes: Sequence[str] = (),
    updates: str = "",
    details: bool = True,
) -> Table:
    """Return a plan as a table: a row for each rank, and below them the prediction for the step.

    Beyond 24 ranks, neighbours with equal values share a row, such as "128 × A6000"; the values
    are those of each rank.

    Args:
        plan: the plan to show.
        units: number of the model's units. With it, a rank's predicted time is that of a whole
            step, also as a share of the step; without it, that of one unit.
        model: the model's units, the root unit first, for a line below the table.
        notes: sentences that go below the prediction.
        updates: when updates run, for a line below the table.
        details: whether to say how the plan was solved, and how far from the optimum it may be.
    """
    units_line = f"global batch {plan.global_batch_size}, {units_text(model)}" if model else None
    updates_line = f"updates {updates}" if updates else None
    lines = [units_line, updates_line, _outcome(plan, details), *notes]
    caption = "\n".join(line for line in lines if line) or None
    table = Table(title="Plan", caption=caption, caption_justify="left", show_footer=True)
    table.add_column("rank", justify="right")
    table.add_column("device")
    table.add_column("samples", str(plan.global_batch_size), justify="right")
    table.add_column("microbatches", overflow="fold")
    has_activations = any(rank.recompute is not None or rank.offload for rank in plan.ranks)
    if has_activations:
        table.add_column("activations", overflow="fold")
    table.add_column("state", justify="right")
    table.add_column("busy per unit" if units is None else "busy per step", justify="right")
    table.add_column("memory of capacity", justify="right")
    rows = [
        (
            rank.name or ABSENT,
            str(rank.batch_size),
            format_microbatches(rank.microbatch_sizes),
            *([_activations(rank)] if has_activations else []),
            f"{rank.state_fraction:.1%}",
            _busy(rank, units, plan.step_s),
            _memory(rank),
        )
        for rank in plan.ranks
    ]
    is_short = len(rows) <= _RANKS_IN_FULL
    first = 0
    for (device, *cells), count in [(row, 1) for row in rows] if is_short else _runs(rows):
        if count == 1:
            table.add_row(str(first), device, *cells)
        else:
            table.add_row(f"{first}–{first + count - 1}", f"{count} × {device}", *cells)
        first += count
    return table


def _runs(values: Iterable[_Value]) -> list[tuple[_Value, int]]:
    """Return each run of equal values as one of them and their number."""
    return [(value, len(list(alike))) for value, alike in groupby(values)]


def step_line(predicted_s: float | None, measured_s: float) -> str:
    """Return the time of a step in a line, with the difference in percent of the prediction."""
    difference = f" ({measured_s / predicted_s - 1:+.1%})" if predicted_s else ""
    times = f"predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}"
    return f"Step: {times}{difference}"


def replan_line(change: Replan, name: str = "") -> str:
    """Return what tells of a change of plan, in a line; ``name`` is that of its rank's device."""
    rank = f"{change.rank} ({name})" if name else str(change.rank)
    why = {
        "pace": f"rank {rank} takes {change.factor:.1f}x as long since step {change.since_step}.",
        "memory": f"rank {rank} ran out of memory; the step is repeated.",
        "loaded": "batches follow, as all that were loaded before are trained.",
    }[change.cause]
    return (
        f"Step {change.step}: {why}"
        f" New plan: {format_seconds(change.plan.step_s)} a step, not"
        f" {format_seconds(change.old_step_s)}; rows moved in {format_seconds(change.moved_s)}."
    )


_KINDS = ("peak", "state", "gathered", "gradients", "boundaries", "inside", "other")


def memory_table(predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> Table:
    """Return every rank's memory by kind as a table: predicted / measured, where it is predicted.

    Of more than 24 ranks, only the 24 with the highest peaks are shown.
    """
    rows = list(enumerate(zip(predicted, measured, strict=True)))
    most = max((rank.peak_bytes or 0.0 for rank in (*predicted, *measured)), default=0.0)
    unit, unit_bytes = byte_unit(most)
    notes = []
    if len(rows) > _RANKS_IN_FULL:
        notes.append(f"the fullest {_RANKS_IN_FULL} of {len(rows)} ranks")
        rows.sort(key=lambda row: -(row[1][1].peak_bytes or 0.0))
        rows = sorted(rows[:_RANKS_IN_FULL], key=lambda row: row[0])
    steps = {rank.step for rank in measured if rank.step is not None}
    if steps:
        notes.append(f"measured in step {', '.join(map(str, sorted(steps)))}")
    table = Table(
        title=f"Memory in {unit}: predicted / measured",
        caption=", ".join(notes) or None,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("rank", justify="right")
    kinds = (*_KINDS, "host") if any(rank.host_bytes for rank in measured) else _KINDS
    for heading in kinds:
        table.add_column(heading, justify="right")

    def cell(size: float | None) -> str:
        if size is None:
            return ABSENT
        amount = size / unit_bytes
        return f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}"

    def both(before: float | None, after: float | None) -> str:
        # in two lines, so that all kinds fit into 80 columns
        return f"\n{cell(after)}" if before is None else f"{cell(before)} /\n{cell(after)}"

    for index, pair in rows:
        cells = [both(*(getattr(rank, f"{kind}_bytes") for rank in pair)) for kind in kinds]
        table.add_row(str(index), *cells)
    return table


def format_microbatches(sizes: Iterable[int]) -> str:
    """Return ``4+4+3``, or ``12×4 + 3`` where there are many; ``none`` without a microbatch."""
    sizes = tuple(sizes)
    if len(sizes) <= _MICROBATCHES_IN_FULL:
        return "+".join(map(str, sizes)) or "none"
    parts = (str(size) if count == 1 else f"{count}×{size}" for size, count in _runs(sizes))
    return " + ".join(parts)


def _activations(rank: RankPlan) -> str:
    parts = []
    if rank.recompute is not None:
        parts.append("recomputed" if rank.recompute else "kept")
    if rank.offload:
        size = "" if rank.host_bytes is None else f" {format_bytes(rank.host_bytes)}"
        parts.append(f"offloaded{size}")
    return ", ".join(parts) or ABSENT


def _busy(rank: RankPlan, units: int | None, step_s: float | None) -> str:
    if rank.forward_s is None or rank.backward_s is None:
        return ABSENT
    if units is None:
        return format_seconds(rank.forward_s + rank.backward_s)
    busy_s = units * (rank.forward_s + rank.backward_s) + (rank.tail_s or 0.0)
    share = f" ({busy_s / step_s:.0%})" if step_s else ""
    return format_seconds(busy_s) + share


def _memory(rank: RankPlan) -> str:
    if rank.capacity_bytes is None:
        return format_bytes(rank.memory_bytes)
    share = ""
    if rank.memory_bytes is not None and math.isfinite(rank.capacity_bytes):
        share = f" ({rank.memory_bytes / rank.capacity_bytes:.0%})"
    return f"{format_bytes(rank.memory_bytes)} of {format_bytes(rank.capacity_bytes)}{share}"


def _outcome(plan: Plan, details: bool) -> str | None:
    """Return the plan's figures for the whole step as a sentence; None if it has none."""
    parts = []
    if plan.reshard_after_forward is False:
        parts.append("units stay gathered from forward to backward")
    if plan.padded:
        parts.append("slices of even shares are padded")
    if plan.groups:
        count = len(set(plan.groups))
        parts.append(f"each of {count} groups of ranks holds the whole state")
    if plan.step_s is not None:
        rate = plan.global_batch_size / plan.step_s if plan.step_s else math.inf
        parts.append(
            f"predicted step {format_seconds(plan.step_s)} ({format_rate(rate)} samples/s)"
        )
    if details and plan.bound_s is not None:
        parts.append(f"proven bound {format_seconds(plan.bound_s)}")
    if details and plan.gap is not None:
        parts.append(f"gap {plan.gap:.1%}")
    if details and plan.solve_s is not None:
        by = f" by {plan.backend}" if plan.backend else ""
        parts.append(f"solved{by} in {format_seconds(plan.solve_s)}")
    return ", ".join(parts) or None


def show(table: object) -> None:
    """Print a table to the terminal; its texts are no markup."""
    Console(markup=False).print(table)
