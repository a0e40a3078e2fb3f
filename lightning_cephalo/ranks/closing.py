"""Closes this process's connections to other ranks, so that none of them waits for it.

torch has no call that aborts a gloo group. But where a receive waits in vain for longer than *it*
may, gloo closes all connections of its group (``Context::signalException`` in its source). So a
receive of a message that nobody sends, with a limit of a millisecond, ends a group. The other
ranks then see what they see when this process ends.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_LIMIT = timedelta(milliseconds=1)
# nobody sends this tag: those of this package and of torch are small
_TAG = 2**31 - 1


def close_connections() -> None:
    """Close this process's connections in all groups that send host memory, such as gloo's.

    [Note: private name of torch] There is no public list of groups. Those of the user's count: the
    other ranks may wait there. ``test_a_rank_that_closes_its_connections_lets_no_other_wait`` fails
    when the list, or what a receive does that waits in vain, changes.
    """
    for group in list(distributed_c10d._world.pg_map):
        for peer in set(range(group.size())) - {group.rank()}:
            # It waits in vain; or this connection was closed before, and others are not; or the
            # group sends no host memory.
            with suppress(RuntimeError):
                receive = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_TAG)
                if receive is not None:
                    receive.wait(_LIMIT)
