"""Limits of control groups, in trees of files as versions 1 and 2 have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cephalo.accelerator.cgroup import MemoryLimit, memory_limit
from lightning_cephalo.accelerator.host import USABLE_SHARE, host_share

NO_LIMIT = str(2**63 - 4096)  # as version 1 writes it


def tree(folder: Path, groups: str, files: dict[str, str]) -> MemoryLimit | None:
    """The limit in a tree of these files, for a process in these groups."""
    (folder / "cgroup").write_text(groups)
    for name, content in files.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return memory_limit(folder / "cgroup", folder / "mount")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param(
            "0::/\n",
            {"memory.max": "1000", "memory.current": "300", "memory.stat": "inactive_file 100"},
            (1000, 800, "memory.max"),
            id="a container with version 2: dropped file pages are free",
        ),
        pytest.param(
            "0::/job/step\n",
            {
                "memory.stat": "anon 1",  # the root has no limit
                "job/memory.max": "500",
                "job/memory.current": "450",
                "job/step/memory.max": "max",
                "job/step/memory.current": "10",
            },
            (500, 50, "job/memory.max"),
            id="the limit of a group around it",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/memory.max": "500",
                "a/memory.current": "490",
                "a/b/memory.max": "100",
                "a/b/memory.current": "20",
            },
            (100, 10, "a/b/memory.max"),
            id="others fill the group around it",
        ),
        pytest.param(
            "0::/kubepods/pod1\n",
            {"memory.max": "1000", "memory.current": "1200"},
            (1000, 0, "memory.max"),
            id="a group that only the host sees under that name, and that is over its limit",
        ),
        pytest.param(
            "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/1\n0::/\n",
            {
                "memory/memory.limit_in_bytes": NO_LIMIT,
                "memory/docker/1/memory.limit_in_bytes": "2000",
                "memory/docker/1/memory.usage_in_bytes": "500",
                "memory/docker/1/memory.stat": "inactive_file 9\ntotal_inactive_file 200",
            },
            (2000, 1700, "memory/docker/1/memory.limit_in_bytes"),
            id="version 1",
        ),
        pytest.param(
            "3:memory:/\n0::/job\n",
            {"memory/memory.limit_in_bytes": NO_LIMIT, "unified/job/memory.max": "70"},
            (70, 70, "unified/job/memory.max"),
            id="both versions",
        ),
    ],
)
def test_the_tightest_limit_counts_with_what_is_free_below_all(tmp_path, groups, files, expected):
    total, free, file = expected
    found = tree(tmp_path, groups, files)
    assert found == MemoryLimit(total, free, str(tmp_path / "mount" / file))


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": "max"}),
        ("0::/\n", {}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT}),
        ("4:cpu:/\n", {"memory/memory.limit_in_bytes": "10", "memory.max": "10"}),
        ("nonsense\n\n::\n", {"memory.max": "many"}),
    ],
)
def test_without_a_limit_there_is_none(tmp_path, groups, files):
    assert tree(tmp_path, groups, files) is None


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    assert memory_limit(tmp_path / "absent", tmp_path) is None


def test_a_ranks_part_of_its_host_obeys_the_limit_and_names_it():
    free = host_share(1, lambda: None)
    assert free.limited_by == ""
    half = host_share(2, lambda: None)
    assert half.total_bytes == free.total_bytes / 2
    tight = host_share(4, lambda: MemoryLimit(4 * 2.0**20, 2.0**20, "/f/memory.max"))
    assert (tight.total_bytes, tight.free_bytes) == (2.0**20, 2.0**18 * USABLE_SHARE)
    assert tight.limited_by == "its control group (/f/memory.max: 4.0 MiB)"
    # a limit above the host's memory is none, but others may have filled it
    full = host_share(1, lambda: MemoryLimit(2.0**59, 0.0, "/f"))
    assert (full.total_bytes, full.free_bytes, full.limited_by) == (free.total_bytes, 0.0, "")
