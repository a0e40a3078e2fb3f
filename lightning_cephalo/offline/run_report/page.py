"""Writes the page of a run: what a user with a slow run wants to see first, then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader

from lightning_cephalo.common.quantities import (
    ABSENT,
    format_bytes,
    format_rate,
    format_seconds,
)
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe.report import format_microbatches
from lightning_cephalo.observe.run_record import RunRecord
from lightning_cephalo.offline.run_report import drawing
from lightning_cephalo.offline.run_report.findings import findings
from lightning_cephalo.offline.run_report.folder import RunFolder
from lightning_cephalo.offline.run_report.lost_time import LostTime, lost_time
from lightning_cephalo.plan.memory_timeline import MemoryTimeline

_RANKS_IN_FULL = 64
_KINDS = (
    ("peak", "peak_bytes"),
    ("state", "state_bytes"),
    ("gathered", "gathered_bytes"),
    ("gradients", "gradients_bytes"),
    ("boundaries", "boundaries_bytes"),
    ("inside", "inside_bytes"),
    ("other", "other_bytes"),
    ("host", "host_bytes"),
)
Row = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    heading: str
    notes: tuple[str, ...] = ()
    drawing: str = ""
    tables: tuple[tuple[Row, ...], ...] = ()
    items: tuple[str, ...] = ()


def page(run: RunFolder) -> str:
    """Return the page of a run as HTML that needs nothing else."""
    record = run.record
    timelines = record.timelines()
    lost = lost_time([rank.recording for rank in record.ranks])
    held = [timeline for timeline in timelines if timeline.held]
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        name=run.name,
        subject=_subject(record),
        figures=list(_figures(run, lost)),
        sections=[
            _what_stands_out(record, lost),
            *_where_it_went(lost),
            *_timeline(timelines),
            *_memory_over_the_step(held, len(timelines)),
            _the_plan(record),
            *_predicted_and_measured(record),
            *_steps(record),
            *([Section("What is missing here", items=run.missing)] if run.missing else []),
        ],
    )


def _shown(value: Any) -> Any:
    """Return what the template shows; no text of a run moves a terminal's cursor."""
    return printable(value) if type(value) is str else value


def _subject(record: RunRecord) -> str:
    plan = record.plan
    parts = [f"{plan.world_size} ranks, global batch {plan.global_batch_size}"]
    if record.model:
        parts.append(record.model)
    if record.updates:
        parts.append(f"updates {record.updates}")
    if record.is_given:
        parts.append("the plan was given")
    return "; ".join(parts)


def _figures(run: RunFolder, lost: Sequence[LostTime]) -> Iterator[tuple[str, str]]:
    """Yield the large figures at the top, each with what it is."""
    record = run.record
    steps = [rank.step_s for rank in record.ranks if rank.step_s is not None]
    predicted_s = record.plan.step_s
    if steps:
        beside = f" (predicted {format_seconds(predicted_s)})" if predicted_s else ""
        yield format_seconds(max(steps)), f"a step{beside}"
        yield format_rate(record.plan.global_batch_size / max(steps)), "samples per second"
    elif predicted_s:
        yield format_seconds(predicted_s), "a step, predicted"
    if lost:
        working = fmean(one.compute_s / one.step_s if one.step_s else 0.0 for one in lost)
        yield f"{working:.0%}", "of the recorded step computes"
    peaks = [
        rank.measured_memory.peak_bytes
        for rank in record.ranks
        if rank.measured_memory is not None and rank.measured_memory.peak_bytes is not None
    ]
    if peaks:
        yield format_bytes(max(peaks)), "at most on a device"
    if run.comparison is not None:
        ratio = run.comparison.samples_per_s / run.comparison.even_samples_per_s
        yield f"{ratio:.2f} ×", "the speed of even sharding"


def _what_stands_out(record: RunRecord, lost: Sequence[LostTime]) -> Section:
    sentences = [finding.text for finding in findings(record, lost)]
    sentences += list(record.remarks)
    if record.changes:
        sentences.append(f"The plan has changed {'; '.join(record.changes)}.")
    if not sentences:
        known = any(rank.step_s is not None for rank in record.ranks)
        sentences = [
            "Nothing: no loss is above a twentieth of a step." if known else "Not measured."
        ]
    return Section("What stands out", items=tuple(sentences))


def _where_it_went(lost: Sequence[LostTime]) -> Iterator[Section]:
    if not lost:
        return
    note = (
        "The recorded step. Waiting for slower ranks ends when the last one comes; waiting for the"
        " network begins then."
    )
    if len(lost) > drawing.MOST_RANKS:
        note += f" The {drawing.MOST_RANKS} of {len(lost)} ranks that wait least for others."
    heading = ("rank", *(what for what, _, _ in drawing.PARTS), "step")
    rows = (
        (
            _name(one.rank, one.name),
            *(format_seconds(getattr(one, field)) for _, field, _ in drawing.PARTS),
            format_seconds(one.step_s),
        )
        for one in lost
    )
    yield Section(
        "Where the time went", (note,), drawing.lost_bars(lost), tables=((heading, *rows),)
    )


def _timeline(timelines: Sequence[MemoryTimeline]) -> Iterator[Section]:
    if not timelines:
        return
    note = "Upper bar: the device. Below: gathers and reduces, from their begin to their end."
    if any(one.lanes()[2] or one.lanes()[3] for one in timelines):
        note += " Then copies between device and host, and updates by the host."
    if len(timelines) > drawing.MOST_RANKS:
        note += f" The first {drawing.MOST_RANKS} of {len(timelines)} recorded ranks."
    yield Section("A step, rank by rank", (note,), drawing.step_timeline(timelines))


def _memory_over_the_step(held: Sequence[MemoryTimeline], ranks: int) -> Iterator[Section]:
    if not held:
        return
    fullest = sorted(held, key=lambda one: -(one.peak_bytes or 0.0))[: drawing.MOST_MEMORIES]
    note = "Bytes on the device, by kind."
    if len(fullest) < ranks:
        note += f" The {len(fullest)} fullest of {ranks} recorded ranks."
    shown = sorted(fullest, key=lambda one: one.rank)
    yield Section("Memory over the step", (note,), drawing.memories(shown))


def _the_plan(record: RunRecord) -> Section:
    rows = []
    for rank, part in zip(record.ranks[:_RANKS_IN_FULL], record.plan.ranks, strict=False):
        activations = {True: "recomputed", False: "kept", None: ""}[part.recompute]
        if part.offload:
            activations = ", ".join(filter(None, (activations, "offloaded")))
        rows.append(
            (
                _name(rank.rank, rank.name or part.name),
                str(part.batch_size),
                format_microbatches(part.microbatch_sizes),
                f"{part.state_fraction:.1%}",
                activations or ABSENT,
                format_bytes(part.memory_bytes),
                format_bytes(part.capacity_bytes),
            )
        )
    heading = ("rank", "samples", "microbatches", "state", "activations", "memory", "may use")
    notes = _left_out(record)
    if not record.notes and record.is_given:
        notes += ("The plan was given: nothing was compared with it.",)
    return Section("The plan, and why", notes, tables=((heading, *rows),), items=record.notes)


def _predicted_and_measured(record: RunRecord) -> Iterator[Section]:
    ranks = record.ranks[:_RANKS_IN_FULL]
    notes, tables = _left_out(record), list[tuple[Row, ...]]()
    if any(rank.busy_s is not None for rank in ranks):
        notes += ("Times are medians of all steps but the first few.",)
        heading = ("rank", "own work, predicted", "measured", "difference", "waiting", "step",
                   "between steps")  # fmt: skip
        rows = (
            (
                _name(rank.rank, rank.name),
                format_seconds(rank.predicted_busy_s),
                format_seconds(rank.busy_s),
                _difference(rank.predicted_busy_s, rank.busy_s),
                format_seconds(rank.waiting_s),
                format_seconds(rank.step_s),
                format_seconds(rank.between_s),
            )
            for rank in ranks
        )
        tables.append((heading, *rows))
    measured = [rank for rank in ranks if rank.measured_memory is not None]
    if measured:
        notes += ("Memory is predicted / measured.",)
        kinds = [
            (what, field)
            for what, field in _KINDS
            if any(getattr(rank.measured_memory, field) for rank in measured)
        ]
        columns = ("rank", *(what for what, _ in kinds), "state per parameter")
        memory_rows = (
            (
                _name(rank.rank, rank.name),
                *(
                    f"{format_bytes(getattr(rank.predicted_memory, field, None))} /"
                    f" {format_bytes(getattr(rank.measured_memory, field))}"
                    for _, field in kinds
                ),
                _bytes_per_parameter(rank.measured_memory),
            )
            for rank in measured
        )
        tables.append((columns, *memory_rows))
    if tables:
        yield Section("Predicted beside measured", notes, tables=tuple(tables))


def _bytes_per_parameter(memory: object) -> str:
    found = getattr(memory, "bytes_per_parameter", None)
    return ABSENT if found is None else f"{found[0]:.1f} B, {found[1]:.1f} B within a step"


def _steps(record: RunRecord) -> Iterator[Section]:
    if len(record.steps_s) > 1:
        yield Section(
            "All steps",
            ("On rank 0, since the last change of the plan.",),
            drawing.steps_over_time(record.steps_s, record.plan.step_s),
        )


def _left_out(record: RunRecord) -> tuple[str, ...]:
    if len(record.ranks) <= _RANKS_IN_FULL:
        return ()
    return (f"The first {_RANKS_IN_FULL} of {len(record.ranks)} ranks.",)


def _difference(predicted: float | None, measured: float | None) -> str:
    if not predicted or measured is None:
        return ABSENT
    return f"{measured / predicted - 1:+.1%}"


def _name(rank: int, name: str) -> str:
    return f"rank {rank} {name}".strip()
