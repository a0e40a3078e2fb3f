"""Decides whether units may be updated inside the backward.

It must give what updating at the end gives, to the last bit, and nobody may need gradients in
between. What is known before training decides for the whole run, as the plan counts on the memory.
What may change between steps is looked at before every step, which makes later ones late, too.
Code that reads a gradient after its update is refused by name when it does.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_cephalo.adapters import precision
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


def late_by_job(view: TrainerView, module: LightningModule) -> str:
    """Return why no step may update early, in a few words; empty: every step may."""
    if not module.automatic_optimization:
        return "manual optimization"
    owners = ((module, _HOOKS_OF_MODULE), *((callback, _HOOKS) for callback in view.callbacks))
    for owner, hooks in owners:
        if hasattr(owner, "going_to_accumulate_grad_batches"):  # GradientAccumulationScheduler
            return type(owner).__name__
        for hook in hooks:
            if is_overridden(hook, owner):
                return f"{type(owner).__name__}.{hook}()"
    plugin = view.precision
    if precision.loss_scaler(plugin) is not None:
        return "loss scaling"
    if not precision.is_known(plugin):
        return f"the precision plugin {type(plugin).__name__}"
    return late_by_options(view)


def late_by_options(view: TrainerView) -> str:
    """Return why steps may not update early, of options that may change between them."""
    if view.clip_value:
        return "gradient clipping"
    adds_up = view.accumulates != 1 and not view.skips_backward
    return f"gradients of {view.accumulates} batches add up" if adds_up else ""


def late_by_optimizer(optimizer: Optimizer) -> str:
    """Return why an optimizer may not update early; empty: it may."""
    # Private: there is no public way to ask for hooks.
    hooks = chain(
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return not_by_units(optimizer) or f"hooks of {type(optimizer).__name__}" * bool(list(hooks))
