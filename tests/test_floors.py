"""Imports go down the stairs only, and the pure core neither communicates nor knows Lightning."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_cephalo"
FLOORS = (
    {"common"},
    {"plan", "accelerator"},
    {"sharding", "ranks", "data"},
    {"execution"},
    {"features"},
    {"observe", "adapters"},
    {"profiling", "recovery"},
    {"preparation"},
    {"strategy", "connected", "saving", "steps", "_autoload", "emulation", "run", "__init__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BESIDE_THE_STAIRS = "offline"  # may import any floor; no floor imports it
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def _imports(path: Path) -> frozenset[str]:
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
    return frozenset(found)


def _id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_down_the_stairs():
    faults = []
    for path in FILES:
        room = _room(path)
        for name in _imports(path):
            package, _, other = name.partition(".")
            other = other.split(".")[0]
            if package != PACKAGE.name or other == room or room == BESIDE_THE_STAIRS:
                continue
            below = FLOOR_OF.get(other, -1) < FLOOR_OF[room] or FLOOR_OF[room] == len(FLOORS) - 1
            if other == BESIDE_THE_STAIRS or not below:
                faults.append(f"{_id(path)} imports {name}")
    assert not faults


PURE = [
    *(PACKAGE / "common").rglob("*.py"),
    *(PACKAGE / "plan").rglob("*.py"),
    PACKAGE / "sharding/layout.py",
    PACKAGE / "offline/simulate.py",
]
FOREIGN = ("torch.distributed", "lightning.", "pytorch_lightning")


def test_the_pure_core_neither_communicates_nor_knows_lightning():
    found = [(_id(path), name) for path in PURE for name in _imports(path)]
    assert not [each for each in found if each[1].startswith(FOREIGN)]


# what only code that tells devices and backends apart by name has to write
KNOWS_DEVICES = re.compile(r"cuda|nccl|[xh]ccl|CUDA_|NCCL_|active_device\(|\btype [!=]= [\"']")
KNOWERS = {"accelerator", BESIDE_THE_STAIRS}


def _device_questions(text: str) -> list[str]:
    return [line for line in text.splitlines() if KNOWS_DEVICES.search(line)]


def test_no_other_room_tells_devices_or_backends_apart_by_name():
    others = [path for path in FILES if _room(path) not in KNOWERS]
    assert not [
        (_id(path), line) for path in others for line in _device_questions(path.read_text())
    ]


@pytest.mark.parametrize(
    "line",
    [
        'if device.type == "cuda":',
        "if device.type != 'cpu':",
        "torch.cuda.empty_cache()",
        "if values.is_cuda:",
        'if dist.get_backend(group) == "nccl":',
        '"NCCL_LAUNCH_ORDER_IMPLICIT"',
        "_CUDA_LARGE_NUMEL = 1",
        "emulated = active_device()",
    ],
)
def test_the_search_finds_what_it_is_for(line):
    assert _device_questions(line)


def test_the_walk_sees_imports_and_spares_those_for_type_checkers():
    inside = _imports(PACKAGE / "preparation/prepare.py")
    assert any(name.startswith("lightning_cephalo.plan") for name in inside)
    assert not any(name == "lightning.pytorch.Trainer" for name in inside)


def test_no_module_imports_a_private_name_of_another():
    private = re.compile(rf"{PACKAGE.name}\..*\b_[^.]*$")
    found = {name for path in FILES for name in _imports(path) if private.match(name)}
    assert found <= {f"{PACKAGE.name}._autoload"}
