"""The memory that this process's control group may use: what a container or a job scheduler allows.

A host may have 512 GiB while the container has 16: the kernel kills a process above the limit of
its group, or of any group around it. Versions 1 and 2 have other names for the same files.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes no word for "no limit", but the largest number of pages.
_NO_LIMIT_BYTES = 2.0**60


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest limit on the memory of this process."""

    total_bytes: float
    free_bytes: float
    file: str


@dataclass(frozen=True)
class _Names:
    """Names of a version's files, and of the entry of droppable pages in ``memory.stat``."""

    limit: str
    usage: str
    droppable: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def memory_limit(groups: Path = _GROUPS, mount: Path = _MOUNT) -> MemoryLimit | None:
    """Return the limit on this process's memory; None if there is none, or no control group.

    ::

        memory_limit()      # MemoryLimit(17179869184.0, 12884901888.0, '/sys/fs/cgroup/memory.max')
    """
    limits = [
        limit
        for folder, names in _folders(groups, mount)
        if (limit := _limit_of(folder, names)) is not None
    ]
    if not limits:
        return None
    tightest = min(limits, key=lambda limit: limit.total_bytes)
    free_bytes = min(limit.free_bytes for limit in limits)
    return MemoryLimit(tightest.total_bytes, free_bytes, tightest.file)


def _folders(groups: Path, mount: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's group and of all groups around it."""
    for line in (_read(groups) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        trees: tuple[Path, ...]
        if not controllers:
            trees, names = (mount, mount / "unified"), _VERSION_2
        elif "memory" in controllers.split(","):
            trees, names = (mount / "memory",), _VERSION_1
        else:
            continue
        inner = PurePosixPath("/", group)
        for tree in trees:
            for path in (inner, *inner.parents):
                # a container may see its own group only, at the root
                yield tree.joinpath(*path.parts[1:]), names


def _limit_of(folder: Path, names: _Names) -> MemoryLimit | None:
    total = _number(folder / names.limit)
    if total is None or total >= _NO_LIMIT_BYTES:
        return None
    used = _number(folder / names.usage) or 0.0
    droppable = 0.0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, size = line.partition(" ")
        if name == names.droppable and size.isdigit():
            droppable = float(size)
    free = min(max(total - max(used - droppable, 0.0), 0.0), total)
    return MemoryLimit(total, free, str(folder / names.limit))


def _number(path: Path) -> float | None:
    content = (_read(path) or "").strip()
    return float(content) if content.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
