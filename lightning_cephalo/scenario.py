"""From what a user asks on the command line to a problem, and from plans to a comparison."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_cephalo.estimate import Cluster, CurveTable, NodeGroup, RankSource, find_device
from lightning_cephalo.estimate.devices import Device, lookup
from lightning_cephalo.figures import ComparisonRow
from lightning_cephalo.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    Problem,
    SolverError,
    _fields,
    solve,
)
from lightning_cephalo.plan.baselines import BASELINES
from lightning_cephalo.report import format_bytes, format_rate, format_seconds
from lightning_cephalo.simulate import Simulation

if TYPE_CHECKING:
    from lightning_cephalo.estimate import ModelWork

_OURS = "cephalo"
_PUBLISHED_TOKENS = 512
# Fields of a question that are called otherwise on the command line.
_OPTIONS = {"global_batch_size": "batch_size", "tables": "table", "model_options": "model_option"}
# Arguments of work_of() itself, which no --model-option can be, and the option to use instead.
_NOT_MODEL_OPTIONS = {
    "dtype": "--dtype",
    "sequence_length": "--sequence-length",
    "model": "--model",
    "name": "--model, which names it",
}


@dataclass(frozen=True)
class Question:
    """What was asked: a saved problem, or a cluster, a model and a batch. None and empty: not said.

    Attributes:
        problem: path of a saved problem.
        cluster: path of a ``cluster.yaml``.
        devices: one node in words, such as ``"2x RTX 4090, RTX 3090"``.
        model: as :func:`~lightning_cephalo.estimate.work_of` takes it.
        model_options: ``"name=value"``, changes of the config or arguments of the class.
        global_batch_size: samples of a step over all ranks.
        sequence_length: tokens of a sample; None: the model's own.
        dtype: of computation; None: fp32.
        tables: paths of measured curves.
        published: folder of profiles in the format of the paper's release, which has ``model``.
        recompute: ``"on"``, ``"off"`` or ``"choose"``; None: ``"on"``.
        offload: whether the plan may move boundaries to host memory.
    """

    problem: Path | None = None
    cluster: Path | None = None
    devices: str | None = None
    model: str | None = None
    model_options: tuple[str, ...] = ()
    global_batch_size: int | None = None
    sequence_length: int | None = None
    dtype: str | None = None
    tables: tuple[Path, ...] = ()
    published: Path | None = None
    recompute: str | None = None
    offload: bool = False


@dataclass(frozen=True)
class Scenario:
    """A problem, where its times are from, and what it was made of unless it was read from a file.

    ``subject`` says what is planned for in a line; ``problem_of`` makes the problem of the same
    question on another cluster.
    """

    problem: Problem
    subject: str
    sources: tuple[RankSource, ...] = ()
    broken_files: tuple[str, ...] = ()
    cluster: Cluster | None = None
    problem_of: Callable[[Cluster], Problem] | None = None

    def lines(self) -> list[str]:
        """What is planned for, and a line for each kind of device: where its times are from."""
        lines = [self.subject]
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
        return _saved(question, question.problem)
    from lightning_cephalo.estimate import build_problem, work_of
    from lightning_cephalo.estimate.models import names_class

    cluster = _cluster(question)
    if question.model is None:
        raise PlanError("Expected --model (or --problem), but got neither. See --help.")
    global_batch_size = question.global_batch_size
    if global_batch_size is None:
        raise PlanError("Expected --batch-size, the samples of a step over all ranks.")
    if question.sequence_length is not None:
        _fields.whole("--sequence-length", question.sequence_length, minimum=1)
    if question.published is not None:
        return _published(question, cluster, question.model, global_batch_size)
    if question.offload and not any(group.host_memory_bytes for group in cluster.nodes):
        raise PlanError(
            f"--offload: expected nodes with host memory to move activations to, but "
            f"{question.cluster or '--devices'} gives none. Use --cluster with a file that has a "
            f"line such as 'host_memory: 256 GiB' in its nodes."
        )
    options = dict(_model_option(option) for option in question.model_options)
    work = work_of(
        question.model,
        sequence_length=question.sequence_length,
        dtype=question.dtype or "fp32",
        **options,
    )
    tables = [CurveTable.load(path) for path in question.tables]

    def estimate_of(where: Cluster) -> Any:
        return build_problem(
            where,
            work,
            global_batch_size=global_batch_size,
            tables=tables,
            recompute=question.recompute in (None, "on"),
            choose_recompute=question.recompute == "choose",
            allow_offload=question.offload,
        )

    estimate = estimate_of(cluster)
    _refuse_unused(tables, work)
    return Scenario(
        estimate.problem,
        _subject(question, work.model, work.sequence_length, is_class=names_class(question.model)),
        estimate.sources,
        estimate.broken_files,
        cluster,
        lambda where: estimate_of(where).problem,
    )


def _saved(question: Question, path: Path) -> Scenario:
    for field in dataclasses.fields(question):
        if field.name != "problem" and getattr(question, field.name) != field.default:
            option = _OPTIONS.get(field.name, field.name).replace("_", "-")
            raise PlanError(
                f"--problem says all there is to plan for, but --{option} was given as well. "
                f"Leave one of them out."
            )
    problem = Problem.load(path)
    return Scenario(
        problem, f"{path}, {problem.units} units, global batch {problem.global_batch_size}"
    )


def _subject(
    question: Question, model: str, sequence_length: int, *, is_class: bool = False
) -> str:
    """What is planned for, such as ``gpt2, fp32, 1024 tokens (default), global batch 48``."""
    tokens = f"{sequence_length} tokens"
    if question.sequence_length is None:
        tokens += " (default)"
    elif sequence_length != question.sequence_length:
        tokens += f" (its own, not {question.sequence_length})"
    if is_class:
        tokens += " unless its example_input_array has others"
    dtype = question.dtype or "fp32"
    return f"{model}, {dtype}, {tokens}, global batch {question.global_batch_size}"


def _published(
    question: Question, cluster: Cluster, model: str, global_batch_size: int
) -> Scenario:
    """A problem by published profiles alone: compute only, links and tail are not in them."""
    from lightning_cephalo.estimate.published import read_published

    own = question.model_options or question.tables or question.offload
    if own or question.recompute not in (None, "on"):
        raise PlanError(
            "--published has its own model and times: leave out --model-option, --table, "
            "--recompute and --offload."
        )
    assert question.published is not None
    profiles = read_published(question.published)
    dtype = question.dtype or "fp32"
    sequence_length = question.sequence_length or _PUBLISHED_TOKENS

    def problem_of(where: Cluster) -> Problem:
        return profiles.problem(
            model=model,
            dtype=dtype,
            devices=[rank.device.name for rank in where.ranks],
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            memory_share=1 - where.reserve,
        )

    detail = f"published profiles of {model} in {question.published}; compute only"
    sources = tuple(RankSource(rank.device.name, "table", detail) for rank in cluster.ranks)
    subject = _subject(question, model, sequence_length)
    return Scenario(problem_of(cluster), subject, sources, (), cluster, problem_of)


def _refuse_unused(tables: Sequence[CurveTable], work: ModelWork) -> None:
    for table in tables:
        if not table.matches(work.model, work.dtype, work.sequence_length, work.parameters):
            of = "" if table.parameters is None else f", {table.parameters:,} parameters"
            raise PlanError(
                f"--table: expected curves of {work.model!r}, {work.dtype}, sequence length "
                f"{work.sequence_length}, {work.parameters:,.0f} parameters, but got those of "
                f"{table.model!r}, {table.dtype}, {table.sequence_length}{of}. Leave it out, or "
                f"measure this model."
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
    parts = [part.strip() for part in question.devices.split(",")]
    if not all(parts):
        raise PlanError(
            f'--devices: expected a list such as "2x RTX 4090, RTX 3090", but got '
            f"{question.devices!r}."
        )
    return Cluster((NodeGroup(tuple(_counted_device(part) for part in parts)),))


def _counted_device(text: str) -> tuple[Device, int]:
    """``2x RTX 4090``, ``2xRTX 4090`` or ``2 RTX 4090``. A known name comes first, as some begin
    with digits: ``1080 Ti``.
    """
    found = re.fullmatch(r"(\d+)(?:\s*[xX×]\s*|\s+)(\S.*)", text)
    if found is None or lookup(text) is not None:
        return find_device(text, where="--devices"), 1
    count = _fields.whole(f"--devices: count of {found[2]!r}", int(found[1]), minimum=1)
    return find_device(found[2], where="--devices"), count


def _model_option(option: str) -> tuple[str, Any]:
    import yaml

    name, separator, value = option.partition("=")
    if not separator or not name.isidentifier():
        raise PlanError(f"--model-option: expected NAME=VALUE, but got {option!r}.")
    if name in _NOT_MODEL_OPTIONS:
        raise PlanError(
            f"--model-option: expected another name than {', '.join(_NOT_MODEL_OPTIONS)}, but got "
            f"{option!r}. Use {_NOT_MODEL_OPTIONS[name]}. Where a class has such an argument, name "
            f"a subclass that sets it."
        )
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise PlanError(
            f"--model-option: expected NAME=VALUE with a value in YAML, such as n_layer=4, but "
            f"got {option!r}."
        ) from error


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
        InfeasibleError: neither ours nor an addition has a plan.
        SolverError: likewise, as ours found none in time.
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
    try:
        plan = solve(asked.problem, time_limit_s=time_limit_s)
    except (InfeasibleError, SolverError) as error:
        if all(row.step_s is None for row in rows[len(BASELINES) :]):
            raise
        return [*rows, ComparisonRow(_OURS, reason=str(error))]
    return [*rows, _row_of(_OURS, asked.problem, plan)]


def _row(name: str, problem: Problem, make: Callable[[], Plan]) -> ComparisonRow:
    try:
        return _row_of(name, problem, make())
    except (InfeasibleError, SolverError) as error:
        return ComparisonRow(name, reason=_reason(name, str(error)))


def _row_of(name: str, problem: Problem, plan: Plan) -> ComparisonRow:
    assert plan.step_s is not None
    memory = tuple((rank.memory_bytes or 0.0, rank.capacity_bytes or 0.0) for rank in plan.ranks)
    rate = problem.global_batch_size / plan.step_s if plan.step_s else math.inf
    return ComparisonRow(name, plan.step_s, rate, memory)


def _reason(name: str, error: str) -> str:
    """Why a row has no plan, without the name of the planner, which the row has already."""
    planner, separator, rest = error.partition(": ")
    if separator and (name.startswith(planner) or planner.startswith("published program")):
        error = rest
    # ours says itself what binds; a rank may also lack a microbatch size, with memory to spare
    speaks_of_memory = "GiB" in error and "microbatch size" not in error
    return error if name.startswith(_OURS) or not speaks_of_memory else f"out of memory: {error}"


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
    """The same for JSON, which has no infinities."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return "inf" if value == float("inf") else value
