"""Lets the process of a rank stay at the beginning of ``fit()``, while a fork of it trains.

When a rank is killed, the forks of all others end. Then the processes that have stayed fork again,
all of them, and training goes on from the newest kept step, as after a restart. The script does not
run again: what it has imported, loaded and built is there. Nothing of a training that has lost a
rank is used further: no group, no shard, no counter of Lightning's. So this needs nothing that a
restart does not need (docs/design/recovery.md).

A fork goes on with the script behind ``fit()``. The process that has stayed waits for it, and ends
as it ends. Whatever else happens, such as an error of the script, ends both, and the agent starts
all ranks again.

[Note: private names of Lightning] A fork that has lost another rank ends here, as Lightning would
end it: with ``_interrupt`` and ``_teardown``. Only this file uses them;
tests/lightning/test_staying.py fails when they change.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_cephalo.accelerator.torch_device import used_device
from lightning_cephalo.common.errors import RecoveryError, RemoteRankError
from lightning_cephalo.ranks.crash_report import is_lost_connection
from lightning_cephalo.ranks.rounds import STAYED, STORE, Rounds
from lightning_cephalo.ranks.unwritten import flush_files, open_files

LOST_ANOTHER = 75
"""Exit status of a fork that has lost another rank."""

# seconds between two looks at other ranks, and until a fork is ended that has not noticed a loss
_LOOK_S, _NOTICE_S = 0.5, 5.0
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
# the system's and the user's ways to ask a process to end: it is not lost
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class StayingLauncher(_Launcher):
    """Forks before ``fit()`` trains; the agent's process of this rank waits, and forks again.

    Args:
        environment: Knows this process's rank.

    Raises:
        RecoveryError: If no agent is there that lets ranks stay.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        if STORE not in os.environ or not isinstance(environment, TorchElasticEnvironment):
            raise RecoveryError(
                "recover=Recovery(stay=True): ranks can stay only under `python -m"
                " lightning_cephalo.run`, on one host. Start them so, or leave stay=True out."
            )
        self._child = 0
        # of the script before fit()
        self._files: list[io.IOBase] = []
        self._is_asked_to_end = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: this process has started no other rank."""

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        why = obstacle()
        if why is not None:
            warnings.warn(
                f"recover=Recovery(stay=True): {why}. A loss restarts this rank's script, too.",
                stacklevel=2,
            )
            return function(*args, **kwargs)
        self._fork()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if _is_of_a_loss(error):
                self._leave(trainer, error)
            raise
        gc.unfreeze()
        _rounds().tell_over()
        return result

    def _leave(self, trainer: Any, error: Exception) -> NoReturn:
        """End a fork that has lost another rank; the script behind ``fit()`` does not run.

        Call it where the error is handled, as Lightning does with hooks for errors.
        """
        for end in (lambda: call._interrupt(trainer, error), trainer._teardown):
            try:
                end()
            except BaseException as second:
                if second is not error:  # it is raised again where a hook wants a checkpoint
                    traceback.print_exception(second)
        cause = str(error).partition("\n")[0]
        print(f"{cause} The process of this rank stays.", file=sys.stderr)
        flush_files([*self._files, *open_files()])
        os._exit(LOST_ANOTHER)

    # -- the process that stays -------------------------------------------------------------------

    def _fork(self) -> None:
        """Return in a fork; the process itself stays here until it ends."""
        handlers = {number: signal.getsignal(number) for number in _FORWARDED}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_FORWARDED})
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        own, numbers = os.getpid(), random.getstate()
        round_ = 0
        self._files = open_files()
        flush_files(self._files)
        # a fork that looks at all objects copies all of their memory
        gc.freeze()
        while True:
            signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
            child = os.fork()
            if child == 0:
                for number, handler in handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                random.setstate(numbers)  # a fork has drawn others
                _begin(own, round_)
                return
            self._child = child
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            self._stay(round_)
            round_ += 1

    def _stay(self, round_: int) -> None:
        """Wait for the fork; return if all ranks fork again, else end as it has ended."""
        rounds = _rounds()
        status, was_ended_here = self._wait(lambda: rounds.is_lost(round_))
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _ASKED
        has_lost = os.WIFEXITED(status) and os.WEXITSTATUS(status) == LOST_ANOTHER
        stays = (is_killed or has_lost) and not self._is_asked_to_end
        if not stays or not rounds.agree(
            round_, is_killed and not was_ended_here, lambda: self._is_asked_to_end
        ):
            _end(status)

    def _wait(self, is_lost: Callable[[], bool]) -> tuple[int, bool]:
        """Return how the fork has ended, and whether this process has ended it."""
        end_s, was_ended_here = None, False
        while True:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                self._child = 0
                return status, was_ended_here
            now_s = time.monotonic()
            if end_s is None and is_lost():
                end_s = now_s + _NOTICE_S
            elif end_s is not None and now_s > end_s and is_lost():
                was_ended_here = True
                os.kill(self._child, signal.SIGKILL)

    def _forward(self, number: int, frame: Any) -> None:
        self._is_asked_to_end = True
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def obstacle() -> str | None:
    """Return why this process cannot be forked here; None: it can.

    A fork has one thread. What others were about to do never ends there, such as with a lock.
    """
    if not sys.platform.startswith("linux"):
        return "processes are forked on Linux only"
    if dist.is_initialized():
        return "an earlier run of this script has connected the ranks already"
    used = used_device()
    if used is not None:
        return f"the script has used a device ({used}) before fit(), which no fork can use then"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        named = [thread.name for thread in threading.enumerate()][1:]
        known = f", among them {', '.join(named)}" if named else ""
        return (
            f"the script runs {threads} threads before fit(){known}, and a fork would have one"
            " (OMP_NUM_THREADS=1 and TOKENIZERS_PARALLELISM=false end some)"
        )
    return None


def _is_of_a_loss(error: Exception) -> bool:
    """Return whether a fork ends as it has lost another rank, connected or not yet."""
    return is_lost_connection(error) or (
        # while ranks connect, the loss has been found out: a group is there behind that only
        isinstance(error, RemoteRankError) and not dist.is_initialized()
    )


def _rounds() -> Rounds:
    return Rounds(
        os.environ[STORE],
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
    )


def _begin(parent: int, round_: int) -> None:
    """Prepare a fork: it ends with its parent, and meets the others in the agent's store."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # a store on rank 0 would be on a port that may be taken when rank 0 is forked again
    host, _, port = os.environ[STORE].rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=str(True))
    os.environ[STAYED] = str(round_)


def _end(status: int) -> NoReturn:
    """End this process as its fork has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):  # of SIGKILL nothing can be changed
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
