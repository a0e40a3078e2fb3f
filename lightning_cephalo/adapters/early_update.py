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
from typing import TYPE_CHECKING

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
from lightning_cephalo.adapters.scope import not_by_units
from lightning_cephalo.adapters.view import TrainerView

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
    owners = ((module, _HOOKS_OF_MODULE), *((callback, _HOOKS) for callback in view.callbacks))
    for owner, hooks in owners:
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
    return "detect_anomaly=True" if view.detects_anomalies else _late_by_options(view)


def _late_by_options(view: TrainerView) -> str:
    if view.clip_value and not view.clips_by_value:
        return _CLIPS
    return f"gradients of {view.accumulates} batches add up" if view.accumulates != 1 else ""


def late_by_optimizer(optimizer: Optimizer) -> str:
    """Return why an optimizer may not update early; empty: it may."""
    # Private: there is no public way to ask for hooks.
    hooks = chain(
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    has_hooks = any(True for _ in hooks)
    return not_by_units(optimizer) or f"hooks of {type(optimizer).__name__}" * has_hooks


def gradients_leave(late: str, view: TrainerView) -> bool:
    """Return whether gradients may leave for the host, as nothing but the norm delays updates."""
    return late == _late_by_options(view) == _CLIPS and view.accumulates == 1


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

    def look(self, optimizer: Optimizer) -> bool:
        """Look how the step that begins may update; return whether gradients may leave."""
        self._units.begin(optimizer)
        late = late_by_optimizer(optimizer)
        if torch.is_anomaly_enabled():
            late = "torch.autograd.set_detect_anomaly(True)"
        if self._late:
            return not late and gradients_leave(self._late, self._view)
        late = late or _late_by_options(self._view)
        if optimizer is not self._optimizer:
            late = "another optimizer has taken the place of the first one"
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
        return may

    def update(self, parameters: Sequence[nn.Parameter], on_host: bool = False) -> list[bool]:
        """Update sharded parameters by their gradients, and return for each whether it was."""
        return self._units.update(parameters, on_host, self._view.clip_value)
