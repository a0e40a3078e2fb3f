"""Turns the options of the command line into a planning problem."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.build import Choices, Estimate, build_problem
from lightning_cephalo.offline.estimate.cluster import Cluster, Node
from lightning_cephalo.offline.estimate.devices import Device, find_device, lookup
from lightning_cephalo.offline.pipeline.build import pipeline_problem
from lightning_cephalo.offline.pipeline.problem import PipelineProblem
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.curves import Curves, CurveTable, cached_tables

if TYPE_CHECKING:
    from lightning_cephalo.offline.estimate.work import ModelWork

_MOVES: dict[str | None, bool | Literal["auto"]] = {"auto": "auto", "on": True}
# Arguments of work_of() itself, and the option to use instead of --model-option.
_NOT_MODEL_OPTIONS = {
    "dtype": "--dtype",
    "sequence_length": "--sequence-length",
    "model": "--model",
    "name": "--model, which names it",
}


@dataclass(frozen=True)
class Scenario:
    """A problem and the sources of its times.

    ``tokens`` of a sample are None where they are unknown. ``problem_of(cluster, hybrid)`` and
    ``pipeline_of(cluster)`` build the problem of the same job on another cluster; a saved problem
    has neither.
    """

    problem: Problem
    subject: str
    sources: tuple[Curves, ...] = ()
    left_out: tuple[str, ...] = ()
    cluster: Cluster | None = None
    problem_of: Callable[[Cluster, bool], Problem] | None = None
    pipeline_of: Callable[[Cluster], PipelineProblem] | None = None
    tokens: int | None = None

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes, with known links between them."""
        return self.cluster is not None and len(self.cluster.nodes) > 1

    @property
    def hybrid(self) -> Problem | None:
        """The problem in which each node holds the whole state; None: there are no such times."""
        if self.cluster is None or self.problem_of is None or not self.has_nodes:
            return None
        return self.problem_of(self.cluster, True)

    def in_nodes(self) -> Scenario:
        """Return the scenario in which each node holds the whole state."""
        if self.problem.groups:
            return self
        problem = self.hybrid
        if problem is None:
            raise PlanError(
                "Hybrid sharding needs --cluster with several nodes, and a model whose bytes are "
                "counted. Give both, or leave it out."
            )
        return replace(self, problem=problem)

    def lines(self) -> list[str]:
        """Return the subject, and one line per kind of device with the source of its times."""
        lines = [self.subject]
        for source, count in Counter(self.sources).items():
            detail = f": {source.detail}" if source.detail else ""
            lines.append(f"{count} × {source.device}: times by {source.source}{detail}")
        return lines


def read(options: Namespace) -> Scenario:
    """Read or build the problem that the options ask for."""
    if options.problem is not None:
        problem = Problem.load(options.problem)
        size = f"{problem.units} units, global batch {problem.global_batch_size}"
        return Scenario(problem, f"{options.problem}, {size}")
    # counting a model needs torch
    from lightning_cephalo.offline.estimate.models import names_class, work_of

    cluster = cluster_of(options)
    _check(options, cluster)
    work = work_of(
        options.model,
        sequence_length=options.sequence_length,
        dtype=options.dtype or "fp32",
        **dict(map(_model_option, options.model_option)),
    )
    tables = [CurveTable.load(path) for path in options.table]
    for table in tables:
        if not table.matches(work.model, work.dtype, work.sequence_length, work.parameters):
            raise PlanError(
                f"--table: expected curves of {work.model!r}, {_size(work)}, but got those of "
                f"{table.model!r}, {_size(table)}. Leave it out, or measure this model."
            )
    choices = Choices(
        recompute=options.recompute in (None, "on"),
        choose_recompute=options.recompute == "choose",
        allow_offload=options.offload,
        optimizer_offload=_MOVES.get(options.optimizer_offload, False),
        early_update=options.early_update,
    )

    def estimate(where: Cluster, hybrid: bool = False) -> Estimate:
        return build_problem(
            where,
            work,
            global_batch_size=options.batch_size,
            tables=tables,
            choices=replace(choices, hybrid_sharding=hybrid),
        )

    def pipeline_of(where: Cluster) -> PipelineProblem:
        return pipeline_problem(
            where,
            work,
            estimate(where).problem,
            tables=tables,
            recompute=choices.recompute,
            choose_recompute=choices.choose_recompute,
        )

    found, is_class = estimate(cluster), names_class(options.model)
    return Scenario(
        found.problem,
        _subject(options, work, is_class),
        found.sources,
        (*found.broken_files, *_near_misses(work)),
        cluster,
        lambda where, hybrid: estimate(where, hybrid).problem,
        pipeline_of,
        None if is_class else work.sequence_length,
    )


def _check(options: Namespace, cluster: Cluster) -> None:
    """Raise where options are missing, or where two of them do not go together."""
    if options.model is None:
        raise PlanError("Expected --model (or --problem), but got neither. See --help.")
    if options.batch_size is None:
        raise PlanError("Expected --batch-size, the samples of a step over all ranks.")
    moves_state = options.optimizer_offload in _MOVES
    has_host = any(node.host_memory_bytes for node in cluster.nodes)
    if (options.offload or moves_state) and not has_host:
        raise PlanError(
            f"{'--offload' if options.offload else '--optimizer-offload'}: expected nodes with "
            f"host memory, but {options.cluster or '--devices'} gives none. Use --cluster with a "
            f"file that has a line such as 'host_memory: 256 GiB' in its nodes."
        )
    if options.offload and options.recompute == "off":
        raise PlanError(
            "--offload: expected --recompute on or choose, but got off. Activations that are kept "
            "inside units hold what enters them: there is nothing to move."
        )


def _subject(options: Namespace, work: ModelWork, is_class: bool) -> str:
    """Describe the job, such as ``gpt2, fp32, 1024 tokens (default), global batch 48``."""
    tokens = f"{work.sequence_length} tokens"
    if options.sequence_length is None:
        tokens += " (default)"
    elif work.sequence_length != options.sequence_length:
        tokens += f" (its own, not {options.sequence_length})"
    if is_class:
        tokens += " unless its example_input_array has others"
    return f"{work.model}, {work.dtype}, {tokens}, global batch {options.batch_size}"


def _near_misses(work: ModelWork) -> list[str]:
    """List the measured tables of a model of this name with another size, dtype or length."""
    return [
        f"times of {table.model!r} that were measured at {_size(table)}: this is {_size(work)}."
        for table in cached_tables().tables
        if table.model.casefold() == work.model.casefold()
        and not table.matches(work.model, work.dtype, work.sequence_length, work.parameters)
    ]


def _size(of: CurveTable | ModelWork) -> str:
    size = "" if of.parameters is None else f", {of.parameters:,.0f} parameters"
    return f"{of.dtype}, length {of.sequence_length}{size}"


def cluster_of(options: Namespace) -> Cluster:
    """Return the cluster of the options, from its file or from a list of devices."""
    if (options.cluster is None) == (options.devices is None):
        raise PlanError(
            'Expected one of --cluster cluster.yaml and --devices "2x RTX 4090, RTX 3090", but '
            f"got {'neither' if options.cluster is None else 'both'}."
        )
    if options.cluster is not None:
        return Cluster.load(options.cluster)
    parts = [part.strip() for part in options.devices.split(",")]
    if not all(parts):
        raise PlanError(
            f'--devices: expected a list such as "2x RTX 4090, RTX 3090", but got '
            f"{options.devices!r}."
        )
    return Cluster((Node(tuple(map(_counted_device, parts))),))


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
    try:
        if not separator or not name.isidentifier():
            raise ValueError(option)
        parsed = yaml.safe_load(value)
    except (ValueError, yaml.YAMLError) as error:
        raise PlanError(
            f"--model-option: expected NAME=VALUE with a value in YAML, such as n_layer=4, but "
            f"got {option!r}."
        ) from error
    if name in _NOT_MODEL_OPTIONS:
        raise PlanError(
            f"--model-option: expected an option of the model, but got {option!r}. Use "
            f"{_NOT_MODEL_OPTIONS[name]}."
        )
    return name, parsed
