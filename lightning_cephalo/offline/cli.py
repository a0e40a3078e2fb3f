"""The command line: ``cephalo plan``, ``simulate``, ``compare``, ``report``.

It needs no GPU, so it can answer questions before one is rented.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe import report
from lightning_cephalo.observe.trace import write_trace
from lightning_cephalo.offline import answers, figures, scenario
from lightning_cephalo.offline.pipeline.figure import pipeline_figure
from lightning_cephalo.offline.pipeline.text import advice_lines, pipeline_table
from lightning_cephalo.offline.run_report import RunFolder, page
from lightning_cephalo.offline.scenario import Scenario
from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import Plan, solve

DONE, INFEASIBLE, BAD_INPUT, UNSOLVED, UNEXPECTED = 0, 1, 2, 3, 70

_REMOVED = {
    "memory-timeline": "cephalo simulate --memory-figure FILE draws the memory of a simulated step;"
    " cephalo report RUN_FOLDER shows that of a run with CephaloStrategy(record=RUN_FOLDER).",
    "--published": "--table FILE takes measured curves of devices. To compare with the paper's"
    " planner on its profiles, run: python benchmarks/planner.py --published FOLDER",
}

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    # Only results go to standard output, which may be piped into a program.
    notes = Console(stderr=True, highlight=False)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        _refuse_removed(given)
        options = _parser().parse_args(given)
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


def _refuse_removed(arguments: Sequence[str]) -> None:
    """Name the way on for a command or an option that is gone."""
    options = (each.partition("=")[0] for each in arguments if each.startswith("--"))
    for name in (*arguments[:1], *options):
        if name in _REMOVED:
            raise PlanError(f"{name} is gone. {_REMOVED[name]}")


def _failed(notes: Console, kind: str, error: Exception, code: int) -> int:
    notes.print(printable(f"{kind}: {error}"), markup=False, soft_wrap=True)
    return code


def _plan(options: argparse.Namespace, notes: Console) -> None:
    if options.figure is not None and not options.pipeline:
        raise PlanError("--figure draws pipelines: give --pipeline too, or leave it out.")
    if options.hybrid_sharding == "on" and options.optimizer_offload in ("auto", "on"):
        raise PlanError(
            "--hybrid-sharding on: expected --optimizer-offload off, but got"
            f" {options.optimizer_offload}. The two do not work together so far: leave one out."
        )
    asked = _scenario(options, notes)
    with _status(notes, "solving"):
        chosen = answers.choose(asked, options.hybrid_sharding, time_limit_s=options.time_limit)
    asked, plan, found = chosen.asked, chosen.plan, None
    if options.pipeline:
        with _status(notes, "searching pipelines"):
            found = answers.pipelines(asked, plan, time_limit_s=options.time_limit)
    if options.output is not None:
        plan.save(options.output)
        notes.print(f"Wrote {options.output}.")
    if found is not None and options.figure is not None:
        pipeline_figure(found.advice, found.crossover, options.figure)
        notes.print(f"Wrote {options.figure}.")
    if options.json:
        more: dict[str, Any] = {} if found is None else {"pipeline": found.to_dict()}
        if chosen.rows:
            more["ways"] = [answers.row_as_dict(row) for row in chosen.rows]
        _print_json({**plan.to_dict(), "sources": asked.sources_as_dicts(), **more})
        return
    _print_scenario(asked)
    report.show(report.plan_table(plan, units=asked.problem.units))
    if chosen.rows:
        rows = [*([] if found is None else [answers.pipeline_row(found)]), *chosen.rows]
        report.show(answers.comparison_table(rows, "Ways to train"))
    if found is not None:
        if found.advice.best is not None:
            report.show(pipeline_table(found.advice, found.advice.best))
        for line in advice_lines(found.advice, found.crossover):
            print(line)


def _simulate(options: argparse.Namespace, notes: Console) -> None:
    asked = _scenario(options, notes)
    with _status(notes, "solving"):
        plan = _plan_to_play(options, asked)
        asked = asked.of_plan(plan)
    with _status(notes, "simulating"):
        simulation = simulate(asked.problem, plan, steps=options.steps)
    if options.trace is not None:
        write_trace(simulation, asked.problem, options.trace)
        notes.print(f"Wrote {options.trace}: open it in https://ui.perfetto.dev.")
    if options.figure is not None or options.memory_figure is not None:
        if options.figure is not None:
            figures.timeline_figure(simulation, asked.problem, options.figure)
            notes.print(f"Wrote {options.figure}.")
        if options.memory_figure is not None:
            figures.memory_figure(simulation, asked.problem, plan, options.memory_figure)
            notes.print(f"Wrote {options.memory_figure}.")
    summary = answers.summarise(asked.problem, plan, simulation)
    if options.json:
        _print_json(summary.to_dict())
        return
    _print_scenario(asked)
    report.show(answers.simulation_table(summary))


def _report(options: argparse.Namespace, notes: Console) -> None:
    content = page(RunFolder.read(options.run_folder))
    path = options.output or options.run_folder / "report.html"
    files.write_text(path, content)
    notes.print(f"Wrote {path}.")


def _plan_to_play(options: argparse.Namespace, asked: Scenario) -> Plan:
    if options.plan is None:
        plan = solve(asked.problem, time_limit_s=options.time_limit)
    else:
        plan = Plan.load(options.plan)
    plan.check(
        world_size=len(asked.problem.ranks), global_batch_size=asked.problem.global_batch_size
    )
    return plan


def _compare(options: argparse.Namespace, notes: Console) -> None:
    asked = _scenario(options, notes)
    with _status(notes, "comparing") as say:
        rows = answers.compare(asked, options.add, time_limit_s=options.time_limit, say=say)
    if options.figure is not None:
        figures.comparison_figure(rows, options.figure)
        notes.print(f"Wrote {options.figure}.")
    if options.json:
        _print_json([answers.row_as_dict(row) for row in rows])
        return
    _print_scenario(asked)
    report.show(answers.comparison_table(rows))


def _scenario(options: argparse.Namespace, notes: Console) -> Scenario:
    with _status(notes, "counting what the model asks of a device"), _current_folder_first():
        asked = scenario.read(
            scenario.Question(
                problem=options.problem,
                cluster=options.cluster,
                devices=options.devices,
                model=options.model,
                model_options=tuple(options.model_option),
                global_batch_size=options.batch_size,
                sequence_length=options.sequence_length,
                dtype=options.dtype,
                tables=tuple(options.table),
                recompute=options.recompute,
                offload=options.offload,
                optimizer_offload=options.optimizer_offload,
                early_update=options.early_update,
                clip_by_norm=options.clip_by_norm,
            )
        )
    for line in asked.left_out:
        notes.print(printable(f"Left out: {line}"), markup=False, soft_wrap=True)
    if options.save_problem is not None:
        asked.problem.save(options.save_problem)
        notes.print(f"Wrote {options.save_problem}.")
    return asked


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Put the current folder first in ``sys.path``, as ``python -m`` does.

    ``--model package.module:Class`` is imported from there. An installed script has its own folder
    in that place instead.
    """
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _print_scenario(asked: Scenario) -> None:
    for line in asked.lines():
        print(line)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


@contextmanager
def _status(notes: Console, doing: str) -> Iterator[Any]:
    """Show an animated status line on a terminal, and nothing elsewhere.

    Yields a function that changes its text.
    """
    if not notes.is_terminal:
        yield lambda text: None
        return
    with notes.status(doing) as status:
        yield status.update


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cephalo",
        description="Plan training on mixed GPUs, also on a cluster that is not here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = _command(commands, "plan", _plan, "who does what, proven to be the fastest")
    plan.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the plan (.yaml or .json): CephaloStrategy(plan=FILE) trains with it",
    )
    plan.add_argument(
        "--pipeline",
        action="store_true",
        help="also say whether a pipeline of node groups would be faster, and below which "
        "bandwidth between nodes; advice only: training does not run pipelines",
    )
    plan.add_argument(
        "--hybrid-sharding",
        choices=("auto", "on", "off"),
        default="off",
        help="hold the whole state on each node of --cluster: where that is faster, or always; "
        "training does so over gloo (default: off, and the table says its price)",
    )
    plan.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="with --pipeline: draw its stages, and the step over the bandwidth (.png or .svg)",
    )
    simulate = _command(commands, "simulate", _simulate, "play one step of a plan, event by event")
    simulate.add_argument(
        "--plan", type=Path, metavar="FILE", help="the plan to play (default: solve for one)"
    )
    simulate.add_argument(
        "--steps", type=int, default=1, metavar="N", help="how many steps (default: %(default)s)"
    )
    simulate.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write a trace for Perfetto or Chrome"
    )
    simulate.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the timeline (.png or .svg)"
    )
    simulate.add_argument(
        "--memory-figure", type=Path, metavar="FILE", help="draw every rank's memory"
    )
    _report_command(commands)
    compare = _command(
        commands, "compare", _compare, "this plan against what people do without a planner"
    )
    compare.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="DEVICE",
        help="also with one more of this device, in the first node; may be repeated",
    )
    compare.add_argument("--figure", type=Path, metavar="FILE", help="draw it (.png or .svg)")
    return parser


def _report_command(commands: Any) -> None:
    summary = "where a run's time and memory went: one HTML file, without outside resources"
    command = commands.add_parser(
        "report",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_report)
    command.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN_FOLDER",
        help="the folder of a run with CephaloStrategy(record=RUN_FOLDER)",
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write it (default: RUN_FOLDER/report.html)",
    )


def _command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    where = command.add_argument_group("the cluster")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="cluster.yaml")
    where.add_argument(
        "--devices", metavar="LIST", help='one node in place of a file: "2x RTX 4090, RTX 3090"'
    )
    what = command.add_argument_group("the model and its batch")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help="config.json of Hugging Face or a folder with one, a type such as gpt2, or "
        "package.module:Class of a LightningModule",
    )
    what.add_argument(
        "--model-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the config, or an argument of the class; may be repeated",
    )
    what.add_argument("--batch-size", type=int, metavar="N", help="samples of a step, all ranks")
    what.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens of a sample (default: the model's maximum)",
    )
    what.add_argument(
        "--dtype",
        choices=("fp32", "tf32", "fp16", "bf16"),
        help="what is computed in; weights stay fp32 (default: fp32)",
    )
    what.add_argument(
        "--recompute",
        choices=("on", "off", "choose"),
        help="activations inside units: again in the backward, kept, or as the plan chooses for "
        "each rank (default: on)",
    )
    what.add_argument(
        "--offload",
        action="store_true",
        help="let the plan move boundary activations to the host_memory of a cluster file",
    )
    what.add_argument(
        "--optimizer-offload",
        choices=("auto", "on", "off"),
        help="optimizer state in the host_memory of a cluster file: what has no room on devices, "
        "all of it, or none (default: off)",
    )
    what.add_argument(
        "--early-update",
        action="store_true",
        help="update units inside the backward, as training does unless it clips by norm or the "
        "like: less memory, and moves of optimizer state hide",
    )
    what.add_argument(
        "--clip-by-norm",
        action="store_true",
        help="gradients are clipped by norm: updates follow the backward",
    )
    times = command.add_argument_group("times")
    times.add_argument(
        "--table",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="measured curves of devices (.yaml or .json), before any estimate; may be repeated",
    )
    times.add_argument(
        "--problem",
        type=Path,
        metavar="FILE",
        help="a saved problem, in place of cluster, model and batch",
    )
    times.add_argument(
        "--save-problem", type=Path, metavar="FILE", help="write the problem (.yaml or .json)"
    )
    command.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="after this long the best plan so far is taken, with its gap (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


if __name__ == "__main__":
    sys.exit(main())
