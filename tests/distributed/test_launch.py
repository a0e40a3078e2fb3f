"""What starts ranks for tests waits for them, and not for long once one has failed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
import weakref

import launch
import pytest

from lightning_cephalo.ranks import connection, ending


def _fails_first(rank):
    if rank == 0:
        raise ValueError("boom")
    time.sleep(launch.SOON_S)


def test_ranks_that_outlive_a_failure_are_ended_and_named(monkeypatch):
    monkeypatch.setattr(launch, "AFTER_FAILURE_S", 0.1)
    with pytest.raises(launch.RankFailure) as failed:
        launch.run_ranks(3, _fails_first, process_group=False)
    said = str(failed.value)
    assert "rank 0:\n" in said and "ValueError: boom" in said
    assert said.endswith("ranks [1, 2] were still running 0.1 s after rank 0 had failed")


def _hangs(rank):
    time.sleep(launch.SOON_S)


def test_ranks_that_hang_are_ended_after_their_time():
    with pytest.raises(launch.RankFailure, match=r"ranks \[0, 1\] were still running after 0.2 s$"):
        launch.run_ranks(2, _hangs, timeout_s=0.2, process_group=False)


def _has_a_slow_neighbour(rank):
    time.sleep(0.3 * rank)
    return rank


def test_ranks_that_end_one_after_another_are_waited_for():
    assert launch.run_ranks(3, _has_a_slow_neighbour, process_group=False) == [0, 1, 2]


class _Holds:
    def __init__(self, failed_alone):
        self.failed_alone = failed_alone

    def forget_groups(self):
        pass


def _has_text(file):
    file.write("all")
    return lambda: file  # it lives on, as in a cycle


def _file(folder):
    return _has_text((folder / "text").open("w"))


def _pipe_to_another(folder):
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        signal.alarm(10)
        os.close(writing)
        (folder / "text").write_bytes(os.read(reading, 3))
        os._exit(0)
    os.close(reading)
    kept = _has_text(os.fdopen(writing, "w"))
    return lambda: os.waitpid(other, 0) and kept


def _terminal(folder):
    reading, writing = pty.openpty()
    os.set_blocking(reading, False)
    kept = _has_text(os.fdopen(writing, "w"))
    return lambda: (folder / "text").write_bytes(os.read(reading, 3)) and kept


def _nothing_to_write(folder):
    """What ranks have open: sockets, pipes to themselves, files to read, mappings."""
    kept = [*socket.socketpair(), *os.pipe(), (folder / "read").open("w+").close()]
    kept += [(folder / "read").open(), os.open(os.devnull, os.O_WRONLY)]
    with (folder / "mapped").open("wb+") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
    return lambda: kept


def _file_of_a_library(folder):
    """Python knows its descriptor only; the library would write it when the process ends."""
    number = os.open(folder / "text", os.O_WRONLY | os.O_CREAT)
    return lambda: os.write(number, b"all")


def _writes_at_its_end(folder):
    class WritesAtItsEnd:
        def __del__(self):
            pass

    kept = WritesAtItsEnd()
    return lambda: kept


def _leaves(rank, folder, failed_alone, made=None):
    """Whether the interpreter still looks for cycles, has searched all, and skips destructors."""
    gc.freeze()  # what other tests have made
    for number in os.listdir("/proc/self/fd"):  # as above: pytest has files open
        with contextlib.suppress(OSError):
            if int(number) > 2 and not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                os.close(int(number))
    frozen, searched, skipped = gc.get_freeze_count(), [], []
    look, kept = gc.get_objects, ending.skip_destructors
    behind = made(folder) if made else None
    holder = _Holds(failed_alone)
    known = connection.Connection(None)
    known.hold(holder)
    gc.get_objects = lambda: [searched.append(True), look()][1]
    ending.skip_destructors = lambda: skipped.append(True)
    connection._leave(weakref.ref(known))
    if behind is not None:
        behind()
    looks = gc.get_freeze_count() == frozen and kept is not None
    return looks, bool(searched), bool(skipped)


def _written(path):
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others search all objects")
def test_a_rank_that_fails_ends_soon_and_loses_nothing_that_it_writes(tmp_path):
    """Also where the script catches the error, and ends otherwise."""
    for given, looks, searches, skips, written in (
        ((False,), True, False, False, ""),
        ((True,), False, False, True, ""),
        ((True, _nothing_to_write), False, False, True, ""),
        ((True, _file), False, True, True, "all"),
        ((True, _pipe_to_another), False, True, True, "all"),
        # its other side is a terminal, too, and no file of Python's
        ((True, _terminal), False, True, False, "all"),
        ((True, _file_of_a_library), False, True, False, "all"),
        ((True, _writes_at_its_end), True, True, False, ""),
    ):
        folder = tmp_path / str(given)
        folder.mkdir()
        found = launch.run_ranks(1, _leaves, folder, *given, process_group=False)
        assert found == [(looks, searches, skips)], given
        assert _written(folder / "text") == written, given


_ENDS_WITHOUT = """
import ctypes, sys
from lightning_cephalo.ranks import ending
system = ctypes.CDLL(None)
system.on_exit(system.abort, None)  # as a handler of a library
print("not written yet", end="")
if sys.argv[1] == "without":
    ending.skip_destructors()
raise SystemExit(7)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="only glibc has on_exit")
def test_a_process_without_destructors_keeps_its_status_and_what_it_has_printed():
    for how, status in (("with", -signal.SIGABRT), ("without", 7)):
        ended = subprocess.run(
            [sys.executable, "-c", _ENDS_WITHOUT, how], capture_output=True, text=True
        )
        assert (ended.returncode, ended.stdout) == (status, "not written yet"), ended.stderr
