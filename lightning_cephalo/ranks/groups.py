"""The process groups of a run."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.meeting import Meeting
from lightning_cephalo.ranks.switchboard import Switchboard


@dataclass(frozen=True)
class Groups:
    """The process groups of a run; created once, used by every stage of the Trainer.

    Attributes:
        gather: Gathers parameters.
        reduce: Reduces gradients; a separate group lets reduces overlap with gathers.
        control: Carries small messages between processes, on the CPU.
        nodes: The node of every rank, by the first rank on it.
        meeting: Where ranks meet before they communicate outside of a step.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    control: ControlGroup
    nodes: tuple[int, ...]
    meeting: Meeting

    @classmethod
    def create(cls, timeout: datetime.timedelta, node_rank: int = 0) -> Groups:
        """Create the groups; collective.

        Args:
            timeout: Timeout of collectives.
            node_rank: This rank's node as the launcher counts them. Ranks of one number are on
                several nodes if their hosts or network namespaces differ.
        """
        control = ControlGroup(dist.new_group(backend="gloo", timeout=timeout))
        named = control.gather((node_rank, socket.gethostname(), _network()))
        nodes = tuple(named.index(name) for name in named)
        return cls(
            dist.new_group(timeout=timeout),
            dist.new_group(timeout=timeout),
            control,
            nodes,
            Meeting(Switchboard.create(control, nodes), timeout),
        )


def _network() -> int | None:
    """Return the number of this process's network namespace; None where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
