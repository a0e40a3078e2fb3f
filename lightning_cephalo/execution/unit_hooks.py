"""Where the model is cut: a unit's ``forward`` is replaced on the instance.

On the instance, and not by wrapping the module, so that no name in a state dict moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.replay import ChangingBuffers

Enter = Callable[[Callable[..., Any], ChangingBuffers, tuple[Any, ...], dict[str, Any]], Any]


class Cut:
    """Stands in for the forward of one unit until it is removed.

    Args:
        module: The unit's module.
        enter: Called with the real forward, the unit's buffers and the arguments.
    """

    def __init__(self, module: nn.Module, enter: Enter) -> None:
        self._module = module
        self._enter = enter
        self._buffers = ChangingBuffers(module)
        # modules wrapped by torch.compile keep their forward on the instance too
        self._replaced = module.__dict__.get("forward")
        # `module.compile()` would trace into the scheduler: the cut goes outside of it
        self._compiled = module._compiled_call_impl
        self._body = module.forward if self._compiled is None else self._compiled_body
        if self._compiled is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise UnitUseError(
                f"{type(module).__name__} was compiled in place and has forward hooks, which would"
                " run twice. Compile it by `blocks[i] = torch.compile(block)` instead."
            )
        module._compiled_call_impl = None
        module.forward = self

    @property
    def is_compiled(self) -> bool:
        """Whether the module was compiled in place."""
        return self._compiled is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(self._body, self._buffers, args, kwargs)

    def _compiled_body(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        self._restore_forward()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._module.forward = self

    def _restore_forward(self) -> None:
        if self._replaced is None:
            del self._module.forward
        else:
            self._module.forward = self._replaced

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._restore_forward()
        self._module._compiled_call_impl = self._compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnitUseError(
            "A module that cephalo has sharded cannot be deep-copied: the copy would share its"
            " shards. Copy it before training (in the setup hook), or copy its state_dict()."
        )
