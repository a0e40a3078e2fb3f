"""Which of three ways to train serves which cluster, over bandwidth between nodes and batch.

    python benchmarks/which_way.py --record record.md --figure which_way.png
    python benchmarks/which_way.py --only 2 --batches 256

The ways: uneven sharding over all ranks; hybrid sharding, where each node holds the whole state;
and a pipeline of node groups, which is advice: training does not run it. Everything is predicted by
the planner's own cost model, from data sheets. Nothing was measured on a cluster.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_cephalo.common.errors import InfeasibleError, SolverError
from lightning_cephalo.offline.canvas import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    add_legend,
    add_title,
    empty_figure,
    save,
)
from lightning_cephalo.offline.estimate import Cluster, build_problem, work_of
from lightning_cephalo.offline.pipeline.build import pipeline_problem
from lightning_cephalo.offline.pipeline.search import Planned, advise
from lightning_cephalo.plan import Plan, Problem, RankPlan, solve
from lightning_cephalo.plan.solver.solve import solve_if_possible

GIGABYTES_PER_S = (0.6, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
BATCHES = (32, 64, 128, 256, 512)
TOKENS = 1024
# Halvings of the interval between two bandwidths of the table: to within 5 %.
_HALVINGS = 3
# Seconds for each search. Proofs that nothing is roomier take longer, and change no step.
_LIMIT_S = 1.0
_LONGER_S = 30.0
_PIPELINES_LIMIT_S = 10.0
# Steps within this fraction are equal.
_EQUAL = 0.01
# Plans have finite steps.
_LONG_S = 1e12
UNEVEN, HYBRID, PIPELINE = "uneven sharding over all ranks", "hybrid sharding by node", "pipeline"
_COLOURS = {UNEVEN: BLUE, HYBRID: GREEN, PIPELINE: VERMILION}


def _quickly(problem: Problem, time_limit_s: float) -> Plan | None:
    return solve_if_possible(problem, time_limit_s=min(time_limit_s, _LIMIT_S))


@dataclass(frozen=True)
class Case:
    """A cluster and a model, in fp16 with recomputation.

    Attributes:
        name: of the cluster.
        nodes: as in ``cluster.yaml``.
        model: its name, and the size of a GPT-2.
    """

    name: str
    nodes: str
    model: tuple[str, dict[str, int]]

    def cluster(self, gigabytes_per_s: float) -> Cluster:
        """Return the cluster with this bandwidth between each two nodes."""
        return Cluster.from_yaml(
            f"nodes: [{self.nodes}]\nbetween_nodes: {gigabytes_per_s * 1e3:.6g} MB/s"
        )


_6_7B = "6.7B", {"n_layer": 32, "n_embd": 4096, "n_head": 32}
_2_6B = "2.6B", {"n_layer": 32, "n_embd": 2560, "n_head": 32}
_1_5B = "1.5B", {"n_layer": 48, "n_embd": 1600, "n_head": 25}
_A100 = "{devices: {A100: 8}, link: 250 GB/s}"
_V100 = "{devices: {V100: 8}, link: 120 GB/s}"
_T4 = "{devices: {T4: 8}, link: 12 GB/s}"
CASES = (
    Case("3 mixed nodes: 8 A100, 8 V100, 8 T4", f"{_A100}, {_V100}, {_T4}", _6_7B),
    Case("2 nodes, fast inside: 8 A100, 8 V100", f"{_A100}, {_V100}", _2_6B),
    Case(
        "2 workstations: 2 RTX 4090, 2 RTX 3090",
        "{devices: {RTX 4090: 2}, link: 25 GB/s}, {devices: {RTX 3090: 2}, link: 25 GB/s}",
        _1_5B,
    ),
)


@dataclass(frozen=True)
class Cell:
    """Predicted seconds of a step by each way.

    Infinite where it does not fit; a pipeline's also where another way is as fast.
    """

    gigabytes_per_s: float
    batch: int
    seconds: dict[str, float]

    @property
    def fastest(self) -> str | None:
        """The way with the shortest step, or uneven sharding if it is as short; None: none fits."""
        way = min(self.seconds, key=lambda one: self.seconds[one])
        if self.seconds[UNEVEN] <= (1 + _EQUAL) * self.seconds[way]:
            way = UNEVEN
        return way if math.isfinite(self.seconds[way]) else None

    @property
    def fastest_that_runs(self) -> str:
        """The same without pipelines."""
        both = self.seconds[HYBRID], self.seconds[UNEVEN]
        return HYBRID if both[0] * (1 + _EQUAL) < both[1] else UNEVEN


class Priced:
    """Prices of the three ways for one case, kept for later questions.

    Args:
        case: the cluster and the model.

    Attributes:
        largest_gap: the most that a plan of one stage may be above the fastest, as a fraction.
        largest_pipeline_gap: the same of pipelines.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        _, size = case.model
        self._work = work_of("gpt2", sequence_length=TOKENS, dtype="fp16", **size)
        self._planned: dict[int, Planned] = {}
        self._steps_s: dict[tuple[str, float, int], float] = {}
        self.largest_gap = self.largest_pipeline_gap = 0.0

    def problem(self, rate: float, batch: int, *, hybrid: bool) -> Problem:
        """Return the problem of one stage."""
        return build_problem(
            self.case.cluster(rate), self._work, global_batch_size=batch, hybrid_sharding=hybrid
        ).problem

    def step_s(self, way: str, rate: float, batch: int) -> float:
        """Return the seconds of a step by one way; infinite as in :class:`Cell`."""
        key = way, rate, batch
        if key not in self._steps_s:
            of = self._pipeline_s if way == PIPELINE else self._one_stage_s
            self._steps_s[key] = of(way, rate, batch)
        return self._steps_s[key]

    def _one_stage_s(self, way: str, rate: float, batch: int) -> float:
        problem = self.problem(rate, batch, hybrid=way == HYBRID)
        try:
            plan = solve_if_possible(problem, time_limit_s=_LIMIT_S)
        except SolverError:
            plan = solve_if_possible(problem, time_limit_s=_LONGER_S)
        if plan is None or plan.step_s is None:
            return math.inf
        self.largest_gap = max(self.largest_gap, plan.gap or 0.0)
        return plan.step_s

    def _pipeline_s(self, way: str, rate: float, batch: int) -> float:
        whole = self.problem(rate, batch, hybrid=False)
        problem = pipeline_problem(self.case.cluster(rate), self._work, whole)
        below_s = min(self.step_s(UNEVEN, rate, batch), self.step_s(HYBRID, rate, batch))
        today = replace(Plan((RankPlan((1,), 1.0),)), step_s=min(below_s, _LONG_S))
        planned = self._planned.setdefault(batch, Planned(_quickly))
        advice = advise(
            problem, today=today, below_s=below_s, planned=planned, time_limit_s=_PIPELINES_LIMIT_S
        )
        if advice.best is None or advice.best.step_s >= below_s:
            return math.inf
        gap = 1 - advice.bound_s / advice.best.step_s
        self.largest_pipeline_gap = max(self.largest_pipeline_gap, gap)
        return advice.best.step_s

    def cell(self, rate: float, batch: int) -> Cell:
        """Return the seconds by all ways."""
        return Cell(rate, batch, {way: self.step_s(way, rate, batch) for way in _COLOURS})

    def why_no_hybrid(self, batch: int) -> str:
        """Return why hybrid sharding does not fit; empty if it does."""
        try:
            solve(self.problem(GIGABYTES_PER_S[0], batch, hybrid=True))
        except InfeasibleError as error:
            return str(error).partition(" hybrid_sharding=False")[0]
        return ""

    def crossover(self, way: str, batch: int) -> float:
        """Return the GB/s below which a way is the fastest; 0: nowhere; infinite: everywhere.

        A pipeline is compared with both others, hybrid sharding with uneven sharding.
        """
        others = [UNEVEN] if way == HYBRID else [UNEVEN, HYBRID]

        def wins(rate: float) -> bool:
            own = self.step_s(way, rate, batch)
            least_s = min(self.step_s(other, rate, batch) for other in others)
            return own * (1 + _EQUAL) < least_s

        pairs = itertools.pairwise(GIGABYTES_PER_S)
        found = [pair for pair in pairs if wins(pair[0]) and not wins(pair[1])]
        if not found:
            return math.inf if wins(GIGABYTES_PER_S[-1]) else 0.0
        below, above = found[-1]
        for _ in range(_HALVINGS):
            middle = math.sqrt(below * above)
            below, above = (middle, above) if wins(middle) else (below, middle)
        return math.sqrt(below * above)


def main() -> None:
    """Print the tables; write the record and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, choices=range(1, len(CASES) + 1), help="one case")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--record", type=Path, metavar="FILE.md")
    parser.add_argument("--figure", type=Path, metavar="FILE", help=".png or .svg")
    options = parser.parse_args()
    cases = CASES if options.only is None else CASES[options.only - 1 : options.only]
    with ProcessPoolExecutor(len(cases)) as pool:
        of = partial(_answer, batches=options.batches)
        answers = list(pool.map(of, cases))
    text = "".join(answer.text for answer in answers)
    seconds = math.fsum(answer.cpu_s for answer in answers)
    print(f"{text}{seconds:.0f} CPU s")
    grids = [(case, answer.cells) for case, answer in zip(cases, answers, strict=True)]
    if options.figure is not None:
        draw(grids, options.batches, options.figure)
    if options.record is not None:
        options.record.write_text(_head(seconds) + text)


@dataclass(frozen=True)
class _Answer:
    cells: tuple[Cell, ...]
    text: str
    cpu_s: float


def _answer(case: Case, batches: Sequence[int]) -> _Answer:
    """Return all cells of a case, with their section of the record."""
    started_s, priced = time.process_time(), Priced(case)
    cells = tuple(priced.cell(rate, batch) for batch in batches for rate in GIGABYTES_PER_S)
    crossings = _crossings(priced, batches)
    gaps = (
        f"Plans are within {priced.largest_gap:.1%} of the fastest, pipelines within"
        f" {priced.largest_pipeline_gap:.1%}."
    )
    text = "\n".join([*_section(case, cells), *crossings, gaps, "", ""])
    return _Answer(cells, text, time.process_time() - started_s)


def _head(cpu_s: float) -> str:
    said = (
        f"`python benchmarks/which_way.py --record FILE.md --figure FILE.png` ({cpu_s:.0f} CPU"
        " seconds). Everything here is predicted by the planner's own cost model from data sheets;"
        " nothing ran on a cluster. Training does not run pipelines."
        f" GPT-2 of several sizes, fp16, {TOKENS:,} tokens a sample, recomputation, Adam. Cells are"
        " the seconds of a step with uneven sharding over all ranks, with hybrid sharding by node,"
        " and with the fastest pipeline of node groups, in this order. – does not fit; of a"
        " pipeline, or is no faster. The fastest is bold; steps within 1 % are equal. Tables below"
        " have the bandwidths where that changes. Uneven sharding gathers in a ring, as"
        " NCCL does."
    )
    title = f"# Which way serves which cluster, {datetime.date.today():%d %B %Y}"
    return f"{title}\n\n{textwrap.fill(said, 105)}\n\n"


def _section(case: Case, cells: Sequence[Cell]) -> list[str]:
    heads = " | ".join(f"{rate:g} GB/s" for rate in GIGABYTES_PER_S)
    lines = [
        f"## {case.name}; {case.model[0]} parameters",
        "",
        f"| batch | {heads} |",
        f"|{'---|' * (1 + len(GIGABYTES_PER_S))}",
    ]
    for batch in dict.fromkeys(cell.batch for cell in cells):
        row = [_told(cell) for cell in cells if cell.batch == batch]
        lines.append(f"| {batch} | {' | '.join(row)} |")
    return [*lines, ""]


def _told(cell: Cell) -> str:
    parts = []
    for way, seconds in cell.seconds.items():
        text = f"{seconds:.3g}" if math.isfinite(seconds) else "–"
        parts.append(f"**{text}**" if way == cell.fastest else text)
    return " / ".join(parts)


def _crossings(priced: Priced, batches: Sequence[int]) -> list[str]:
    lines = [
        "| batch | hybrid faster than uneven below | pipeline faster than both below |",
        "|---|---|---|",
    ]
    for batch in batches:
        rates = [priced.crossover(way, batch) for way in (HYBRID, PIPELINE)]
        told = [_rate(rate) for rate in rates]
        lines.append(f"| {batch} | {' | '.join(told)} |")
    why = priced.why_no_hybrid(batches[0])
    return [*lines, "", *([f"Hybrid sharding does not fit. {why}", ""] if why else [])]


def _rate(gigabytes_per_s: float) -> str:
    if not gigabytes_per_s:
        return "–"
    return "all" if math.isinf(gigabytes_per_s) else f"{gigabytes_per_s:.2g} GB/s"


def draw(
    grids: Sequence[tuple[Case, Sequence[Cell]]], batches: Sequence[int], path: str | Path
) -> None:
    """Draw the fastest way of every cell, and how many times as fast as uneven sharding it is."""
    from matplotlib.patches import Rectangle

    figure, axes = empty_figure(path, 5.6 * len(grids), 4.6, columns=len(grids))
    for one, (case, cells) in zip(axes, grids, strict=True):
        for cell in cells:
            x, y = GIGABYTES_PER_S.index(cell.gigabytes_per_s), batches.index(cell.batch)
            way = cell.fastest
            colour = GREY if way is None else _COLOURS[way]
            one.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
            if way is None:
                continue
            gain = cell.seconds[UNEVEN] / cell.seconds[way]
            label = f"{gain:.3g}×" if math.isfinite(gain) and way != UNEVEN else ""
            if way == PIPELINE and cell.fastest_that_runs == HYBRID:
                label += "\nhybrid"
            one.text(x + 0.5, y + 0.5, label, ha="center", va="center", color="white", fontsize=8)
        one.set_xlim(0, len(GIGABYTES_PER_S))
        one.set_ylim(0, len(batches))
        rates = [f"{rate:g}" for rate in GIGABYTES_PER_S]
        one.set_xticks([index + 0.5 for index in range(len(rates))], rates)
        one.set_yticks([index + 0.5 for index in range(len(batches))], list(map(str, batches)))
        one.set_xlabel("bandwidth between nodes (GB/s)")
        one.set_ylabel(f"batch (samples of {TOKENS:,} tokens)")
        below = f"GPT-2 of {case.model[0]} parameters, fp16; predicted, against uneven sharding"
        add_title(one, case.name, below)
    advice = {PIPELINE: "pipeline (advice only; training does not run it)"}
    entries = [(advice.get(way, way), colour) for way, colour in _COLOURS.items()]
    entries.append(("nothing fits", GREY))
    add_legend(figure, entries)
    save(figure, path)


if __name__ == "__main__":
    main()
