"""Runs updates and gradient clipping on plain tensors instead of DTensors.

Every operator on a DTensor costs a dispatch in Python, many times what it takes on a small tensor.
The optimizer's ``step`` runs unchanged, but its update finds this rank's rows in place of the
DTensors, or whole parameters (``owned_update.py``). The exchange comes after the closure and after
all hooks that run before the update. Users see DTensors in ``param_groups``, ``state`` and hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.adapters.stepping import (
    copy_of,
    shown,
    step_without_hooks,
    without_torch_functions,
)
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import agreed, in_rows, local_part, rows_of
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import is_spent

Chosen = Sequence[Sequence[Tensor]]
"""Some parameters of each group."""


@contextmanager
def local_update(
    optimizer: Optimizer, owned: OwnedUpdate | None = None, elsewhere: Executor | None = None
) -> Iterator[None]:
    """While active, ``optimizer.step`` updates plain tensors; hooks and closures find DTensors."""
    # rows are right for element-wise updates, and for all on a single rank
    show = partial(_rows_shown, optimizer, elsewhere) if owned is None else owned.shown
    at_end, evaluations = ExitStack(), 0
    depth = 0  # torch runs hooks again where a step calls that of its base class

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        nonlocal depth, evaluations
        depth += 1
        if depth > 1:
            return None
        evaluations, options = 0, dict(kwargs)
        closure = args[1] if len(args) > 1 else options.pop("closure", None)
        if closure is None:  # a gradient scaler has run it already
            at_end.enter_context(show())
            return None

        def closure_and_exchange() -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations > 1 and owned is not None:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluates its closure several times a step, which"
                    " ranks may do differently often. Use a form of it that evaluates it once."
                )
            at_end.close()  # of an evaluation before
            outcome = closure()  # gradients exist, and are clipped, only after it has run
            at_end.enter_context(show())
            return outcome

        return (args[0], closure_and_exchange, *args[2:]), options

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            at_end.close()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    # Private: there is no public way to run before the user's own hooks, which must find DTensors.
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(handles[1].id, last=False)
    try:
        with at_end:
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _rows_shown(
    optimizer: Optimizer,
    elsewhere: Executor | None = None,
    staged: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
) -> Iterator[None]:
    """Put this rank's rows in place of DTensors, and what is ``staged`` in place of their state.

    ``elsewhere`` updates what the optimizer's own step leaves out.
    """
    updated = () if elsewhere is None else elsewhere.before_step()
    groups = [list(group["params"]) for group in optimizer.param_groups]
    pairs = [[(parameter, local_part(parameter)) for parameter in group] for group in groups]
    rows = _rows_of(list(chain.from_iterable(groups)), updated)
    with without_torch_functions(), rows, shown(optimizer, pairs, as_state, staged):
        yield
    if elsewhere is not None:
        elsewhere.after_step()


def update_rows(
    optimizer: Optimizer, chosen: Chosen, staged: Mapping[tuple[int, str], Tensor]
) -> None:
    """Update this rank's rows of some parameters of each group, as ``step`` updates them.

    Hooks, schedulers and profilers do not see it: they see the one ``step`` that updates the rest.
    ``staged`` has what stands for rows of state that lie in host memory.
    """
    update = part_of(optimizer, chosen)
    with _rows_shown(update, staged=staged):
        step_without_hooks(update)
    optimizer.state.update(update.state)


def part_of(optimizer: Optimizer, chosen: Chosen, *, on_host: bool = False) -> Optimizer:
    """Return a copy of an optimizer that holds some parameters of each group, and their state."""
    state = {p: optimizer.state[p] for p in chain.from_iterable(chosen) if p in optimizer.state}
    part = copy_of(optimizer, chosen, state, on_host=on_host)
    part.param_groups = [group for group in part.param_groups if group["params"]]
    return part


def has_rows(name: str, parameter: Tensor, value: Any) -> bool:
    """Return whether an entry of a parameter's state has this rank's rows, as plain tensor."""
    # a step count has the shape of a 0-d parameter, but is a plain number on every rank
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or name == "step":
        return False
    return value.shape == local_part(parameter).shape


def as_state(name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """Return rows of state as a DTensor; a number for the whole parameter as it is."""
    return in_rows(value, cast(DTensor, parameter)) if has_rows(name, parameter, value) else value


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients down to a norm over all ranks, and return the norm before; collective.

    Sends one message for all gradients; otherwise like ``torch.nn.utils.clip_grad_norm_``.
    """
    with without_torch_functions(), torch.no_grad():
        held = [parameter for parameter in parameters if parameter.grad is not None]
        for gradient in (parameter.grad for parameter in held):
            if gradient is not None and is_spent(gradient):
                gradient.abs()  # raises by name
        if not held:
            return torch.tensor(0.0)
        with _rows_of(held) as rows:
            cut = [p for p in held if rows_of(p) is not None]
            by_kind: tuple[list[Tensor], list[Tensor]] = [], []
            for parameter, own in zip(held, rows, strict=True):
                by_kind[rows_of(parameter) is None].append(cast(Tensor, own.grad))
            square, of_copies = (_square_of_norm(each, rows[0].device) for each in by_kind)
            if cut:
                mesh = cast(DTensor, cut[0]).device_mesh
                all_reduce(square, mesh.get_group()).wait()
                agreed(square, mesh)
            norm = (square + of_copies).sqrt().to(rows[0].dtype)
            torch.nn.utils.clip_grads_with_norm_(rows, largest, norm)
    return norm


def _square_of_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:  # torch's norm of no tensors is on the CPU: copying it waits for the device
        return torch.zeros((), dtype=torch.float64, device=device)
    # in double precision, the square of a finite single-precision number is finite
    return torch.nn.utils.get_total_norm(gradients).to(torch.float64).square()


@contextmanager
def _rows_of(parameters: list[Tensor], updated: Container[int] = ()) -> Iterator[list[Tensor]]:
    """Yield this rank's rows of parameters, which hold the rows of their gradients inside.

    Gradients that have updated their parameters are left out. Collective if a backward of the
    user's has left whole gradients.
    """
    cut_gradients(parameters)
    rows = [local_part(parameter) for parameter in parameters]
    try:
        for parameter, own in zip(parameters, rows, strict=True):
            gradient = parameter.grad
            if own is parameter or id(parameter) in updated:
                continue
            if gradient is not None and not is_spent(gradient):
                own.grad = local_part(gradient)
        yield rows
    finally:
        for parameter, own in zip(parameters, rows, strict=True):
            if own is not parameter:
                own.grad = None
