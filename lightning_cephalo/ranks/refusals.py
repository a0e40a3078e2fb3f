"""Ends the agent where all ranks refuse to train, as every start would end so.

Where all ranks raise an error that depends on no loss, such as a plan for another number of ranks,
each writes it to a file for the agent of its host. The agent reads it in place of the next start.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from lightning_cephalo.common.errors import (
    BatchSplitError,
    CephaloError,
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
    KeptForAnotherError,
    UnitUseError,
    UnsupportedError,
)


class RefusedError(CephaloError, RuntimeError):
    """All ranks refuse to train; the message is theirs."""


# -- in a rank ------------------------------------------------------------------------------------


def is_refusal(error: BaseException) -> bool:
    """Return whether an error would end every start, if all ranks raise it."""
    kinds = (*_OF_THE_HOSTS, *_OF_THE_SCRIPT)
    # a disk that is full may have room at the next start
    return isinstance(error, kinds) and not isinstance(error, UnwritableError)


def note(error: BaseException) -> None:
    """Note a refusal that all ranks raise; the script may still catch it."""
    setattr(error, _IS_SHARED, True)
    # for an interpreter of its own: a script in a fork has its end in `run_script`
    atexit.register(lambda: tell(getattr(sys, "last_value", None)))


def tell(error: BaseException | None) -> None:
    """Tell the agent of the error that ends this process, if :func:`note` was called with it."""
    folder = os.environ.get(TOLD)
    if folder is None or error is None or not hasattr(error, _IS_SHARED):
        return
    text = printable(f"{type(error).__name__}: {error}")
    told = {"text": text, "is_of_hosts": isinstance(error, _OF_THE_HOSTS)}
    with suppress(OSError):  # then the ranks are started again
        Path(folder, _FILE).write_text(json.dumps(told))


# -- in the agent ---------------------------------------------------------------------------------


class UnlessRefused:
    """A rendezvous handler that lets the agent start ranks, unless all have refused to train."""

    def __init__(self, handler: RendezvousHandler, folder: Path, most_hosts: int) -> None:
        self._handler, self._folder, self._most_hosts = handler, folder, most_hosts
        self._starts = self._hosts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Let the agents meet for the next start, or raise what ranks have told since the last."""
        self._refuse()
        found = self._handler.next_rendezvous()
        self._starts, self._hosts = self._starts + 1, found.world_size
        return found

    def _refuse(self) -> None:
        told = None
        with suppress(OSError, ValueError):  # no file, or a rank has died while it wrote
            told = json.loads((self._folder / _FILE).read_text())
        for path in self._folder.iterdir():
            path.unlink()
        may_change = self._starts > 1 or self._hosts < self._most_hosts
        if told is not None and not (told["is_of_hosts"] and may_change):
            raise RefusedError(told["text"])
