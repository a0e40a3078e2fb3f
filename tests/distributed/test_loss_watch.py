"""A rank whose device waits for a rank that is gone waits no longer, and says which one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from launch import SOON_S, RankFailure, run_ranks

from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.crash_report import CrashReport
from lightning_cephalo.ranks.loss_watch import LossWatch
from lightning_cephalo.ranks.switchboard import Process, Switchboard

PATIENCE_S = 0.2


def _watched(patience_s=PATIENCE_S):
    """The connection, a watch, and what its abort sets: a wait for a device that it ends."""
    control = ControlGroup(dist.new_group(timeout=timedelta(seconds=SOON_S)))
    report = CrashReport(control, Switchboard.create(control, (0,) * control.world_size))
    aborted = threading.Event()
    watch = LossWatch.begin(report, aborted.set, patience_s)
    control.barrier()
    return control, report, watch, aborted


def test_all_ranks_learn_of_one_that_is_killed_and_stop_waiting(tmp_path):
    def rank(number):
        _, report, _, aborted = _watched()
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert aborted.wait(SOON_S), "this rank would wait for its device"
        lost = RuntimeError("NCCL communicator was aborted")
        report.on_exception(lost)
        (tmp_path / str(number)).write_text(str(lost))

    with pytest.raises(RankFailure, match=r"^rank 1:\ndied without a result$"):
        run_ranks(4, rank)
    said = [path.read_text() for path in tmp_path.iterdir()]
    # rank 3 is no neighbour of the one that is gone
    assert len(said) == 3
    for message in said:
        assert message.startswith("Rank 1 (process ") and "is gone" in message, message


def _fails_alone(rank):
    _, report, watch, aborted = _watched()
    if rank == 0:
        watch.stand_down()
        report.on_exception(ValueError("only here"))
        return aborted.wait(3 * PATIENCE_S), report.switchboard.heard()
    waits = aborted.wait(SOON_S)
    return waits, report.switchboard.heard()


def test_a_rank_that_fails_alone_aborts_the_waits_of_the_others_only():
    (own, own_heard), (other, heard) = run_ranks(2, _fails_alone)
    assert not own and other
    assert own_heard == [] and "only here" in heard[0]


def _one_ends_before(rank):
    _, report, watch, aborted = _watched()
    if rank == 1:
        watch.end()
        return None
    ended = aborted.wait(10 * PATIENCE_S)
    watch.end()
    return ended, report.switchboard.heard()


def test_a_rank_that_ends_well_is_no_loss():
    first, _ = run_ranks(2, _one_ends_before)
    assert first == (False, [])


def _link_is_cut(rank):
    control, report, watch, aborted = _watched()
    if rank == 0:
        watch._link.shutdown(2)
    ended = aborted.wait(10 * PATIENCE_S)
    control.barrier()
    watch.end()
    return ended, report.switchboard.heard()


def test_a_cut_connection_between_ranks_that_live_is_no_loss():
    assert run_ranks(2, _link_is_cut) == [(False, []), (False, [])]


def test_a_rank_that_ends_before_it_answers_is_not_waited_for():
    with socket.create_server(("localhost", 0)) as server:
        board = Switchboard(0, 2)
        processes = [board.process("na"), Process.here("na", server.getsockname()[1])]
        board.know(processes)
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        with pytest.raises(ConnectionError):
            board.stay_with(1)
        closing.join()
        board.close()


def test_one_rank_watches_nobody():
    def alone(rank):
        return LossWatch.begin(CrashReport(ControlGroup(dist.group.WORLD), None), lambda: None)

    assert run_ranks(1, alone) == [None]
