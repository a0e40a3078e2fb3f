"""The Makefile installs in silence, and shows what pip says where that fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def install(folder: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """Run the Makefile's installation with this script for pip."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, script in (("python", "exit 0"), ("pip", pip)):
        program = folder / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    command = ["make", "--no-print-directory", ".venv/.installed"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")
def test_pip_is_quiet_unless_it_fails(tmp_path):
    done = install(tmp_path / "good", "echo 250 lines")
    assert done.returncode == 0 and (tmp_path / "good/.venv/.installed").exists()
    assert done.stdout.splitlines() == [
        "Installing into .venv, which takes minutes. What pip says is in .venv/pip.log."
    ]
    assert (tmp_path / "good/.venv/pip.log").read_text() == "250 lines\n" * 2
    failed = install(tmp_path / "bad", "echo no such package; exit 1")
    assert failed.returncode and not (tmp_path / "bad/.venv/.installed").exists()
    assert failed.stdout.splitlines()[1:] == [
        "no such package",
        "The installation failed. All of it is in .venv/pip.log.",
    ]
