"""The command line: ``cephalo plan``, ``simulate``, ``compare``, ``report``.

It needs no GPU, so it can answer questions before one is rented.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe import report
from lightning_cephalo.observe.trace import write_trace
from lightning_cephalo.offline import answers, figures, scenario
from lightning_cephalo.offline.pipeline.figure import pipeline_figure
from lightning_cephalo.offline.pipeline.text import advice_lines, pipeline_table
from lightning_cephalo.offline.prices import prices_of
from lightning_cephalo.offline.run_report import page
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import Plan, solve

DONE, INFEASIBLE, BAD_INPUT, UNSOLVED, UNEXPECTED = 0, 1, 2, 3, 70

_EPILOG = """\
examples:
  cephalo plan --devices "2x RTX 4090, RTX 3090" --model gpt2 --batch-size 48
  cephalo plan --cluster cluster.yaml --model llama/config.json --batch-size 64 -o plan.yaml
  cephalo simulate --problem problem.yaml --plan plan.yaml --trace trace.json
  cephalo report runs/today
  cephalo compare --devices "2x RTX 4090, RTX 3090" --model gpt2 --batch-size 48 --add "RTX 3090"

exit codes: 0 done; 1 nothing fits (the message says what would help); 2 wrong input;
3 the solver found nothing in time; 70 an unexpected error, with its traceback: please report it.
"""

_JOB = "plan simulate compare"
_TYPES = {"FILE": Path, "RUN_FOLDER": Path, "N": int, "SECONDS": float, "HOURS": float}
# (commands, title of the group) -> name, value, default, help. A value is one of _TYPES or text,
# or one of several words. An option whose default is False is a switch, and one whose default is []
# may be repeated.
_OPTIONS: dict[tuple[str, str], tuple[tuple[str, str, Any, str], ...]] = {
    (_JOB, "the job"): (
        ("--cluster", "FILE", None, "cluster.yaml"),
        ("--devices", "LIST", None, 'one node in place of a file: "2x RTX 4090, RTX 3090"'),
        ("--model", "MODEL", None, "a Hugging Face config.json or its folder, a type such as gpt2,"
            " or package.module:Class of a LightningModule"),
        ("--model-option", "NAME=VALUE", [], "of the config or the class; repeatable"),
        ("--batch-size", "N", None, "samples of a step, all ranks"),
        ("--sequence-length", "N", None, "tokens of a sample (default: the model's maximum)"),
        ("--dtype", "fp32|tf32|fp16|bf16", None, "of compute (default: fp32); weights stay fp32"),
        ("--recompute", "on|off|choose", None, "activations inside units: again in the backward,"
            " kept, or as the plan chooses for each rank (default: on)"),
        ("--offload", "", False, "boundary activations may move to the host_memory of a cluster"),
        ("--optimizer-offload", "auto|on|off", None, "optimizer state in host_memory: what has no"
            " room on devices, all of it, or none (default: off)"),
        ("--early-update", "", False, "update units inside the backward, as training does unless it"
            " clips by norm or the like"),
        ("--table", "FILE", [], "measured curves (.yaml or .json), before estimates; repeatable"),
    ),
    (_JOB, "in place of the job"): (("--problem", "FILE", None, "a saved problem"),),
    (_JOB, ""): (
        ("--save-problem", "FILE", None, "write the problem (.yaml or .json)"),
        ("--time-limit", "SECONDS", 60.0, "then the best plan so far is taken (default: 60)"),
        ("--json", "", False, "print JSON"),
    ),
    ("plan", ""): (
        ("-o --output", "FILE", None, "write the plan, for CephaloStrategy(plan=FILE)"),
        ("--pipeline", "", False, "also whether a pipeline of node groups would be faster, and"
            " below which bandwidth between nodes; advice only: training does not run pipelines"),
        ("--hybrid-sharding", "", False, "hold the whole state on each node of --cluster; training"
            " does so over gloo (compare has the step of both ways)"),
        ("--figure", "FILE", None, "with --pipeline: draw its stages, and the step over bandwidth"),
    ),
    ("simulate", ""): (
        ("--plan", "FILE", None, "the plan to play (default: solve for one)"),
        ("--trace", "FILE", None, "write a trace for Perfetto or Chrome (.json)"),
        ("--figure", "FILE", None, "draw the timeline (.png or .svg)"),
        ("--memory-figure", "FILE", None, "draw every rank's memory"),
    ),
    ("compare", ""): (
        ("--add", "DEVICE", [], "also with one more of it, in the first node; repeatable"),
        ("--price", "LIST", None, 'per hour, before those of the cluster: "A6000=0.8,L4=0.7"'),
        ("--deadline", "HOURS", None, "with --samples and prices: also the cheapest mix of these"
            " devices that is done in time; all mixes are planned, at most 64"),
        ("--samples", "N", None, "samples of the whole training, for --deadline"),
    ),
    ("report", ""): (
        ("run_folder", "RUN_FOLDER", None, "of CephaloStrategy(record=RUN_FOLDER)"),
        ("-o --output", "FILE", None, "where to write it (default: RUN_FOLDER/report.html)"),
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    # Only results go to standard output, which may be piped into a program.
    notes = Console(stderr=True, highlight=False)
    try:
        options = _parser().parse_args(arguments)
        options.run(options, notes)
    except InfeasibleError as error:
        return _failed(notes, "Nothing fits", error, INFEASIBLE)
    except (PlanError, ImportError) as error:
        return _failed(notes, "Wrong input", error, BAD_INPUT)
    except SolverError as error:
        return _failed(notes, "No plan yet", error, UNSOLVED)
    except Exception:
        # Python would exit with 1, which means "nothing fits" here.
        traceback.print_exc()
        return UNEXPECTED
    return DONE


def _failed(notes: Console, kind: str, error: Exception, code: int) -> int:
    notes.print(printable(f"{kind}: {error}"), markup=False, soft_wrap=True)
    return code


def _plan(options: argparse.Namespace, notes: Console) -> None:
    """Who does what, proven to be the fastest."""
    if options.figure is not None and not options.pipeline:
        raise PlanError("--figure draws pipelines: give --pipeline too, or leave it out.")
    if options.hybrid_sharding and options.optimizer_offload in ("auto", "on"):
        raise PlanError(
            "--hybrid-sharding: expected --optimizer-offload off, but got"
            f" {options.optimizer_offload}. The two do not work together so far: leave one out."
        )
    asked = _scenario(options, notes)
    if options.hybrid_sharding:
        asked = asked.in_nodes()
    with notes.status("solving"):
        plan = solve(asked.problem, time_limit_s=options.time_limit)
    data: dict[str, Any] = plan.to_dict()
    data["sources"] = [
        {name: getattr(each, name) for name in ("device", "source", "detail")}
        for each in asked.sources
    ]
    shown: list[Any] = [report.plan_table(plan, units=asked.problem.units)]
    if options.pipeline:
        with notes.status("searching pipelines"):
            found = answers.pipelines(asked, plan, time_limit_s=options.time_limit)
        advice, crossover = found.advice, found.crossover
        data["pipeline"] = found.to_dict()
        if advice.best is not None:
            shown.append(pipeline_table(advice, advice.best))
        shown += advice_lines(advice, crossover)
        _write(notes, options.figure, lambda path: pipeline_figure(advice, crossover, path))
    _write(notes, options.output, plan.save)
    _answer(options, asked, data, *shown)


def _simulate(options: argparse.Namespace, notes: Console) -> None:
    """Play one step of a plan, event by event."""
    asked = _scenario(options, notes)
    with notes.status("simulating"):
        if options.plan is None:
            plan = solve(asked.problem, time_limit_s=options.time_limit)
        else:
            plan = Plan.load(options.plan)
        if plan.groups:
            asked = asked.in_nodes()
        problem = asked.problem
        plan.check(world_size=len(problem.ranks), global_batch_size=problem.global_batch_size)
        played = simulate(problem, plan)
    steps = played.timelines
    _write(notes, options.trace, lambda path: write_trace(steps, path))
    _write(notes, options.figure, lambda path: figures.timeline_figure(steps, path))
    _write(notes, options.memory_figure, lambda path: figures.memory_figure(steps, path))
    summary = answers.summarise(problem, plan, played)
    _answer(options, asked, summary, answers.simulation_table(summary))


def _report(options: argparse.Namespace, notes: Console) -> None:
    """Where a run's time and memory went: one HTML file, without outside resources."""
    content = page(options.run_folder)
    path = options.output or options.run_folder / "report.html"
    _write(notes, path, lambda path: files.write_text(path, content))


def _compare(options: argparse.Namespace, notes: Console) -> None:
    """This plan against what people do without a planner."""
    asked = _scenario(options, notes)
    deadline = _deadline(options)
    with notes.status("comparing") as status:
        rows = answers.compare(
            asked,
            options.add,
            prices=prices_of(options.price, asked.cluster),
            deadline=deadline,
            time_limit_s=options.time_limit,
            say=status.update,
        )
    _answer(options, asked, rows, answers.comparison_table(rows))


def _answer(options: argparse.Namespace, asked: Scenario, data: Any, *shown: Any) -> None:
    """Print the data as JSON, or else the subject, and tables and lines to show."""
    if options.json:
        print(json.dumps(answers.plain(data), indent=2, allow_nan=False))
        return
    for part in (*asked.lines(), *shown):
        report.show(part) if isinstance(part, Table) else print(part)


def _deadline(options: argparse.Namespace) -> answers.Deadline | None:
    given = options.deadline, options.samples
    if given == (None, None):
        return None
    if None in given:
        raise PlanError("--deadline HOURS needs --samples N, and --samples needs --deadline.")
    hours = records.real("--deadline", options.deadline, above_minimum=True)
    return answers.Deadline(hours, records.whole("--samples", options.samples, minimum=1))


def _scenario(options: argparse.Namespace, notes: Console) -> Scenario:
    if options.problem is not None:
        for name, *_ in _OPTIONS[_JOB, "the job"]:
            if getattr(options, name.strip("-").replace("-", "_")) not in (None, False, []):
                raise PlanError(
                    f"--problem says all there is to plan for, but {name} was given as well. "
                    f"Leave one of them out."
                )
    # ``--model package.module:Class`` is imported from the current folder, as ``python -m`` does.
    # An installed script has its own folder in that place instead.
    sys.path.insert(0, "")
    try:
        with notes.status("counting what the model asks of a device"):
            asked = scenario.read(options)
    finally:
        sys.path.remove("")
    for line in asked.left_out:
        notes.print(printable(f"Left out: {line}"), markup=False, soft_wrap=True)
    _write(notes, options.save_problem, asked.problem.save)
    return asked


def _write(notes: Console, path: Path | None, write: Callable[[Path], Any]) -> None:
    if path is not None:
        write(path)
        notes.print(f"Wrote {path}.")


def _parser() -> argparse.ArgumentParser:
    layout: dict[str, Any] = {
        "epilog": _EPILOG,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(
        prog="cephalo",
        description="Plan training on mixed GPUs, also on a cluster that is not here.",
        **layout,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for run in (_plan, _simulate, _report, _compare):
        name, summary = run.__name__.strip("_"), run.__doc__ or ""
        command = commands.add_parser(name, help=summary, description=summary, **layout)
        command.set_defaults(run=run)
        for (users, title), options in _OPTIONS.items():
            if name in users.split():
                group = command.add_argument_group(title) if title else command
                for option in options:
                    _add(group, *option)
    return parser


def _add(group: Any, names: str, value: str, default: Any, summary: str) -> None:
    settings: dict[str, Any] = {"metavar": value, "type": _TYPES.get(value, str)}
    if default is False:
        settings = {"action": "store_true"}
    elif "|" in value:
        settings = {"choices": value.split("|")}
    elif default == []:
        settings["action"] = "append"
    if names.startswith("-"):
        settings["default"] = default
    group.add_argument(*names.split(), help=summary, **settings)


if __name__ == "__main__":
    sys.exit(main())
