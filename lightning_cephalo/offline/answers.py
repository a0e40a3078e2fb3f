"""Answers of the command line: comparisons and summaries of simulations, as rows and tables."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.table import Table

from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.common.quantities import format_bytes, format_rate, format_seconds
from lightning_cephalo.observe.recording import Stream
from lightning_cephalo.offline.baselines import BASELINES
from lightning_cephalo.offline.estimate.devices import find_device
from lightning_cephalo.offline.pipeline.crossover import Crossover, find_crossover
from lightning_cephalo.offline.pipeline.plan import Advice
from lightning_cephalo.offline.pipeline.search import Planned, advise
from lightning_cephalo.offline.pipeline.text import ADVICE_ONLY, crossover_text, pipeline_name
from lightning_cephalo.offline.prices import counted, mixes, price_of
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.offline.simulate import Simulation
from lightning_cephalo.plan import Plan, Problem, predict, solve

_OURS = "cephalo"
_HYBRID = f"{_OURS}, hybrid sharding by node (over gloo)"


@dataclass(frozen=True)
class ComparisonRow:
    """One way to train, with what it costs where prices are known; ``reason``: it cannot run."""

    name: str
    step_s: float | None = None
    samples_per_s: float | None = None
    memory: tuple[tuple[float, float], ...] | None = None
    reason: str = ""
    price_per_hour: float | None = None
    cost_per_million_samples: float | None = None
    cost_per_million_tokens: float | None = None


class Deadline(NamedTuple):
    """Samples of a whole training, and the hours that it may take."""

    hours: float
    samples: int


def compare(
    asked: Scenario,
    additions: Sequence[str] = (),
    *,
    prices: Mapping[str, float] = MappingProxyType({}),
    deadline: Deadline | None = None,
    time_limit_s: float = 60.0,
    say: Callable[[str], Any] = lambda text: None,
) -> list[ComparisonRow]:
    """Compare the baselines with this planner.

    The rows are every baseline, our plan with one more of each addition, and our plan last. Where
    there are several nodes, our plan with the whole state on each node comes before it, and the
    fastest pipeline of node groups. With a deadline, so does the cheapest mix that holds it.
    """
    larger: dict[str, Problem] = {}
    parts: list[Problem] = []
    if additions or deadline:
        cluster, problem_of = asked.cluster, asked.problem_of
        if cluster is None or problem_of is None:
            option = "--add" if additions else "--deadline"
            raise PlanError(f"{option} needs --cluster or --devices: a saved problem has neither.")
        if deadline and not prices:
            raise PlanError("--deadline needs prices: give --price, or prices in the cluster file.")
        for name in additions:
            device = find_device(name, cluster.own_devices, where="--add")
            larger[name] = problem_of(cluster.with_device(device), False)
        parts = [problem_of(mix, False) for mix in mixes(cluster)] if deadline else []

    def row(name: str, problem: Problem, make: Callable[..., Plan]) -> ComparisonRow:
        say(f"comparing: {name}")
        try:
            plan = make(problem, time_limit_s=time_limit_s)
        except (InfeasibleError, SolverError) as error:
            return ComparisonRow(name, reason=str(error))
        return priced(name, problem, plan.step_s, plan)

    def priced(name: str, problem: Problem, step_s: float | None, *plans: Plan) -> ComparisonRow:
        assert step_s is not None
        ranks = [rank for plan in plans for rank in plan.ranks]
        memory = tuple((rank.memory_bytes or 0.0, rank.capacity_bytes or 0.0) for rank in ranks)
        rate = problem.global_batch_size / step_s if step_s else math.inf
        price = price_of(problem, prices)
        if price is None:
            return ComparisonRow(name, step_s, rate, memory)
        cost = price * 1e6 / (3600 * rate)
        of_tokens = cost / asked.tokens if asked.tokens else None
        return ComparisonRow(name, step_s, rate, memory, "", price, cost, of_tokens)

    rows = [row(name, asked.problem, baseline) for name, baseline in BASELINES.items()]
    rows += [row(f"{_OURS} and one more {name}", own, solve) for name, own in larger.items()]
    say(f"comparing: {_OURS}")
    try:
        plan = solve(asked.problem, time_limit_s=time_limit_s)
    except (InfeasibleError, SolverError) as error:
        if all(row.step_s is None for row in rows[len(BASELINES) :]):
            raise
        return [*rows, ComparisonRow(_OURS, reason=str(error))]
    if asked.hybrid is not None:
        rows.append(row(_HYBRID, asked.hybrid, solve))
    if asked.has_nodes and asked.pipeline_of is not None:
        say("comparing: pipelines")
        found = pipelines(asked, plan, time_limit_s=time_limit_s)
        best = found.advice.best
        if best is None:
            rows.append(ComparisonRow("pipeline", reason="no pipeline of node groups fits"))
        else:
            name = f"{pipeline_name(best)} (advice only: {crossover_text(found.crossover)})"
            stages = [stage.plan for stage in best.stages]
            rows.append(priced(name, asked.problem, best.step_s, *stages))
    if deadline is not None:
        tried = [row(counted(part), part, solve) for part in parts]
        rows.append(_cheapest(tried, asked.problem.global_batch_size, deadline))
    return [*rows, priced(_OURS, asked.problem, plan.step_s, plan)]


def _cheapest(rows: Sequence[ComparisonRow], batch: int, deadline: Deadline) -> ComparisonRow:
    """Return the row of the mix that trains all samples in time for the least money."""
    name = f"{_OURS}, cheapest within {deadline.hours:g} h"
    steps = math.ceil(deadline.samples / batch)
    planned = [(steps * row.step_s / 3600, row) for row in rows if row.step_s is not None]
    found = [(hours * (row.price_per_hour or 0.0), hours, row) for hours, row in planned]
    in_time = [each for each in found if each[1] <= deadline.hours]
    if not in_time:
        least_h = min((hours for hours, _ in planned), default=None)
        why = "none has room" if least_h is None else f"the fastest takes {least_h:.3g} h"
        reason = f"of {len(rows)} mixes, no one trains {deadline.samples:,} samples in time: {why}"
        return ComparisonRow(name, reason=reason)
    cost, hours, row = min(in_time, key=lambda each: each[:2])
    return replace(row, name=f"{name}: {row.name} ({hours:.3g} h for {cost:,.2f})")


@dataclass(frozen=True)
class Pipelines:
    """Whether a pipeline would be faster, and below which bandwidth between nodes."""

    advice: Advice
    crossover: Crossover

    def to_dict(self) -> dict[str, Any]:
        """Return what :func:`plain` makes values for JSON of."""
        best = self.advice.best
        return {
            "advice_only": ADVICE_ONLY,
            "wins": self.advice.pipeline_wins,
            "today_s": self.advice.today_s,
            "bound_s": self.advice.bound_s,
            "covers": self.advice.covers,
            "wins_below_bytes_per_s": self.crossover.bandwidth_bytes_per_s,
            "by_bandwidth": self.crossover.points,
            "best": None if best is None else best.to_dict(self.advice.problem),
        }


def pipelines(asked: Scenario, today: Plan, *, time_limit_s: float = 60.0) -> Pipelines:
    """Search for pipelines of node groups, on this network and on slower and faster ones."""
    if asked.pipeline_of is None or asked.cluster is None:
        raise PlanError(
            "--pipeline needs --cluster and a model whose bytes are counted: a saved problem "
            "says too little about nodes. Leave it out, or give both."
        )
    make, cluster, planned = asked.pipeline_of, asked.cluster, Planned()
    started = time.perf_counter()
    assert today.step_s is not None
    advice = advise(make(cluster), today.step_s, planned=planned, time_limit_s=time_limit_s / 2)
    crossover = find_crossover(
        lambda factor: make(cluster.with_network_scaled(factor)),
        planned=planned,
        time_limit_s=max(time_limit_s - (time.perf_counter() - started), time_limit_s / 2),
    )
    return Pipelines(advice, crossover)


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the rows as a table. The last row is ours; the others are compared with it."""
    best = rows[-1].samples_per_s
    table = Table(title="Comparison", caption_justify="left")
    # tokens where the length of samples is known
    fields = ("cost_per_million_tokens", "cost_per_million_samples")
    costs = [name for name in fields if any(getattr(row, name) is not None for row in rows)][:1]
    headings = ["step", "samples/s", f"of {_OURS}'s", "fullest rank"]
    headings += [f"cost of 1M {name.rpartition('_')[2]}" for name in costs]
    table.add_column("allocation")
    for heading in headings:
        table.add_column(heading, justify="right")
    notes = []
    for row in rows:
        if row.step_s is None or row.samples_per_s is None:
            notes.append(f"{row.name}: {row.reason}")
            table.add_row(row.name, "–", "cannot run", *["–"] * (len(headings) - 2))
            continue
        fullest = max((used / capacity for used, capacity in row.memory or ()), default=0.0)
        table.add_row(
            row.name,
            format_seconds(row.step_s),
            format_rate(row.samples_per_s),
            f"{row.samples_per_s / best:.0%}" if best and math.isfinite(best) else "–",
            f"{fullest:.0%}",
            *(f"{getattr(row, name):,.3g}" for name in costs),
        )
    table.caption = "\n".join(notes) or None
    return table


def summarise(problem: Problem, plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """Return the times of a simulated step and of the closed form, and a summary of each rank."""
    timelines = [simulation.timeline(index) for index in range(len(problem.ranks))]
    ranks = [
        {
            "name": profile.name,
            "compute_s": timeline.busy_s(Stream.COMPUTE),
            "communication_s": timeline.busy_s(Stream.COMMUNICATION),
            "waiting_s": max(simulation.step_s - timeline.busy_s(Stream.COMPUTE), 0.0),
            "peak_bytes": timeline.peak_bytes,
            "capacity_bytes": profile.capacity_bytes,
        }
        for profile, timeline in zip(problem.ranks, timelines, strict=True)
    ]
    return {
        "predicted_s": predict(problem, plan).step_s,
        "simulated_s": simulation.step_s,
        "global_batch_size": problem.global_batch_size,
        "ranks": ranks,
    }


def simulation_table(summary: dict[str, Any]) -> Table:
    """Return a table with one row for each run of consecutive equal ranks."""
    simulated_s, predicted_s = summary["simulated_s"], summary["predicted_s"]
    difference = simulated_s / predicted_s - 1 if predicted_s else 0.0
    rate = summary["global_batch_size"] / simulated_s if simulated_s else 0.0
    table = Table(
        title="Simulated step",
        caption=f"step {format_seconds(simulated_s)} ({format_rate(rate)} samples/s), "
        f"{difference:+.1%} from the closed form's {format_seconds(predicted_s)}",
        caption_justify="left",
    )
    for heading in ("ranks", "device"):
        table.add_column(heading)
    for heading in ("computing", "communicating", "not computing", "peak of capacity"):
        table.add_column(heading, justify="right")
    first = 0
    for rank, alike in groupby(summary["ranks"]):
        last = first + len(list(alike)) - 1
        waiting = f" ({rank['waiting_s'] / simulated_s:.0%})" if simulated_s else ""
        table.add_row(
            str(first) if first == last else f"{first}–{last}",
            rank["name"],
            format_seconds(rank["compute_s"]),
            format_seconds(rank["communication_s"]),
            format_seconds(rank["waiting_s"]) + waiting,
            f"{format_bytes(rank['peak_bytes'])} of {format_bytes(rank['capacity_bytes'])}",
        )
        first = last + 1
    return table


def plain(value: Any) -> Any:
    """Return what JSON can hold: records as mappings, infinity as ``"inf"``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(vars(value))
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return "inf" if value == float("inf") else value
