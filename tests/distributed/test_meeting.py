"""Ranks that need all ranks wait for those that will come, and not for those that never will."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from launch import SOON_S, run_ranks

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks import meeting as meetings
from lightning_cephalo.ranks import switchboard
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.meeting import Meeting
from lightning_cephalo.ranks.switchboard import Switchboard

LOOK_S = 0.3


def _meeting(timeout_s: float = SOON_S) -> tuple[ControlGroup, Switchboard, Meeting]:
    control = ControlGroup(dist.new_group())
    switchboard = Switchboard.create(control, (0,) * control.world_size)
    meetings.FIRST_LOOK_S = meetings.LOOK_S = LOOK_S
    return control, switchboard, Meeting(switchboard, timedelta(seconds=timeout_s))


def _meets_often(rank):
    _, _, meeting = _meeting()
    for number in range(20):
        meeting.meet(f"doing {number}", "Do it.")
    return True


def test_ranks_that_all_come_go_on():
    assert run_ranks(3, _meets_often) == [True] * 3


def test_one_rank_meets_nobody():
    Meeting(None, timedelta(seconds=1)).meet("anything", "")


class _Unreachable:
    """A switchboard whose rank 0 cannot be asked."""

    rank, world_size = 1, 2

    def __init__(self, error: OSError) -> None:
        self.error = error

    def arrive(self, *_):
        raise self.error


def test_only_a_rank_that_has_ended_ends_a_meeting_without_an_error():
    lost = Meeting(_Unreachable(ConnectionResetError("gone")), timedelta(seconds=1))
    lost.meet("computing", "")
    full = Meeting(_Unreachable(OSError(errno.EMFILE, "too many open files")), timedelta(seconds=1))
    with pytest.raises(OSError, match="too many open files"):
        full.meet("computing", "")


def _comes_alone(rank):
    control, _, meeting = _meeting()
    said = ""
    if rank == 1:
        with pytest.raises(UnsupportedError) as raised:
            meeting.meet("calling a block", "Call it everywhere.")
        said = str(raised.value)
    control.gather(0.0)  # where the others have waited
    return said


def test_a_rank_that_comes_alone_says_who_waits_for_what():
    said = run_ranks(3, _comes_alone)[1]
    assert said.startswith("Rank 1 is calling a block, outside of hooks (_comes_alone in")
    assert "Meanwhile rank 0 waits outside of hooks (_comes_alone in test_meeting.py, line" in said
    assert "rank 2 waits" in said and said.endswith("They will not come. Call it everywhere.")


def _comes_for_another(rank):
    _, _, meeting = _meeting()
    with pytest.raises(UnsupportedError) as raised:
        meeting.meet(f"calling block {rank}", f"Call block {rank} everywhere.")
    return str(raised.value)


def test_ranks_that_come_for_different_things_all_say_so():
    for said in run_ranks(2, _comes_for_another):
        assert said.startswith("Every rank must do the same here, but rank 0 is calling block 0, ")
        assert "; rank 1 is calling block 1, " in said
        assert said.endswith(". Call block 0 everywhere. Call block 1 everywhere.")


def _comes_to_another(rank):
    control, _, meeting = _meeting()
    meeting._count = 7 * rank
    with pytest.raises(UnsupportedError, match="They will not come"):
        meeting.meet("calling a block", "")
    control.barrier()  # a rank that ends first would be missed, not waited for
    return True


def test_ranks_that_wait_in_different_meetings_do_not_wait_forever():
    assert run_ranks(2, _comes_to_another) == [True, True]


def _comes_late(rank):
    _, _, meeting = _meeting()
    if rank == 0:
        time.sleep(8 * LOOK_S)  # works; others look and go on waiting
    meeting.meet("writing", "")
    return True


def test_a_rank_that_works_is_waited_for():
    assert run_ranks(2, _comes_late) == [True, True]


def _waits_for_a_stopped_rank(rank):
    control, switchboard, meeting = _meeting(timeout_s=1.0)
    pids = control.gather(float(os.getpid()))
    if rank == 1:
        control.gather(0.0)
        return ""
    os.kill(int(pids[1]), signal.SIGSTOP)
    try:
        assert switchboard.where_is(1) is None
        with pytest.raises(UnsupportedError) as raised:
            meeting.meet("calling a block", "")
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)
    control.gather(0.0)
    return str(raised.value)


def test_a_stopped_rank_does_not_answer():
    assert "Meanwhile rank 1 does not answer." in run_ranks(2, _waits_for_a_stopped_rank)[0]


def _waits_for_an_ended_rank(rank):
    control, switchboard, meeting = _meeting()
    if rank == 1:
        switchboard.close()
    control.barrier()
    if rank == 0:
        with pytest.raises(ConnectionError):
            switchboard.where_is(1)
        meeting.meet("calling a block", "")  # what follows it fails
    control.barrier()
    return threading.active_count()


def test_nobody_waits_for_a_rank_that_has_ended_and_servers_leave_no_thread():
    assert run_ranks(2, _waits_for_an_ended_rank)[1] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not wake a server")
def test_a_server_is_woken_to_stop_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(switchboard, "_LOOKS_S", 10 * SOON_S)
    board = Switchboard(0, 2)
    port = board._server.server_address[1]
    with socket.create_connection(("localhost", port)) as connection:
        connection.sendall(b'{"ask": "whereabouts"}\n')
        assert connection.recv(1)  # it serves
    closing = threading.Thread(target=board.close, daemon=True)
    closing.start()
    closing.join(SOON_S)
    assert not closing.is_alive()


def _cannot_start_threads(rank):
    """Rank 1 may start no thread, and is asked and tells the others all the same."""
    control, made, _ = _meeting()
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    if rank == 1:
        threading.Thread.start = refuse
    control.barrier()
    answers = made.look()
    control.barrier()
    made.tell(f"rank {rank} ends")
    control.barrier()
    threading.Thread.start = start
    return [type(answer).__name__ for answer in answers.values()], set(made.heard())


def test_ranks_tell_and_are_asked_where_they_may_start_no_threads():
    for rank, (answers, heard) in enumerate(run_ranks(3, _cannot_start_threads)):
        assert answers == ["Whereabouts"] * 2
        assert heard == {f"rank {other} ends" for other in range(3) if other != rank}


def test_what_all_have_come_for_is_told_even_where_one_has_failed_since():
    meetings_of_all = switchboard._Meetings(2)
    meetings_of_all.arrive(1, 0, ("a", "here"), 0.0)
    meetings_of_all.end()
    came = meetings_of_all.arrive(1, 1, ("b", "there"), 0.0)
    assert came == {0: ("a", "here"), 1: ("b", "there")}
    assert meetings_of_all.arrive(2, 0, ("c", "here"), SOON_S) is None
