"""What every test shares: the order, garbage and caches; tests without their device are skipped."""

import contextlib
import functools
import gc
import importlib.metadata
import itertools
import multiprocessing.process
import os
import subprocess
import tempfile

import hypothesis
import pytest
import simulated_cuda
import torch
from simulated_server import Server

# No verdict may depend on how fast a machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Forked ranks hang in OpenMP if this process has ever run it with several threads.
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Half as many workers again as processors: ranks of a test wait for each other in between.

    Twice as many take more processor time: threads of gloo spin while they wait.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return processors + processors // 2


# Each Trainer looks through all installed packages for plugins: 3 ms of the 100 of a short fit.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make more than a million objects that live until the end.

    No collection of garbage needs to look through them, here or in a forked rank.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def _new_caches(tmp_path_factory):
    """Names of folders that nothing has used; pytest counts its own anew for each one."""
    parent = tmp_path_factory.mktemp("caches")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _cache_of_the_test(_new_caches, monkeypatch):
    """What is measured in a test is not to be planned with later, nor by another test."""
    cache = next(_new_caches)
    cache.mkdir()
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(cache))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory):
    """Likewise for fixtures that several tests share."""
    before = os.environ.get("LIGHTNING_CEPHALO_CACHE")
    os.environ["LIGHTNING_CEPHALO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["LIGHTNING_CEPHALO_CACHE"]
    else:
        os.environ["LIGHTNING_CEPHALO_CACHE"] = before


@pytest.fixture(autouse=True)
def _no_rank_of_a_launcher():
    """Drop what launchers leave behind; Lightning's for spawned ranks leaves its MASTER_PORT.

    Jobs that a later test starts would meet at that port, which may be another process's by then.
    """
    yield
    for name in {"RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _no_processes(request, monkeypatch):
    """`make unit` selects tests that start no process: one that does needs the marker."""
    if "not processes" not in request.config.option.markexpr:
        return

    def refuse(*_, **__):
        raise AssertionError("a process is started: mark this test with `processes`")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(scope="session")
def simulated():
    """Runs functions on ranks with simulated CUDA devices."""
    with tempfile.TemporaryFile() as log, contextlib.closing(Server(log)) as server:
        yield server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # a worker that gets a long test at the very end would leave the others without work
    is_one_of_several = hasattr(config, "workerinput")
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None) == is_one_of_several)
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "simulated": simulated_cuda.unavailable(),
    }
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None and reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
