"""Takes from ranks what the system gives them: threads, room on a disk. Needs root, and Linux."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GROUPS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))


@contextmanager
def thread_group() -> Iterator[Path]:
    """Yield a control group whose processes can be given a limit of threads, as in containers.

    Raises:
        OSError: If the system has no such groups, or makes none for this process.
    """
    above = next((path for path in _GROUPS if (path / "cgroup.procs").exists()), _GROUPS[0])
    group = above / f"cephalo-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        yield group
    finally:
        with suppress(OSError):  # a process that is killed may not be gone yet
            group.rmdir()


def take_threads(group: Path, process: int, more: int = 0) -> None:
    """Let a process start no threads.

    Args:
        group: From :func:`thread_group`.
        process: The number of the process.
        more: Threads that it may start yet.
    """
    (group / "cgroup.procs").write_text(str(process))
    has = int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(has + more))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Let a folder be on a disk of its own without room, inside the block.

    Raises:
        OSError: If the system does not allow it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=16", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"mount failed: {done.stderr.strip()}")
    try:
        with suppress(OSError), (folder / "filled").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=True)
