"""Runs a part of the tests on the oldest versions that pyproject.toml promises, and on the newest.

    make floor
    python benchmarks/versions.py [--oldest python3.10] [--newest python3.13] [--record record.md]

Each end gets a virtual environment in `.floor/`, which a later run uses again. The part: gradients,
hooks, callbacks, checkpoints and arguments of the Trainer, each against one device. It downloads
a few gigabytes, and takes about ten minutes. Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = (
    "tests/distributed/test_torch_versions.py",
    "tests/distributed/test_placement.py",
    "tests/distributed/test_row_operators.py",
    "tests/distributed/test_gradients.py",
    "tests/lightning/test_gradients_in_hooks.py",
    "tests/lightning/test_hooks.py",
    "tests/lightning/test_callbacks.py",
    "tests/lightning/test_lightnings_callbacks.py",
    "tests/lightning/test_trainer_arguments.py",
    "tests/lightning/test_averaged_weights.py",
    "tests/lightning/test_checkpoints.py",
    "tests/adapters",
    "tests/preparation/test_held_state.py",
)
SHOWN = ("lightning", "torch", "numpy", "transformers")


def oldest_requirements(project: Path) -> list[str]:
    """Return the lowest versions of Lightning and torch that pyproject.toml allows.

    ::

        oldest_requirements(ROOT / "pyproject.toml")   # ["lightning~=2.6.0", "torch~=2.11.0"]
    """
    # Python 3.10 cannot read TOML
    promised = re.findall(r'"(lightning|torch)>=([\d.]+)"', project.read_text())
    # the first release of a series may be missing
    return [f"{package}~={version}.0" for package, version in promised]


def environment(name: str, python: str, requirements: list[str]) -> Path:
    """Return the interpreter of a virtual environment, which is made if it is not there."""
    folder = ROOT / ".floor" / name
    found = folder / "bin" / "python"
    done = folder / "installed.txt"
    wanted = "\n".join([python, *requirements])
    if not done.is_file() or done.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install = [found, "-m", "pip", "install", "--quiet", *requirements, "-e", ".[dev]"]
        subprocess.run(install, check=True, cwd=ROOT)
        done.write_text(wanted)
    return found


def versions(python: Path) -> str:
    """Return the versions of Python and of a few packages in an environment."""
    code = (
        "import sys, importlib.metadata as m;"
        f"print('Python', sys.version.split()[0], *[n + ' ' + m.version(n) for n in {SHOWN!r}],"
        " sep=', ')"
    )
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return said.stdout.strip().replace("Python, ", "Python ")


def tested(python: Path) -> tuple[bool, list[str]]:
    """Run the part of the tests; return whether they pass, and the lines that say so."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PART]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = [
        line.split(" - ")[0]
        for line in done.stdout.splitlines()
        if re.match(r"(FAILED|ERROR|SKIPPED|\d+ (passed|failed)|[\d ,]*\w+ in )", line)
    ]
    return done.returncode == 0, lines or done.stdout.splitlines()[-5:]


def main() -> int:
    """Test both ends, print the result and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--oldest", default="python3.10", help="interpreter of the oldest end")
    parser.add_argument("--newest", default="python3.13", help="interpreter of the newest end")
    parser.add_argument("--record", type=Path, help="file for the result")
    options = parser.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    said = [
        "# The oldest and the newest versions",
        "",
        f"`make floor`, {now:%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}, commit {commit}. The tests: `{'`, `'.join(PART)}`.",
    ]
    passed = True
    ends = (
        ("oldest", options.oldest, oldest_requirements(ROOT / "pyproject.toml")),
        ("newest", options.newest, []),
    )
    for name, interpreter, requirements in ends:
        python = environment(name, interpreter, requirements)
        is_well, lines = tested(python)
        passed &= is_well
        said += ["", f"## {name}", "", versions(python), "", "```", *lines, "```"]
        print("\n".join(said[-6 - len(lines) :]), flush=True)
    record = options.record or ROOT / "benchmarks" / "records" / f"{now:%Y-%m-%d}_versions.md"
    record.write_text("\n".join(said) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
