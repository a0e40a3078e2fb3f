"""Lets ranks communicate outside of a step only if all of them do.

Code that only one rank runs would wait for parameters that the
other ranks never send, and the others for a message of this rank. So ranks meet first. A rank that
waits looks where the others are. If all of them wait too, elsewhere, nobody will ever come.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.switchboard import Switchboard
from lightning_cephalo.ranks.whereabouts import Whereabouts, whereabouts

# Two looks and an answer take less than 30 s. A warning comes after _LONG_S.
FIRST_LOOK_S, LOOK_S, _LONG_S = 8.0, 4.0, 60.0


class Meeting:
    """Waits until all ranks have come for the same purpose, or until a timeout."""

    def __init__(self, switchboard: Switchboard | None, timeout: timedelta) -> None:
        self.switchboard = switchboard
        self.timeout_s = timeout.total_seconds()
        self._count = 0

    def begin_run(self) -> None:
        """Count meetings anew: ranks may have failed together behind different numbers of them."""
        self._count = 0
        if self.switchboard is not None:
            self.switchboard.begin_run()

    def close(self) -> None:
        """Stop answering other ranks."""
        if self.switchboard is not None:
            self.switchboard.close()

    def meet(self, purpose: str, remedy: str, *, is_patient: bool = False) -> None:
        """Wait for all ranks; collective.

        Args:
            purpose: What needs all ranks, such as "calling unit 'layers.0'".
            remedy: A sentence with the way out for messages.
            is_patient: Whether ranks may work for long without a warning, such as write a file.

        Raises:
            UnsupportedError: If a rank will not come, or has come for another purpose; only on
                ranks that have come.
            OSError: If this rank cannot ask the others, for example without a free file number.
        """
        switchboard = self.switchboard
        if switchboard is None:
            return
        self._count += 1
        here = str(whereabouts(threading.get_ident()))
        began_s, wait_s, were_stuck, has_warned = time.monotonic(), FIRST_LOOK_S, False, False
        while True:
            try:
                came = switchboard.arrive(self._count, (purpose, here, remedy), wait_s)
                missing = [rank for rank in range(switchboard.world_size) if rank not in came]
                others = {rank: switchboard.where_is(rank) for rank in missing}
            except TimeoutError:  # rank 0, which counts the ranks, is stopped
                came, missing, others = {}, [0], {0: None}
            except ConnectionError:
                return  # a rank has ended or failed: what follows fails, and tells what is known
            if not missing:
                break
            waited_s = time.monotonic() - began_s
            said = f"Rank {switchboard.rank} is {purpose}, {here}. {_told(others)}"
            # all ranks wait: no message is under way that could end any of these waits
            are_stuck = all(other is not None and other.waits for other in others.values())
            if (are_stuck and were_stuck) or waited_s > self.timeout_s:
                raise UnsupportedError(
                    f"{said} This rank has waited {waited_s:.0f} s. They will not come. {remedy}"
                )
            if waited_s > _LONG_S and not has_warned and not is_patient:
                warnings.warn(f"{said} It has waited {waited_s:.0f} s. {remedy}", stacklevel=2)
                has_warned = True
            were_stuck, wait_s = are_stuck, LOOK_S
        if len({of for of, *_ in came.values()}) > 1:
            said = "; ".join(f"rank {rank} is {of}, {at}" for rank, (of, at, _) in came.items())
            # nobody knows which rank is the one that is wrong
            remedies = " ".join(dict.fromkeys(remedy for *_, remedy in came.values()))
            raise UnsupportedError(f"Every rank must do the same here, but {said}. {remedies}")


def _told(others: Mapping[int, Whereabouts | None]) -> str:
    said = [
        f"rank {rank} does not answer"
        if other is None
        else f"rank {rank} {'waits' if other.waits else 'works'} {other}"
        for rank, other in others.items()
    ]
    return f"Meanwhile {', '.join(said)}."
