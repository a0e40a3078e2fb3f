"""Writes the page of a run: what a user with a slow run wants to see first, then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import format_bytes, format_rate, format_seconds
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.pace import MeasuredRank, busy_table
from lightning_cephalo.observe.recording import Recording
from lightning_cephalo.observe.report import memory_table, plan_table
from lightning_cephalo.observe.run_record import RECORD_NAME, RunRecord
from lightning_cephalo.offline import figures
from lightning_cephalo.offline.run_report.findings import findings, missing_in
from lightning_cephalo.offline.run_report.lost_time import LostTime, lost_time

_PARTS = (
    ("compute", "compute_s", figures.BLUE),
    ("update", "update_s", figures.GREEN),
    ("slower ranks", "others_s", figures.VERMILION),
    ("network", "network_s", figures.ORANGE),
    ("rest", "rest_s", figures.GREY),
)


def page(folder: Path) -> str:
    """Return the page of the run in a folder as HTML that needs nothing else."""
    path = folder / RECORD_NAME
    if not path.is_file():
        raise PlanError(
            f"{folder}: expected the folder of a run, with {RECORD_NAME}, but that is not there."
            f" Train with CephaloStrategy(record={str(folder)!r})."
        )
    return page_of(str(folder), RunRecord.load(path))


def page_of(name: str, record: RunRecord) -> str:
    timelines = record.timelines()
    lost = lost_time(timelines)
    steps = [replace(one, name=_name(one)) for one in timelines]
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        # no text of a run moves a terminal's cursor
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"seconds": format_seconds, "rows": _rows}
    return environment.get_template("page.html").render(
        name=name,
        record=record,
        missing=list(missing_in(record)),
        draw=figures,
        totals=list(_totals(record, lost)),
        stands_out=_what_stands_out(record, lost),
        lost=lost,
        longest_s=max((one.step_s for one in lost), default=0.0) or 1.0,
        parts=_PARTS,
        steps=steps,
        held=[step for step in steps if step.held],
        plan=plan_table(record.plan, details=False),
        measured=list(_measured(record)),
    )


def _name(one: Recording) -> str:
    """Return the rank and its device, in as many letters as figures have room for."""
    whole = printable(f"rank {one.rank} {one.name}".strip())
    return whole if len(whole) <= 22 else f"{whole[:21]}…"


def _measured(record: RunRecord) -> Iterator[Table]:
    """Yield tables of predictions beside measurements, as they are printed after training."""
    timed = [
        MeasuredRank(
            one.rank,
            one.name,
            steps=0,
            step_s=one.step_s,
            busy_s=one.busy_s,
            waiting_s=one.waiting_s or 0.0,
            predicted_busy_s=one.predicted_busy_s,
        )
        for one in record.ranks
        if one.busy_s is not None and one.step_s is not None
    ]
    if timed:
        yield busy_table(timed)
    measured = [one.measured_memory or RankMemory() for one in record.ranks]
    if any(one.peak_bytes is not None for one in measured):
        yield memory_table([one.predicted_memory or RankMemory() for one in record.ranks], measured)


def _rows(table: Table) -> list[tuple[object, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def _totals(record: RunRecord, lost: Sequence[LostTime]) -> Iterator[tuple[str, str]]:
    """Yield the large figures at the top, each with what it is."""
    plan = record.plan
    step_s = max(rank.step_s or 0.0 for rank in record.ranks) or None
    yield format_seconds(step_s), f"a step (predicted {format_seconds(plan.step_s)})"
    if step_s is not None:
        yield format_rate(plan.global_batch_size / step_s), "samples per second"
    if lost:
        share = fmean(one.share("compute_s") for one in lost)
        yield f"{share:.0%}", "of the recorded step computes"
    peaks = [rank.measured_memory.peak_bytes for rank in record.ranks if rank.measured_memory]
    if any(peaks):
        yield format_bytes(max(peak or 0.0 for peak in peaks)), "at most on a device"


def _what_stands_out(record: RunRecord, lost: Sequence[LostTime]) -> list[str]:
    sentences = [finding.text for finding in findings(record, lost)]
    sentences += record.remarks
    if record.changes:
        sentences.append(f"The plan has changed {'; '.join(record.changes)}.")
    if sentences:
        return sentences
    known = any(rank.step_s is not None for rank in record.ranks)
    return ["Nothing: no loss is above a twentieth of a step." if known else "Not measured."]
