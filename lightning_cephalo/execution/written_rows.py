"""Puts back the rows of parameters that a measured step has written.

Steps that optimize manually write to parameters between their uses: they clamp the weights of a
critic, or move a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.unit import Unit

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS.split())


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "").split(".")[0]
    if name in _IN_PLACE or name == "__setitem__" or kwargs.get("out") is not None:
        return True
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 for none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return 0


def _memory_of(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


class WrittenRows:
    def __init__(self, units: Sequence[Unit], accelerator: Accelerator) -> None:
        self._units, self._accelerator = units, accelerator
        self._rows: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def before(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Keep what a torch function is about to write."""
        if not _writes(func, kwargs):
            return
        if not self._rows:
            flats = [flat for unit in self._units for flat in unit.flats]
            rows = [flat.shard for flat in flats]
            self._rows = {_address(each): _memory_of(each) for each in rows if _address(each)}
        for tensor in pytree.tree_leaves((args, kwargs)):
            at = _address(local_part(tensor)) if isinstance(tensor, Tensor) else 0
            if at in self._rows and at not in self._kept:
                with self._accelerator.on_host():
                    self._kept[at] = self._rows[at].to("cpu", copy=True)

    def put_back(self) -> None:
        with torch.no_grad():
            for at, kept in self._kept.items():
                self._rows[at].copy_(kept)
        self._rows, self._kept = {}, {}
