"""When a measurement counts as disturbed by other programs, and where the figures come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cephalo.profiling.disturbance import ProcessorUse, ProcessorWatch, disturbance


def use(ran_s: float, waited_s: float, busy_s: float, host: str = "na") -> ProcessorUse:
    return ProcessorUse(host, wall_s=4.0, ran_s=ran_s, waited_s=waited_s, busy_s=busy_s)


def test_ranks_that_wait_while_others_compute_are_disturbed():
    said = disturbance([use(1.2, 2.8, 8.0), use(0.8, 0.8, 8.0)])
    assert said.startswith("Other programs used 1.5 processors of 'na' while ranks were measured")
    assert "rank 0 could compute, it waited 70% for a processor" in said
    assert "remeasure=True" in said and "give a plan" in said


@pytest.mark.parametrize(
    "uses",
    [
        [use(2.0, 0.0, 4.0), use(2.0, 0.0, 4.0)],
        [use(2.0, 2.0, 4.0), use(2.0, 2.0, 4.0)],  # for each other: so they will in training
        [use(2.0, 0.1, 90.0), use(2.0, 0.1, 90.0)],  # on processors that no rank wants
        [use(2.0, 2.0, 4.9), use(2.0, 2.0, 4.9)],  # a little beside
        [use(0.0, 0.0, 8.0)],  # a rank without work
        [None, None],
        [],
    ],
    ids=["quiet", "crowded", "elsewhere", "little", "idle", "unknown", "none"],
)
def test_what_disturbs_nobody_is_not_told(uses):
    assert disturbance(uses) == ""


def test_hosts_are_judged_each_for_itself():
    said = disturbance([use(2.0, 0.0, 2.0), use(1.0, 3.0, 8.0, "nb"), None])
    assert "'nb'" in said and "'na'" not in said and "rank 1 could compute" in said


def test_a_window_shorter_than_the_kernels_ticks_can_tell_says_nothing():
    assert disturbance([ProcessorUse("na", 0.05, 0.01, 0.04, 0.1)]) == ""


def _kernel(proc: Path, waited_ns: int, ticks: int) -> None:
    task = proc / "self" / "task" / "7"
    task.mkdir(parents=True, exist_ok=True)
    (task / "schedstat").write_text(f"123 {waited_ns} 9\n")
    (proc / "stat").write_text(f"cpu  {ticks} 0 100 5000 40 0 0 50 0 0\ncpu0 1 2 3\n")


def test_the_kernels_figures_are_read_as_differences(tmp_path):
    _kernel(tmp_path, 1_000_000_000, 1000)
    watch = ProcessorWatch(tmp_path)
    _kernel(tmp_path, 3_500_000_000, 1200)
    found = watch.use()
    assert found is not None
    assert found.waited_s == pytest.approx(2.5)
    assert found.busy_s == pytest.approx(2.0)  # 200 ticks; neither idle nor waiting for a disk
    assert 0.0 <= found.ran_s <= found.wall_s + 1.0


def test_a_host_that_does_not_tell_is_not_judged(tmp_path):
    assert ProcessorWatch(tmp_path).use() is None
