"""A rank that loses another one says which, where it ran and what is known, and never hangs."""

from __future__ import annotations

import math
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import SOON_S, RankFailure, run_ranks

from lightning_cephalo.ranks import crash_report
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.crash_report import CrashReport
from lightning_cephalo.ranks.groups import Groups
from lightning_cephalo.ranks.switchboard import Switchboard, _Failures

TIMEOUT_S = 4.0


def _report() -> tuple[ControlGroup, CrashReport, list[int]]:
    control = ControlGroup(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)))
    report = CrashReport(control, Switchboard.create(control, (0,) * control.world_size))
    pids = [int(pid) for pid in control.gather(float(os.getpid()))]
    return control, report, pids


def _said(report: CrashReport, exception: BaseException) -> str:
    started_s = time.monotonic()
    report.on_exception(exception)
    assert time.monotonic() - started_s < SOON_S
    return str(exception)


def _lost(folder, signal_number, lost, rank):
    control, report, pids = _report()
    if rank == lost:
        os.kill(pids[rank], signal_number)
    with pytest.raises(RuntimeError) as raised:
        control.barrier()
    (folder / str(rank)).write_text(f"{pids[lost]}\n{_said(report, raised.value)}")
    if signal_number == signal.SIGSTOP and rank == 1:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.1)  # the other one asks the stopped rank, too
        os.kill(pids[lost], signal.SIGKILL)


@pytest.mark.parametrize(
    ("signal_number", "lost", "known"),
    [
        (signal.SIGKILL, 1, "is gone: the process ended without a message, or was killed"),
        (signal.SIGSTOP, 0, "is silent: the process is stopped, or its host cannot be reached"),
        (signal.SIGSTOP, 2, "is silent: the process is stopped, or its host cannot be reached"),
    ],
)
def test_every_remaining_rank_names_the_one_that_is_lost(tmp_path, signal_number, lost, known):
    with pytest.raises(RankFailure, match=rf"^rank {lost}:\ndied without a result$"):
        run_ranks(3, lambda rank: _lost(tmp_path, signal_number, lost, rank))
    said = [path.read_text().split("\n", 1) for path in tmp_path.iterdir()]
    assert len(said) == 2
    for pid, message in said:
        assert message.startswith(f"Rank {lost} (process {pid} on host "), message
        assert known in message and "Exception raised from" not in message
        assert "\nThis rank then lost its connection: " in message


def test_a_rank_that_ends_because_of_another_one_is_not_named(tmp_path):
    def rank(number):
        if number == 0:
            with pytest.raises(RuntimeError) as raised:
                _, report, _ = _report()
                dist.recv(torch.zeros(1), src=1)
            _said(report, raised.value)
            os._exit(0)
        if number == 1:
            _report()
            os._exit(0)
        _, report, _ = _report()
        with pytest.raises(RuntimeError) as raised:
            dist.recv(torch.zeros(1), src=0)
        (tmp_path / "said").write_text(_said(report, raised.value))

    with pytest.raises(RankFailure):
        run_ranks(3, rank)
    assert (tmp_path / "said").read_text().startswith("Rank 1 (process")


def test_the_error_of_a_rank_that_fails_alone_is_told_everywhere_without_frames():
    first, second, third = run_ranks(3, _fails_and_leaves)
    for said, pid in (first, third):
        assert said.startswith(f"Rank 1 (process {pid} on host "), said
        assert " failed: RuntimeError: only \\x1b[2Jhere\nThis rank then lost" in said
    assert second[0].startswith("only \x1b[2Jhere\nException")


def _fails_and_leaves(rank):
    control, report, pids = _report()
    if rank == 1:
        error = RuntimeError("only \x1b[2Jhere\nException raised from nowhere:\nframe #0")
        return _said(report, error), pids[1]
    with pytest.raises(RuntimeError) as raised:
        control.barrier()  # rank 1 does not come
    return _said(report, raised.value), pids[1]


def _works(seconds):
    time.sleep(seconds)


def _comes_late(rank):
    control, report, _ = _report()
    if rank == 1:
        _works(TIMEOUT_S + 2.0)
        return ""
    with pytest.raises(RuntimeError) as raised:
        control.barrier()
    return _said(report, raised.value)


def test_a_rank_that_works_elsewhere_is_named_with_its_line():
    first = run_ranks(2, _comes_late)[0]
    assert first.startswith("No other rank has ended"), first
    assert "Rank 1 (process" in first and "works outside of hooks (_works in" in first


def test_all_ranks_get_one_verdict_on_whether_all_have_failed():
    failures = _Failures(2)

    def fail(run, rank, position, *, gives_up=False):
        return failures.fail(run, rank, position, 0.0, gives_up)["verdict"]

    assert fail(1, 0, [3, 1]) is None and fail(1, 1, [3, 1]) is True
    assert fail(1, 0, [3, 1], gives_up=True) is True  # the other one has been told
    assert fail(2, 0, [3, 1], gives_up=True) is False and fail(2, 1, [3, 1]) is False
    assert fail(3, 0, [3, 1]) is None and fail(3, 1, [4, 1]) is False


def test_ranks_that_fail_by_themselves_share_that_and_none_waits_for_one_in_a_collective():
    def fail(rank):
        crash_report._PATIENCE_S = math.inf
        groups = Groups.create(timedelta(seconds=SOON_S))
        switchboard = groups.meeting.switchboard
        report = CrashReport(groups.control, switchboard)
        report.on_exception(ValueError("each by itself"))
        together = report.all_fail(ValueError("each by itself"))
        assert switchboard.heard() == []
        groups.meeting.meet("going on", "")
        switchboard.begin_run()
        alone = rank == 1 and report.all_fail(ValueError("alone"))
        groups.control.barrier()
        return together, alone

    assert run_ranks(2, fail) == [(True, False), (True, False)]
