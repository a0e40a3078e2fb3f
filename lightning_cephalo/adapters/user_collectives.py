"""Finds collectives of torch.distributed in the user's step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

# The dispatcher looks here for every operator, whatever its tensors and the modes they are in.
_KEY = torch._C.DispatchKey.BackendSelect


# These need no third rank.
_BETWEEN_TWO = {"send", "recv_", "recv_any_source_", "check_for_nan"}


class UserCollectives:
    """Reports each collective that the user's code starts, before it runs.

    ``report`` gets the name of the collective, and whether all ranks take part. It may raise; its
    own collectives run as they are. torch's dispatcher calls it for collectives only: other
    operators take no time. Private API: the key and its removal from a set of keys.
    """

    def __init__(self, report: Callable[[str, bool], None]) -> None:
        self._watch = _Watch(report)
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, place_of_group in _collectives():
            run = partial(_run, self._watch, operator, place_of_group)
            self._library.impl(operator, run, _KEY.name, with_keyset=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report the collectives of this thread in a ``with`` block."""
        self._watch.thread = threading.get_ident()
        try:
            yield
        finally:
            self._watch.thread = None

    def close(self) -> None:
        self._library._destroy()
        self._watch.report = None


@dataclass
class _Watch:
    report: Callable[[str, bool], None] | None
    thread: int | None = None


def _run(watch: _Watch, operator: Any, place: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
    thread = watch.thread
    report = watch.report
    if report is not None and thread is not None and thread == threading.get_ident():
        name = operator.overloadpacket.__name__
        group = dist.ProcessGroup.unbox(args[place])
        takes_all = name not in _BETWEEN_TWO and group.size() == dist.get_world_size()
        watch.thread = None
        try:
            report(name.rstrip("_"), takes_all)
        finally:
            watch.thread = thread
    return operator.redispatch(keys.remove(_KEY), *args, **kwargs)


@cache
def _collectives() -> tuple[tuple[Any, int], ...]:
    """Return the operators of torch.distributed, and which argument of each is the group."""
    found = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    names = {name.split(".")[0] for space, name in found if space == "c10d"}
    packets = [getattr(torch.ops.c10d, name) for name in names]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return tuple((each, place) for each in operators for place in _places_of_groups(each)[:1])


def _places_of_groups(operator: Any) -> list[int]:
    types = [str(argument.type) for argument in operator._schema.arguments]
    return [place for place, name in enumerate(types) if "ProcessGroup" in name]
