"""Imports go one way, and the pure rooms import nothing that communicates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_cephalo"

# room -> rooms that it may import from
ALLOWED = {
    "plan": set(),
    "stopwatch": {"emulation"},
    "sharding": {"plan", "stopwatch"},
    "accumulation": {"sharding", "stopwatch", "timeline"},
    "data": set(),
    "emulation": set(),
    "cluster": {"emulation"},
    "timeline": set(),
    "simulate": {"plan", "timeline"},
    "trace": {"plan", "timeline"},
    "canvas": {"plan"},
    "figures": {"canvas", "plan", "report", "timeline"},
    "estimate": {"emulation", "plan", "sharding"},
    "scenario": {"estimate", "plan"},
    "answers": {"estimate", "figures", "plan", "report", "scenario", "timeline"},
    "cli": {"answers", "figures", "plan", "report", "scenario", "simulate", "trace"},
    "slurm": {"cluster"},
    "report": {"memory_account", "plan"},
    "local_step": {"sharding"},
    "precision": {"local_step", "sharding"},
    "memory_account": set(),
    "memory_cap": {
        "accumulation",
        "cluster",
        "emulation",
        "estimate",
        "plan",
        "profiling",
    },
    "host_memory": {"accumulation", "cluster", "emulation", "memory_cap", "plan"},
    "memory_meter": {"emulation", "engine", "memory_account", "sharding"},
    "stepping": {"data"},
    "metric_states": set(),
    "metrics": {"accumulation", "metric_states"},
    "dealing": {"data", "planning", "sharded", "stepping"},
    "engine": {"accumulation", "sharding", "stopwatch"},
    "pace": {"plan", "report"},
    "watch": {
        "accumulation",
        "cluster",
        "emulation",
        "engine",
        "pace",
        "plan",
        "report",
        "timeline",
        "trace",
    },
    "checkpoint": {"engine", "sharding"},
    "support": {"accumulation", "engine", "local_step", "plan"},
    "profiling": {
        "accumulation",
        "cluster",
        "data",
        "emulation",
        "engine",
        "estimate",
        "local_step",
        "memory_account",
        "plan",
        "sharding",
        "stepping",
        "support",
    },
    "planning": {
        "accumulation",
        "cluster",
        "data",
        "engine",
        "host_memory",
        "memory_account",
        "memory_cap",
        "plan",
        "profiling",
        "report",
        "stepping",
        "support",
    },
    "user_gathers": {"accumulation", "support"},
    "sharded": {
        "accumulation",
        "checkpoint",
        "cluster",
        "data",
        "engine",
        "memory_account",
        "memory_meter",
        "metrics",
        "plan",
        "planning",
        "ranks",
        "stepping",
        "support",
        "user_gathers",
    },
    "last_words": {"accumulation"},
    "ranks": {"accumulation", "engine", "last_words"},
}
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in ALLOWED
]


def _imports(path: Path) -> set[str]:
    """Modules that the file imports when it runs; for type checkers only does not count."""
    found = set()
    stack: list[ast.AST] = [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(PACKAGE.parent).parts[: -node.level]
            module = ".".join([*parents, node.module or ""]) if node.level else node.module or ""
            found.update(f"{module}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))
    return found


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    allowed = ALLOWED[_room(path)]
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "lightning_cephalo" and len(parts) > 1:
            assert parts[1] in allowed | {_room(path)}, f"{path} imports {name}"


@pytest.mark.parametrize(
    "path",
    [
        *(PACKAGE / "plan").glob("*.py"),
        PACKAGE / "simulate.py",
        PACKAGE / "timeline.py",
        PACKAGE / "sharding/layout.py",
        PACKAGE / "accumulation/schedule.py",
    ],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_pure_core_neither_communicates_nor_knows_lightning(path):
    for name in _imports(path):
        assert not name.startswith(("torch.distributed", "lightning.", "pytorch_lightning")), name


def test_the_walk_sees_imports_and_spares_those_for_type_checkers(tmp_path):
    inside = _imports(PACKAGE / "planning.py")
    assert any(name.startswith("lightning_cephalo.plan") for name in inside)
    assert not any(name == "lightning.pytorch.Trainer" for name in inside)
