"""How the process-group backends of torch.distributed differ, in one table.

``Backend()`` stands for a backend that is not in the table: like gloo it runs on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.distributed as dist


@dataclass(frozen=True)
class Backend:
    """How collectives of one backend run.

    Attributes:
        runs_on_device: On a stream of the device: to wait for one makes the current stream wait,
            not the host, and a reduce adds up on the way. Else threads of the host move the data,
            and a reduce receives the summands of all ranks.
        environment: Variables that it must find before its first communicator, unless the user has
            set them.
        barrier_names_device: Whether a barrier must say on which device it runs.
        must_be_aborted: Whether groups must be aborted where a rank fails alone, because to destroy
            them would wait for kernels that wait for that rank.
        signs_of_loss: What its errors say on the ranks that are left when a rank has gone.
    """

    runs_on_device: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    barrier_names_device: bool = False
    must_be_aborted: bool = False
    signs_of_loss: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "gloo": Backend(
            signs_of_loss=(
                "Connection closed by peer",
                "Connection reset",
                "Broken pipe",
                "Timed out waiting",
                "Socket",
            )
        ),
        "nccl": Backend(
            runs_on_device=True,
            # gathers and reduces run at the same time on communicators of their own, issued in one
            # order on all ranks: from 2.26 on NCCL keeps to that order if asked to ("Using multiple
            # NCCL communicators concurrently" in its documentation)
            environment=MappingProxyType({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
            barrier_names_device=True,
            must_be_aborted=True,
            signs_of_loss=(
                "remote process exited",
                "ncclRemoteError",
                "NCCL communicator was aborted",
            ),
        ),
        # of XPU and of Ascend NPU, by their documentation: never run here
        "xccl": Backend(runs_on_device=True, barrier_names_device=True),
        "hccl": Backend(runs_on_device=True),
    }
)
SIGNS_OF_LOSS = tuple(sign for backend in BACKENDS.values() for sign in backend.signs_of_loss)


def backend_named(name: str | None) -> Backend:
    """The table's entry for a backend's name."""
    return BACKENDS.get(name or "", Backend())


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The table's entry for a group's backend; None: the default group's."""
    return backend_named(dist.get_backend(group))
