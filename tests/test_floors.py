"""Imports go down the stairs only, and the pure core neither communicates nor knows Lightning."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_cephalo"
FLOORS = (
    {"common"},
    {"plan", "accelerator"},
    {"sharding", "ranks", "data"},
    {"execution"},
    {"observe", "adapters"},
    {"profiling"},
    {"preparation"},
    {"strategy", "_autoload", "emulation", "__init__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BESIDE_THE_STAIRS = "offline"  # may import any floor; no floor imports it
FILES = sorted(PACKAGE.rglob("*.py"))
# what the moves left behind; each goes with the part of the redesign that it belongs to
LEFT_OVER = {
    ("execution", "observe"),
    ("ranks", "observe"),
    ("sharding", "observe"),
}


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
            assert not node.level, f"{path}: relative imports hide the room"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))
    return found


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_the_stairs(path):
    room = _room(path)
    for name in _imports(path):
        package, _, other = name.partition(".")
        other = other.split(".")[0]
        if package != PACKAGE.name or other == room or room == BESIDE_THE_STAIRS:
            continue
        below = FLOOR_OF.get(other, -1) < FLOOR_OF[room] or FLOOR_OF[room] == len(FLOORS) - 1
        assert other != BESIDE_THE_STAIRS, f"{path} imports {name}"
        assert below or (room, other) in LEFT_OVER, f"{path} imports {name}"


PURE = [*(PACKAGE / "common").rglob("*.py"), *(PACKAGE / "plan").rglob("*.py")]


@pytest.mark.parametrize(
    "path",
    [*PURE, PACKAGE / "sharding/layout.py", PACKAGE / "offline/simulate.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_pure_core_neither_communicates_nor_knows_lightning(path):
    for name in _imports(path):
        assert not name.startswith(("torch.distributed", "lightning.", "pytorch_lightning")), name


def test_the_walk_sees_imports_and_spares_those_for_type_checkers():
    inside = _imports(PACKAGE / "preparation/prepare.py")
    assert any(name.startswith("lightning_cephalo.plan") for name in inside)
    assert not any(name == "lightning.pytorch.Trainer" for name in inside)
