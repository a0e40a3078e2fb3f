"""A rank fails alone and its process goes on: no other waits for it, and the next run is right."""

from __future__ import annotations

import gc
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Net, in_ranks, loader, trainer
from launch import SOON_S
from lightning.pytorch import Callback

RANKS = 3
OUT_OF_FILES = "opening files"
IN_RUN = [
    (1, "setup"),
    (0, "on_fit_start"),
    (1, "on_before_batch_transfer"),
    (0, "on_train_batch_start"),
    (1, "on_validation_batch_start"),
    (2, "on_train_batch_end"),
    (2, OUT_OF_FILES),
    (0, "on_validation_batch_end"),
    (1, "on_train_end"),
]
BEHIND_RUN = [(0, "on_fit_end"), (1, "on_fit_end"), (2, "teardown")]
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
RAISED: dict[str, BaseException] = {
    "on_validation_batch_start": KeyboardInterrupt("only in on_validation_batch_start"),
    "on_train_batch_end": SystemExit("only in on_train_batch_end"),
    OUT_OF_FILES: OSError(24, "Too many open files", os.devnull),
}
OF_ONE_CONNECTION = (12, 20)
"""Most threads and files of a closed connection; what is left of a run may hold one, not more."""
ENDS = {"on_validation_batch_start": ("SystemExit", "1")}
"""How Trainer.fit() ends on the rank that fails, where it is not with what the hook raises."""


def _error_of(hook: str) -> BaseException:
    return RAISED.get(hook, KeyError(f"only in {hook}"))


class FailsAlone(Callback):
    """Raises in a hook, on one rank."""

    def __init__(self, rank: int, hook: str) -> None:
        def fail(trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_rank == rank:
                raise _error_of(hook)

        setattr(self, hook, fail)


class RunsOutOfFiles(Callback):
    """Opens files until it has no number for another, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.held = rank, []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            most = max(map(int, os.listdir("/proc/self/fd"))) + 2
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, LIMITS[1]))
            while True:
                self.held.append(open(os.devnull))  # noqa: SIM115


class Transfers(Net):
    """Raises where its batch is about to go to the device, on one rank."""

    fails_on = -1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_rank == self.fails_on:
            raise KeyError("only in on_before_batch_transfer")
        return batch


@dataclass(frozen=True)
class Ends:
    """How a case ends on a rank.

    Attributes:
        kind: The error's class.
        message: Its message; empty: there was none.
        process: The rank's number.
        losses: Those of the next run.
        leaves_nothing: Whether there are no more threads and files than behind the cases before,
            but for those of one closed connection.
    """

    kind: str
    message: str
    process: int
    losses: list[float]
    leaves_nothing: bool


def _fit(rank: int = -1, hook: str = "") -> list[float]:
    model, callbacks = Transfers(), []
    if hook == "on_before_batch_transfer":
        model.fails_on = rank
    elif hook == OUT_OF_FILES:
        callbacks = [RunsOutOfFiles(rank)]
    elif hook:
        callbacks = [FailsAlone(rank, hook)]
    plan = "three" if os.environ["WORLD_SIZE"] == "3" else "3:1"
    trainer(plan, callbacks=callbacks).fit(model, loader(16), loader(8))
    return model.losses


def _told(fit: Callable[[], Any]) -> tuple[str, str]:
    try:
        fit()
    except BaseException as failure:
        return type(failure).__name__, str(failure)
    return "", ""


def _wait_until_all_have_ended(folder: Path) -> bool:
    """Whether the other ranks have ended a run while this process goes on."""
    (folder / os.environ["RANK"]).touch()
    end_s = time.monotonic() + SOON_S / 4
    while len(list(folder.iterdir())) < RANKS:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def _threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _within(most: tuple[int, int], more: tuple[int, int] = (0, 0)) -> bool:
    """Whether there are no more threads and files than these; they may take a moment to end."""
    gc.collect()
    end_s = time.monotonic() + 10.0
    while any(now > m + n for now, m, n in zip(_threads_and_files(), most, more, strict=True)):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def _fails_in_each(cases: list[tuple[int, str]], folder: Path) -> list[Ends]:
    most, found = (0, 0), []
    for number, (rank, hook) in enumerate(cases):
        mine = folder / str(number)
        mine.mkdir(exist_ok=True)
        told = _told(partial(_fit, rank, hook))
        gc.collect()  # of the files
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
        assert _wait_until_all_have_ended(mine), (rank, hook, told)
        losses = _fit()
        if number == 1:
            most = _threads_and_files()
        found.append(
            Ends(*told, os.getpid(), losses, number < 2 or _within(most, OF_ONE_CONNECTION))
        )
    return found


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return in_ranks(RANKS, _fit)[0]


def test_all_others_end_while_its_process_goes_on_and_the_next_run_is_right(tmp_path, losses):
    found = in_ranks(RANKS, _fails_in_each, IN_RUN, tmp_path)
    for number, (failing, hook) in enumerate(IN_RUN):
        process = found[failing][number].process
        for rank in range(RANKS):
            ends = found[rank][number]
            error = _error_of(hook)
            if rank == failing:
                own = type(error).__name__, str(error)
                assert (ends.kind, ends.message) == ENDS.get(hook, own)
            else:
                assert ends.message.startswith(f"Rank {failing} (process {process} on host "), ends
                assert f") failed: {type(error).__name__}: {error}" in ends.message
            assert ends.losses == pytest.approx(losses, rel=1e-6)
            assert ends.leaves_nothing, ends


def test_behind_the_last_collective_the_others_end_well_and_connect_anew(tmp_path, losses):
    found = in_ranks(RANKS, _fails_in_each, BEHIND_RUN, tmp_path)
    for number, (failing, hook) in enumerate(BEHIND_RUN):
        for rank in range(RANKS):
            ends = found[rank][number]
            assert ends.message == (f"'only in {hook}'" if rank == failing else ""), ends
            assert ends.losses == pytest.approx(losses, rel=1e-6)
            assert ends.leaves_nothing, ends


def _ends_behind_a_failure(folder: Path) -> tuple[str, str]:
    """What the next run tells where the process that failed is gone by then."""
    told = _told(partial(_fit, 1, "on_fit_end"))
    if os.environ["RANK"] == "1":
        (folder / "own").write_text(str(os.getpid()))
        (folder / "own").rename(folder / "pid")  # the others find it whole
        return told
    while not (folder / "pid").exists():
        time.sleep(0.02)
    while _is_there(int((folder / "pid").read_text())):
        time.sleep(0.02)
    return _told(_fit)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_where_the_process_that_failed_is_gone_the_next_run_is_refused(tmp_path):
    first, second, third = in_ranks(RANKS, _ends_behind_a_failure, tmp_path)
    assert second == ("KeyError", "'only in on_fit_end'")
    for kind, message in (first, third):
        assert kind == "RemoteRankError"
        # the other one may be refused, and gone, before this one looks
        assert re.search(r"Rank 1 \(process .* (is|are) gone by now\. Rank 1 \(process", message)
        assert "failed: KeyError: 'only in on_fit_end'" in message


def _fits_share() -> bool:
    _fit()
    most = _threads_and_files()
    for _ in range(3):
        _fit()
    return _within(most)


def test_all_fits_of_a_process_share_threads_and_files():
    """Each had nine threads and 15 files of its own, until the default group was destroyed."""
    assert in_ranks(2, _fits_share) == [True, True]


def _groups_end_with_the_default_one() -> bool:
    found = []
    for _ in range(2):
        _fit()
        torch.distributed.destroy_process_group()
        found.append(_within((1, 1000)))
    return all(found)


def test_where_the_users_code_destroys_the_default_group_no_thread_is_left():
    """What belongs to a connection is kept by its default group, and must not keep it."""
    assert in_ranks(2, _groups_end_with_the_default_one) == [True, True]
