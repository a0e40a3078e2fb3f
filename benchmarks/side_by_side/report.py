"""The table, the claims, the figure and the record of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .cases import CEPHALO, DDP_BY_SPEED, EVEN, FAST, NAMES, OTHERS, SLOW
from .results import Result

HEADINGS = (
    "speeds",
    "link",
    "micro-batches",
    "ideal",
    *NAMES,
    "over the best even",
    f"over {DDP_BY_SPEED}",
    "cephalo's batches",
)
CAPTION = (
    "Ideal: samples/s, the sum of the ranks' own speeds. Each way to train: % of ideal reached ("
    "% of the step lost to waiting for the slowest rank, communication not hidden, overhead). Last"
    " columns: step time over cephalo's, median of rounds (quartiles); above 1 cephalo is ahead."
    " 'stay': by cephalo's plan units stay gathered from the forward to the backward."
)
# The claimed part of the ideal at 3:1, and the noise of steps on emulated devices.
_NEAR_IDEAL, _NOISE = 0.95, 0.01
_COLOURS = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#999999", "#009E73")


@dataclass(frozen=True)
class Claim:
    """A claim of the design, checked against one case."""

    text: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'reached' if self.holds else 'MISSED'}: {self.text}: {self.found}"


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Return the table's cells, one row for each case."""
    return [_row(result) for result in results]


def _row(result: Result) -> list[str]:
    case = result.case
    cells = [
        case.ratio,
        case.link,
        f"{case.microbatches} × {case.samples}",
        f"{result.ideal_samples_per_s:.1f}",
    ]
    for name in NAMES:
        split = result.splits.get(name)
        cells.append("–" if split is None else cell(split.shares()))
    best = result.best(EVEN)
    ratios = (f"{result.ratios[best]} {best}", str(result.ratios[DDP_BY_SPEED]))
    stay = " stay" if result.stay_gathered else ""
    return [*cells, *ratios, ":".join(map(str, result.batches)) + stay]


def cell(shares: Sequence[float]) -> str:
    """Format percentages that sum to 100, such as ``"97 (0 2 1)"``, by largest remainder."""
    exact = [share * 100 for share in shares]
    whole = [math.floor(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in order[: 100 - sum(whole)]:
        whole[index] += 1
    reached, *lost = whole
    return f"{reached} ({' '.join(map(str, lost))})"


def claims(results: Sequence[Result]) -> list[Claim]:
    """Return the design's claims about these cases, with the measured values."""
    found = []
    for result in results:
        case = result.case
        label = f"{case.ratio}, {case.link} link, {case.microbatches} × {case.samples}"
        if case.speeds == (3, 1) and case.link == FAST:
            share = result.splits[CEPHALO].shares()[0]
            found.append(
                Claim(
                    f"{label}: {_NEAR_IDEAL} of the ideal sum of speeds",
                    f"{share:.3f}",
                    share >= _NEAR_IDEAL,
                )
            )
        if len(set(case.speeds)) == 1:
            best = result.best(EVEN)
            ratio = result.ratios[best]
            found.append(
                Claim(
                    f"{label}: no slower than the best even one ({best}), within {_NOISE:.0%}",
                    str(ratio),
                    ratio.median >= 1 - _NOISE,
                )
            )
        if case.link == SLOW and case.microbatches > 1:
            best = result.best(OTHERS)
            ratio = result.ratios[best]
            found.append(
                Claim(f"{label}: ahead of all others ({best})", str(ratio), ratio.median > 1)
            )
    return found


def table(results: Sequence[Result]) -> Table:
    """Return the table for the terminal."""
    made = Table(title="Side by side", caption=CAPTION, caption_justify="left")
    for heading in HEADINGS:
        made.add_column(heading, justify="right")
    for row in rows(results):
        made.add_row(*row)
    return made


def markdown(results: Sequence[Result], header: Sequence[str], notes: Sequence[str]) -> str:
    """Return the record: conditions, table, claims, and contenders that could not run."""
    lines = [f"# {header[0]}", "", *header[1:], "", CAPTION, ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    lines += [f"| {' | '.join(row)} |" for row in rows(results)]
    lines += ["", "What the design asks for:", "", *(f"- {claim}" for claim in claims(results))]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def dump(results: Sequence[Result], header: Sequence[str], notes: Sequence[str]) -> str:
    """Return all figures as JSON, in seconds and samples per second."""
    return json.dumps(
        {
            "header": list(header),
            "results": [dataclasses.asdict(result) for result in results],
            "claims": [dataclasses.asdict(claim) for claim in claims(results)],
            "notes": list(notes),
        },
        indent=1,
    )


def reasons(results: Sequence[Result]) -> list[str]:
    """List the contenders that could not run, each once, with the reason."""
    found = [
        f"{name} did not run: {why}" for result in results for name, why in result.reasons.items()
    ]
    return list(dict.fromkeys(found))


def figure(results: Sequence[Result], path: Path) -> None:
    """Draw the part of the ideal that each contender reaches, by link and microbatch count.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "--figure needs matplotlib: pip install 'lightning-cephalo[plot]'"
        ) from error
    links = list(dict.fromkeys(result.case.link for result in results))
    counts = sorted({result.case.microbatches for result in results})
    drawn = Figure(figsize=(5.5 * len(counts), 2.9 * len(links) + 0.6), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(len(links), len(counts), squeeze=False, sharey=True)
    for link, line in zip(links, panels, strict=True):
        for count, axes in zip(counts, line, strict=True):
            here = [r for r in results if (r.case.link, r.case.microbatches) == (link, count)]
            _bars(axes, here)
            ending = "" if count == 1 else "es"
            axes.set_title(f"{link} link, {count} microbatch{ending}", loc="left")
    for line in panels:
        line[0].set_ylabel("of the ideal throughput")
    for axes in panels[-1]:
        axes.set_xlabel("speeds of the ranks")
    handles, labels = panels[0][0].get_legend_handles_labels()
    drawn.legend(
        handles, labels, loc="outside lower center", ncols=len(NAMES), frameon=False, fontsize=9
    )
    drawn.savefig(path, dpi=150, facecolor="white")


def _bars(axes: Any, results: Sequence[Result]) -> None:
    width = 0.8 / len(NAMES)
    for position, (name, colour) in enumerate(zip(NAMES, _COLOURS, strict=True)):
        places = [
            index + (position - (len(NAMES) - 1) / 2) * width for index in range(len(results))
        ]
        heights = [
            result.splits[name].shares()[0] if name in result.splits else 0.0 for result in results
        ]
        axes.bar(places, heights, width, color=colour, label=name, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), [result.case.ratio for result in results])
    axes.set_ylim(0, 1.08)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
