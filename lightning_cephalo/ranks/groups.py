"""The process groups of a run."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_cephalo.accelerator import torch_versions
from lightning_cephalo.accelerator.backends import backend_named, backend_of
from lightning_cephalo.accelerator.host import kernel_of_host
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.meeting import Meeting
from lightning_cephalo.ranks.switchboard import Switchboard


def while_connecting(
    backend: str, wait: datetime.timedelta, timeout: datetime.timedelta
) -> datetime.timedelta:
    """Return how long a group may be made, whose collectives wait for ``timeout`` later."""
    return wait if backend_named(backend).changes_timeout else timeout


def set_timeout(group: dist.ProcessGroup | None, timeout: datetime.timedelta) -> None:
    """Set how long a group's collectives wait, now that it is made."""
    if backend_of(group).changes_timeout:
        torch_versions.set_timeout(timeout, group)


class GroupsOfState(NamedTuple):
    """The process groups of ranks that hold the whole state together."""

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    rows: dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """The process groups of a run; created once, used by every stage of the Trainer."""

    gather: dist.ProcessGroup
    # apart, so that reduces overlap with gathers
    reduce: dist.ProcessGroup
    control: ControlGroup
    # by the first rank on each
    nodes: tuple[int, ...]
    meeting: Meeting
    timeout: datetime.timedelta | None = None
    _counted: list[Any] = field(default_factory=list, repr=False)
    _of_state: dict[tuple[tuple[int, ...], ...], GroupsOfState] = field(
        default_factory=dict, repr=False
    )

    def of_state(self, members: Sequence[Sequence[int]]) -> GroupsOfState:
        """Return the groups of this rank's part, of whose ranks each holds the whole state.

        Collective the first time.
        """
        parts = tuple(map(tuple, members))
        known = self._of_state.get(parts)
        if known is not None:
            return known
        # each rank makes the groups of all parts, in one order
        made = [[dist.new_group(part, timeout=self.timeout) for _ in range(3)] for part in parts]
        own = next(number for number, part in enumerate(parts) if self.control.rank in part)
        self._counted.extend(made[own])
        found = self._of_state[parts] = GroupsOfState(*made[own])
        return found

    @classmethod
    def create(
        cls,
        timeout: datetime.timedelta,
        node_rank: int = 0,
        wait: datetime.timedelta | None = None,
        switchboard: Switchboard | None = None,
    ) -> Groups:
        """Create the groups; collective."""
        wait = timeout if wait is None else wait
        of_default = while_connecting(dist.get_backend(), wait, timeout)
        messages = dist.new_group(backend="gloo", timeout=wait)
        control = ControlGroup(messages)
        named = control.gather(place(node_rank))
        nodes = tuple(named.index(name) for name in named)
        gather, reduce = (dist.new_group(timeout=of_default) for _ in range(2))
        if switchboard is None:
            switchboard = Switchboard.create(control, nodes)
        if wait != timeout:
            for group in (messages, gather, reduce):
                set_timeout(group, timeout)
        counted: list[Any] = [messages, gather, reduce]
        if switchboard is not None:
            switchboard.begun = partial(_begun, counted)
        meeting = Meeting(switchboard, timeout)
        return cls(gather, reduce, control, nodes, meeting, timeout, counted)

    def forget(self) -> None:
        """Drop what would keep process groups alive after their run."""
        self._counted.clear()
        if self.meeting.switchboard is not None:
            self.meeting.switchboard.begun = None

    def wait_for(self, timeout: datetime.timedelta) -> None:
        """Let the collectives of the next run wait for ``timeout``."""
        self.meeting.timeout_s = timeout.total_seconds()
        of_state = chain(*self._of_state.values())
        for group in (self.gather, self.reduce, self.control.group, *of_state):
            set_timeout(group, timeout)


def _begun(groups: Sequence[Any]) -> list[int] | None:
    """Return how many collectives this rank has begun in each group; None if nobody counts them.

    Private API: torch has no public count. This one has collectives of the user's code, too.
    """
    world: Any = dist.group.WORLD  # not in ``groups``: what belongs to it must not keep it alive
    if world is None:
        return None
    try:
        return [group._get_sequence_number_for_group() for group in (world, *groups)]
    except RuntimeError:  # of backends that do not count
        return None


def place(node_rank: int) -> str:
    """Return what is equal for ranks on one node: its number, name, kernel, network namespace.

    The first network namespace has the same number on all hosts.
    """
    return f"{node_rank} {socket.gethostname()} {kernel_of_host()} {_network()}"


def _network() -> int | None:
    """Return the number of this process's network namespace; None where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
