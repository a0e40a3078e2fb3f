"""What the runs of a process share: its connection to the other ranks.

The groups, threads and servers beside torch's default group serve all runs, however many Trainers
make them. After a failure of one rank alone the connections are closed, and the next run connects
anew. A rank may fail where the others have ended well, such as in ``on_fit_end``. So runs are
counted, and what a failing rank tells others has the number of its run.
"""

from __future__ import annotations

import atexit
import gc
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch.distributed as dist

from lightning_cephalo.accelerator.backends import backend_of
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks.aborting import abort_groups
from lightning_cephalo.ranks.closing import close_connections
from lightning_cephalo.ranks.connecting import Lookout, Watch, connect_watched
from lightning_cephalo.ranks.control import ControlGroup, NotCopied
from lightning_cephalo.ranks.crash_report import CrashReport, is_lost_connection
from lightning_cephalo.ranks.groups import Groups, set_timeout
from lightning_cephalo.ranks.roll_call import patience, what_follows
from lightning_cephalo.ranks.switchboard import Switchboard

_LEAVING_S = 0.02


class HoldsGroups(Protocol):
    """An object that refers to process groups and can drop these references."""

    @property
    def failed_alone(self) -> bool:
        """Whether a run has failed on this rank and not on all together, such as by a loss."""

    def forget_groups(self) -> None:
        """Drop every reference to a process group."""


@dataclass(frozen=True)
class Ranks(NotCopied):
    """The connection of this process to the processes of the other ranks."""

    groups: Groups
    crash_report: CrashReport

    @property
    def control(self) -> ControlGroup:
        """The group for messages between ranks."""
        return self.groups.control

    @classmethod
    def create(
        cls, timeout: timedelta, node_rank: int, switchboard: Switchboard | None = None
    ) -> Ranks:
        """Create the groups over connected processes; collective."""
        groups = Groups.create(timeout, node_rank, patience(timeout), switchboard)
        return cls(groups, CrashReport(groups.control, groups.meeting.switchboard))


@dataclass(frozen=True)
class Met:
    """What ranks have that met in a store."""

    store: dist.Store
    switchboard: Switchboard | None


class Connection:
    """The connection over one default group, for all runs of this process."""

    def __init__(self, met: Met | None, earlier: Connection | None = None) -> None:
        self._met = met
        self._earlier = earlier
        self._ranks: Ranks | None = None
        self._holders: weakref.WeakSet[HoldsGroups] = weakref.WeakSet()
        self._is_closed = False

    def ranks_for(self, holder: HoldsGroups, timeout: timedelta, node_rank: int) -> Ranks:
        """Return the groups of all runs, to which a holder refers; collective in the first run."""
        self._holders.add(holder)
        if self._ranks is None:
            self._ranks = self._connected(timeout, node_rank)
            if self._earlier is not None:
                # All ranks have come, so that none asks these servers any more.
                self._earlier.end_servers()
                self._earlier = None
        else:
            self._ranks.groups.wait_for(timeout)
            if not self.is_of_user:
                set_timeout(None, timeout)
        return self._ranks

    def _connected(self, timeout: timedelta, node_rank: int) -> Ranks:
        switchboard = None if self._met is None else self._met.switchboard
        if switchboard is None:
            return Ranks.create(timeout, node_rank)
        create, wait = partial(Ranks.create, timeout, node_rank, switchboard), patience(timeout)
        try:
            return connect_watched(switchboard, dist.get_backend(), create, wait, what_follows())
        except BaseException:
            self.close()
            if backend_of().must_be_aborted:
                abort_groups()
            self.leave()
            raise

    def close(self) -> None:
        """Let no other rank wait for this one any longer. The next run connects anew."""
        self._is_closed = True
        close_connections()

    def end_servers(self) -> None:
        """Stop answering other ranks."""
        if self._ranks is not None:
            self._ranks.groups.meeting.close()

    def watch_for(self, own: Switchboard) -> Watch:
        """Return a watch for ranks of an earlier run, while this one waits for all to come anew."""
        ranks = self._ranks
        if ranks is None or ranks.crash_report.switchboard is None:
            return Watch(own)
        switchboard, report = ranks.crash_report.switchboard, ranks.crash_report
        lookout = Lookout(switchboard)
        # rank 0 tells all others; until it has come, each rank looks for the next one
        watched = range(1, switchboard.world_size) if switchboard.rank == 0 else None

        def look() -> None:
            try:
                lookout(watched)
            except dist.DistNetworkError:
                heard = switchboard.heard() if switchboard.knows_of_this_run() else []
                gone = report.gone()
                if heard or gone is not None:
                    said = heard[0] if heard else _ended_behind(gone)
                    switchboard.tell(said)
                    raise RemoteRankError(said) from None

        return Watch(own, look, report.where_are, switchboard.name_of)

    def begin_run(self) -> bool:
        """Return whether another run can use these groups; collective."""
        ranks, switchboard = self._ranks, None
        if ranks is not None:
            switchboard = ranks.groups.meeting.switchboard
        if ranks is None or switchboard is None:
            return True
        # each rank counts it, also one whose connections are closed: others may tell it of a loss
        ranks.groups.meeting.begin_run()
        if not self._is_closed:
            try:
                ranks.control.barrier()
                return True
            except RuntimeError as failure:
                if not is_lost_connection(failure):
                    raise
                if switchboard.knows_of_this_run() or not switchboard.knows_of_earlier_runs():
                    ranks.crash_report.on_exception(failure)
                    self.close()
                    raise RemoteRankError(
                        f"{failure}\nIt was connected to this rank by an earlier Trainer of this"
                        " process. Start all ranks again, and let all of them make the same"
                        " Trainers."
                    ) from failure
            self.close()
        if switchboard.knows_of_this_run():  # from a rank that waits for all to connect anew
            raise RemoteRankError(switchboard.heard()[0])
        gone = ranks.crash_report.gone()
        if gone is not None:
            raise RemoteRankError(_ended_behind(gone))
        return False

    def leave(self) -> None:
        """Destroy the default group, and drop what refers to it; the servers go on."""
        for holder in list(self._holders):
            holder.forget_groups()
        if self._ranks is not None:
            self._ranks.groups.forget()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_of_user(self) -> bool:
        """Whether another's code has made the default group."""
        return self._met is None

    @property
    def failed_alone(self) -> bool:
        """Whether a run of this process has failed on this rank alone."""
        return any(holder.failed_alone for holder in self._holders)


def _ended_behind(gone: str | None) -> str:
    return f"An earlier run has ended with an error of one rank, and {gone} Start all ranks again."


# torch has one default group for a process; what belongs to it lives as long as it does
_CONNECTIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, Connection] = weakref.WeakKeyDictionary()


def current() -> Connection | None:
    """Return the connection over the default group, also of the user's; None if there is none."""
    default = dist.group.WORLD if dist.is_available() else None
    if default is None:
        return None
    known = _CONNECTIONS.get(default)
    return note(None) if known is None else known


def note(met: Met | None, earlier: Connection | None = None) -> Connection:
    """Note that the default group has been made, and destroy it before the interpreter ends.

    A gloo thread that releases a tensor while the interpreter ends aborts the process (pytorch
    #190489), and Lightning leaves gloo's groups.
    """
    default = dist.group.WORLD
    assert default is not None
    connection = _CONNECTIONS[default] = Connection(met, earlier)
    atexit.register(partial(_leave, weakref.ref(connection)))
    return connection


def _leave(connection: weakref.ref[Connection]) -> None:
    known = connection()
    if known is None:  # another has taken its place, or the user's code has destroyed the group
        return
    is_closed = known.failed_alone and dist.is_initialized()
    is_closed = is_closed and not backend_of().must_be_aborted
    known.end_servers()
    known.leave()
    # a group's threads end with the last reference to it; behind closed ones nothing waits for them
    if not is_closed:
        gc.collect()
    # The default group outlives this in the caches of torch's DTensor: let its threads finish.
    time.sleep(_LEAVING_S)
