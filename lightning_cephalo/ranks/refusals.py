"""Ends the agent where all ranks refuse to train, as every start would end so.

A rank that is lost is started again, and so are all others. But some errors do not depend on a
loss, such as a plan for another number of ranks. Where all ranks raise one before a step is done,
each tells the agent of its host in a file, when the script has not caught the error. The agent
reads it in place of the next start.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from typing_extensions import override

from lightning_cephalo.common.errors import (
    BatchSplitError,
    CephaloError,
    CheckpointError,
    KeptForAnotherError,
    PlanError,
    TooLittleMemoryError,
    UnitUseError,
    UnsupportedError,
    UnwritableError,
)
from lightning_cephalo.common.texts import printable
from lightning_cephalo.ranks.starter import TOLD

_FILE = "refusal"
# the attribute of an error that note() was told of
_IS_SHARED = "_is_refusal_of_all_ranks"
# more hosts, or those of the first start, may do without these
_OF_THE_HOSTS = (PlanError, TooLittleMemoryError)
_OF_THE_SCRIPT = (
    BatchSplitError,
    CheckpointError,
    KeptForAnotherError,
    UnitUseError,
    UnsupportedError,
)


class RefusedError(CephaloError, RuntimeError):
    """All ranks refuse to train; the message is theirs."""


# -- in a rank ------------------------------------------------------------------------------------


def is_refusal(error: BaseException) -> bool:
    """Return whether an error would end every start, if all ranks raise it.

    Args:
        error: The error. That a disk is full may be different at the next start.
    """
    kinds = (*_OF_THE_HOSTS, *_OF_THE_SCRIPT)
    return isinstance(error, kinds) and not isinstance(error, UnwritableError)


def note(error: BaseException) -> None:
    """Note a refusal that all ranks raise.

    Args:
        error: This rank's. The script may still catch it.
    """
    setattr(error, _IS_SHARED, True)
    # for an interpreter of its own: a script in a fork has its end in `run_script`
    atexit.register(lambda: tell(getattr(sys, "last_value", None)))


def tell(error: BaseException | None) -> None:
    """Tell the agent of the refusal that ends this process.

    Args:
        error: What ends it. Nothing is told of others than that of :func:`note`.
    """
    folder = os.environ.get(TOLD)
    if folder is None or error is None or not hasattr(error, _IS_SHARED):
        return
    text = printable(f"{type(error).__name__}: {error}")
    told = {"text": text, "is_of_hosts": isinstance(error, _OF_THE_HOSTS)}
    with suppress(OSError):  # then the ranks are started again
        Path(folder, _FILE).write_text(json.dumps(told))


# -- in the agent ---------------------------------------------------------------------------------


class UnlessRefused(RendezvousHandler):
    """Lets the agent start ranks, unless all of them have refused to train."""

    def __init__(self, handler: RendezvousHandler, folder: Path, most_hosts: int) -> None:
        self._handler, self._folder, self._most_hosts = handler, folder, most_hosts
        self._starts = self._hosts = 0

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        self._refuse()
        found = self._handler.next_rendezvous()
        self._starts, self._hosts = self._starts + 1, found.world_size
        return found

    def _refuse(self) -> None:
        """Raise what ranks have told since the last start."""
        told = None
        with suppress(OSError, ValueError):  # no file, or a rank has died while it wrote
            told = json.loads((self._folder / _FILE).read_text())
        for path in self._folder.iterdir():
            path.unlink()
        may_change = self._starts > 1 or self._hosts < self._most_hosts
        if told is not None and not (told["is_of_hosts"] and may_change):
            raise RefusedError(told["text"])

    @override
    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    @override
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    @override
    def is_closed(self) -> bool:
        return self._handler.is_closed()

    @override
    def set_closed(self) -> None:
        self._handler.set_closed()

    @override
    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    @override
    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @override
    def shutdown(self) -> bool:
        return self._handler.shutdown()
