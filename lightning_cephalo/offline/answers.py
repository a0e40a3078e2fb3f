"""Answers of the command line: comparisons and summaries of simulations, as rows and tables."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from rich.table import Table

from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.common.quantities import format_bytes, format_rate, format_seconds
from lightning_cephalo.offline.baselines import BASELINES
from lightning_cephalo.offline.estimate.cluster import Cluster
from lightning_cephalo.offline.estimate.devices import find_device
from lightning_cephalo.offline.figures import ComparisonRow
from lightning_cephalo.offline.pipeline.crossover import Crossover, find_crossover
from lightning_cephalo.offline.pipeline.plan import Advice
from lightning_cephalo.offline.pipeline.search import Planned, advise
from lightning_cephalo.offline.pipeline.text import ADVICE_ONLY, crossover_text, pipeline_name
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.plan import Plan, Problem, predict, solve
from lightning_cephalo.plan.timeline import Simulation

_OURS = "cephalo"
_HYBRID = f"{_OURS}, hybrid sharding by node (over gloo)"
_TOGETHER = f"{_OURS}, all ranks together"


@dataclass(frozen=True)
class RankSummary:
    """One rank of a simulated step: seconds busy and waiting, and peak bytes."""

    name: str
    compute_s: float
    communication_s: float
    waiting_s: float
    peak_bytes: float
    capacity_bytes: float


@dataclass(frozen=True)
class Summary:
    """The times of a simulated step and of the closed form, and a summary of each rank."""

    predicted_s: float
    simulated_s: float
    global_batch_size: int
    ranks: tuple[RankSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        return _finite(dataclasses.asdict(self))


def with_device(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster with one more device in its first node."""
    device = find_device(name, cluster.own_devices, where="--add")
    first, *others = cluster.nodes
    alone = dataclasses.replace(first, count=1, devices=(*first.devices, (device, 1)))
    rest = [] if first.count == 1 else [dataclasses.replace(first, count=first.count - 1)]
    return dataclasses.replace(cluster, nodes=(alone, *rest, *others))


def compare(
    asked: Scenario,
    additions: Sequence[str] = (),
    *,
    time_limit_s: float = 60.0,
    say: Callable[[str], Any] = lambda text: None,
) -> list[ComparisonRow]:
    """Compare the baselines with this planner.

    The rows are every baseline, our plan with one more of each addition, and our plan last. Where
    there are several nodes, our plan with the whole state on each node comes before it, and the
    fastest pipeline of node groups.
    """
    rows = []
    for name, baseline in BASELINES.items():
        say(f"comparing: {name}")
        rows.append(row_or_reason(name, asked.problem, partial(baseline, asked.problem)))
    for addition in additions:
        say(f"comparing: with one more {addition}")
        if asked.cluster is None or asked.problem_of is None:
            raise PlanError("--add needs --cluster or --devices: a saved problem has no cluster.")
        larger = asked.problem_of(with_device(asked.cluster, addition))
        solving = partial(solve, larger, time_limit_s=time_limit_s)
        rows.append(row_or_reason(f"{_OURS} and one more {addition}", larger, solving))
    say(f"comparing: {_OURS}")
    try:
        plan = solve(asked.problem, time_limit_s=time_limit_s)
    except (InfeasibleError, SolverError) as error:
        if all(row.step_s is None for row in rows[len(BASELINES) :]):
            raise
        return [*rows, ComparisonRow(_OURS, reason=str(error))]
    hybrid = asked.hybrid
    if hybrid is not None:
        say("comparing: hybrid sharding")
        solving = partial(solve, hybrid, time_limit_s=time_limit_s)
        rows.append(row_or_reason(_HYBRID, hybrid, solving))
    if asked.pipeline_of is not None and asked.cluster is not None and asked.cluster.node_count > 1:
        say("comparing: pipelines")
        rows.append(pipeline_row(pipelines(asked, plan, time_limit_s=time_limit_s)))
    return [*rows, _row_of(_OURS, asked.problem, plan)]


@dataclass(frozen=True)
class Chosen:
    """A plan, and the other way to hold the state."""

    asked: Scenario
    plan: Plan
    rows: tuple[ComparisonRow, ...] = ()


def choose(asked: Scenario, hybrid_sharding: str, *, time_limit_s: float = 60.0) -> Chosen:
    """Plan with the state on all ranks together, and with the whole state on each node.

    ``"auto"`` takes the faster plan. The time limit is for both: the way that was asked for comes
    last, and has at least half of it.
    """
    hybrid = asked.hybrid
    if hybrid is None:
        if hybrid_sharding == "on":
            raise PlanError(
                "--hybrid-sharding on needs --cluster with several nodes, and a model whose bytes "
                "are counted. Give both, or leave it out."
            )
        return Chosen(asked, solve(asked.problem, time_limit_s=time_limit_s))
    ways = {
        True: (_HYBRID, replace(asked, problem=hybrid)),
        False: (_TOGETHER, asked),
    }
    plans: dict[bool, Plan] = {}
    rows: dict[bool, ComparisonRow] = {}
    started, last = time.perf_counter(), hybrid_sharding == "on"
    for is_hybrid in (not last, last):
        name, way = ways[is_hybrid]
        limit_s = time_limit_s / 2
        if is_hybrid is last:
            limit_s = max(limit_s, time_limit_s - (time.perf_counter() - started))
        try:
            plans[is_hybrid] = solve(way.problem, time_limit_s=limit_s)
            rows[is_hybrid] = _row_of(name, way.problem, plans[is_hybrid])
        except (InfeasibleError, SolverError) as error:
            # the way that was asked for, or the one that needs less memory
            if is_hybrid is last:
                raise
            rows[is_hybrid] = ComparisonRow(name, reason=_reason(name, str(error)))
    own = last
    if hybrid_sharding == "auto" and True in plans:
        own = (plans[True].step_s or 0.0) < (plans[False].step_s or 0.0)
    return Chosen(ways[own][1], plans[own], (rows[not own], rows[own]))


@dataclass(frozen=True)
class Pipelines:
    """Whether a pipeline would be faster, and below which bandwidth between nodes."""

    advice: Advice
    crossover: Crossover

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold."""
        best = self.advice.best
        data = {
            "advice_only": ADVICE_ONLY,
            "wins": self.advice.pipeline_wins,
            "today_s": self.advice.today_s,
            "bound_s": self.advice.bound_s,
            "covers": self.advice.covers,
            "wins_below_bytes_per_s": self.crossover.bandwidth_bytes_per_s,
            "by_bandwidth": [dataclasses.asdict(point) for point in self.crossover.points],
            "best": None if best is None else best.to_dict(self.advice.problem),
        }
        return _finite(data)


def pipelines(asked: Scenario, today: Plan, *, time_limit_s: float = 60.0) -> Pipelines:
    """Search for pipelines of node groups, on this network and on slower and faster ones."""
    if asked.pipeline_of is None or asked.cluster is None:
        raise PlanError(
            "--pipeline needs --cluster and a model whose bytes are counted: a saved problem "
            "says too little about nodes. Leave it out, or give both."
        )
    make, cluster, planned = asked.pipeline_of, asked.cluster, Planned()
    started = time.perf_counter()
    advice = advise(make(cluster), today=today, planned=planned, time_limit_s=time_limit_s / 2)
    crossover = find_crossover(
        lambda factor: make(cluster.with_network_scaled(factor)),
        planned=planned,
        time_limit_s=max(time_limit_s - (time.perf_counter() - started), time_limit_s / 2),
    )
    return Pipelines(advice, crossover)


def pipeline_row(found: Pipelines) -> ComparisonRow:
    """Return the row of the fastest pipelines, or one that says that none fits."""
    best, problem = found.advice.best, found.advice.problem
    if best is None:
        return ComparisonRow("pipeline", reason="no pipeline of node groups fits")
    name = f"{pipeline_name(best)} (advice only: {crossover_text(found.crossover)})"
    stages = [stage for pipeline in best.pipelines for stage in pipeline.stages]
    return _row(name, best.step_s, problem.batch, *(stage.plan for stage in stages))


def row_or_reason(name: str, problem: Problem, make: Callable[[], Plan]) -> ComparisonRow:
    """Return the row of a plan, or a row with the reason why there is none."""
    try:
        return _row_of(name, problem, make())
    except (InfeasibleError, SolverError) as error:
        return ComparisonRow(name, reason=_reason(name, str(error)))


def _row_of(name: str, problem: Problem, plan: Plan) -> ComparisonRow:
    assert plan.step_s is not None
    return _row(name, plan.step_s, problem.global_batch_size, plan)


def _row(name: str, step_s: float, samples: int, *plans: Plan) -> ComparisonRow:
    memory = tuple(
        (rank.memory_bytes or 0.0, rank.capacity_bytes or 0.0)
        for plan in plans
        for rank in plan.ranks
    )
    return ComparisonRow(name, step_s, samples / step_s if step_s else math.inf, memory)


def _reason(name: str, error: str) -> str:
    """Say why a row has no plan. Leaves out the planner's name, which the row already has."""
    planner, separator, rest = error.partition(": ")
    if separator and name.startswith(planner):
        error = rest
    # Our own message already names the limit. A rank may also lack a microbatch size while it has
    # memory to spare.
    speaks_of_memory = "GiB" in error and "microbatch size" not in error
    return error if name.startswith(_OURS) or not speaks_of_memory else f"out of memory: {error}"


def comparison_table(rows: Sequence[ComparisonRow], title: str = "Comparison") -> Table:
    """Return the rows as a table. The last row is ours; the others are compared with it."""
    best = rows[-1].samples_per_s
    table = Table(title=title, caption_justify="left")
    table.add_column("allocation")
    for heading in ("step", "samples/s", f"of {_OURS}'s", "fullest rank"):
        table.add_column(heading, justify="right")
    notes = []
    for row in rows:
        if row.step_s is None or row.samples_per_s is None:
            notes.append(f"{row.name}: {row.reason}")
            table.add_row(row.name, "–", "cannot run", "–", "–")
            continue
        share = f"{row.samples_per_s / best:.0%}" if best and math.isfinite(best) else "–"
        fullest = max(used / capacity for used, capacity in row.memory) if row.memory else 0.0
        table.add_row(
            row.name,
            format_seconds(row.step_s),
            format_rate(row.samples_per_s),
            share,
            f"{fullest:.0%}",
        )
    table.caption = "\n".join(notes) or None
    return table


def row_as_dict(row: ComparisonRow) -> dict[str, Any]:
    """Return the row as values that JSON can hold."""
    return _finite(dataclasses.asdict(row))


def summarise(problem: Problem, plan: Plan, simulation: Simulation) -> Summary:
    """Summarise a simulated step, rank by rank, with the closed form's time."""
    ranks = []
    for index, profile in enumerate(problem.ranks):
        timeline = simulation.timeline(index)
        ranks.append(
            RankSummary(
                profile.name,
                timeline.compute_s,
                timeline.communication_s,
                timeline.waiting_s,
                max((held for _, held in timeline.memory), default=0.0),
                profile.capacity_bytes,
            )
        )
    predicted_s = predict(problem, plan).step_s
    return Summary(predicted_s, simulation.step_s, problem.global_batch_size, tuple(ranks))


def simulation_table(summary: Summary) -> Table:
    """Return a table with one row for each run of consecutive equal ranks."""
    difference = summary.simulated_s / summary.predicted_s - 1 if summary.predicted_s else 0.0
    rate = summary.global_batch_size / summary.simulated_s if summary.simulated_s else 0.0
    table = Table(
        title="Simulated step",
        caption=f"step {format_seconds(summary.simulated_s)} ({format_rate(rate)} samples/s), "
        f"{difference:+.1%} from the closed form's {format_seconds(summary.predicted_s)}",
        caption_justify="left",
    )
    for heading in ("ranks", "device"):
        table.add_column(heading)
    for heading in ("computing", "communicating", "not computing", "peak of capacity"):
        table.add_column(heading, justify="right")
    first = 0
    for rank, alike in groupby(summary.ranks):
        last = first + len(list(alike)) - 1
        table.add_row(
            str(first) if first == last else f"{first}–{last}",
            rank.name,
            format_seconds(rank.compute_s),
            format_seconds(rank.communication_s),
            _share(rank.waiting_s, summary.simulated_s),
            f"{format_bytes(rank.peak_bytes)} of {format_bytes(rank.capacity_bytes)}",
        )
        first = last + 1
    return table


def _share(part_s: float, whole_s: float) -> str:
    return format_seconds(part_s) + (f" ({part_s / whole_s:.0%})" if whole_s else "")


def _finite(value: Any) -> Any:
    """Replace infinity by ``"inf"``, as JSON has no infinities."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return "inf" if value == float("inf") else value
