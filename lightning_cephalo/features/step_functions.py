"""Handles the torch functions that the code of a manually optimized step calls.

Between its uses of units such code computes with parameters of the root unit, which is gathered
then, and reads and writes shards. It calls ``backward``. A torch function mode sees all of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.sharding.write_guard import spelled

if TYPE_CHECKING:
    from lightning_cephalo.features.manual_step import PhasedSteps


class StepFunctions(TorchFunctionMode):
    def __init__(self, steps: PhasedSteps) -> None:
        super().__init__()
        self._steps = steps
        self._root: dict[int, Tensor] = {}
        self._inside: dict[int, str] = {}
        self._is_suspended = False

    def __enter__(self) -> StepFunctions:
        self._root = self._steps.root_parameters()
        self._inside = self._steps.names_inside()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_suspended or self._steps.running is None:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            return self._steps.backward(*args, **kwargs)
        if func is torch.autograd.grad:
            outputs, inputs = (_listed(each) for each in (*args, *kwargs.values())[:2])
            self._steps.refuse_gradients_through_units(outputs, inputs)
            gathered = {id(each) for each in self._root.values()}
            if any(id(each) in self._root or id(each) in gathered for each in inputs):
                self._steps.warn_of_own_gradient()
        elif _computes(func):
            args = self._with_root(func, args)
        return func(*args, **kwargs)

    def _with_root(self, func: Any, args: Any) -> Any:
        """Return arguments with gathered parameters of the root unit in place of their shards.

        Code without gradients reads and writes shards: an average of weights, for example.
        """
        leaves = [each for arg in args for each in _listed(arg)]
        with_gradients = torch.is_grad_enabled()
        inside = [self._inside[id(each)] for each in leaves if id(each) in self._inside]
        if inside and with_gradients:
            raise UnitUseError(
                f"training_step computes ({getattr(func, '__name__', func)}) with {spelled(inside)}"
                " of a unit, outside of the unit's forward, so that the gradient would be lost. Do"
                " it in the forward; code that needs no gradient stands under torch.no_grad()."
            )
        used = [each for each in leaves if id(each) in self._root]
        if used and (with_gradients or all(each.ndim == 0 for each in used)):
            self._steps.need_root()
            return [self._gathered(each) for each in args]
        return args

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([self._gathered(each) for each in value])
        return self._root.get(id(value), value)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Undo :meth:`suspended` in a ``with`` block."""
        before, self._is_suspended = self._is_suspended, False
        try:
            with self:
                yield
        finally:
            self._is_suspended = before

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do nothing in a ``with`` block, for code that is not the user's.

        Private API: torch has no public way to leave a mode in the middle of its block. If the
        user's code has entered a mode of its own (``with torch.device(...)``), this one stays.
        """
        is_innermost = _get_current_function_mode() is self
        before, self._is_suspended = self._is_suspended, True
        if is_innermost:
            _pop_mode()
        try:
            yield
        finally:
            self._is_suspended = before
            if is_innermost:
                _push_mode(self)


def warn_of_own_gradient() -> None:
    warnings.warn(
        "training_step computes the gradient of a parameter itself (torch.autograd.grad, as for"
        " VQ-GAN's adaptive weight). It is that of a microbatch's samples, so that a weight from"
        " its norm, and with it training, will differ from one device. Use a fixed weight, or one"
        " that on_train_batch_start computes for all ranks.",
        stacklevel=2,
    )


_NO_COMPUTING = frozenset(
    [
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__len__",
        "__repr__",
        "__format__",
        "__reduce_ex__",
        "detach",
        "data_ptr",
        "requires_grad_",
        "register_hook",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "get_device",
    ]
)


def _computes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _NO_COMPUTING or name.startswith(("register_", "is_")):
        return False
    return not name.endswith("_") or name.endswith("__")


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
