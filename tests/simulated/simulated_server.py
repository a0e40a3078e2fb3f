"""Runs functions on ranks with simulated devices, in forks of one interpreter that has them.

The interpreter of the tests has imported torch, and a simulated device must be there before. So a
second interpreter starts once, and forks the ranks of every test: a start costs seconds, a fork
next to nothing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

DEVICES = 4
_SERVE = "import simulated_server; simulated_server.serve()"


@dataclass(frozen=True)
class Outcome:
    """What one rank did.

    Attributes:
        value: The function's result.
        findings: What the checker found, in order.
        waits: How often the host waited for the device, by what for and Python lines.
        kernels: How often each operator, copy and collective was launched.
    """

    value: Any
    findings: list[str]
    waits: dict[str, int]
    kernels: dict[str, int]


class Server:
    """The interpreter with simulated devices.

    Args:
        log: A file for what the ranks print.
        name: Of the devices; see :func:`simulated_cuda.start`.
    """

    def __init__(self, log: BinaryIO, name: str = "cuda") -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 450.0
    ) -> list[Outcome]:
        """Return ``function(rank, *args)`` of every rank, with what the checker found.

        Args:
            world_size: Number of ranks; each may use all devices.
            function: A function at the top of a file, which is sent by file and name.
            args: Further arguments.
            timeout_s: When ranks that still run are killed.

        Raises:
            AssertionError: If a rank fails or hangs, with its traceback and what it printed.
        """
        (outcomes,) = self.run_each(world_size, function, [args], timeout_s=timeout_s)
        return outcomes

    def run_each(
        self,
        world_size: int,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        timeout_s: float = 450.0,
    ) -> list[list[Outcome]]:
        """Return what :meth:`run` returns for each call, in one start of the ranks.

        A second training in ranks that are warm costs a fraction of a start. Process groups that a
        call leaves behind are there in the next one; findings and environment variables are not.

        Args:
            world_size: Number of ranks; each may use all devices.
            function: A function at the top of a file, which is sent by file and name.
            calls: The further arguments of each call.
            timeout_s: When ranks that still run are killed.

        Raises:
            AssertionError: As :meth:`run`; it names the call by its position.
        """
        start = self._log.seek(0, os.SEEK_END)
        assert self._process.stdin is not None and self._process.stdout is not None
        known = inspect.getfile(function), function.__qualname__
        _send(self._process.stdin, (world_size, known, calls, timeout_s))
        try:
            is_done, value = _receive(self._process.stdout)
        except EOFError:
            is_done, value = False, "the interpreter with simulated devices has ended"
        if not is_done:
            self._log.seek(start)
            printed = self._log.read().decode(errors="replace")[-6000:]
            raise AssertionError(f"{value}\n\nranks printed:\n{printed}")
        of_ranks: list[list[Outcome]] = value
        return [list(of_call) for of_call in zip(*of_ranks, strict=True)]

    def close(self) -> None:
        """End the interpreter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _send(file: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def _receive(file: BinaryIO) -> Any:
    size = int.from_bytes(_exactly(file, 8), "little")
    return pickle.loads(_exactly(file, size))


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


# -- in the interpreter with simulated devices ----------------------------------------------------


def serve() -> None:
    """Start the devices, and run what comes in until the other side closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print goes to the log

    import simulated_cuda

    simulated_cuda.start(DEVICES, name=sys.argv[1])
    import launch
    import torch

    for name in ("lightning.pytorch", "lightning_cephalo"):
        importlib.import_module(name)  # once, for all forks

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            world_size, known, calls, timeout_s = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            function = getattr(_module(known[0]), known[1])
            value = launch.run_ranks(
                world_size,
                _observed_each,
                function,
                calls,
                timeout_s=timeout_s,
                process_group=False,
            )
            _send(answers, (True, value))
        except BaseException as error:
            _send(answers, (False, f"{type(error).__name__}: {error}"))


@functools.cache
def _module(path: str) -> Any:
    """Return a file of tests as a module; pytest gives its own a name that varies."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def _observed_each(
    rank: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> list[Outcome]:
    """Return what one rank does in each call, in a process that has simulated devices."""
    import simulated_cuda
    import torch

    outcomes = []
    for number, args in enumerate(calls):
        before = dict(os.environ)
        simulated_cuda.clear()
        try:
            value = function(rank, *args)
        except BaseException as error:
            raise AssertionError(f"call {number} of {len(calls)} failed") from error
        outcomes.append(
            Outcome(
                value, simulated_cuda.findings(), simulated_cuda.waits(), simulated_cuda.kernels()
            )
        )
        if number + 1 < len(calls):
            os.environ.clear()
            os.environ.update(before)
            # what this call leaves behind is no finding of the next one, nor memory of it
            for device in range(DEVICES):
                torch.accelerator.synchronize(device)
            gc.collect()
            torch.accelerator.empty_cache()
    return outcomes
