"""Starts the ranks of this host, and starts them again when one is lost.

::

    python -m lightning_cephalo.run --nproc-per-node 2 train.py --epochs 3
    python -m lightning_cephalo.run --nnodes 2:4 --rdzv-endpoint na:29400 --rdzv-id j train.py

If the host of the endpoint is lost, the agents of the others keep what their ranks have kept, and
wait until an agent is started there again.

This is the elastic agent of torchrun with other settings. Ranks are forked from a process that has
imported torch and Lightning already, so that a restart takes about two seconds, not twenty. The
store in which ranks meet is new at every start: torchrun's keeps addresses of ranks that are gone
(pytorch#135712). With ``CephaloStrategy(recover="auto")``, the default, training goes on from the
newest step in the hosts' memory (docs/failures.md).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_IS_QUIET = __name__ == "__main__" and _LOG_LEVEL not in os.environ
if _IS_QUIET:
    # For each try to reach a host that is lost, torch prints its frames of C++; the agent itself
    # says what is lost. The level is read when torch is imported, which comes next.
    os.environ[_LOG_LEVEL] = "ERROR"

from lightning_cephalo.ranks import refusals, starter  # noqa: E402
from lightning_cephalo.recovery.options import AGENT, LAUNCHES, MOST_HOSTS  # noqa: E402
from lightning_cephalo.recovery.store import Agent, folder_of  # noqa: E402

PRELOADED = (
    "torch",
    "lightning.pytorch",
    "lightning_cephalo.strategy",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
)
"""What ranks need not import."""

_TERMINATED = 128 + signal.SIGTERM
_RENDEZVOUS = {
    # seconds to wait for more nodes than the fewest, where some may come
    "last_call_timeout": 3,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "join_timeout": 600,
    # a place that has not answered for so long is lost: its host is cut off, or does not run
    "read_timeout": 20,
}
# a first host may begin later than others
_FIRST_WAIT_S = 60.0


@dataclass(frozen=True)
class Nodes:
    """How many nodes may take part."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Read ``"2"`` or ``"2:4"``."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if match is not None:
            found = cls(int(match[1]), int(match[2] or match[1]))
            if 1 <= found.least <= found.most:
                return found
        raise argparse.ArgumentTypeError(
            f"expected a number of nodes such as 2, or the fewest and the most such as 2:4, but got"
            f" {text!r}"
        )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, but got {text!r}")
    return int(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_cephalo.run",
        description="Starts the ranks of this host, and starts them again when one is lost.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=_positive, default=1, help="ranks on this host (1)")
    add("--nnodes", type=Nodes.parse, default=Nodes(1, 1), help="hosts: 2, or 2:4 (1)")
    add("--max-restarts", type=int, default=100, help="restarts before giving up (100)")
    add("--rdzv-endpoint", default="", help="where hosts meet, HOST:PORT; for more than one host")
    add("--rdzv-id", default="", help="a name of the job, equal on all hosts")
    add("--local-addr", default=None, help="this host's address for the others (its name)")
    add(
        "--endpoint-wait-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for another agent at the endpoint if its host is lost (600)",
    )
    add("--new-interpreters", action="store_true", help="start ranks as torchrun does, not forked")
    add("script", help="the script of a rank")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    found = parser.parse_args(arguments)
    if found.nnodes.most > 1 and not (found.rdzv_endpoint and found.rdzv_id):
        parser.error("--nnodes: several hosts need --rdzv-endpoint HOST:PORT and --rdzv-id NAME")
    if not found.endpoint_wait_s >= 0:
        parser.error(f"--endpoint-wait-s: expected 0 or more, but got {found.endpoint_wait_s:g}")
    if found.max_restarts < 0:
        parser.error(f"--max-restarts: expected 0 or more, but got {found.max_restarts}")
    if not os.path.isfile(found.script):
        parser.error(f"{found.script}: there is no such script")
    return found


def run_script(script: str, arguments: Sequence[str], launches: int = 0) -> None:
    """Run a script in a rank, as the interpreter would."""
    os.environ[LAUNCHES] = str(launches)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    # the process that ranks are forked from has drawn seeds, which would be equal in all of them
    random.seed()
    np.random.seed()
    # else workers of loaders are started as this rank was, and import the script
    multiprocessing.set_start_method(None, force=True)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        refusals.tell(error)
        raise
    except SystemExit as end:
        # Lightning's SIGTERMException is one without a code: the training has not ended well
        if type(end).__name__ == "SIGTERMException":
            raise SystemExit(_TERMINATED) from end
        if end.code not in (None, 0):
            raise
        # the agent takes a rank that has not returned for one that still works
    starter.tell_ended()


def preload() -> None:
    """Import what ranks need, in the process that they will be forked from.

    The agent joins the others only then: they stop their ranks for it, which wait for its ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # its first process begins when all is imported
    first = context.Process(target=os.getpid)
    first.start()
    first.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until all ranks have ended well; return the exit status."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    if _IS_QUIET:
        del os.environ[_LOG_LEVEL]  # ranks print what they ever print
    os.environ[AGENT] = str(os.getpid())
    os.environ[MOST_HOSTS] = str(given.nnodes.most)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        with tempfile.TemporaryDirectory() as told:
            os.environ[starter.TOLD] = told
            if not given.new_interpreters:
                preload()  # with all variables of the environment
            return _run_agents(given)
    finally:
        folder = folder_of(None, Agent.of(os.getpid()).name)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other jobs of this user keep steps there
            folder.parent.rmdir()


def _run_agents(given: argparse.Namespace) -> int:
    """Run an agent, and another one each time that the hosts have lost the place where they meet.

    What ranks have kept on this host stays meanwhile: it is this process's.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
    )

    from lightning_cephalo.ranks import agents

    agents.register()
    endpoint, job = given.rdzv_endpoint, given.rdzv_id
    until_s = time.monotonic() + min(_FIRST_WAIT_S, given.endpoint_wait_s)
    # what ends the watch for the place where hosts have met
    has_met: list[Callable[[], None]] = []
    for launches in itertools.count():
        has_met.clear()
        try:
            if endpoint and not agents.may_meet_at(endpoint, until_s):
                break
            _launch(given, launches, has_met.append)
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return 1
        except SignalException as error:
            print(f"Ended by {error.sigval.name}.", file=sys.stderr)
            return 128 + error.sigval
        except refusals.RefusedError as refused:
            print(
                f"All ranks refuse to train, and every start would end so. {refused}",
                file=sys.stderr,
            )
            return 1
        except RendezvousClosedError:
            print(f"The job {job!r} has ended: this host has nothing to do.", file=sys.stderr)
            return 0
        except (RendezvousConnectionError, DistNetworkError, DistStoreError) as error:
            is_there = not isinstance(error, RendezvousConnectionError) and agents.answers(endpoint)
            if not endpoint or is_there:
                raise
            if not has_met:
                if time.monotonic() >= until_s:
                    break
                continue
            until_s = time.monotonic() + given.endpoint_wait_s
            print(
                f"The host of --rdzv-endpoint={endpoint}, where the hosts of {job!r} meet, is"
                " lost, stopped or cannot be reached. Start an agent there again, with the command"
                " of the others. This host keeps its steps, and waits for"
                f" {given.endpoint_wait_s:g} s.",
                file=sys.stderr,
                flush=True,
            )
        else:
            return 0
        finally:
            for end_watch in has_met:
                end_watch()
    print(
        f"Nobody answers at --rdzv-endpoint={endpoint}, where the hosts of {job!r} meet: the job"
        " has ended, or its first host is lost or not up yet.",
        file=sys.stderr,
    )
    return 1


def _launch(
    given: argparse.Namespace, launches: int, met: Callable[[Callable[[], None]], None]
) -> None:
    """Run torch's agent until all ranks have ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lightning_cephalo.ranks import agents

    config = LaunchConfig(
        min_nodes=given.nnodes.least,
        max_nodes=given.nnodes.most,
        nproc_per_node=given.nproc_per_node,
        run_id=given.rdzv_id or uuid.uuid4().hex,
        rdzv_backend=agents.BACKEND,
        rdzv_endpoint=given.rdzv_endpoint or "localhost:0",
        rdzv_configs={**_RENDEZVOUS, agents.MET: met},
        max_restarts=given.max_restarts,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(),
        local_addr=given.local_addr if given.nnodes.most > 1 else "localhost",
    )
    if given.new_interpreters:
        os.environ[LAUNCHES] = str(launches)
        elastic_launch(config, sys.executable)("-u", given.script, *given.arguments)
    else:
        elastic_launch(config, run_script)(given.script, given.arguments, launches)


if __name__ == "__main__":
    sys.exit(main())
