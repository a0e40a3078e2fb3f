"""The process groups of a run."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from lightning_cephalo.ranks.control import ControlGroup


@dataclass(frozen=True)
class Groups:
    """The process groups of a run; created once, used by every stage of the Trainer.

    Attributes:
        gather: Gathers parameters.
        reduce: Reduces gradients; a separate group lets reduces overlap with gathers.
        control: Carries small messages between processes, on the CPU.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    control: ControlGroup

    @classmethod
    def create(cls, timeout: datetime.timedelta) -> Groups:
        """Create the groups; collective.

        Args:
            timeout: Timeout of collectives.
        """
        control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(
            dist.new_group(timeout=timeout),
            dist.new_group(timeout=timeout),
            ControlGroup(control),
        )
