"""Finds collectives of torch.distributed in the user's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,  # private, but documented for subclassing
)

from lightning_cephalo.accelerator.versions import count_foreach_writes

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


class UserCollectives(TorchDispatchMode):
    """Reports each collective that runs inside, before it runs.

    ::

        with UserCollectives(report):
            dist.all_reduce(loss)      # report("all_reduce")

    It sees every operator and so takes time. The executor uses it while it traces the order of
    units: in the first step, and when the order changes.

    Args:
        report: Called with the name of the collective; may raise.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` work inside, which otherwise leaves such frames alone for good."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            self._report(func.overloadpacket.__name__.rstrip("_"))
        result = func(*args, **kwargs or {})
        count_foreach_writes(func, args)
        return result
