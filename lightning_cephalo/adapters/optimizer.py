"""Runs updates and gradient clipping on plain tensors instead of DTensors.

Every operator on a DTensor costs a dispatch in Python, many times what it takes on a small tensor.
The optimizer's ``step`` runs unchanged, but its update finds this rank's rows in place of the
DTensors, or whole parameters (``owned_update.py``). The exchange comes after the closure and after
all hooks that run before the update. Users see DTensors in ``param_groups``, ``state`` and hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.owned_update import OwnedUpdate, common_state, following
from lightning_cephalo.adapters.scope import known_scope
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import (
    Rows,
    agreed,
    in_rows,
    local_part,
)
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import (
    SentGradient,
    is_spent,
    sent_gradient,
)
from lightning_cephalo.sharding.write_guard import Locked, spelled


class UpdatesElsewhere(Protocol):
    """Updates parameters whose state is not on the device; ``step`` leaves them out."""

    def before_step(self) -> Container[int]:
        """Update them; return their ids. Gradients are final and clipped."""

    def after_step(self) -> None:
        """Wait until they are updated; hooks behind the step may read them."""


@contextmanager
def local_update(
    optimizer: Optimizer,
    owned: OwnedUpdate | None = None,
    elsewhere: UpdatesElsewhere | None = None,
) -> Iterator[None]:
    """While active, ``optimizer.step`` updates plain tensors; hooks and closures find DTensors.

    Args:
        owned: Its updates on whole parameters; None: it updates this rank's rows, which is right
            for element-wise updates, and for all on a single rank.
        elsewhere: Updates some parameters around the optimizer's own update of rows.
    """
    exchange = _Exchange(optimizer, elsewhere) if owned is None else owned
    depth = 0  # torch runs hooks again where a step calls that of its base class

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        if depth > 1:
            return None
        options = dict(kwargs)
        given = len(args) > 1 or "closure" in options
        closure = args[1] if len(args) > 1 else options.pop("closure", None)
        wrapped = exchange.wrapped(closure)
        if given:
            # gradients exist, and are clipped, only after the closure has run
            return (args[0], wrapped, *args[2:]), options
        wrapped()  # a gradient scaler has run the closure already
        return None

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            exchange.finish(None)

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    # Private: there is no public way to run before the user's own hooks, which must find DTensors.
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(handles[1].id, last=False)
    try:
        with following(optimizer) if owned is not None else nullcontext():
            yield
    except Exception as failure:
        exchange.finish(failure)
        raise
    finally:
        for handle in handles:
            handle.remove()
        exchange.restore()


class _Exchange:
    """Puts rows in place of an optimizer's DTensors, and DTensors back."""

    def __init__(self, optimizer: Optimizer, elsewhere: UpdatesElsewhere | None = None) -> None:
        self._optimizer, self._elsewhere = optimizer, elsewhere
        self._updated: Container[int] = ()
        self._is_torchs = known_scope(optimizer) is not None
        self._meanwhile = ExitStack()
        self._dtensors: list[list[Tensor]] = []
        self._shown: Sequence[Sequence[Tensor]] = []
        self._own_memory: list[list[Tensor]] = []
        self._faces: dict[Tensor, dict[str, Any]] = {}
        self._staged: Mapping[tuple[int, str], Tensor] = {}
        self._state: Any = None

    def wrapped(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        """Return a closure that also shows rows."""

        def closure_and_exchange() -> Any:
            self.finish(None)  # of an evaluation before
            outcome = closure() if closure is not None else None
            if self._elsewhere is not None:
                self._updated = self._elsewhere.before_step()
            self.show_rows()
            return outcome

        return closure_and_exchange

    def show_rows(
        self,
        chosen: Sequence[Sequence[Tensor]] | None = None,
        staged: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
    ) -> None:
        """Put this rank's rows in place of DTensors: of all parameters, or of some of each group.

        ``staged`` has what stands for rows of state that lie in host memory.
        """
        optimizer = self._optimizer
        self._meanwhile.enter_context(_without_torch_functions())
        self._dtensors = [list(group["params"]) for group in optimizer.param_groups]
        self._shown, self._staged = self._dtensors if chosen is None else chosen, staged
        self._own_memory = []
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        optimizer.state.update(common_state(self._state))
        for group, parameters in zip(optimizer.param_groups, self._shown, strict=True):
            rows = self._meanwhile.enter_context(_rows_of(list(parameters), self._updated))
            # in place: an optimizer may hold the list itself
            group["params"][:] = rows
            # torch's own optimizers write in place; one view per tensor would cost them time
            self._own_memory.append([] if self._is_torchs else [own.detach() for own in rows])
            for parameter, own in zip(parameters, rows, strict=True):
                if parameter in self._state:
                    # the same dict: a step may have looked it up before its closure
                    entries = optimizer.state[own] = self._state[parameter]
                    self._faces[own] = dict(entries)
                    for name, value in entries.items():
                        held = staged.get((id(parameter), name))
                        entries[name] = _mapped(local_part, value) if held is None else held

    def finish(self, failure: BaseException | None) -> None:
        """Put the DTensors back where rows are shown, with the update's additions to the state."""
        if self._state is None:
            return
        optimizer, by_rows = self._optimizer, self._optimizer.state
        optimizer.state, self._state = self._state, None
        optimizer.state.update(common_state(by_rows))
        for group, parameters in zip(optimizer.param_groups, self._dtensors, strict=True):
            group["params"][:] = parameters
        for parameter in chain.from_iterable(self._shown):
            rows = local_part(parameter)
            if rows in by_rows:
                optimizer.state[parameter] = by_rows[rows]
                self._show_state(by_rows[rows], self._faces.get(rows, {}), parameter)
        for shown, memory in zip(self._shown, self._own_memory, strict=False):
            for parameter, own in zip(shown, memory, strict=False):
                rows = local_part(parameter)
                if rows.data_ptr() != own.data_ptr():  # after `p.data = p.data - update`
                    own.copy_(rows.detach())
                    rows.data = own
        self._faces = {}
        self._meanwhile.close()
        if failure is None and self._elsewhere is not None:
            self._elsewhere.after_step()

    def _show_state(
        self, entries: dict[str, Any], faces: dict[str, Any], parameter: Tensor
    ) -> None:
        """Put DTensors in place of rows in a parameter's state: those of before, and new ones."""
        for name, value in entries.items():
            before, held = faces.get(name), self._staged.get((id(parameter), name))
            is_same = held is not None and value is held
            if isinstance(before, Tensor) and (is_same or local_part(before) is value):
                entries[name] = before
            else:
                entries[name] = _mapped(partial(as_state, name, parameter), value)

    def restore(self) -> None:
        """Put the DTensors back after a failure too."""
        self.finish(None)


def update_rows(
    optimizer: Optimizer,
    chosen: Sequence[Sequence[Tensor]],
    clip_value: float | None = None,
    staged: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
) -> None:
    """Update this rank's rows of some parameters, as the optimizer's ``step`` updates them.

    Hooks, schedulers and profilers do not see it: they see the one ``step`` that updates the rest.
    """
    exchange, groups = _Exchange(optimizer), optimizer.param_groups
    try:
        exchange.show_rows(chosen, staged)
        optimizer.param_groups = [group for group in groups if group["params"]]
        for group in optimizer.param_groups if clip_value is not None else ():
            torch.nn.utils.clip_grad_value_(group["params"], cast(float, clip_value))
        if optimizer.param_groups:
            step_without_hooks(optimizer)
    finally:
        optimizer.param_groups = groups
        exchange.restore()


def step_without_hooks(optimizer: Optimizer) -> None:
    """Run the step of an optimizer's class."""
    # Private: below the hooks of instances, and torch's own for profilers
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def step_is_replaced(optimizer: Optimizer) -> bool:
    """Return whether an instance has another ``step`` than its class, not only a scheduler's."""
    replaced = vars(optimizer).get("step")
    # schedulers wrap it to notice its calls
    is_schedulers = getattr(replaced, "_wrapped_by_lr_sched", False)
    wrapped = getattr(replaced, "__wrapped__", None)
    return replaced is not None and not (is_schedulers and wrapped is type(optimizer).step)


def put_in_order(optimizer: Optimizer, before: int) -> None:
    """Put states that a step has made into the order of the groups, which checkpoints keep."""
    state = cast("dict[Any, Any]", optimizer.state)
    made = set(list(state)[before:])
    for group in optimizer.param_groups if made else ():
        for parameter in group["params"]:
            if parameter in made:
                state[parameter] = state.pop(parameter)


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to a tensor, or to all tensors of a container."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple, dict)):
        return pytree.tree_map_only(Tensor, function, value)
    return value


def has_rows(name: str, parameter: Tensor, value: Any) -> bool:
    """Return whether an entry of a parameter's state has this rank's rows, as plain tensor."""
    # a step count has the shape of a 0-d parameter, but is a plain number on every rank
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or name == "step":
        return False
    return value.shape == local_part(parameter).shape


def as_state(name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """Return rows of state as a DTensor; a number for the whole parameter as it is."""
    if not isinstance(parameter, DTensor) or not has_rows(name, parameter, value):
        return value
    return in_rows(value, parameter)


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients down to a norm over all ranks, and return the norm before; collective.

    Sends one message for all gradients; otherwise like ``torch.nn.utils.clip_grad_norm_``. Of those
    that have left for the host the norms are known. The host gets the factor.
    """
    with _without_torch_functions(), torch.no_grad():
        held = [parameter for parameter in parameters if parameter.grad is not None]
        sent = {id(p): own for p in held if (own := sent_gradient(p.grad)) is not None}
        for parameter in held:
            if id(parameter) not in sent and is_spent(parameter.grad):
                cast(Tensor, parameter.grad).abs()  # raises by name
        if not held:
            return torch.tensor(0.0)
        in_rows = [isinstance(p, DTensor) and isinstance(p.placements[0], Rows) for p in held]
        with _rows_of(held) as rows:
            gradients = [
                _Part(own.grad, sent.get(id(parameter)), part)
                for parameter, own, part in zip(held, rows, in_rows, strict=True)
            ]
            parts = [each for each in gradients if each.is_in_rows]
            copies = [each for each in gradients if not each.is_in_rows]
            square, square_of_copies = (_square_of_norm(g, rows[0].device) for g in (parts, copies))
            if parts:
                mesh = cast(DTensor, held[in_rows.index(True)]).device_mesh
                all_reduce(square, mesh.get_group()).wait()
                agreed(square, mesh)
            norm = (square + square_of_copies).sqrt().to(rows[0].dtype)
            torch.nn.utils.clip_grads_with_norm_(rows, largest, norm)
        if sent:
            factor = float(torch.clamp(float(largest) / (norm + 1e-6), max=1.0))
            for own_sent in sent.values():
                own_sent.factor *= factor  # a second clipping finds what the first has left
                own_sent.norm = own_sent.norm * factor
    return norm


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, as ``torch.nn.utils.get_total_norm`` computes it."""
    return list(torch._foreach_norm(gradients))  # private: torch has no public form of it


@dataclass(frozen=True)
class _Part:
    """A gradient on this rank, or what is known of one that has left for the host."""

    gradient: Tensor | None
    sent: SentGradient | None
    is_in_rows: bool


def _square_of_norm(parts: list[_Part], device: torch.device) -> Tensor:
    if not parts:  # torch's norm of no tensors is on the CPU: copying it waits for the device
        return torch.zeros((), dtype=torch.float64, device=device)
    gradients = [part.gradient for part in parts if part.gradient is not None and not part.sent]
    if len(gradients) < len(parts):
        there = iter(norms_of(gradients) if gradients else [])
        norms = [part.sent.norm if part.sent else next(there) for part in parts]
        whole = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
        return whole.to(torch.float64).square()
    # in double precision, the square of a finite single-precision number is finite
    return torch.nn.utils.get_total_norm(gradients).to(device, torch.float64).square()


def clip_by_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Clamp the gradients' elements to ``largest``; UnsupportedError if some are on the host."""
    held = list(parameters)
    left = [name for name in map(_name_of_sent, held) if name]
    if left:
        raise UnsupportedError(
            f"Gradients are clipped by value, but those of {spelled(left)} are on the host already:"
            " the step began with clipping by norm. Change gradient_clip_algorithm before a step,"
            " such as in on_train_batch_start()."
        )
    with _without_torch_functions(), _rows_of(held) as rows:
        torch.nn.utils.clip_grad_value_(rows, largest)


def _name_of_sent(parameter: Tensor) -> str:
    """Return the full name of a parameter whose gradient is on the host; empty: it is not."""
    gradient = parameter.grad
    if gradient is None or sent_gradient(gradient) is None:
        return ""
    return str(cast(Locked, local_part(gradient)).full_name)


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


def _without_torch_functions() -> Any:
    """Return a context inside which no ``TorchFunctionMode`` sees any call.

    Private: torch has no public way to suspend a mode that is not the innermost one.
    """
    return torch._C.DisableTorchFunction()
