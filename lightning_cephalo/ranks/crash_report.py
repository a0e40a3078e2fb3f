"""Says on every rank why another rank has ended the run.

A process group reports a closed connection or a timeout only. So a rank that fails outside of a
step first tells all others its error. A rank that loses its connection asks all of them what they
know, and tells the answer before it ends, as others may lose the connection to this rank first.
The default group's store would die with rank 0, and files do not reach other hosts.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_cephalo.accelerator.backends import SIGN_OF_LOSS
from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.common.texts import printable
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.ranks.switchboard import Switchboard
from lightning_cephalo.ranks.whereabouts import Whereabouts

# torch appends its C++ stack
_FRAMES = "Exception raised from"
_MOST_CHARACTERS = 20_000
_THEN = "\nThis rank then lost its connection: "
# how long a rank that fails waits for ranks that neither fail nor communicate
_PATIENCE_S, _LOOK_S = 5.0, 0.1


@dataclass(frozen=True)
class CrashReport:
    """Tells other ranks why this one fails, and finds out why another one has."""

    control: ControlGroup
    switchboard: Switchboard | None

    def is_common(self, exception: BaseException) -> bool:
        """Whether all ranks raise at this point, so that none has a collective under way."""
        return isinstance(exception, RemoteRankError) or exception is self.control.raised

    def all_fail(self, exception: BaseException) -> bool:
        """Whether all ranks fail with errors of their own, and none waits for another; collective.

        All ranks have then begun equally many collectives, and agree on the answer.
        """
        switchboard = self.switchboard
        if switchboard is None:
            return True
        if not isinstance(exception, Exception) or is_lost_connection(exception):
            return False
        try:
            verdict = _verdict(switchboard)
        except OSError:  # rank 0 has ended or is stopped
            return False
        if verdict:
            switchboard.forget_this_run()
        return verdict

    def on_exception(self, exception: BaseException) -> None:
        """Tell other ranks a failure that not all raise; name the cause in a lost connection's."""
        switchboard = self.switchboard
        if switchboard is None or self.is_common(exception) or _THEN in str(exception):
            return
        cause = tell_why(switchboard, exception)
        if cause is not None:
            exception.args = (f"{cause}{_THEN}{first_lines(exception)}",)

    def tells_of_loss(self) -> bool:
        """Tell the other ranks if a rank is gone; return whether that, or a failure, is known."""
        switchboard = self.switchboard
        if switchboard is None or switchboard.knows_of_this_run():
            return switchboard is not None
        answers = switchboard.look()
        if not _ended(answers):
            return False
        _tell_those_there(switchboard, answers, seen(switchboard, answers))
        return True

    def where_are(self, ranks: Sequence[int]) -> str:
        """Return a sentence about where ranks are that have not come; empty if none is known."""
        if self.switchboard is None:
            return ""
        answers = self.switchboard.look(ranks)
        if any(isinstance(answer, OSError) for answer in answers.values()):
            return seen(self.switchboard, answers)
        return f"{_where(self.switchboard, answers)}."

    def gone(self) -> str | None:
        """Return a sentence about the ranks whose processes have ended; None if none has."""
        if self.switchboard is None:
            return None
        gone = _ended(self.switchboard.look())
        if not gone:
            return None
        said = f"{_names(self.switchboard, gone)} gone by now."
        heard = self.switchboard.heard()
        return f"{said} {heard[0]}" if heard else said


def tell_why(switchboard: Switchboard, exception: BaseException) -> str | None:
    """Tell other ranks why this one ends; return the cause if it has lost a connection."""
    if not is_lost_connection(exception):
        own = switchboard.name_of(switchboard.rank)
        kind = type(exception).__name__
        switchboard.tell(f"{own} failed: {printable(f'{kind}: {first_lines(exception)}')}")
        return None
    answers = switchboard.look()
    heard = switchboard.heard()
    cause = heard[0] if heard else seen(switchboard, answers)
    _tell_those_there(switchboard, answers, cause)
    return cause


def _tell_those_there(
    switchboard: Switchboard, answers: Mapping[int, Whereabouts | OSError], cause: str
) -> None:
    there = [rank for rank, answer in answers.items() if isinstance(answer, Whereabouts)]
    switchboard.tell(cause, there)


def _verdict(switchboard: Switchboard) -> bool:
    own, until_s, gives_up = switchboard.position(), time.monotonic() + _PATIENCE_S, False
    if own is None:
        return False
    while True:
        verdict, failed = switchboard.fail(own, _LOOK_S, gives_up=gives_up)
        if verdict is not None:
            return verdict
        others = [rank for rank in range(switchboard.world_size) if rank not in failed]
        gives_up = time.monotonic() > until_s or any(
            _waits_in_vain(switchboard, rank, own) for rank in others
        )


def _waits_in_vain(switchboard: Switchboard, rank: int, own: Sequence[int]) -> bool:
    """Return whether a rank has begun a collective that this one has not, or has ended."""
    try:
        position = switchboard.position_of(rank)
    except OSError:
        return True
    return position is None or any(map(operator.gt, position, own))


def is_lost_connection(exception: BaseException) -> bool:
    """Whether an exception says that a collective has lost another rank, or waited in vain."""
    if isinstance(exception, (dist.DistNetworkError, dist.DistStoreError)):
        return True  # of the store, which rank 0 has, or where ranks wait while they connect
    return isinstance(exception, RuntimeError) and bool(SIGN_OF_LOSS.search(str(exception)))


def seen(switchboard: Switchboard, answers: Mapping[int, Whereabouts | OSError]) -> str:
    """Return what this rank sees of the others."""
    gone = _ended(answers)
    if gone:
        return (
            f"{_names(switchboard, gone)} gone: the process ended without a message, or was"
            " killed (the system does so where host memory is short). Its own output and the log"
            " of its host say more."
        )
    silent = [rank for rank, answer in answers.items() if isinstance(answer, OSError)]
    if silent:
        return (
            f"{_names(switchboard, silent)} silent: the process is stopped, or its host cannot"
            " be reached."
        )
    return (
        "No other rank has ended, but a connection to one is cut, or one did not come in time:"
        f" {_where(switchboard, answers)}."
    )


def _ended(answers: Mapping[int, Whereabouts | OSError]) -> list[int]:
    return [rank for rank, answer in answers.items() if isinstance(answer, ConnectionError)]


def _where(switchboard: Switchboard, answers: Mapping[int, Whereabouts | OSError]) -> str:
    return "; ".join(
        f"{switchboard.name_of(rank)} {'waits' if answer.waits else 'works'} {answer}"
        for rank, answer in answers.items()
        if isinstance(answer, Whereabouts)
    )


def _names(switchboard: Switchboard, ranks: list[int]) -> str:
    return f"{', '.join(map(switchboard.name_of, ranks))} {'is' if len(ranks) == 1 else 'are'}"


def first_lines(exception: BaseException) -> str:
    """Return an error's text without the stack that torch appends."""
    return str(exception).split(_FRAMES)[0].strip()[:_MOST_CHARACTERS]
