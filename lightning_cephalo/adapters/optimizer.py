"""Runs element-wise updates and gradient clipping on plain local rows instead of DTensors.

Every operator on a DTensor costs a dispatch in Python, many times what the operator itself takes on
a small tensor. An active ``TorchFunctionMode`` costs a call in Python for every function and
attribute. An element-wise update needs neither: the rows of a parameter, its gradient and its state
lie on the same rank. So torch's own ``step`` runs unchanged, but its update finds this rank's rows
in place of the DTensors. The exchange comes after the closure and after all hooks that run before
the update. Before and after, users see DTensors: in ``param_groups``, in ``state``, in hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import Rows, as_dtensor, local_part, row_spec

# element-wise with any options; a subclass may do anything, and runs on DTensors
_ELEMENT_WISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
# with these options, torch may hold on to the given tensors (graphs)
_KEPT = ("differentiable", "capturable")


def steps_locally(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's update is known to be the same on each rank's rows alone."""
    return type(optimizer) in _ELEMENT_WISE and not any(
        group.get(option) for group in optimizer.param_groups for option in _KEPT
    )


@contextmanager
def local_update(optimizer: Optimizer) -> Iterator[None]:
    """While active, ``optimizer.step`` updates this rank's rows as plain tensors, if possible.

    Hooks of the optimizer, its closure and all code that the closure calls find DTensors.
    """
    if not steps_locally(optimizer):
        yield
        return
    exchange = _Exchange(optimizer)

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        options = dict(kwargs)
        closure = args[1] if len(args) > 1 else options.pop("closure", None)

        def closure_and_exchange() -> Any:
            # gradients exist, and are clipped, only after the closure has run
            outcome = closure() if closure is not None else None
            exchange.show_rows()
            return outcome

        return (args[0], closure_and_exchange), options

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        exchange.show_dtensors()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    # Private: there is no public way to run before the user's own hooks, which must find DTensors.
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(handles[1].id, last=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        exchange.show_dtensors()


class _Exchange:
    """Puts rows in place of an optimizer's DTensors, and DTensors back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._meanwhile = ExitStack()
        self._dtensors: list[list[Tensor]] = []
        self._state: Any = None

    def show_rows(self) -> None:
        optimizer = self._optimizer
        self._meanwhile.enter_context(_without_torch_functions())
        self._dtensors = [group["params"] for group in optimizer.param_groups]
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        for group, parameters in zip(optimizer.param_groups, self._dtensors, strict=True):
            group["params"] = self._meanwhile.enter_context(_rows_of(parameters))
            for parameter, rows in zip(parameters, group["params"], strict=True):
                if parameter in self._state:
                    optimizer.state[rows] = {
                        name: local_part(value) for name, value in self._state[parameter].items()
                    }

    def show_dtensors(self) -> None:
        """Put the DTensors back, with the update's additions to the state.

        Does nothing unless rows are shown.
        """
        if self._state is None:
            return
        optimizer, by_rows = self._optimizer, self._optimizer.state
        optimizer.state, self._state = self._state, None
        for group, parameters in zip(optimizer.param_groups, self._dtensors, strict=True):
            group["params"] = parameters
            for parameter in parameters:
                rows = local_part(parameter)
                if rows in by_rows:
                    _take_over(optimizer.state[parameter], by_rows[rows], parameter)
        self._meanwhile.close()


def _take_over(entries: dict[str, Any], by_rows: dict[str, Any], parameter: Tensor) -> None:
    """Add the new entries of its rows' state to a parameter's state."""
    for name, value in by_rows.items():
        # the parameter's state has entries that were updated in place already
        if name not in entries or local_part(entries[name]) is not value:
            entries[name] = _as_state(name, value, parameter)


def _as_state(name: str, value: Any, parameter: Tensor) -> Any:
    # a step count has the shape of a 0-d parameter, but is a plain number on every rank
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or name == "step":
        return value
    rows = getattr(parameter.placements[0], "rows", None)
    return as_dtensor(value, row_spec(parameter.device_mesh, rows, parameter.shape, value.dtype))


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients down to a norm over all gradients and all ranks; collective.

    Sends one message for all gradients; otherwise like ``torch.nn.utils.clip_grad_norm_``.

    Args:
        parameters: DTensors in rows or with a copy on every rank; those without gradients are
            ignored.
        largest: The largest norm that the gradients may have.

    Returns:
        The norm before clipping.
    """
    with _without_torch_functions(), torch.no_grad():
        held = [parameter for parameter in parameters if parameter.grad is not None]
        if not held:
            return torch.tensor(0.0)
        in_rows = [isinstance(p, DTensor) and isinstance(p.placements[0], Rows) for p in held]
        with _rows_of(held) as rows:
            parts = [own.grad for own, part in zip(rows, in_rows, strict=True) if part]
            copies = [own.grad for own, part in zip(rows, in_rows, strict=True) if not part]
            square, square_of_copies = (_square_of_norm(g, rows[0].device) for g in (parts, copies))
            if parts:
                mesh = cast(DTensor, held[in_rows.index(True)]).device_mesh
                all_reduce(square, mesh.get_group()).wait()
            norm = (square + square_of_copies).sqrt().to(rows[0].dtype)
            torch.nn.utils.clip_grads_with_norm_(rows, largest, norm)
    return norm


def _square_of_norm(gradients: list[Any], device: torch.device) -> Tensor:
    if not gradients:  # torch's norm of no tensors is on the CPU: copying it waits for the device
        return torch.zeros((), dtype=torch.float64, device=device)
    # in double precision, the square of a finite single-precision number is finite
    return torch.nn.utils.get_total_norm(gradients).to(device, torch.float64).square()


def clip_by_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Clamp every element of the gradients to between minus and plus ``largest``."""
    with _without_torch_functions(), _rows_of(list(parameters)) as rows:
        torch.nn.utils.clip_grad_value_(rows, largest)


@contextmanager
def _rows_of(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield this rank's rows of parameters, which hold the rows of their gradients inside."""
    rows = [local_part(parameter) for parameter in parameters]
    try:
        for parameter, own in zip(parameters, rows, strict=True):
            if own is not parameter and parameter.grad is not None:
                own.grad = local_part(parameter.grad)
        yield rows
    finally:
        for parameter, own in zip(parameters, rows, strict=True):
            if own is not parameter:
                own.grad = None


def _without_torch_functions() -> Any:
    """Return a context inside which no ``TorchFunctionMode`` sees any call.

    Private: torch has no public way to suspend a mode that is not the innermost one.
    """
    return torch._C.DisableTorchFunction()
