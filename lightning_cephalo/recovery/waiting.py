"""Waits for more hosts where those that are here cannot hold the model."""

from __future__ import annotations

import os
import time
import warnings

from lightning_cephalo.common.errors import (
    HostMemoryError,
    InfeasibleError,
    RemoteRankError,
    TooLittleMemoryError,
)
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.options import MOST_HOSTS

_LOOK_S = 0.1
_TOO_SMALL = (HostMemoryError, InfeasibleError, TooLittleMemoryError)


def wait_for_hosts(error: Exception, wait_s: float, control: ControlGroup) -> None:
    """Wait for more hosts if an error says that the present ones are too few; collective then.

    The agent ends the ranks when another host comes, and starts them together with its ranks.
    """
    here, most = (int(os.environ.get(n, "1")) for n in ("GROUP_WORLD_SIZE", MOST_HOSTS))
    # only errors that all ranks raise together let them communicate
    is_of_all = isinstance(error, RemoteRankError | TooLittleMemoryError)
    if here >= most or not wait_s or not (is_of_all or control.raised is error):
        return
    if not control.any(isinstance(error, _TOO_SMALL)):
        return
    if control.rank == 0:
        warnings.warn(
            f"The model does not fit into the ranks of {here} hosts. Waiting up to {wait_s:g} s for"
            f" more, of {most} at most. {error}",
            stacklevel=3,
        )
    end_s = time.monotonic() + wait_s
    while not control.any(time.monotonic() > end_s):
        time.sleep(_LOOK_S)
