"""Names what versions of torch differ in, from the oldest that pyproject.toml allows."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed import distributed_c10d

_Class = TypeVar("_Class", bound=type[torch.Tensor])

# 2.13 names these, and deprecates the names of 2.11
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
# Of a group that exists. 2.14 makes it public, and deprecates the private one.
set_timeout: Callable[..., None] = (
    getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
)


def computes_by_itself(cls: _Class) -> _Class:
    """Decorate a subclass of DTensor, so that its own ``__torch_dispatch__`` computes operators.

    Up to torch 2.11, DTensor ignores that of subclasses. A rule for each operator has precedence.
    An operator that is made after the class has none: DTensor refuses it by name.
    """
    if torch.__version__ >= "2.12":
        return cls

    def rule(kind: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return kind.__torch_dispatch__(func, types, args, kwargs)

    libraries = []  # rules live as long as their library
    names = sorted(torch._C._dispatch_get_all_op_names())
    for namespace, own in itertools.groupby(names, lambda name: name.split("::")[0]):
        libraries.append(torch.library.Library(namespace, "FRAGMENT"))
        for name in own:
            torch.library.register_torch_dispatch(name, cls, rule, lib=libraries[-1])
    cls.operator_rules = libraries  # type: ignore[attr-defined]
    return cls


def leave_checkpoints(error: BaseException | None) -> None:
    """Leave ``torch.utils.checkpoint``: in 2.11 its hooks stay as long as an error in it exists."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__:
                frame.clear()
        error = error.__context__


def state_of_constructor(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    """Return the state that no step makes for a parameter; up to 2.11, Adagrad's."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    return {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}
