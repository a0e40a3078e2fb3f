"""Decides whether units may be updated inside the backward, and updates them.

It must give what updating at the end gives, to the last bit, and nobody may need gradients in
between. What is known before training decides for the whole run, as the plan counts on the memory.
What may change between steps is looked at before every step: such a step is late, with a warning.
Code that reads a gradient after its update is refused by name when it does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_cephalo.adapters import precision
from lightning_cephalo.adapters.moved_state import MovedState
from lightning_cephalo.adapters.scope import not_element_wise
from lightning_cephalo.adapters.stepping import step_is_replaced
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

# Hooks that run between the backward and the next step's, with gradients to read.
_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_HOOKS_OF_MODULE = (
    *_HOOKS,
    *("configure_gradient_clipping", "clip_gradients", "optimizer_step", "optimizer_zero_grad"),
)
_CLIPS = "gradient clipping by norm"
# They set accumulate_grad_batches in the middle of a run.
_ACCUMULATE = (GradientAccumulationScheduler, StochasticWeightAveraging)


def late_by_job(view: TrainerView, module: LightningModule) -> str:
    """Return why no step may update early, in a few words; empty: every step may."""
    if not module.automatic_optimization:
        return "manual optimization"
    for owner, hooks in (
        (module, _HOOKS_OF_MODULE),
        *((callback, _HOOKS) for callback in view.callbacks),
    ):
        for hook in hooks:
            if is_overridden(hook, owner):
                return f"{type(owner).__name__}.{hook}()"
        if isinstance(owner, _ACCUMULATE):
            return type(owner).__name__
    plugin = view.precision
    if precision.loss_scaler(plugin) is not None:
        return "loss scaling"
    if not precision.is_known(plugin):
        return f"the precision plugin {type(plugin).__name__}"
    if view.detects_anomalies:
        return "detect_anomaly=True"
    return _late_by_options(view)


def _late_by_options(view: TrainerView) -> str:
    if view.clip_value and not view.clips_by_value:
        return _CLIPS
    if view.accumulates != 1:
        return f"gradients of {view.accumulates} batches add up"
    return ""


def late_by_optimizer(optimizer: Optimizer) -> str:
    """Return why an optimizer may not update early; empty: it may."""
    return not_element_wise(optimizer) or _late_by_hooks(optimizer)


def gradients_leave(late: str, view: TrainerView) -> bool:
    """Return whether gradients may leave for the host, as nothing but the norm delays updates."""
    return late == _late_by_options(view) == _CLIPS and view.accumulates == 1


def _late_by_hooks(optimizer: Optimizer) -> str:
    # Private: there is no public way to ask for hooks.
    hooks = chain(
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(True for _ in hooks):
        return f"hooks of {type(optimizer).__name__}"
    if step_is_replaced(optimizer):
        return f"{type(optimizer).__name__}.step is replaced"
    return ""


class EarlyUpdater:
    """Decides before each step whether units are updated in its backward, and updates them.

    ``late``: why no step of the run may; empty: all may. ``consequence``: what late ones cost.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        view: TrainerView,
        units: MovedState,
        late: str = "",
        consequence: str = "",
    ) -> None:
        self._optimizer, self._view, self._units = optimizer, view, units
        self._late, self._consequence = late, consequence
        self._has_warned = self._may = False
        self._used: dict[str, Any] = {}  # what updates of this step have used

    def look(self, optimizer: Optimizer) -> bool:
        """Look whether the step that begins may update early; return whether gradients may leave.

        Called before anything of the step.
        """
        self._units.begin(optimizer)
        anomalies = "torch.autograd.set_detect_anomaly(True)" * torch.is_anomaly_enabled()
        if self._late:
            leave = not anomalies and gradients_leave(self._late, self._view)
            return leave and not late_by_optimizer(optimizer)
        late = _late_by_options(self._view) or _late_by_hooks(self._optimizer)
        if optimizer is not self._optimizer:
            late = "another optimizer has taken the place of the first one"
        late = late or anomalies
        self._may = not late
        if late and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Updates of this step, and others like it, follow the backward: {late}."
                f"{self._consequence}",
                stacklevel=2,
            )
        return False

    def is_exact(self) -> bool:
        """Return whether the step that begins may update early: :meth:`look` has found so."""
        # a step that nobody has announced updates nothing: it is one of several that add up
        may, self._may = self._may, False
        self._used = {}
        return may

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool = False) -> list[bool]:
        """Update sharded parameters by their gradients, and return for each whether it was."""
        self._used = self._used or self._settings()
        return self._units.update(parameters, on_host, self._view.clip_value)

    def _settings(self) -> dict[str, Any]:
        """Return what updates use, of options the tensors with their versions."""
        found: dict[str, Any] = {
            f"param_groups[{index}][{name!r}]": (value, getattr(value, "_version", 0))
            for index, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        how = self._view.clip_value, _late_by_options(self._view)
        return {**found, "gradient_clip_val": how}

    def check(self) -> None:
        """Raise if code has changed in the backward what updates there had used before."""
        now = self._settings() if self._used else {}
        for name, value in self._used.items():
            if not _is_same(now.get(name), value):
                new = now[name][0] if name in now else None
                raise UnsupportedError(
                    f"Code has changed {name} (now {new!r}) inside of the backward, where units"
                    " are updated: some updates have used the value of before. On one device all"
                    " use the last value. Change it before the backward or behind the step, such"
                    " as in on_train_batch_start(). Or say"
                    " CephaloStrategy(planner=Planner(early_update=False))."
                )


def _is_same(value: Any, before: Any) -> bool:
    """Return whether an option and its version are those of before, or equal numbers."""
    if value is None or value[1] != before[1]:
        return False
    # another type may choose another kernel; tensors and arrays have no single answer
    is_number = type(value[0]) is type(before[0]) and not hasattr(value[0], "shape")
    return value[0] is before[0] or (is_number and value[0] == before[0])
