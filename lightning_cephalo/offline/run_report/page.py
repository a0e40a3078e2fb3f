"""Writes the page of a run: what a user with a slow run wants to see first, then the rest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lightning_cephalo.common.quantities import (
    ABSENT,
    format_bytes,
    format_rate,
    format_seconds,
)
from lightning_cephalo.observe.report import format_microbatches
from lightning_cephalo.observe.run_record import RunRecord
from lightning_cephalo.offline.run_report import drawing
from lightning_cephalo.offline.run_report.findings import findings
from lightning_cephalo.offline.run_report.folder import RunFolder
from lightning_cephalo.offline.run_report.lost_time import LostTime, lost_time
from lightning_cephalo.offline.run_report.markup import Markup, element, joined, table
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
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --soft: #5c5c5c;
  --pale: #ececec; }
@media (prefers-color-scheme: dark) { :root { --page: #17191c; --text: #e8e8e8; --soft: #a6a6a6;
  --pale: #2b2f34; } }
body { background: var(--page); color: var(--text); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
.note { color: var(--soft); margin: .2rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1rem;
  margin: 1.2rem 0; padding: 0; }
.figures b { display: block; font-size: 1.5rem; font-weight: 600; }
.figures span { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--pale); text-align: left; }
.number { text-align: right; }
.drawing { width: 100%; height: auto; display: block; margin: .6rem 0; }
.drawing text { fill: var(--text); font-size: 13px;
  paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
.drawing text.inside { fill: #ffffff; text-anchor: middle; font-size: 12px; stroke: none; }
.drawing line { stroke: var(--soft); stroke-width: 1; }
.drawing .trend { fill: none; stroke: #2f8fd0; stroke-width: 1.5; }
rect.pale { fill: var(--pale); }
.legend { font-size: .85rem; color: var(--soft); }
.entry { margin-right: 1.1rem; white-space: nowrap; }
.entry svg { margin-right: .35rem; }
"""


def page(run: RunFolder) -> str:
    """Return the page of a run as HTML that needs nothing else."""
    record = run.record
    timelines = record.timelines()
    lost = lost_time([rank.recording for rank in record.ranks])
    held = [timeline for timeline in timelines if timeline.held]
    parts = [
        element("h1", run.name),
        element("p", _subject(record), class_="note"),
        _figures(run, lost),
        *_what_stands_out(record, lost),
        *_where_it_went(lost),
        *_timeline(timelines),
        *_memory_over_the_step(held, len(timelines)),
        *_the_plan(record),
        *_predicted_and_measured(record),
        *_steps(record),
        *_missing(run),
    ]
    head = joined(
        [
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            # nothing is loaded, and no script runs, whatever a file of the run says
            Markup(
                '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
                " style-src 'unsafe-inline'\">"
            ),
            element("title", f"{run.name} – cephalo"),
            element("style", Markup(_STYLE)),
        ]
    )
    whole = element(
        "html", element("head", head), element("body", element("main", *parts)), lang="en"
    )
    return f"<!DOCTYPE html>\n{whole}\n"


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


def _figures(run: RunFolder, lost: Sequence[LostTime]) -> Markup:
    record = run.record
    shown: list[tuple[str, str]] = []
    steps = [rank.step_s for rank in record.ranks if rank.step_s is not None]
    if steps:
        step_s, predicted_s = max(steps), record.plan.step_s
        beside = f" (predicted {format_seconds(predicted_s)})" if predicted_s else ""
        shown.append((format_seconds(step_s), f"a step{beside}"))
        shown.append((format_rate(record.plan.global_batch_size / step_s), "samples per second"))
    elif record.plan.step_s:
        shown.append((format_seconds(record.plan.step_s), "a step, predicted"))
    if lost:
        working = fmean(one.compute_s / one.step_s if one.step_s else 0.0 for one in lost)
        shown.append((f"{working:.0%}", "of the recorded step computes"))
    peaks = [
        rank.measured_memory.peak_bytes
        for rank in record.ranks
        if rank.measured_memory is not None and rank.measured_memory.peak_bytes is not None
    ]
    if peaks:
        shown.append((format_bytes(max(peaks)), "at most on a device"))
    if run.comparison is not None:
        ratio = run.comparison.samples_per_s / run.comparison.even_samples_per_s
        shown.append((f"{ratio:.2f} ×", "the speed of even sharding"))
    figures = [element("div", element("b", value), element("span", what)) for value, what in shown]
    return element("div", *figures, class_="figures")


def _what_stands_out(record: RunRecord, lost: Sequence[LostTime]) -> list[Markup]:
    sentences = [finding.text for finding in findings(record, lost)]
    sentences += list(record.remarks)
    if record.changes:
        sentences.append(f"The plan has changed {'; '.join(record.changes)}.")
    if not sentences:
        known = any(rank.step_s is not None for rank in record.ranks)
        sentences = [
            "Nothing: no loss is above a twentieth of a step." if known else "Not measured."
        ]
    items = [element("li", sentence) for sentence in sentences]
    return [element("h2", "What stands out"), element("ul", *items)]


def _where_it_went(lost: Sequence[LostTime]) -> list[Markup]:
    if not lost:
        return []
    note = (
        "The recorded step. Waiting for slower ranks ends when the last one comes; waiting for the"
        " network begins then."
    )
    if len(lost) > drawing.MOST_RANKS:
        note += f" The {drawing.MOST_RANKS} of {len(lost)} ranks that wait least for others."
    rows = [
        (
            _name(one.rank, one.name),
            *(format_seconds(getattr(one, field)) for _, field, _ in drawing.PARTS),
            format_seconds(one.step_s),
        )
        for one in lost
    ]
    heading = ("rank", *(what for what, _, _ in drawing.PARTS), "step")
    return [
        element("h2", "Where the time went"),
        element("p", note, class_="note"),
        drawing.lost_bars(lost),
        drawing.legend((what, colour) for what, _, colour in drawing.PARTS),
        table(heading, rows),
    ]


def _timeline(timelines: Sequence[MemoryTimeline]) -> list[Markup]:
    if not timelines:
        return []
    note = "Upper bar: the device. Below: gathers and reduces, from their begin to their end."
    if any(one.lanes()[2] or one.lanes()[3] for one in timelines):
        note += " Then copies between device and host, and updates by the host."
    if len(timelines) > drawing.MOST_RANKS:
        note += f" The first {drawing.MOST_RANKS} of {len(timelines)} recorded ranks."
    return [
        element("h2", "A step, rank by rank"),
        element("p", note, class_="note"),
        drawing.step_timeline(timelines),
        drawing.legend(drawing.operations_in(timelines)),
    ]


def _memory_over_the_step(held: Sequence[MemoryTimeline], ranks: int) -> list[Markup]:
    if not held:
        return []
    shown = sorted(
        sorted(held, key=lambda one: -(one.peak_bytes or 0.0))[: drawing.MOST_MEMORIES],
        key=lambda one: one.rank,
    )
    note = "Bytes on the device, by kind."
    if len(shown) < ranks:
        note += f" The {len(shown)} fullest of {ranks} recorded ranks."
    drawn = []
    for one in shown:
        drawn.append(element("p", f"{_name(one.rank, one.name)}: {_peak(one)}", class_="note"))
        drawn.append(drawing.memory(one))
    return [
        element("h2", "Memory over the step"),
        element("p", note, class_="note"),
        *drawn,
        drawing.legend(drawing.kinds_in(shown)),
    ]


def _peak(timeline: MemoryTimeline) -> str:
    text = f"{format_bytes(timeline.peak_bytes)} at its peak"
    if timeline.planned_bytes is not None:
        text += f", {format_bytes(timeline.planned_bytes)} predicted"
    return text


def _the_plan(record: RunRecord) -> list[Markup]:
    plan = record.plan
    rows = []
    for rank, part in zip(record.ranks[:_RANKS_IN_FULL], plan.ranks, strict=False):
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
    notes = [element("li", note) for note in record.notes]
    why = [element("ul", *notes)] if notes else []
    if not notes and record.is_given:
        why = [element("p", "The plan was given: nothing was compared with it.", class_="note")]
    return [
        element("h2", "The plan, and why"),
        table(heading, rows),
        *_left_out(record),
        *why,
    ]


def _predicted_and_measured(record: RunRecord) -> list[Markup]:
    ranks = record.ranks[:_RANKS_IN_FULL]
    found = []
    if any(rank.busy_s is not None for rank in ranks):
        rows = [
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
        ]
        heading = ("rank", "own work, predicted", "measured", "difference", "waiting", "step",
                   "between steps")  # fmt: skip
        found += [element("p", "Medians of all steps but the first few:", class_="note")]
        found.append(table(heading, rows))
    measured = [rank for rank in ranks if rank.measured_memory is not None]
    if measured:
        kinds = [
            (what, field)
            for what, field in _KINDS
            if any(getattr(rank.measured_memory, field) for rank in measured)
        ]
        memory_rows = [
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
        ]
        found.append(element("p", "Memory, predicted / measured:", class_="note"))
        columns = ("rank", *(what for what, _ in kinds), "state per parameter")
        found.append(table(columns, memory_rows))
    if not found:
        return []
    return [element("h2", "Predicted beside measured"), *found, *_left_out(record)]


def _bytes_per_parameter(memory: object) -> str:
    found = getattr(memory, "bytes_per_parameter", None)
    return ABSENT if found is None else f"{found[0]:.1f} B, {found[1]:.1f} B within a step"


def _steps(record: RunRecord) -> list[Markup]:
    if len(record.steps_s) < 2:
        return []
    return [
        element("h2", "All steps"),
        element("p", "On rank 0, since the last change of the plan.", class_="note"),
        drawing.steps_over_time(record.steps_s, record.plan.step_s),
    ]


def _missing(run: RunFolder) -> list[Markup]:
    if not run.missing:
        return []
    items = [element("li", sentence) for sentence in run.missing]
    return [element("h2", "What is missing here"), element("ul", *items)]


def _left_out(record: RunRecord) -> list[Markup]:
    if len(record.ranks) <= _RANKS_IN_FULL:
        return []
    text = f"The first {_RANKS_IN_FULL} of {len(record.ranks)} ranks."
    return [element("p", text, class_="note")]


def _difference(predicted: float | None, measured: float | None) -> str:
    if not predicted or measured is None:
        return ABSENT
    return f"{measured / predicted - 1:+.1%}"


def _name(rank: int, name: str) -> str:
    return f"rank {rank} {name}".strip()
