"""A rank that is lost or fails while all connect is named by all others, and none hangs."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from launch import SOON_S, run_ranks, torchrun_environments
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_cephalo import run
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks import connecting, launch, roll_call
from lightning_cephalo.ranks.connecting import Lookout, Watch, connect_watched, within
from lightning_cephalo.ranks.crash_report import is_lost_connection
from lightning_cephalo.ranks.starter import STARTER, TOLD
from lightning_cephalo.ranks.switchboard import Process, Switchboard

SOON = timedelta(seconds=SOON_S)
SHORT_S = 1.0


class _Holder:
    failed_alone = False

    def forget_groups(self) -> None:
        pass


class _OnlyHereError(Exception):
    pass


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise _OnlyHereError("only here")


def _instead(owner, name, fault, calls):
    """Let a function fail where it is called for the given time."""
    function, counted = getattr(owner, name), iter(range(calls, 0, -1))

    def called(*args, **options):
        if next(counted, None) == 1:
            fault()
        return function(*args, **options)

    setattr(owner, name, called)


def _rank_main(rank, environment, lost, fault, place, timeout, answers):
    os.environ.update(environment)
    torch.set_num_threads(1)
    roll_call._HEARING = timedelta(seconds=SHORT_S)
    connecting._LATER_S = 0.2
    if rank == lost:
        owner, name, calls = PLACES[place]
        _instead(owner, name, fault, calls)
    begin_s = time.monotonic()
    try:
        launch.connect(TorchElasticEnvironment(), "gloo", timeout, torch.device("cpu"))
        launch.ranks_for(_Holder(), timeout, 0)
    except Exception as error:
        answers.put((rank, type(error), str(error), time.monotonic() - begin_s))
        if rank == lost:
            time.sleep(SOON_S)  # a notebook's process goes on
        raise SystemExit(1) from None
    answers.put((rank, None, "", time.monotonic() - begin_s))


PLACES = {
    "in the roll call": (roll_call, "answer_the_call", 1),
    "before the default group": (launch, "_init_dist_connection", 1),
    "before the second group": (dist, "new_group", 2),
}
"""Where a fault comes: a function, and which of its calls."""


def _ends(world_size, lost, fault, place, timeout=SOON):
    """How all other ranks end: kinds of errors, texts, seconds. All processes end."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(
            target=_rank_main, args=(rank, environment, lost, fault, place, timeout, answers)
        )
        for rank, environment in enumerate(torchrun_environments(world_size))
    ]
    for process in ranks:
        process.start()
    try:
        others = [process for rank, process in enumerate(ranks) if rank != lost]
        found = {}
        while len(found) < len(others):
            rank, *end = answers.get(timeout=SOON_S / 2)
            if rank != lost:
                found[rank] = end
        for process in others:
            process.join(SOON_S / 2)
            assert not process.is_alive(), "a rank has raised, but its process does not end"
        return ranks[lost].pid, found
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("place", ["before the default group", "before the second group"])
def test_a_killed_rank_is_named_by_all_others_long_before_the_timeout(place, lost):
    number, found = _ends(3, lost, _die, place)
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        if place == "before the second group":  # all have read who is there
            assert text.startswith(f"Rank {lost} (process {number} on host ") and "is gone" in text
        assert f"ank {lost}" in text and "gone" in text
        assert "Exception raised from" not in text and "frame #" not in text
        assert took_s < SOON_S / 4


def test_an_error_of_one_rank_is_told_to_all_others_also_where_its_process_goes_on():
    number, found = _ends(3, 1, _fail, "before the second group")
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        assert text.startswith(f"Rank 1 (process {number} on host ")
        assert "failed: _OnlyHereError: only here" in text.splitlines()[0]
        assert took_s < SOON_S / 4


@pytest.mark.parametrize("place", ["in the roll call", "before the second group"])
def test_a_stopped_first_rank_whose_store_others_wait_for_is_named(place):
    timeout = timedelta(seconds=SHORT_S)
    _, found = _ends(2, 0, _stop, place, timeout)
    ((kind, text, took_s),) = found.values()
    assert kind is RemoteRankError
    assert "ank 0" in text
    assert took_s < SOON_S / 4


def test_a_stopped_rank_is_named_after_the_timeout():
    number, found = _ends(3, 1, _stop, "before the second group", timedelta(seconds=SHORT_S))
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        assert text.startswith(f"Rank 1 (process {number} on host ")
        assert "is silent: the process is stopped, or its host cannot be reached" in text
        assert took_s < SOON_S / 4


# -- while some wait in the store for others ------------------------------------------------------


_STEPS = ("starts", "meets", "is connected", "has its groups", "has passed the barrier", "waits")
"""What ranks tell of, in turn, so that a test that waits in vain says where each one is."""


def _waits_rank(rank, environment, lost, fault, timeout, is_first, waiting, steps, answers):
    """Meet the others, once or a second time; ``waiting`` counts those that wait in the store."""

    def tell(step):
        steps[rank] = _STEPS.index(step)

    os.environ.update(environment)
    torch.set_num_threads(1)
    # rank 0 looks for 2 s at most, twice, for one that is stopped
    roll_call._HEARING = timedelta(seconds=5 * SHORT_S)
    connecting._LATER_S = 0.2
    meets = partial(launch.connect, TorchElasticEnvironment(), "gloo", device=torch.device("cpu"))
    if not is_first:
        tell("meets")
        try:
            # it ends before the parent's wait does, and says why
            meets(timeout=SOON / 4)
            tell("is connected")
            launch.ranks_for(_Holder(), SOON / 4, 0)
            tell("has its groups")
            dist.barrier()
        except Exception as error:
            answers.put((rank, type(error), f"in the first meeting: {error}", 0.0))
            raise
        tell("has passed the barrier")
        launch.close_groups()  # as behind an error of one rank alone
        if rank == lost:
            _wait_for_all(waiting, 2)
            fault()
    elif rank == LATE:
        time.sleep(SOON_S)
    function = launch.store_of_all

    def store_of_all(*args):
        tell("waits")
        waiting.release()
        return function(*args)

    launch.store_of_all = store_of_all
    if is_first and rank == lost:
        threading.Thread(target=_once_there, args=(waiting, fault), daemon=True).start()
    begin_s = time.monotonic()
    try:
        meets(timeout=timeout)
    except Exception as error:
        answers.put((rank, type(error), str(error), time.monotonic() - begin_s))
        raise SystemExit(1) from None
    answers.put((rank, None, "", time.monotonic() - begin_s))


LATE = 3


def _wait_for_all(waiting, count):
    for _ in range(count):
        waiting.acquire()
    time.sleep(0.3)  # they also begin to wait


def _once_there(waiting, fault):
    _wait_for_all(waiting, 3)
    time.sleep(3.0)  # this one has answered, on a busy machine, too: else nobody knows of it
    fault()


def _ends_of_those_that_wait(lost, fault, is_first, timeout=SOON):
    """How the ranks end that wait while another one is lost; its process number."""
    context = multiprocessing.get_context("fork")
    answers, waiting = context.Queue(), context.Semaphore(0)
    environments = torchrun_environments(4 if is_first else 3)
    steps = context.Array("i", len(environments), lock=False)
    given = (lost, fault, timeout, is_first, waiting, steps, answers)
    ranks = [
        context.Process(target=_waits_rank, args=(rank, environment, *given))
        for rank, environment in enumerate(environments)
    ]
    for process in ranks:
        process.start()
    try:
        found = {}
        while len(found) < 2:
            try:
                rank, *end = answers.get(timeout=SOON_S / 2)
            except queue.Empty:
                told = [(_STEPS[step], p.exitcode) for step, p in zip(steps, ranks, strict=True)]
                pytest.fail(f"only {found} have answered; last steps and exit codes: {told}")
            found[rank] = end
        return ranks[lost].pid, found
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_while_others_wait_for_another_trainer_is_named(lost):
    number, found = _ends_of_those_that_wait(lost, _die, is_first=False)
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        assert f"Rank {lost} (process {number} on host " in text and "gone by now" in text
        assert took_s < SOON_S / 4


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_stopped_while_others_wait_for_another_trainer_is_named(lost):
    timeout = timedelta(seconds=SHORT_S)
    number, found = _ends_of_those_that_wait(lost, _stop, is_first=False, timeout=timeout)
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        assert f"ank {lost} (process {number} on host " in text and "is silent" in text
        assert took_s < SOON_S / 4


def test_a_rank_that_has_come_and_is_killed_while_others_wait_for_a_late_one_is_named():
    number, found = _ends_of_those_that_wait(1, _die, is_first=True)
    for kind, text, took_s in found.values():
        assert kind is RemoteRankError
        assert text.startswith(f"Rank 1 (process {number} on host ") and "is gone" in text
        assert took_s < SOON_S / 4


def _is_started(rank, environment, starter, answers):
    os.environ.update(environment, **{STARTER: str(starter)})
    begin_s = time.monotonic()
    try:
        launch.connect(TorchElasticEnvironment(), "gloo", SOON, torch.device("cpu"))
    except Exception as error:
        answers.put((type(error), str(error), time.monotonic() - begin_s))


def test_a_rank_whose_starter_is_killed_before_ranks_meet_names_it():
    """As where Lightning's launcher starts ranks, and the first one ends before the others come."""
    context = multiprocessing.get_context("fork")
    answers, environments = context.Queue(), torchrun_environments(2)
    starter = context.Process(target=time.sleep, args=(SOON_S,))
    starter.start()
    started = context.Process(target=_is_started, args=(1, environments[1], starter.pid, answers))
    started.start()
    starter.kill()
    starter.join()
    try:
        kind, text, took_s = answers.get(timeout=SOON_S / 2)
    finally:
        started.kill()
        started.join()
    assert kind is RemoteRankError
    assert text.startswith(f"Rank 0 (process {starter.pid} on host ") and "is gone" in text
    assert took_s < SOON_S / 4


def _starts(environment, codes, answers):
    """Meet processes that this one has started, which end or never come."""
    os.environ.update(environment)
    started = [subprocess.Popen(["sh", "-c", code]) for code in codes]
    begin_s = time.monotonic()
    try:
        environment, device = TorchElasticEnvironment(), torch.device("cpu")
        launch.connect(environment, "gloo", SOON, device, started)
    except Exception as error:
        took_s = time.monotonic() - begin_s
        answers.put((type(error), str(error), took_s, [process.pid for process in started]))
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("codes", "rank", "how"),
    [
        (("exit 3", "exec sleep 300"), 1, "ended with status 3"),
        (("exec sleep 300", "kill -9 $$"), 2, "was killed by signal 9"),
        (("exit 0", "exec sleep 300"), 1, "ended with status 0"),
    ],
)
def test_a_rank_that_ends_before_it_comes_is_named_by_the_rank_that_has_started_it(
    codes, rank, how
):
    """As with Lightning's launcher, whose thread kills all ranks later, and says nothing."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    environment = torchrun_environments(3)[0]
    starter = context.Process(target=_starts, args=(environment, codes, answers))
    starter.start()
    try:
        kind, text, took_s, numbers = answers.get(timeout=SOON_S / 2)
    finally:
        starter.kill()
        starter.join()
    assert kind is RemoteRankError
    assert text.startswith(f"Rank {rank} (process {numbers[rank - 1]} on host ")
    assert f"which rank 0 has started, is gone: the process {how} before it came" in text
    assert took_s < SOON_S / 4


# -- what ranks see of each other -----------------------------------------------------------------


def _boards(places):
    boards = [Switchboard(rank, len(places)) for rank in range(len(places))]
    processes = [board.process(place) for board, place in zip(boards, places, strict=True)]
    for board in boards:
        board.know(processes)
    return boards


def test_a_host_that_refuses_connections_counts_as_lost_only_if_it_has_answered():
    first, second = _boards(["a", "b"])
    watch = Lookout(first)
    second.close()
    watch()
    first, second = _boards(["a", "b"])
    watch = Lookout(first)
    watch()
    second.close()
    with pytest.raises(dist.DistNetworkError, match="rank 1 has ended"):
        watch()
    first.close()


def test_a_call_that_does_not_return_is_left_after_its_limit_and_its_error_is_raised():
    begin_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"nothing has come for 0\.1 s"):
        within(0.1, partial(time.sleep, SOON_S))
    assert time.monotonic() - begin_s < SOON_S / 4
    with pytest.raises(_OnlyHereError):
        within(SOON_S, _fail)
    assert within(SOON_S, lambda: 3) == 3


def test_where_no_thread_starts_a_rank_connects_by_itself(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    assert within(SOON_S, lambda: 3) == 3


def test_a_rank_hears_of_a_failure_while_torch_hangs():
    first, second = _boards(["a", "a"])
    second.tell("Rank 1 failed: it said so")
    with pytest.raises(RemoteRankError, match="Rank 1 failed: it said so"):
        connect_watched(first, "gloo", partial(time.sleep, SOON_S), SOON, "Start again.")
    for board in (first, second):
        board.close()


def test_a_rank_that_waits_for_others_prints_nothing(capfd):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    here, wait = Process.here("na"), timedelta(seconds=0.5)
    short = timedelta(milliseconds=1)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(RemoteRankError):
        patched.setattr(roll_call, "_HEARING", short)
        roll_call.answer_the_call(client, 1, here, 2, "gloo", wait)
    assert capfd.readouterr().err == ""


def test_a_connection_that_gloo_cannot_make_is_a_lost_one():
    """As it is seen where a rank is killed while others connect to it."""
    said = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: refused"
    assert is_lost_connection(RuntimeError(said))


@pytest.mark.parametrize(
    "said",
    [
        "Socket closed while https://data.example was read",
        "[Errno 104] Connection reset by peer",
        "download failed: [Errno 32] Broken pipe",
    ],
)
def test_a_download_that_breaks_off_is_no_lost_rank(said):
    assert not is_lost_connection(RuntimeError(said))
    lost = f"[/gloo/transport/tcp/pair.cc:534] {said}"
    assert is_lost_connection(RuntimeError(lost))
    assert is_lost_connection(RuntimeError("ncclRemoteError: a call failed"))


def test_hosts_with_equal_names_are_told_apart():
    """Such as containers."""
    board = Switchboard(0, 2)
    board.know([Process("na", address, 7, 4711, address) for address in ("10.0.0.1", "10.0.0.2")])
    assert board.name_of(0) == "Rank 0 (process 4711 on host na, 10.0.0.1)"
    assert board.name_of(1) == "Rank 1 (process 4711 on host na, 10.0.0.2)"
    board.close()


class _Board:
    """Another rank has told of a loss; no rank that has come is known."""

    rank, world_size = 1, 3

    def knows_of_this_run(self):
        return True

    def heard(self):
        return ["Rank 0 (process 7 on host here) is gone."]

    def look(self, ranks=()):
        return {}


def test_a_rank_that_waits_says_what_it_has_heard_of_a_loss():
    with pytest.raises(RemoteRankError, match="Rank 0 \\(process 7 on host here\\) is gone"):
        Watch(_Board()).look({})


# -- under the agent ------------------------------------------------------------------------------


def _ends_well_or_connects(rank, environments, folder):
    os.environ.update(environments[rank], **{TOLD: str(folder)})
    if rank == 1:
        run.run_script(str(folder.parent / "script.py"), [])
        return os.getpid()
    begin_s = time.monotonic()
    device = torch.device("cpu")
    with pytest.raises(RemoteRankError) as raised:
        launch.connect(TorchElasticEnvironment(), "gloo", timeout=SOON, device=device)
    return str(raised.value), time.monotonic() - begin_s


def test_a_rank_that_ends_well_before_it_comes_is_named_by_ranks_of_its_host(tmp_path):
    folder = tmp_path / "told"
    folder.mkdir()
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    first, process, last = run_ranks(
        3, _ends_well_or_connects, torchrun_environments(3), folder, process_group=False
    )
    for text, took_s in (first, last):
        assert text.startswith(f"Rank 1 (process {process} on host ")
        assert "its script ended with status 0 before it came to the others" in text
        assert took_s < SOON_S / 4
