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
from typing import Any

from rich.console import Console

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe import report
from lightning_cephalo.observe.trace import write_trace
from lightning_cephalo.offline import answers, figures, scenario
from lightning_cephalo.offline.options import add_options
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
    print(*asked.lines(), sep="\n")
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
    print(*asked.lines(), sep="\n")
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
    print(*asked.lines(), sep="\n")
    report.show(answers.comparison_table(rows))


def _scenario(options: argparse.Namespace, notes: Console) -> Scenario:
    with _status(notes, "counting what the model asks of a device"), _current_folder_first():
        asked = scenario.read(options)
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
    for name, (run, summary) in _COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description, **layout)
        command.set_defaults(run=run)
        add_options(command, name)
    return parser


_COMMANDS = {
    "plan": (_plan, "who does what, proven to be the fastest"),
    "simulate": (_simulate, "play one step of a plan, event by event"),
    "report": (
        _report,
        "where a run's time and memory went: one HTML file, without outside resources",
    ),
    "compare": (_compare, "this plan against what people do without a planner"),
}


if __name__ == "__main__":
    sys.exit(main())
