"""Writes the page of a run: what a user with a slow run wants to see first, then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import ABSENT, format_bytes, format_rate, format_seconds
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.report import format_microbatches
from lightning_cephalo.observe.run_record import RECORD_NAME, RunRecord
from lightning_cephalo.offline import figures
from lightning_cephalo.offline.run_report import drawing
from lightning_cephalo.offline.run_report.findings import findings, missing_in
from lightning_cephalo.offline.run_report.lost_time import LostTime, lost_time
from lightning_cephalo.plan import RankPlan

_RANKS_IN_FULL = 64
_PARTS = (
    ("compute", "compute_s", figures.BLUE),
    ("update", "update_s", figures.GREEN),
    ("slower ranks", "others_s", figures.VERMILION),
    ("network", "network_s", figures.ORANGE),
    ("rest", "rest_s", figures.GREY),
)
_MEMORY = ("peak", "state", "gathered", "gradients", "boundaries", "inside", "other", "host")


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
    ranks = record.ranks[:_RANKS_IN_FULL]
    measured = [rank.measured_memory for rank in ranks if rank.measured_memory is not None]
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        # no text of a run moves a terminal's cursor
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "microbatches": format_microbatches,
        "activations": _activations,
        "per_parameter": _per_parameter,
        "difference": _difference,
    }
    return environment.get_template("page.html").render(
        name=name,
        record=record,
        missing=list(missing_in(record)),
        drawing=drawing,
        figures=list(_figures(record, lost)),
        stands_out=_what_stands_out(record, lost),
        lost=lost,
        longest_s=max((one.step_s for one in lost), default=0.0) or 1.0,
        parts=_PARTS,
        timelines=timelines,
        held=[timeline for timeline in timelines if timeline.held],
        ranks=list(zip(ranks, record.plan.ranks, strict=False)),
        are_timed=any(rank.busy_s is not None for rank in ranks),
        memory=[name for name in _MEMORY if any(getattr(m, f"{name}_bytes") for m in measured)],
    )


def _figures(record: RunRecord, lost: Sequence[LostTime]) -> Iterator[tuple[str, str]]:
    """Yield the large figures at the top, each with what it is."""
    plan = record.plan
    steps = [rank.step_s for rank in record.ranks if rank.step_s is not None]
    if steps:
        beside = f" (predicted {format_seconds(plan.step_s)})" if plan.step_s else ""
        yield format_seconds(max(steps)), f"a step{beside}"
        yield format_rate(plan.global_batch_size / max(steps)), "samples per second"
    elif plan.step_s:
        yield format_seconds(plan.step_s), "a step, predicted"
    if lost:
        yield (
            f"{fmean(one.share('compute_s') for one in lost):.0%}",
            "of the recorded step computes",
        )
    memories = [rank.measured_memory for rank in record.ranks if rank.measured_memory]
    peaks = [memory.peak_bytes for memory in memories if memory.peak_bytes is not None]
    if peaks:
        yield format_bytes(max(peaks)), "at most on a device"


def _what_stands_out(record: RunRecord, lost: Sequence[LostTime]) -> list[str]:
    sentences = [finding.text for finding in findings(record, lost)]
    sentences += record.remarks
    if record.changes:
        sentences.append(f"The plan has changed {'; '.join(record.changes)}.")
    if sentences:
        return sentences
    known = any(rank.step_s is not None for rank in record.ranks)
    return ["Nothing: no loss is above a twentieth of a step." if known else "Not measured."]


def _activations(part: RankPlan) -> str:
    kept = {True: "recomputed", False: "kept", None: ""}[part.recompute]
    return ", ".join(filter(None, (kept, "offloaded" if part.offload else ""))) or ABSENT


def _per_parameter(memory: RankMemory) -> str:
    found = memory.bytes_per_parameter
    return ABSENT if found is None else f"{found[0]:.1f} B, {found[1]:.1f} B within a step"


def _difference(measured: float | None, predicted: float | None) -> str:
    return ABSENT if not predicted or measured is None else f"{measured / predicted - 1:+.1%}"
