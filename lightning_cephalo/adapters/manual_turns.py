"""What Lightning and torch need where several microbatches of a rank optimize manually.

The code of ``training_step`` runs once per microbatch. Steps of optimizers and of schedules, and
what Lightning counts around them, come once a step. ``execution/in_turns.py`` compares what the
microbatches do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable as Function
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.manual_step import ManualSteps

_WAY_OUT = "Use a plan with one microbatch per rank."


class StepSettings:
    """Learning rates and other options of optimizers, and schedules.

    Args:
        module: The user's module, which may hold schedules of its own.
        optimizers: Returns the optimizers.
    """

    def __init__(self, module: Any, optimizers: Function[[], Sequence[Optimizer]]) -> None:
        self._module, self._optimizers = module, optimizers

    def _schedules(self) -> list[Any]:
        given = [config.scheduler for config in self._module.trainer.lr_scheduler_configs]
        own = [value for value in vars(self._module).values() if isinstance(value, LRScheduler)]
        return list({id(each): each for each in (*given, *own)}.values())

    def read(self) -> Any:
        """Return a copy of them."""
        groups = [
            [
                (group, list(group["params"]), {k: _copied(v) for k, v in _options(group)})
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers()
        ]
        return groups, [copy.deepcopy(schedule.state_dict()) for schedule in self._schedules()]

    def show(self, settings: Any) -> None:
        """Put back an earlier copy."""
        groups_of, states = settings
        for optimizer, groups in zip(self._optimizers(), groups_of, strict=True):
            optimizer.param_groups[:] = [group for group, _, _ in groups]
            for group, parameters, options in groups:
                group["params"][:] = parameters
                for name in [name for name, _ in _options(group) if name not in options]:
                    del group[name]
                for name, value in options.items():
                    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value
        for schedule, state in zip(self._schedules(), states, strict=True):
            schedule.load_state_dict(copy.deepcopy(state))

    def difference(self, one: Any, other: Any) -> str | None:
        """Return the name of what differs between two copies; None: nothing."""
        for mine, its in zip(one[0], other[0], strict=True):
            if len(mine) != len(its):
                return "parameter groups"
            for (_, parameters, options), (_, its_parameters, its_options) in zip(
                mine, its, strict=True
            ):
                if [*map(id, parameters)] != [*map(id, its_parameters)]:
                    return "the parameters of a parameter group"
                for name in {**options, **its_options}:
                    if not _is_same(options.get(name), its_options.get(name)):
                        return f"{name!r} of a parameter group"
        pairs = zip(self._schedules(), one[1], other[1], strict=True)
        for schedule, state, its_state in pairs:
            if not _is_same(state, its_state):
                return f"{type(schedule).__name__}, a schedule"
        return None

    def said(self, settings: Any) -> str:
        """Return text about a copy that is the same on ranks whose settings are."""
        groups_of, states = settings
        options = [[(len(held), own) for _, held, own in groups] for groups in groups_of]
        return _said((options, states))

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors of optimizers' state."""
        return [
            value
            for optimizer in self._optimizers()
            for entries in optimizer.state.values()
            if isinstance(entries, dict)
            for value in entries.values()
            if isinstance(value, Tensor)
        ]


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return _said(value.tolist()) if value.numel() < 16 else str(tuple(value.shape))
    if isinstance(value, dict):
        return ",".join(f"{key}:{_said(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_said, value)) + "]"
    if isinstance(value, int | float | str | None):
        return repr(value)
    return type(value).__name__


def _options(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in group.items() if name != "params"]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if hasattr(one, "__dict__") and not callable(one):  # copies of an object
        return _is_same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


@contextmanager
def once(manual: ManualSteps, optimizers: Sequence[LightningOptimizer]) -> Iterator[None]:
    """Let Lightning count each optimizer's step once in a ``with`` block.

    Private API: the two functions that Lightning's loop sets around steps of optimizers.

    Args:
        manual: Runs the step.
        optimizers: Lightning's optimizers.
    """
    before = [(each, each._on_before_step, each._on_after_step) for each in optimizers]
    if manual.takes_turns:
        for each, before_step, after_step in before:
            each._on_before_step = _by_leader(manual, before_step)
            each._on_after_step = _by_leader(manual, after_step)
    try:
        yield
    finally:
        for each, before_step, after_step in before:
            each._on_before_step, each._on_after_step = before_step, after_step


def _by_leader(manual: ManualSteps, function: Function[[], None]) -> Function[[], None]:
    def called() -> None:
        if manual.turns.leads:
            function()

    return called


def check(module: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise if code would run once per microbatch that must run once.

    Raises:
        UnsupportedError: The message names it and the way out.
    """
    wrapped = [each for each in optimizers if isinstance(each, LightningOptimizer)]
    if wrapped:
        raise UnsupportedError(
            f"configure_optimizers returns a {type(wrapped[0]).__name__}, which Lightning has"
            " wrapped already. With manual optimization and several microbatches per rank, its"
            " step() could not be told from the optimizer's own. Return the torch.optim.Optimizer."
            f" {_WAY_OUT}"
        )
    for callback in (module, *module.trainer.callbacks):
        parent = LightningModule if callback is module else Callback
        if is_overridden("on_before_backward", callback, parent):
            raise UnsupportedError(
                f"{type(callback).__name__} has on_before_backward, which gets the loss. With"
                " manual optimization and several microbatches per rank there is one for each"
                f" microbatch. Read it in training_step instead. {_WAY_OUT}"
            )


_RUN_ONCE = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)


def read_in_hooks(module: Any) -> frozenset[str]:
    """Return the names of attributes that hooks read which run once for all microbatches.

    Args:
        module: The user's module; the hooks of callbacks count too.
    """
    found: set[str] = set()
    for owner in (module, *module.trainer.callbacks):
        for name in _RUN_ONCE:
            hook: Any = getattr(type(owner), name, None)
            is_users = not getattr(hook, "__module__", "lightning").startswith("lightning")
            if is_users and hasattr(hook, "__code__"):
                found.update(hook.__code__.co_names)
    return frozenset(found)


def refuse_closures(optimizers: Sequence[Optimizer]) -> None:
    """Raise for optimizers that cannot do without a closure, as they evaluate it several times.

    Raises:
        UnsupportedError: The message names one and the way out.
    """
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UnsupportedError(
                f"{type(optimizer).__name__} evaluates its closure several times, which several"
                f" microbatches per rank with manual optimization cannot follow. {_WAY_OUT}"
            )


def refuse_own_steps(manual: ManualSteps, optimizers: Sequence[Optimizer]) -> list[RemovableHandle]:
    """Refuse ``step()`` of optimizers themselves inside of a step with several microbatches.

    Args:
        manual: Runs the steps.
        optimizers: The optimizers.

    Returns:
        What ends it.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if manual.takes_turns and manual.running is not None and not manual.turns.is_acting:
            raise UnsupportedError(
                f"training_step calls {type(optimizer).__name__}.step() of the optimizer itself"
                " (use_pl_optimizer=False?). With manual optimization and several microbatches per"
                " rank, each microbatch would update. Call step() of self.optimizers()."
                f" {_WAY_OUT}"
            )

    return [each.register_step_pre_hook(before) for each in optimizers]
