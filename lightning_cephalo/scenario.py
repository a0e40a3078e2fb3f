"""From what a user asks on the command line to a problem, and from plans to a comparison."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_cephalo.estimate import Cluster, CurveTable, NodeGroup, RankSource, find_device
from lightning_cephalo.figures import ComparisonRow
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError, Problem, SolverError, solve
from lightning_cephalo.plan.baselines import BASELINES
from lightning_cephalo.report import format_bytes, format_seconds
from lightning_cephalo.simulate import Simulation

if TYPE_CHECKING:
    from lightning_cephalo.estimate import ModelWork

_OURS = "cephalo"


@dataclass(frozen=True)
class Question:
    """What was asked: a saved problem, or a cluster, a model and a batch.

    Attributes:
        problem: path of a saved problem.
        cluster: path of a ``cluster.yaml``.
        devices: one node in words, such as ``"2x RTX 4090, RTX 3090"``.
        model: as :func:`~lightning_cephalo.estimate.work_of` takes it.
        model_options: ``"name=value"``, changes of the config or arguments of the class.
        global_batch_size: samples of a step over all ranks.
        sequence_length: tokens of a sample; None: the model's own.
        dtype: of computation.
        tables: paths of measured curves.
        published: folder of profiles in the format of the paper's release, which has ``model``.
        recompute: ``"on"``, ``"off"`` or ``"choose"``.
        offload: whether the plan may move boundaries to host memory.
    """

    problem: Path | None = None
    cluster: Path | None = None
    devices: str | None = None
    model: str | None = None
    model_options: tuple[str, ...] = ()
    global_batch_size: int | None = None
    sequence_length: int | None = None
    dtype: str = "fp32"
    tables: tuple[Path, ...] = ()
    published: Path | None = None
    recompute: str = "on"
    offload: bool = False


@dataclass(frozen=True)
class Scenario:
    """A problem, where its times are from, and what it was made of unless it was read from a file.

    ``problem_of`` makes the problem of the same question on another cluster.
    """

    problem: Problem
    sources: tuple[RankSource, ...] = ()
    broken_files: tuple[str, ...] = ()
    cluster: Cluster | None = None
    problem_of: Callable[[Cluster], Problem] | None = None

    def source_lines(self) -> list[str]:
        """One line for each kind of device: where its times are from."""
        lines = []
        for source in dict.fromkeys(self.sources):
            count = self.sources.count(source)
            detail = f": {source.detail}" if source.detail else ""
            lines.append(f"{count} × {source.device}: times by {source.source}{detail}")
        return lines

    def sources_as_dicts(self) -> list[dict[str, str]]:
        """The sources, one for each rank, for JSON."""
        return [dataclasses.asdict(source) for source in self.sources]


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
    """A simulated step beside the closed form's."""

    predicted_s: float
    simulated_s: float
    global_batch_size: int
    ranks: tuple[RankSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return _finite(dataclasses.asdict(self))


def read(question: Question) -> Scenario:
    """Read or make the problem that was asked for.

    Raises:
        PlanError: something is missing, contradicts something else, or is not what is expected.
    """
    if question.problem is not None:
        for name in ("cluster", "devices", "model", "global_batch_size"):
            if getattr(question, name) is not None:
                option = name.replace("global_", "").replace("_", "-")
                raise PlanError(
                    f"--problem says all there is to plan for, but --{option} was given as well. "
                    f"Leave one of them out."
                )
        return Scenario(Problem.load(question.problem))
    from lightning_cephalo.estimate import build_problem, work_of

    cluster = _cluster(question)
    if question.model is None:
        raise PlanError("Expected --model (or --problem), but got neither. See --help.")
    global_batch_size = question.global_batch_size
    if global_batch_size is None:
        raise PlanError("Expected --batch-size, the samples of a step over all ranks.")
    if question.published is not None:
        return _published(question, cluster, question.model, global_batch_size)
    options = dict(_model_option(option) for option in question.model_options)
    work = work_of(
        question.model, sequence_length=question.sequence_length, dtype=question.dtype, **options
    )
    tables = [CurveTable.load(path) for path in question.tables]

    def estimate_of(where: Cluster) -> Any:
        return build_problem(
            where,
            work,
            global_batch_size=global_batch_size,
            tables=tables,
            recompute=question.recompute != "off",
            choose_recompute=question.recompute == "choose",
            allow_offload=question.offload,
        )

    estimate = estimate_of(cluster)
    _refuse_unused(tables, work)
    return Scenario(
        estimate.problem,
        estimate.sources,
        estimate.broken_files,
        cluster,
        lambda where: estimate_of(where).problem,
    )


def _published(
    question: Question, cluster: Cluster, model: str, global_batch_size: int
) -> Scenario:
    """A problem by published profiles alone: compute only, links and tail are not in them."""
    from lightning_cephalo.estimate.published import read_published

    if question.model_options or question.tables or question.recompute != "on" or question.offload:
        raise PlanError(
            "--published has its own model and times: leave out --model-option, --table, "
            "--recompute and --offload."
        )
    assert question.published is not None
    profiles = read_published(question.published)

    def problem_of(where: Cluster) -> Problem:
        return profiles.problem(
            model=model,
            dtype=question.dtype,
            devices=[rank.device.name for rank in where.ranks],
            global_batch_size=global_batch_size,
            sequence_length=question.sequence_length or 512,
            memory_share=1 - where.reserve,
        )

    detail = f"published profiles of {model} in {question.published}; compute only"
    sources = tuple(RankSource(rank.device.name, "table", detail) for rank in cluster.ranks)
    return Scenario(problem_of(cluster), sources, (), cluster, problem_of)


def _refuse_unused(tables: Sequence[CurveTable], work: ModelWork) -> None:
    for table in tables:
        if not table.matches(work.model, work.dtype, work.sequence_length):
            raise PlanError(
                f"--table: expected curves of {work.model!r}, {work.dtype}, sequence length "
                f"{work.sequence_length}, but got those of {table.model!r}, {table.dtype}, "
                f"{table.sequence_length}. Leave it out, or measure this model."
            )


def _cluster(question: Question) -> Cluster:
    if (question.cluster is None) == (question.devices is None):
        raise PlanError(
            'Expected one of --cluster cluster.yaml and --devices "2x RTX 4090, RTX 3090", but '
            f"got {'neither' if question.cluster is None else 'both'}."
        )
    if question.cluster is not None:
        return Cluster.load(question.cluster)
    assert question.devices is not None
    counts = []
    for part in question.devices.split(","):
        found = re.fullmatch(r"\s*(?:(\d+)\s*[x×]\s+)?(\S.*?)\s*", part)
        if found is None:
            raise PlanError(
                f'--devices: expected a list such as "2x RTX 4090, RTX 3090", but got '
                f"{question.devices!r}."
            )
        counts.append((find_device(found[2], where="--devices"), int(found[1] or 1)))
    return Cluster((NodeGroup(tuple(counts)),))


def _model_option(option: str) -> tuple[str, Any]:
    import yaml

    name, separator, value = option.partition("=")
    if not separator or not name.isidentifier():
        raise PlanError(f"--model-option: expected NAME=VALUE, but got {option!r}.")
    return name, yaml.safe_load(value)


def with_device(cluster: Cluster, name: str) -> Cluster:
    """The cluster with one more device in its first node.

    Raises:
        PlanError: an unknown device.
    """
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
    """Every baseline, ours with one more of each addition, and ours, which comes last.

    Args:
        asked: what to compare on.
        additions: names of devices.
        time_limit_s: for each plan.
        say: told what is being done.

    Raises:
        PlanError: an addition is unknown, or the problem came from a file and has no cluster.
        InfeasibleError: there is no plan at all.
    """
    rows = []
    for name, baseline in BASELINES.items():
        say(f"comparing: {name}")
        rows.append(_row(name, asked.problem, partial(baseline, asked.problem)))
    for addition in additions:
        say(f"comparing: with one more {addition}")
        if asked.cluster is None or asked.problem_of is None:
            raise PlanError("--add needs --cluster or --devices: a saved problem has no cluster.")
        larger = asked.problem_of(with_device(asked.cluster, addition))
        solved = partial(solve, larger, time_limit_s=time_limit_s)
        rows.append(_row(f"{_OURS} and one more {addition}", larger, solved))
    say(f"comparing: {_OURS}")
    plan = solve(asked.problem, time_limit_s=time_limit_s)
    rows.append(_row(_OURS, asked.problem, lambda: plan))
    return rows


def _row(name: str, problem: Problem, make: Callable[[], Plan]) -> ComparisonRow:
    try:
        plan = make()
    except InfeasibleError as error:
        return ComparisonRow(name, reason=f"out of memory: {error}")
    except SolverError as error:
        return ComparisonRow(name, reason=str(error))
    assert plan.step_s is not None
    memory = tuple((rank.memory_bytes or 0.0, rank.capacity_bytes or 0.0) for rank in plan.ranks)
    return ComparisonRow(name, plan.step_s, problem.global_batch_size / plan.step_s, memory)


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """Rows as a table; the last one is ours, and what others are compared with."""
    best = rows[-1].samples_per_s
    table = Table(title="Comparison", caption_justify="left")
    table.add_column("allocation")
    for heading in ("step", "samples/s", f"of {_OURS}'s", "fullest rank"):
        table.add_column(heading, justify="right")
    notes = []
    for row in rows:
        if row.step_s is None or row.samples_per_s is None:
            notes.append(f"{row.name}: {row.reason}")
            table.add_row(row.name, "–", "cannot run", "–", "–")
            continue
        share = f"{row.samples_per_s / best:.0%}" if best else "–"
        fullest = max(used / capacity for used, capacity in row.memory) if row.memory else 0.0
        table.add_row(
            row.name,
            format_seconds(row.step_s),
            f"{row.samples_per_s:.3g}",
            share,
            f"{fullest:.0%}",
        )
    table.caption = "\n".join(notes) or None
    return table


def row_as_dict(row: ComparisonRow) -> dict[str, Any]:
    """For JSON."""
    return _finite(dataclasses.asdict(row))


def summarise(problem: Problem, plan: Plan, simulation: Simulation) -> Summary:
    """The simulated step beside the closed form's, rank by rank."""
    from lightning_cephalo.plan import predict

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
    predicted_s = predict(problem, plan.ranks).step_s
    return Summary(predicted_s, simulation.step_s, problem.global_batch_size, tuple(ranks))


def simulation_table(summary: Summary) -> Table:
    """One row for each run of ranks that are alike."""
    difference = summary.simulated_s / summary.predicted_s - 1 if summary.predicted_s else 0.0
    rate = summary.global_batch_size / summary.simulated_s if summary.simulated_s else 0.0
    table = Table(
        title="Simulated step",
        caption=f"step {format_seconds(summary.simulated_s)} ({rate:.3g} samples/s), "
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
            f"{format_seconds(rank.waiting_s)} ({rank.waiting_s / summary.simulated_s:.0%})",
            f"{format_bytes(rank.peak_bytes)} of {format_bytes(rank.capacity_bytes)}",
        )
        first = last + 1
    return table


def _finite(value: Any) -> Any:
    """The same for JSON, which has no infinities."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return "inf" if value == float("inf") else value
