"""The launcher starts lost ranks again, and training goes on."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from common import in_ranks
from launch import SOON_S, port_to_meet
from plans import QUIET, plan_of
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    registry,
)

from lightning_cephalo import CephaloStrategy, Planner, run
from lightning_cephalo.ranks import agents
from lightning_cephalo.ranks.starter import TOLD
from lightning_cephalo.recovery.options import AGENT, LAUNCHES, MOST_HOSTS
from lightning_cephalo.recovery.store import MEMORY, Agent, folder_of

ROOT = Path(__file__).parents[1]
STEPS = 24

SCRIPT = f"""
import json, os, sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "examples")!r}]
from test_run import trained
trained(sys.argv[1], recover=True)
raise SystemExit(0)
"""


def trained(folder, recover):
    """Train the example, and tell every step, and the process of every rank."""
    import spot
    from lightning.pytorch import Callback

    class Tells(Callback):
        def on_train_batch_end(self, trainer, *_):
            told = [trainer.global_step, float(trainer.callback_metrics["loss"]), os.getpid()]
            with open(Path(folder) / f"rank{trainer.global_rank}", "a") as file:
                file.write(json.dumps(told) + "\n")

    plan = plan_of(((24, 24), 0.6), ((16,), 0.4))
    strategy = CephaloStrategy(
        plan=plan, global_batch_size=64, recover=recover, planner=Planner(verbose=False)
    )
    options = {"strategy": strategy, "max_epochs": STEPS // 4, "callbacks": [Tells()]}
    spot.main(samples=256, **{**QUIET, "devices": 2, **options})


def _told(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


@pytest.mark.skipif(not MEMORY.is_dir(), reason="steps are kept in /dev/shm")
def test_a_killed_rank_is_started_again_and_every_loss_is_as_without(tmp_path):
    (tmp_path / "whole").mkdir()
    in_ranks(2, trained, tmp_path / "whole", False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = os.pathsep.join(str(ROOT / "tests" / name) for name in ("lightning", "distributed"))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([path, tests])}
    command = [sys.executable, "-m", "lightning_cephalo.run", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        job = folder_of(None, Agent.of(agent.pid).name)
        deadline = time.monotonic() + SOON_S
        while len(told := _told(tmp_path / "rank1")) < 3 and time.monotonic() < deadline:
            assert agent.poll() is None
            time.sleep(0.01)
        os.kill(told[-1][2], signal.SIGKILL)
        said, _ = agent.communicate(timeout=SOON_S)
    assert agent.returncode == 0, said
    told, whole = _told(tmp_path / "rank0"), _told(tmp_path / "whole" / "rank0")
    assert len({process for *_, process in told}) == 2
    assert {step: loss for step, loss, _ in told} == {step: loss for step, loss, _ in whole}
    assert len(whole) == STEPS and len(told) <= STEPS + 1
    assert "Training goes on from step" in said and not job.exists()


REFUSES = """
import os, sys
from lightning.pytorch import LightningModule, Trainer
from lightning_cephalo import CephaloStrategy, Plan, RankPlan
from lightning_cephalo.common.errors import UnsupportedError
from torch import nn, zeros
from torch.utils.data import DataLoader

class Refuses(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(sys.argv[1], "a") as file:
            print(rank, start, file=file)
        if start == "1" or rank == "1":
            raise UnsupportedError(f"start {start}")

plan = Plan((RankPlan((1,), 0.5), RankPlan((1,), 0.5)))
strategy = CephaloStrategy(plan=plan, recover=False)
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **options)
trainer.fit(Refuses(), DataLoader(zeros(4, 2), batch_size=1))
"""


def test_an_error_of_one_rank_starts_all_again_and_one_of_all_ends_the_agent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REFUSES)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "lightning_cephalo.run", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(script), str(tmp_path / "started")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert sorted((tmp_path / "started").read_text().split("\n")[:-1]) == [
        *("0 0", "0 1"),
        *("1 0", "1 1"),
    ]
    assert ended.stderr.endswith(
        "All ranks refuse to train, and every start would end so. UnsupportedError: start 1\n"
    )


def test_the_command_line_is_read():
    found = run.parse(["--nproc-per-node", "2", __file__, "--fast", "-v"])
    assert (found.nproc_per_node, found.nnodes, found.arguments) == (
        2,
        run.Nodes(1, 1),
        ["--fast", "-v"],
    )
    several = ["--nnodes=2:4", "--rdzv-endpoint=na:1", "--rdzv-id=j", __file__]
    assert run.parse(several).nnodes == run.Nodes(2, 4)


@pytest.mark.parametrize("text", ["0", "4:2", "two", "2:", ""])
def test_other_numbers_of_nodes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number of nodes"):
        run.Nodes.parse(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes=2", __file__], "several hosts need --rdzv-endpoint"),
        (["--nproc-per-node=0", __file__], "expected 1 or more, but got '0'"),
        (["--max-restarts=-1", __file__], "expected 0 or more, but got -1"),
        (["--endpoint-wait-s=-1", __file__], "expected 0 or more, but got -1"),
        (["--endpoint-wait-s=nan", __file__], "expected 0 or more, but got nan"),
        (["no.py"], "no.py: there is no such script"),
    ],
)
def test_wrong_arguments_are_told(arguments, said, capsys):
    with pytest.raises(SystemExit):
        run.parse(arguments)
    assert said in capsys.readouterr().err


def _joins(endpoint):
    options = ["--nnodes=1:2", "--rdzv-id=j", f"--rdzv-endpoint={endpoint}", "--max-restarts=0"]
    options += ["--endpoint-wait-s=0"]
    return run.main([*options, "--new-interpreters", __file__])


@pytest.fixture
def _environment(monkeypatch):
    """What the launcher sets goes with the test."""
    for name in (AGENT, MOST_HOSTS, TOLD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(LAUNCHES, "0")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")


@pytest.mark.usefixtures("_environment")
def test_a_host_that_joins_a_job_that_has_ended_ends_well(capfd):
    endpoint = f"127.0.0.1:{port_to_meet()}"
    parameters = RendezvousParameters("c10d", endpoint, "j", 1, 2)
    first = registry.get_rendezvous_handler(parameters)  # has the store
    first.set_closed()  # as agents do at the end
    assert _joins(endpoint) == 0
    assert "The job 'j' has ended: this host has nothing to do." in capfd.readouterr().err


@pytest.mark.usefixtures("_environment")
def test_a_host_that_finds_nobody_says_so(capfd):
    assert _joins("192.0.2.1:29400") == 1  # an address that nobody has
    assert "Nobody answers at --rdzv-endpoint=192.0.2.1:29400" in capfd.readouterr().err


WAITS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "started").open("a") as file:
    print(os.environ["RANK"], os.environ["LIGHTNING_CEPHALO_LAUNCHES"], file=file)
while not (folder / "enough").exists():
    time.sleep(0.02)
"""


def _agent(number, endpoint, folder, *more):
    """Start the agent of a host, whose ranks import nothing."""
    script = folder / "script.py"
    script.write_text(WAITS)
    options = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=j", "--nnodes=2", *more]
    options += [f"--local-addr=127.0.0.{number}", "--new-interpreters", str(script), str(folder)]

    def main():
        os.setsid()
        with (folder / f"log{number}").open("a") as log:
            os.dup2(log.fileno(), 2)
            sys.stderr = log
            raise SystemExit(run.main(options))

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def _wait_until(is_so):
    end_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _lines(folder, count):
    """Wait until ranks have been started so many times, and return what each has told."""
    end_s = time.monotonic() + SOON_S
    while time.monotonic() < end_s:
        path = folder / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError(list(folder.iterdir()))


@contextmanager
def _two_hosts(folder):
    """The place where two hosts meet, and their agents; the first one has the place."""
    endpoint = f"127.0.0.1:{port_to_meet()}"
    hosts = [_agent(1, endpoint, folder)]
    _wait_until(lambda: agents.answers(endpoint))
    hosts.append(_agent(2, endpoint, folder))
    try:
        assert sorted(_lines(folder, 2)) == ["0 0", "1 0"]
        yield endpoint, hosts
        (folder / "enough").touch()
        for agent in hosts:
            agent.join(SOON_S)
            assert agent.exitcode == 0
    finally:
        for agent in hosts:
            agent.kill()


def test_hosts_that_lose_the_place_where_they_meet_wait_and_go_on(tmp_path):
    """The first agent has the store in which agents meet, and is lost with it."""
    with _two_hosts(tmp_path) as (endpoint, hosts):
        os.killpg(hosts[0].pid, signal.SIGKILL)
        hosts[0] = _agent(1, endpoint, tmp_path)
        # the one that has stayed says that its ranks were started before
        assert sorted(_lines(tmp_path, 4)[2:]) == ["0 0", "1 1"]
    assert f"The host of --rdzv-endpoint={endpoint}, where" in (tmp_path / "log2").read_text()


def test_hosts_whose_place_to_meet_is_stopped_say_so_and_meet_there_when_it_goes_on(
    tmp_path, monkeypatch
):
    """Its kernel acknowledges all that the other agents ask meanwhile."""
    monkeypatch.setattr(agents, "_SILENT_S", 3.0)
    log = tmp_path / "log2"
    with _two_hosts(tmp_path) as (endpoint, hosts):
        os.kill(hosts[0].pid, signal.SIGSTOP)
        place = f"The host of --rdzv-endpoint={endpoint}, where the hosts of 'j' meet"
        _wait_until(lambda: f"{place}, is lost, stopped" in log.read_text())
        os.kill(hosts[0].pid, signal.SIGCONT)
        # the ranks of both are started again; which host is the first may change
        launches = sorted(line.split()[1] for line in _lines(tmp_path, 4)[2:])
        assert launches == ["0", "1"]


def _serves(endpoint):
    host, _, port = endpoint.partition(":")
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    time.sleep(SOON_S)
    del store


@pytest.mark.slow
def test_a_host_says_that_the_others_cannot_be_reached_without_frames(tmp_path):
    endpoint = f"127.0.0.1:{port_to_meet()}"
    place = multiprocessing.get_context("fork").Process(target=_serves, args=(endpoint,))
    place.start()
    script = tmp_path / "script.py"
    script.write_text(WAITS.replace('os.environ["RANK"]', 'os.environ.get("TORCH_CPP_LOG_LEVEL")'))
    options = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=j", "--nnodes=1:2", "--endpoint-wait-s=0"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    _wait_until(lambda: agents.answers(endpoint))
    command = [sys.executable, "-m", "lightning_cephalo.run", *options, "--new-interpreters"]
    with subprocess.Popen(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        assert _lines(tmp_path, 1) == ["None 0"]
        place.kill()
        _lines(tmp_path, 2)  # the address is this host's: the agent begins there itself
        (tmp_path / "enough").touch()
        _, said = agent.communicate(timeout=SOON_S)
    assert agent.returncode == 0
    assert f"The host of --rdzv-endpoint={endpoint}, where the hosts of 'j' meet, is lost" in said
    assert "frame #" not in said and "Exception raised from" not in said


@pytest.mark.usefixtures("_environment")
def test_a_host_waits_for_the_place_where_hosts_meet_as_long_as_it_is_told(monkeypatch, capfd):
    """Only where it has met others: a first start that finds nobody ends."""
    launches = []

    def loses(given, number, met):
        launches.append(number)
        met(lambda: None)
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(run, "_launch", loses)
    monkeypatch.setattr(agents, "may_meet_at", lambda *_: not launches)
    options = ["--nnodes=1:2", "--rdzv-id=j", "--rdzv-endpoint=na:29400", "--endpoint-wait-s=0"]
    assert run.main([*options, "--new-interpreters", __file__]) == 1
    assert launches == [0]
    said = capfd.readouterr().err
    assert "keeps its steps, and waits for 0 s" in said
    assert "Nobody answers at --rdzv-endpoint=na:29400" in said


def test_a_script_runs_as_the_main_program_and_ends_as_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "beside.py").write_text("code = {'well': 0, 'badly': 3}\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nif __name__ == '__main__': sys.exit(beside.code[sys.argv[1]])"
    )
    run.run_script(str(script), ["well"])
    with pytest.raises(SystemExit, match="3"):
        run.run_script(str(script), ["badly"])


def test_ranks_draw_other_numbers_though_they_are_forked_from_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    script = tmp_path / "script.py"
    script.write_text(
        "import random, sys, numpy\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    print(random.random(), numpy.random.rand(), file=file)\n"
    )
    states = random.getstate(), np.random.get_state()
    try:
        for _ in range(2):
            random.seed(1)
            np.random.seed(1)
            run.run_script(str(script), [str(tmp_path / "drawn")])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    first, second = (tmp_path / "drawn").read_text().splitlines()
    assert not set(first.split()) & set(second.split())


def test_processes_of_a_script_start_as_under_torchrun(tmp_path, monkeypatch):
    """Not as the rank itself: workers of a loader would import a script, and so run it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(multiprocessing.get_start_method())\n"
    )
    kept = multiprocessing.get_start_method(allow_none=True)
    try:
        multiprocessing.set_start_method("forkserver", force=True)
        run.run_script(str(script), [str(tmp_path / "method")])
    finally:
        multiprocessing.set_start_method(kept, force=True)
    default = multiprocessing.get_all_start_methods()[0]
    assert (tmp_path / "method").read_text() == default


def test_a_rank_that_was_told_to_end_has_not_ended_well(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    script = tmp_path / "script.py"
    place = "lightning.pytorch.utilities.exceptions"
    script.write_text(f"from {place} import SIGTERMException\nraise SIGTERMException\n")
    with pytest.raises(SystemExit, match="143"):
        run.run_script(str(script), [])
