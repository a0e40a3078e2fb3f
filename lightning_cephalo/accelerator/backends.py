"""A table of the differences between the process-group backends of torch.distributed.

A backend that is not in the table is described by what torch knows of it: one for tensors on the
CPU runs on the host, like gloo. Any other runs on the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.distributed as dist


@dataclass(frozen=True)
class Backend:
    """Properties of one backend's collectives."""

    runs_on_device: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    barrier_names_device: bool = False
    must_be_aborted: bool = False
    changes_timeout: bool = False
    # regular expressions
    signs_of_loss: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "gloo": Backend(
            changes_timeout=True,
            # behind a place in gloo's source: a user's own download may lose its connection, too
            signs_of_loss=(
                r"\.(cc|h):\d+\] .*("
                "Connection closed by peer|Connection reset|Broken pipe|Timed out waiting|Socket"
                # while a group is made
                "|timed out connecting)",
                # in the group, where a receive has waited in vain
                "Application timeout caused pair closure",
            ),
        ),
        "nccl": Backend(
            runs_on_device=True,
            # all-gathers and reduces run at the same time on separate communicators, issued in the
            # same order on all ranks: with this variable NCCL keeps that order from 2.26 on ("Using
            # multiple NCCL communicators concurrently" in its documentation)
            environment=MappingProxyType({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
            barrier_names_device=True,
            must_be_aborted=True,
            changes_timeout=True,
            signs_of_loss=(
                "remote process exited",
                "ncclRemoteError",
                "NCCL communicator was aborted",
            ),
        ),
        # XPU and Ascend NPU, by their documentation; untested
        "xccl": Backend(runs_on_device=True, barrier_names_device=True),
        "hccl": Backend(runs_on_device=True),
    }
)
SIGN_OF_LOSS = re.compile(
    "|".join(sign for backend in BACKENDS.values() for sign in backend.signs_of_loss), re.DOTALL
)


def backend_named(name: str | None) -> Backend:
    """Return the table's entry for a backend's name, or what its kinds of tensors tell of it."""
    known = BACKENDS.get(name or "")
    if known is not None:
        return known
    devices = dist.Backend.backend_capability.get(name or "", ["cpu"])
    on_device = "cpu" not in devices
    return Backend(runs_on_device=on_device, barrier_names_device=on_device)


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """Return the table's entry for a group's backend; None means the default group."""
    return backend_named(dist.get_backend(group))
