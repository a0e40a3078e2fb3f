"""Agents of several hosts meet whatever their clocks say, and lose only what is silent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
import torch.distributed as dist
from launch import port_to_meet
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from lightning_cephalo.ranks import agents
from lightning_cephalo.ranks.agents import OwnClock, Watch, answers, limit_silence, may_meet_at

LAST_CALL_S = 3
_BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Shared(torchs.RendezvousBackend):
    """A state in this process, written as torch's store does it."""

    name = "shared"

    def __init__(self):
        self.state, self.token = None, 0

    def get_state(self):
        return None if self.state is None else (self.state, self.token)

    def set_state(self, state, token=None):
        has_set = self.state is None or token == self.token
        if has_set:
            self.state, self.token = state, self.token + 1
        return self.state, self.token, has_set


class Hosts:
    """Hosts whose clocks differ, and an hour that passes on all of them."""

    def __init__(self, monkeypatch, *hours_apart):
        self.passed_s, self._at, shared = 0.0, 0, Shared()
        self._apart = [timedelta(hours=hours) for hours in hours_apart]
        settings = torchs.RendezvousSettings(
            "job", 1, 3, torchs.RendezvousTimeout(), timedelta(seconds=1), 3
        )
        hosts = self

        class Clock(datetime):
            @classmethod
            def now(cls, _):
                return hosts.now(hosts._at)

        monkeypatch.setattr(torchs, "datetime", Clock)
        self.holders = []
        for host in range(len(hours_apart)):
            clock = {"clock_s": lambda: self.passed_s, "now": lambda host=host: self.now(host)}
            backend = OwnClock(shared, LAST_CALL_S, **clock)
            self.holders.append(
                torchs._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
            )
        self.nodes = [torchs._NodeDesc(str(host), 1, 1) for host in range(len(hours_apart))]

    def now(self, host):
        return _BEGIN + timedelta(seconds=self.passed_s) + self._apart[host]

    def look(self, host, *, beats=False):
        """Let a host read the state, and say that it is there; return it."""
        self._at, holder = host, self.holders[host]
        holder.sync()
        if beats:
            holder.state.participants[self.nodes[host]] = host
            holder.state.last_heartbeats[self.nodes[host]] = self.now(host)
            holder.mark_dirty()
            assert holder.sync()
        return holder.state

    def pass_by(self, seconds, *running):
        """Let seconds pass, in which some hosts say that they are there."""
        for _ in range(seconds):
            self.passed_s += 1.0
            for host in running:
                self.look(host, beats=True)

    def present(self, host):
        """Return the hosts that one sees."""
        return sorted(self.nodes.index(node) for node in self.look(host).participants)


def test_hosts_whose_clocks_differ_stay_and_only_a_silent_one_is_lost(monkeypatch):
    hosts = Hosts(monkeypatch, 0, -1, 2)
    hosts.pass_by(20, 0, 1, 2)
    assert [hosts.present(host) for host in range(3)] == [[0, 1, 2]] * 3
    hosts.pass_by(3, 0, 1)
    assert hosts.present(0) == [0, 1, 2]
    hosts.pass_by(1, 0, 1)
    assert hosts.present(0) == hosts.present(1) == [0, 1]


def test_a_host_that_did_not_run_takes_no_other_for_lost(monkeypatch):
    hosts = Hosts(monkeypatch, 0, 0)
    hosts.pass_by(5, 0, 1)
    hosts.passed_s += 60.0  # neither has run, as on a machine that does much else
    assert hosts.present(0) == hosts.present(1) == [0, 1]
    hosts.pass_by(2, 0, 1)
    assert hosts.present(0) == hosts.present(1) == [0, 1]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_did_not_run_behind_an_old_sign_takes_not_itself_for_lost(monkeypatch, stopped):
    hosts = Hosts(monkeypatch, 0, 0)
    hosts.pass_by(5, 0, 1)
    hosts.passed_s += 1.5
    assert hosts.present(stopped) == [0, 1]
    hosts.passed_s += 60.0
    assert hosts.present(stopped) == [0, 1]


def test_a_clock_that_is_set_anew_changes_nothing(monkeypatch):
    hosts = Hosts(monkeypatch, 0, 0)
    hosts.pass_by(5, 0, 1)
    hosts._apart[0] += timedelta(minutes=10)
    assert hosts.present(0) == hosts.present(1) == [0, 1]


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_last_call_is_as_long_for_all(monkeypatch, hours):
    hosts = Hosts(monkeypatch, 0, hours)
    state = hosts.look(1, beats=True)
    state.deadline = hosts.now(1) + timedelta(seconds=LAST_CALL_S)
    hosts.holders[1].mark_dirty()
    for passed_s in range(LAST_CALL_S + 1):
        for host in (1, 0):
            left = hosts.look(host, beats=True).deadline - hosts.now(host)
            assert left == timedelta(seconds=LAST_CALL_S - passed_s)
        hosts.passed_s += 1.0


def _store(port=0):
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_agents_may_meet_where_somebody_answers_or_this_host_may():
    store = _store()
    endpoint = f"127.0.0.1:{store.port}"
    assert answers(endpoint) and may_meet_at(endpoint, 0.0)
    del store
    assert not answers(endpoint) and may_meet_at(endpoint, 0.0)  # this host can listen there
    assert not may_meet_at("192.0.2.1:29400", 0.0)  # an address that nobody has


def test_a_host_whose_process_is_stopped_does_not_answer(monkeypatch):
    """Its kernel takes connections."""
    monkeypatch.setattr(agents, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert not answers(endpoint) and not may_meet_at(endpoint, 0.0)


def test_agents_wait_until_somebody_answers(monkeypatch):
    def fails(*_):
        raise OSError

    monkeypatch.setattr(socket, "create_server", fails)  # as on a host with another address
    port, stores = port_to_meet(), []
    later = threading.Timer(0.1, lambda: stores.append(_store(port)))
    later.start()
    assert may_meet_at(f"127.0.0.1:{port}", time.monotonic() + 60.0, look_s=0.01)
    later.join()


@pytest.mark.parametrize("ends", [False, True])
def test_a_wait_for_a_store_that_answers_no_more_ends_and_for_one_that_answers_goes_on(ends):
    """A wait for another agent's word may be long: the store's own answers count."""
    number, port = _stops_after_a_second(ends)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    Watch("127.0.0.1", port, silent_s=2.0, look_s=0.05).begin()
    begin_s = time.monotonic()
    try:
        store.wait(["never"], timedelta(seconds=6 if not ends else 300))
    except dist.DistError:
        assert (time.monotonic() - begin_s < 6) == ends
    else:
        raise AssertionError("the key has come")
    finally:
        os.kill(number, signal.SIGKILL)


def _stops_after_a_second(ends):
    """The process of a store, and its port."""
    ours, theirs = multiprocessing.Pipe()

    def serve():
        store = _store()
        theirs.send(store.port)
        time.sleep(1.0)
        if ends:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60.0)

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    return process.pid, ours.recv()


def test_other_kinds_of_connections_are_left_alone():
    """Such as those between the threads of asyncio, whose ends have no name."""
    here, there = socket.socketpair()
    with here, there:
        assert limit_silence(1, 15.0) == 0


def test_a_connection_to_a_host_that_acknowledges_nothing_has_a_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert limit_silence(port, 15.0) == 0
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            limits_ms = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_silence(port, 15.0) == 1
            assert connection.getsockopt(*limits_ms) == 15000
            assert limit_silence(store.port, 15.0) == 1  # torch's own
            assert connection.getsockopt(*limits_ms) == 15000
