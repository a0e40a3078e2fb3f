"""Turns the options of the command line into a planning problem."""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.build import RankSource
from lightning_cephalo.offline.estimate.cluster import Cluster, NodeGroup
from lightning_cephalo.offline.estimate.devices import Device, find_device, lookup
from lightning_cephalo.offline.options import beside_problem
from lightning_cephalo.offline.pipeline.build import pipeline_problem
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.plan import Plan, Problem
from lightning_cephalo.plan.curves import CurveTable, cached_tables

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork

_MOVES: dict[str | None, bool | Literal["auto"]] = {
    None: False,
    "off": False,
    "auto": "auto",
    "on": True,
}
# Arguments of work_of() itself, which --model-option cannot set, and the option to use instead.
_NOT_MODEL_OPTIONS = {
    "dtype": "--dtype",
    "sequence_length": "--sequence-length",
    "model": "--model",
    "name": "--model, which names it",
}


@dataclass(frozen=True)
class Scenario:
    """A problem and the sources of its times."""

    problem: Problem
    subject: str
    sources: tuple[RankSource, ...] = ()
    left_out: tuple[str, ...] = ()
    cluster: Cluster | None = None
    problem_of: Callable[[Cluster], Problem] | None = None
    pipeline_of: Callable[[Cluster], PipelineProblem] | None = None
    hybrid_of: Callable[[Cluster], Problem] | None = None

    @property
    def hybrid(self) -> Problem | None:
        """The problem in which each node holds the whole state; None: there are no such times."""
        if self.cluster is None or self.hybrid_of is None or self.cluster.node_count < 2:
            return None
        return self.hybrid_of(self.cluster)

    def of_plan(self, plan: Plan) -> Scenario:
        """Return the scenario whose problem has the groups of ranks of a plan, if there are."""
        if not plan.state_groups or self.problem.hybrid_sharding:
            return self
        return dataclasses.replace(self, problem=self.hybrid or self.problem)

    def lines(self) -> list[str]:
        """Return the subject, and one line per kind of device with the source of its times."""
        lines = [self.subject]
        for source in dict.fromkeys(self.sources):
            count = self.sources.count(source)
            detail = f": {source.detail}" if source.detail else ""
            lines.append(f"{count} × {source.device}: times by {source.source}{detail}")
        return lines

    def sources_as_dicts(self) -> list[dict[str, str]]:
        """Return the sources, one for each rank, for JSON."""
        return [dataclasses.asdict(source) for source in self.sources]


def read(options: Namespace) -> Scenario:
    """Read or build the problem that the options ask for."""
    if options.problem is not None:
        return _saved(options, options.problem)
    from lightning_cephalo.offline.estimate.build import Choices, build_problem
    from lightning_cephalo.offline.estimate.models import names_class, work_of

    cluster = cluster_of(options)
    if options.model is None:
        raise PlanError("Expected --model (or --problem), but got neither. See --help.")
    if options.batch_size is None:
        raise PlanError("Expected --batch-size, the samples of a step over all ranks.")
    if options.sequence_length is not None:
        records.whole("--sequence-length", options.sequence_length, minimum=1)
    _check_hosts(options, cluster)
    if options.offload and options.recompute == "off":
        raise PlanError(
            "--offload: expected --recompute on or choose, but got off. Activations that are kept "
            "inside units hold what enters them: there is nothing to move."
        )
    if options.clip_by_norm and options.early_update:
        raise PlanError(
            "--clip-by-norm: expected updates behind the backward, which know the norm of all "
            "gradients, but got --early-update. Leave one of the two out."
        )
    changes = dict(_model_option(option) for option in options.model_option)
    work = work_of(
        options.model,
        sequence_length=options.sequence_length,
        dtype=options.dtype or "fp32",
        **changes,
    )
    tables = [CurveTable.load(path) for path in options.table]

    choices = Choices(
        recompute=options.recompute in (None, "on"),
        choose_recompute=options.recompute == "choose",
        allow_offload=options.offload,
        optimizer_offload=_MOVES[options.optimizer_offload],
        early_update=options.early_update,
        clip_by_norm=options.clip_by_norm,
    )

    def estimate_of(where: Cluster, hybrid_sharding: bool = False) -> Any:
        return build_problem(
            where,
            work,
            global_batch_size=options.batch_size,
            tables=tables,
            choices=replace(choices, hybrid_sharding=hybrid_sharding),
        )

    def pipeline_of(where: Cluster) -> PipelineProblem:
        return pipeline_problem(
            where,
            work,
            estimate_of(where).problem,
            tables=tables,
            recompute=choices.recompute,
            choose_recompute=choices.choose_recompute,
        )

    estimate = estimate_of(cluster)
    _refuse_unused(tables, work)
    return Scenario(
        estimate.problem,
        _subject(options, work.model, work.sequence_length, is_class=names_class(options.model)),
        estimate.sources,
        (*estimate.broken_files, *_near_misses(work)),
        cluster,
        lambda where: estimate_of(where).problem,
        pipeline_of,
        lambda where: estimate_of(where, hybrid_sharding=True).problem,
    )


def _check_hosts(options: Namespace, cluster: Cluster) -> None:
    if any(group.host_memory_bytes for group in cluster.nodes):
        return
    moves_state = options.optimizer_offload in ("auto", "on")
    for option, what, is_given in (
        ("--offload", "activations", options.offload),
        ("--optimizer-offload", "optimizer state", moves_state),
    ):
        if is_given:
            raise PlanError(
                f"{option}: expected nodes with host memory to move {what} to, but "
                f"{options.cluster or '--devices'} gives none. Use --cluster with a file that has "
                f"a line such as 'host_memory: 256 GiB' in its nodes."
            )


def _saved(options: Namespace, path: Path) -> Scenario:
    for flag, name in beside_problem():
        value = getattr(options, name)
        if value is not False and value not in (None, []):
            raise PlanError(
                f"--problem says all there is to plan for, but {flag} was given as well. "
                f"Leave one of them out."
            )
    problem = Problem.load(path)
    return Scenario(
        problem, f"{path}, {problem.units} units, global batch {problem.global_batch_size}"
    )


def _subject(
    options: Namespace, model: str, sequence_length: int, *, is_class: bool = False
) -> str:
    """Describe the job, such as ``gpt2, fp32, 1024 tokens (default), global batch 48``."""
    tokens = f"{sequence_length} tokens"
    if options.sequence_length is None:
        tokens += " (default)"
    elif sequence_length != options.sequence_length:
        tokens += f" (its own, not {options.sequence_length})"
    if is_class:
        tokens += " unless its example_input_array has others"
    dtype = options.dtype or "fp32"
    return f"{model}, {dtype}, {tokens}, global batch {options.batch_size}"


def _near_misses(work: ModelWork) -> list[str]:
    """List the measured tables of a model of this name with another size, dtype or length."""
    return [
        f"times of {table.model!r} that were measured at {table.dtype}, length "
        f"{table.sequence_length}{_size(table)}: this is {work.dtype}, length "
        f"{work.sequence_length}, {work.parameters:,.0f} parameters."
        for table in cached_tables().tables
        if table.model.casefold() == work.model.casefold()
        and not table.matches(work.model, work.dtype, work.sequence_length, work.parameters)
    ]


def _size(table: CurveTable) -> str:
    return "" if table.parameters is None else f", {table.parameters:,} parameters"


def _refuse_unused(tables: Sequence[CurveTable], work: ModelWork) -> None:
    for table in tables:
        if not table.matches(work.model, work.dtype, work.sequence_length, work.parameters):
            raise PlanError(
                f"--table: expected curves of {work.model!r}, {work.dtype}, sequence length "
                f"{work.sequence_length}, {work.parameters:,.0f} parameters, but got those of "
                f"{table.model!r}, {table.dtype}, {table.sequence_length}{_size(table)}. Leave it "
                f"out, or measure this model."
            )


def cluster_of(options: Namespace) -> Cluster:
    """Return the cluster of the options, from its file or from a list of devices."""
    if (options.cluster is None) == (options.devices is None):
        raise PlanError(
            'Expected one of --cluster cluster.yaml and --devices "2x RTX 4090, RTX 3090", but '
            f"got {'neither' if options.cluster is None else 'both'}."
        )
    if options.cluster is not None:
        return Cluster.load(options.cluster)
    assert options.devices is not None
    parts = [part.strip() for part in options.devices.split(",")]
    if not all(parts):
        raise PlanError(
            f'--devices: expected a list such as "2x RTX 4090, RTX 3090", but got '
            f"{options.devices!r}."
        )
    return Cluster((NodeGroup(tuple(_counted_device(part) for part in parts)),))


def _counted_device(text: str) -> tuple[Device, int]:
    """Parse ``2x RTX 4090``, ``2xRTX 4090`` or ``2 RTX 4090``.

    A known name takes precedence, as some names begin with digits: ``1080 Ti``.
    """
    found = re.fullmatch(r"(\d+)(?:\s*[xX×]\s*|\s+)(\S.*)", text)
    if found is None or lookup(text) is not None:
        return find_device(text, where="--devices"), 1
    count = records.whole(f"--devices: count of {found[2]!r}", int(found[1]), minimum=1)
    return find_device(found[2], where="--devices"), count


def _model_option(option: str) -> tuple[str, Any]:
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
