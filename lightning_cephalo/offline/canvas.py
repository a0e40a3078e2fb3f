"""Canvas of the figures: colours, titles, legends, and the file; needs matplotlib.

Colours are those of Okabe and Ito (and a dark yellow), which colour-blind readers can distinguish.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.plan.program import OPERATIONS, Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

BLACK, GREY, PALE, OLIVE = "#000000", "#999999", "#e8e8e8", "#8A7A00"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

_SUFFIXES = (".png", ".svg")
_DPI = 150
_LEGEND_COLUMNS = 9


def empty_figure(
    path: str | PathLike[str],
    width: float,
    height: float,
    *,
    columns: int = 1,
    rows: Sequence[float] = (1.0,),
) -> tuple[Figure, Sequence[Axes]]:
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise PlanError(
            f"{path}: expected a file name that ends in {', '.join(_SUFFIXES)}, "
            f"but got the suffix {suffix!r}. Rename the file."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed. "
            "Install it with: pip install 'lightning-cephalo[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(rows),
        columns,
        squeeze=False,
        sharex=len(rows) > 1,
        gridspec_kw={"height_ratios": list(rows)},
    )
    axes = list(grid.flatten())
    for one in axes:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def add_title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.text(0, 1, below, transform=axes.transAxes, va="bottom", fontsize=9, color="#555555")


def end_of_labels(figure: Figure, axes: Axes, labels: Sequence[tuple[float, Annotation]]) -> float:
    """Return the limit of the axis at which all labels next to their bars are inside."""
    figure.draw_without_rendering()  # the layout sets the width of the axes
    width_px = axes.get_window_extent().width
    gap_px = 15.0
    return max(
        # a label counts for at most four fifths of the axes, however narrow they are
        at / max(0.2, 1 - (label.get_window_extent().width + gap_px) / width_px)
        for at, label in labels
    )


def colours_of(seen: Collection[Operation]) -> list[tuple[str, str]]:
    """Return a legend's entries for the operations that a timeline shows."""
    return [(each.value, info.colour) for each, info in OPERATIONS.items() if each in seen]


def add_legend(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    """Put labels and their colours below everything else, in as many rows as their width takes."""
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in entries]
    for columns in range(min(len(handles), _LEGEND_COLUMNS), 0, -1):
        legend = figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
        )
        figure.draw_without_rendering()  # the fonts set the width of the legend
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write the file completely or not at all. Raises PlanError naming the file if that fails."""
    with files.replacing(Path(path)) as beside:
        figure.savefig(beside, dpi=_DPI, facecolor="white")
