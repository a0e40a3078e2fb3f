"""An interpreter that takes no time to start: each run of it is a fork of the test process.

Jobs that start their processes by ``sys.executable`` start forks, as they find its path there. All
is as in processes of their own, except that nothing is imported again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import torch

# What the system starts: it hands over its arguments and files, and ends as the fork does.
_CLIENT = """#!{python} -ISE
import json, os, socket, sys
own = socket.socket(socket.AF_UNIX)
own.connect({address!r})
told = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(own, [len(told).to_bytes(8, "big")], [0, 1, 2])
own.sendall(told)
ended = own.recv(1)
sys.exit(ended[0] if ended else 1)
"""
_FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def forked_interpreter(folder: Path) -> Iterator[str]:
    """Give the path of an interpreter, which runs ``script arguments`` in a fork of this process.

    Signals reach what was started, but not the fork: that ends by itself, or with the context.
    """
    path = folder / "python"
    # the address of a socket has 107 characters at most
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        address = os.path.join(short, "socket")
        path.write_text(_CLIENT.format(python=sys.executable, address=address))
        path.chmod(0o755)
        listening.bind(address)
        listening.listen()
        server = _FORK.Process(target=_serve, args=(listening, str(path)))
        server.start()
        try:
            yield str(path)
        finally:
            server.terminate()
            server.join()


def _serve(listening: socket.socket, path: str) -> None:
    """Fork for everyone who connects, until this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    gc.freeze()  # a collection would copy every page of what the test process has made
    runs: dict[int, tuple[multiprocessing.process.BaseProcess, socket.socket]] = {}
    try:
        while True:
            ready = wait([listening, *runs])
            for run, connection in [runs.pop(one) for one in ready if isinstance(one, int)]:
                run.join()
                connection.sendall(bytes([(run.exitcode or 0) & 255]))
                connection.close()
            if listening in ready:
                connection, _ = listening.accept()
                size, files, _, _ = socket.recv_fds(connection, 8, 3)
                with connection.makefile("rb") as reads:
                    told = json.loads(reads.read(int.from_bytes(size, "big")))
                run = _FORK.Process(target=_run, args=(path, files, *told))
                run.start()
                for file in files:
                    os.close(file)
                runs[run.sentinel] = run, connection
    finally:
        for run, _ in runs.values():
            run.kill()
            run.join()


def _run(
    path: str, files: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")  # threads of OpenMP survive no fork
    torch.set_num_threads(1)
    warnings.resetwarnings()
    sys.executable, sys.argv = path, arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
