"""Every option of the command line, once: the parsers and the checks are made from this table."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_COUNT = {"type": int, "metavar": "N"}
_SWITCH = {"action": "store_true"}
_PLANNERS = ("plan", "simulate", "compare")
_SCENARIO = ("the cluster", "the model and its batch", "times")
# Says what to plan for, so that nothing else may.
_ALONE = ("--problem", "--save-problem")


def _choice(*choices: str, default: str | None = None) -> dict[str, Any]:
    return {"choices": choices, "default": default}


def _several(metavar: str, **settings: Any) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": metavar, **settings}


# (commands, title of the group) -> flags -> settings of argparse, help
_OPTIONS: dict[tuple[tuple[str, ...], str], dict[str, tuple[dict[str, Any], str]]] = {
    (_PLANNERS, "the cluster"): {
        "--cluster": (_FILE, "cluster.yaml"),
        "--devices": (
            {"metavar": "LIST"},
            'one node in place of a file: "2x RTX 4090, RTX 3090"',
        ),
    },
    (_PLANNERS, "the model and its batch"): {
        "--model": (
            {"metavar": "MODEL"},
            "config.json of Hugging Face or a folder with one, a type such as gpt2, or "
            "package.module:Class of a LightningModule",
        ),
        "--model-option": (
            _several("NAME=VALUE"),
            "change the config, or an argument of the class; may be repeated",
        ),
        "--batch-size": (_COUNT, "samples of a step, all ranks"),
        "--sequence-length": (_COUNT, "tokens of a sample (default: the model's maximum)"),
        "--dtype": (
            _choice("fp32", "tf32", "fp16", "bf16"),
            "what is computed in; weights stay fp32 (default: fp32)",
        ),
        "--recompute": (
            _choice("on", "off", "choose"),
            "activations inside units: again in the backward, kept, or as the plan chooses for "
            "each rank (default: on)",
        ),
        "--offload": (
            _SWITCH,
            "let the plan move boundary activations to the host_memory of a cluster file",
        ),
        "--optimizer-offload": (
            _choice("auto", "on", "off"),
            "optimizer state in the host_memory of a cluster file: what has no room on devices, "
            "all of it, or none (default: off)",
        ),
        "--early-update": (
            _SWITCH,
            "update units inside the backward, as training does unless it clips by norm or the "
            "like: less memory, and moves of optimizer state hide",
        ),
        "--clip-by-norm": (
            _SWITCH,
            "gradients are clipped by norm: updates follow the backward",
        ),
    },
    (_PLANNERS, "times"): {
        "--table": (
            _several("FILE", type=Path),
            "measured curves of devices (.yaml or .json), before any estimate; may be repeated",
        ),
        "--problem": (_FILE, "a saved problem, in place of cluster, model and batch"),
        "--save-problem": (_FILE, "write the problem (.yaml or .json)"),
    },
    (_PLANNERS, ""): {
        "--time-limit": (
            {"type": float, "default": 60.0, "metavar": "SECONDS"},
            "after this long the best plan so far is taken, with its gap (default: %(default)s)",
        ),
        "--json": (_SWITCH, "print JSON"),
    },
    (("plan",), ""): {
        "-o --output": (
            _FILE,
            "write the plan (.yaml or .json): CephaloStrategy(plan=FILE) trains with it",
        ),
        "--pipeline": (
            _SWITCH,
            "also say whether a pipeline of node groups would be faster, and below which "
            "bandwidth between nodes; advice only: training does not run pipelines",
        ),
        "--hybrid-sharding": (
            _choice("auto", "on", "off", default="off"),
            "hold the whole state on each node of --cluster: where that is faster, or always; "
            "training does so over gloo (default: off, and the table says its price)",
        ),
        "--figure": (
            _FILE,
            "with --pipeline: draw its stages, and the step over the bandwidth (.png or .svg)",
        ),
    },
    (("simulate",), ""): {
        "--plan": (_FILE, "the plan to play (default: solve for one)"),
        "--steps": (_COUNT | {"default": 1}, "how many steps (default: %(default)s)"),
        "--trace": (_FILE | {"metavar": "FILE.json"}, "write a trace for Perfetto or Chrome"),
        "--figure": (_FILE, "draw the timeline (.png or .svg)"),
        "--memory-figure": (_FILE, "draw every rank's memory"),
    },
    (("report",), ""): {
        "run_folder": (
            _FILE | {"metavar": "RUN_FOLDER"},
            "the folder of a run with CephaloStrategy(record=RUN_FOLDER)",
        ),
        "-o --output": (_FILE, "where to write it (default: RUN_FOLDER/report.html)"),
    },
    (("compare",), ""): {
        "--add": (
            _several("DEVICE"),
            "also with one more of this device, in the first node; may be repeated",
        ),
        "--figure": (_FILE, "draw it (.png or .svg)"),
    },
}


def add_options(parser: ArgumentParser, command: str) -> None:
    """Give the parser of a command its options."""
    for (commands, title), options in _OPTIONS.items():
        if command in commands:
            group = parser.add_argument_group(title) if title else parser
            for flags, (settings, summary) in options.items():
                group.add_argument(*flags.split(), help=summary, **settings)


def beside_problem() -> Iterator[tuple[str, str]]:
    """Yield the flag and the attribute of each option that a saved problem excludes."""
    for (_, title), options in _OPTIONS.items():
        for flag in options:
            if title in _SCENARIO and flag not in _ALONE:
                yield flag, flag.strip("-").replace("-", "_")
