"""Refuses collectives inside of the user's steps that some rank would not join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup

# The dispatcher looks here for every operator, whatever its tensors and the modes they are in.
_KEY = torch._C.DispatchKey.BackendSelect
# These need no third rank.
_BETWEEN_TWO = {"send", "recv_", "recv_any_source_", "check_for_nan"}


class UserCollectives:
    """Checks the collectives of steps, of which ranks may run different numbers of microbatches.

    ``counts`` are those of every rank while ranks are measured; None: the numbers differ.
    ``planned`` are those of the plan.
    """

    def __init__(self, control: ControlGroup, counts: Sequence[int] | None) -> None:
        self.planned: Sequence[int] = ()
        self._control, self._counts = control, counts
        self._own, self._trains = [0.0, 0.0], False
        self._name = ""  # of a collective that training_step has called

    def check(self, counts: Sequence[int] | None, name: str = "") -> None:
        """Reject other numbers of microbatches, with which a collective in steps would hang."""
        name = name or self._name
        if name and (counts is None or len(set(counts)) > 1):
            spelled = "different numbers of" if counts is None else str([*counts])
            raise UnsupportedError(
                f"{name}() inside a step, of which ranks run {spelled} microbatches: it would hang."
                " For a loss over all ranks use lightning_cephalo.loss_over_batch(). Or let every"
                " rank run one microbatch: CephaloStrategy(planner=Planner(single_microbatch=True))"
                ", and DataLoader(drop_last=True). Or gather after the step, in a hook."
            )

    def before_step(self, microbatches: int, *, trains: bool, failed: bool = False) -> None:
        """Check that all ranks would join, if steps have called one; collective.

        A rank without samples comes to no collective of an evaluation, and is asked here.
        """
        self._own, self._trains = [float(microbatches), float(failed)], trains
        self._counts = self.planned
        if self._name or not trains:
            self._exchange()
        if trains:
            self.check(self._counts)

    def called(self, name: str, takes_all: bool = True) -> None:
        """Reject a collective in a microbatch that some rank would not join; collective.

        Unless it ``takes_all`` ranks, others would not come here, and cannot be asked. Where some
        ranks run no step, it may be a part of what all ranks do together.
        """
        if not takes_all and (self._trains or len(set(self._counts or ())) < 2):
            return
        self.check(self._counts, name)
        if self._trains and not self._name:
            # All ranks are in their first microbatch, so they can still communicate. From now on
            # they compare before each step, since a smaller last step may differ.
            self._name = name
            self._exchange()
            self.check(self._counts)

    def _exchange(self) -> None:
        rows = self._control.gather(self._own)
        # where a batch cannot be cut the step itself raises on all ranks
        is_known = not any(failed for _, failed in rows)
        self._counts = [int(count) for count, _ in rows] if is_known else ()


def require_equal_shapes(tensor: Tensor, control: ControlGroup) -> None:
    """Reject a gather of tensors that differ in shape or dtype; collective.

    gloo and NCCL would end a process or return wrong values, without an explanation.
    """
    own = f"{list(tensor.shape)} of {tensor.dtype}"
    if len(set(control.gather(float(crc32(own.encode()))))) > 1:
        shapes = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(control.gather(own)))
        raise UnsupportedError(
            f"all_gather() of tensors that differ between ranks ({shapes}), which have different"
            " numbers of samples. Gather sums and counts, or rows by"
            " torch.distributed.all_gather_object(rows, tensor.cpu()) in a hook."
        )


class CollectiveWatch:
    """Reports each collective of torch.distributed that the user's code starts, before it runs.

    ``report`` gets its name, and whether all ranks take part; it may raise. Other operators take no
    time. Private API: the key and its removal from a set of keys.
    """

    def __init__(self, report: Callable[[str, bool], None]) -> None:
        self._report: Callable[[str, bool], None] | None = report
        self._thread: int | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, place in _collectives():
            run = partial(self._run, operator, place)
            self._library.impl(operator, run, _KEY.name, with_keyset=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report the collectives of this thread in a ``with`` block."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def close(self) -> None:
        self._library._destroy()
        self._report = None

    def _run(self, operator: Any, place: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
        thread = self._thread
        if self._report is not None and thread == threading.get_ident():
            name = operator.overloadpacket.__name__
            size = dist.ProcessGroup.unbox(args[place]).size()
            self._thread = None
            try:
                takes_all = name not in _BETWEEN_TWO and size == dist.get_world_size()
                self._report(name.rstrip("_"), takes_all)
            finally:
                self._thread = thread
        return operator.redispatch(keys.remove(_KEY), *args, **kwargs)


@cache
def _collectives() -> list[tuple[Any, int]]:
    """Return the operators of torch.distributed, and which argument of each is the group."""
    found = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    packets = {name.split(".")[0] for space, name in found if space == "c10d"}
    return [
        (getattr(packet, overload), place)
        for packet in (getattr(torch.ops.c10d, name) for name in packets)
        for overload in packet.overloads()
        for place, argument in enumerate(getattr(packet, overload)._schema.arguments)
        if "ProcessGroup" in str(argument.type)
    ]
