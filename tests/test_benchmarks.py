"""Every benchmark finds what it imports when it is run as a script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from launch import run_ranks

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def is_of_the_repository(path: str | None) -> bool:
    return bool(path) and Path(path).is_relative_to(ROOT) and ".venv" not in Path(path).parts


def _import(rank: int, benchmark: Path) -> None:
    """In a fork, with the import path of a script and nothing of tests imported yet."""
    sys.path[:] = [entry for entry in sys.path if entry and not is_of_the_repository(entry)]
    sys.path[:0] = [str(benchmark.parent), str(ROOT)]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if is_of_the_repository(file) and not name.startswith("lightning_cephalo"):
            del sys.modules[name]
    runpy.run_path(str(benchmark), run_name="imported")


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_its_imports(benchmark):
    run_ranks(1, _import, benchmark, process_group=False)
