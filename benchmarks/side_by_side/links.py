"""Slow links: one network namespace per rank, joined by a bridge, each with a limited rate.

Needs root, ``ip`` and ``tc`` (iproute2), and the kernel's token bucket filter.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

INTERFACE = "eth0"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, <linux/sched.h>


class LinkError(RuntimeError):
    """Shaped links are not available here; the message gives the reason."""


class ShapedHosts:
    """Network namespaces that reach each other at a given rate, inside the block.

    Args:
        hosts: Number of namespaces.
        mbit_per_s: Rate of every host, each way.
        burst_kb: What passes at once behind a pause. A collective that is timed alone goes so much
            faster than one of many in a step.

    Raises:
        LinkError: On entering, if the machine does not allow it.
    """

    def __init__(self, hosts: int, mbit_per_s: float, burst_kb: int = 128) -> None:
        self._rate = f"{mbit_per_s:g}mbit"
        self._burst_kb = burst_kb
        # interfaces have at most 15 letters; the process id keeps two runs apart
        self._bridge = f"cb{os.getpid()}"
        self._cables = [f"cv{os.getpid()}h{host}" for host in range(hosts)]
        self.names = tuple(f"cephalo-{os.getpid()}-{host}" for host in range(hosts))

    def __enter__(self) -> tuple[str, ...]:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinkError(f"{tool} is not installed (package iproute2)")
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self.names

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def cut(self, host: int) -> None:
        """Let nothing pass to or from a namespace any more.

        Args:
            host: The namespace, counted from 0.

        Raises:
            LinkError: If the machine does not allow it.
        """
        _run(f"ip link set {self._cables[host]} down")

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`.

        Args:
            host: The namespace, counted from 0.

        Raises:
            LinkError: If the machine does not allow it.
        """
        _run(f"ip link set {self._cables[host]} up")

    def _make(self) -> None:
        _run(f"ip link add {self._bridge} type bridge")
        _run(f"ip link set {self._bridge} up")
        for host, (name, cable) in enumerate(zip(self.names, self._cables, strict=True), start=1):
            _run(f"ip netns add {name}")
            _run(f"ip link add {cable} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip link set {cable} master {self._bridge} up")
            _run(f"ip -n {name} addr add {address(host - 1)}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip -n {name} link set lo up")
            shape = f"root tbf rate {self._rate} burst {self._burst_kb}kb latency 50ms"
            _run(f"tc -n {name} qdisc replace dev {INTERFACE} {shape}")
            _run(f"tc qdisc replace dev {cable} {shape}")

    def _remove(self) -> None:
        for name, cable in zip(self.names, self._cables, strict=True):
            # a cable is deleted with its end in the namespace, but only after the last process
            # there has ended
            subprocess.run(["ip", "link", "del", cable], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


def address(host: int) -> str:
    """Return where the others reach a namespace."""
    return f"10.77.0.{host + 1}"


def enter(name: str) -> None:
    """Move this process into a namespace; call it while the process has only its first thread.

    Raises:
        OSError: If it cannot.
    """
    with open(f"/run/netns/{name}") as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        # os.setns came with Python 3.12
        if library.setns(namespace.fileno(), _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{command!r} failed: {done.stderr.strip()}")
