"""A rank that fails on its device: all ranks end, and say which rank failed and why."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_jobs import Encoder, data, strategy, trainer
from launch import SOON_S, torchrun_environments
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from plans import plan_of
from test_training import UNEVEN

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks import launch
from lightning_cephalo.ranks.launch import connect

pytestmark = pytest.mark.simulated

STEP = 2


class Failing(Encoder):
    """Fails on one rank in the third step, in one of several ways."""

    def __init__(self, failing_rank: int, way: str) -> None:
        super().__init__()
        self.failing_rank, self.way = failing_rank, way
        self.layers[1].linear1.register_forward_pre_hook(self._in_a_unit)

    @property
    def _is_now(self) -> bool:
        return self.global_rank == self.failing_rank and self.global_step == STEP

    def _in_a_unit(self, *_: object) -> None:
        if not self._is_now:
            return
        if self.way == "out of memory":
            torch.empty(2**40, dtype=torch.uint8, device=self.device)
        elif self.way == "a kernel's error":
            raise torch.AcceleratorError(
                "CUDA error: an illegal memory access was encountered", 700
            )

    def on_train_batch_start(self, batch, batch_idx):
        if self._is_now and self.way == "an error of NCCL":
            group = self.trainer.strategy._connection.groups.gather

            def fails(*_: object, **__: object) -> None:
                raise dist.DistBackendError("NCCL error: unhandled system error (ncclSystemError)")

            group.allgather = group.all_gather_single = fails


def fails(rank, environments, way, failing_rank):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    used = trainer(strategy(plan_of(*UNEVEN)))
    model = Failing(failing_rank, way)
    start_s = time.monotonic()
    try:
        used.fit(model, data())
    except Exception as error:
        return type(error).__name__, str(error), model.global_step, time.monotonic() - start_s


def test_in_a_unit(simulated):
    environments = torchrun_environments(2)
    calls = [
        (environments, way, failing_rank)
        for way, failing_rank in (("out of memory", 0), ("a kernel's error", 1))
    ]
    for (_, way, failing_rank), outcomes in zip(
        calls, simulated.run_each(2, fails, calls), strict=True
    ):
        name, said, step, _ = outcomes[failing_rank].value
        assert step == STEP, (way, failing_rank)
        if way == "out of memory":
            assert name == "OutOfMemoryInStepError" and "CUDA out of memory" in said
            assert "unit 'layers.1'" in said
        else:
            assert name == "AcceleratorError" and "illegal memory access" in said
        name, said, step, _ = outcomes[1 - failing_rank].value
        assert name == "RemoteRankError" and step == STEP, (way, failing_rank)
        assert f"Rank {failing_rank}" in said


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_in_a_collective(simulated, failing_rank):
    environments = torchrun_environments(2)
    outcomes = simulated.run(2, fails, environments, "an error of NCCL", failing_rank)
    name, said, _, _ = outcomes[failing_rank].value
    assert name == "DistBackendError" and "ncclSystemError" in said
    _, said, _, seconds = outcomes[1 - failing_rank].value
    assert said.startswith(f"Rank {failing_rank} (process")
    assert ") failed: DistBackendError: NCCL error" in said
    assert seconds < SOON_S


class WaitsForItsDevice(Encoder):
    """Rank 1 fails alone in a hook; rank 0 waits there until its device's collectives are aborted.

    So it waits in ``loss.item()``, behind a kernel of NCCL that waits for rank 1.
    """

    has_waited_in_vain = False

    def on_train_batch_end(self, *_):
        if self.global_step != STEP:
            return
        if self.global_rank == 1:
            raise ValueError("only here")
        group, until_s = self.trainer.strategy._connection.groups.gather, time.monotonic() + SOON_S
        while not group._is_aborted:
            if time.monotonic() > until_s:
                self.has_waited_in_vain = True
                return
            time.sleep(0.01)


def waits_for_its_device(rank, environments):
    os.environ.update(environments[rank], OMP_NUM_THREADS="1")
    used, model = trainer(strategy(plan_of(*UNEVEN))), WaitsForItsDevice()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        used.fit(model, data())
    return str(raised.value), model.has_waited_in_vain


def test_a_rank_whose_device_waits_for_one_that_fails_alone_waits_no_longer(simulated):
    environments = torchrun_environments(2)
    first, second = simulated.run(2, waits_for_its_device, environments)
    said, has_waited_in_vain = first.value
    assert not has_waited_in_vain
    assert said.startswith("Rank 1 (process") and ") failed: ValueError: only here" in said
    assert second.value[0] == "only here"


class Holds:
    """What uses groups."""

    failed_alone = False

    def forget_groups(self) -> None:
        pass


def _dies():
    os.kill(os.getpid(), signal.SIGKILL)


def _fails():
    raise ValueError("only here")


PLACES = {
    "before the default group": (launch, "_init_dist_connection", 1),
    "before a group over NCCL": (dist, "new_group", 2),
}
"""Where a fault comes: a function, and which of its calls."""


def is_lost_while_all_connect(rank, environments, place, fault, folder):
    os.environ.update(environments[rank])
    device, timeout = torch.device("cuda", rank), timedelta(seconds=SOON_S)
    torch.cuda.set_device(device)
    owner, name, count = PLACES[place]
    function, calls = getattr(owner, name), iter(range(1, 9))

    def called(*args, **options):
        if rank == 1 and next(calls) == count:
            fault()
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, called)
        begin_s = time.monotonic()
        try:
            launch.connect(TorchElasticEnvironment(), "nccl", timeout, device)
            launch.ranks_for(Holds(), timeout, 0)
        except Exception as error:
            took_s = time.monotonic() - begin_s
            told = [type(error).__name__, str(error), took_s]
            (folder / str(rank)).write_text(json.dumps(told))
    if rank == 1:  # its process goes on
        end_s = time.monotonic() + SOON_S
        while len(list(folder.iterdir())) < 3 and time.monotonic() < end_s:
            time.sleep(0.02)


def _named_by(folder):
    """What the ranks say that go on, and how they name the one that does not."""
    for rank in (0, 2):
        kind, said, took_s = json.loads((folder / str(rank)).read_text())
        assert kind == "RemoteRankError"
        assert took_s < SOON_S / 4
        yield said


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_killed_while_all_connect_is_named_long_before_the_timeout(
    simulated, place, tmp_path
):
    given = torchrun_environments(3), place, _dies, tmp_path
    with pytest.raises(AssertionError, match="rank 1:\ndied without a result"):
        simulated.run(3, is_lost_while_all_connect, *given)
    for said in _named_by(tmp_path):
        assert said.startswith("Rank 1 (process ") and "is gone" in said


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_while_all_connect_is_told_to_all_others(simulated, place, tmp_path):
    simulated.run(3, is_lost_while_all_connect, torchrun_environments(3), place, _fails, tmp_path)
    for said in _named_by(tmp_path):
        assert said.startswith("Rank 1 (process ") and "failed: ValueError: only here" in said


def connect_with_default_backends(rank, environments):
    os.environ.update(environments[rank])
    device = torch.device("cuda", 0) if rank == 0 else torch.device("cpu")
    try:
        connect(TorchElasticEnvironment(), None, timedelta(seconds=SOON_S), device)
    except UnsupportedError as error:
        return str(error)
    return None


def test_ranks_with_different_backends_hear_so_before_they_wait_for_each_other(simulated):
    environments = torchrun_environments(3)
    for outcome in simulated.run(3, connect_with_default_backends, environments):
        assert "'gloo' (ranks [1, 2]) and 'nccl' (ranks [0])" in outcome.value
        assert "process_group_backend='gloo'" in outcome.value
