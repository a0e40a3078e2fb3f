"""Refuses collectives inside of the user's steps, of which ranks run different numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup

# The dispatcher looks here for every operator, whatever its tensors and the modes they are in.
_KEY = torch._C.DispatchKey.BackendSelect


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
    """Refuses each collective of torch.distributed that the user's step starts, before it runs.

    Other operators take no time. Private API: the key and its removal from a set of keys.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for operator in _collectives():
            run = partial(self._run, operator)
            self._library.impl(operator, run, _KEY.name, with_keyset=True)

    @contextmanager
    def watched(self, allows: Callable[[], bool]) -> Iterator[None]:
        """Refuse the collectives of this thread in a ``with`` block, unless they are allowed."""
        self._thread = None if allows() else threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def close(self) -> None:
        self._library._destroy()

    def _run(self, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if self._thread == threading.get_ident():
            name = operator.overloadpacket.__name__.strip("_")
            raise UnsupportedError(
                f"{name}() inside a step, of which ranks run different numbers of microbatches: it"
                " would hang. Write the step as for one device: a loss over the samples of all"
                " ranks by lightning_cephalo.loss_over_batch(), sums by summed_buffers=. Or gather"
                " in a hook, or optimize manually, where every rank runs the step once."
            )
        return operator.redispatch(keys.remove(_KEY), *args, **kwargs)


@cache
def _collectives() -> list[Any]:
    """Return the operators of torch.distributed that have a group of ranks."""
    found = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    packets = {name.split(".")[0] for space, name in found if space == "c10d"}
    return [
        operator
        for packet in (getattr(torch.ops.c10d, name) for name in packets)
        for operator in (getattr(packet, overload) for overload in packet.overloads())
        if any("ProcessGroup" in str(each.type) for each in operator._schema.arguments)
    ]
