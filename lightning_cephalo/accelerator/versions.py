"""Counts writes that torch does not count below a dispatch mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import increment_version


def count_foreach_writes(function: Any, arguments: Sequence[Any]) -> None:
    """Raise the versions of the tensors that a foreach operator has written to in place.

    A dispatch mode calls it after the operator. Without a mode torch raises them itself::

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            count_foreach_writes(func, args)     # torch._foreach_mul_([x], 2): x._version rises
            return result
    """
    if function._schema.is_mutable and function.overloadpacket.__name__.startswith("_foreach_"):
        increment_version([tensor for tensor in arguments[0] if not tensor.is_inference()])
