"""The table of what is refused by name before training, on all ranks together.

A row is a function that finds what cannot work, and the sentences that say why, and what to do
instead. ``tests/lightning/test_refusals.py`` has a case for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_cephalo.adapters.averaged_weights import lightnings_classes
from lightning_cephalo.adapters.stepping import parameters_of
from lightning_cephalo.adapters.torchmetrics import metrics_of
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.blocks import is_compiled
from lightning_cephalo.sharding.placement import Rows

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_cephalo.execution.sharded_model import ShardedModel
    from lightning_cephalo.ranks.control import ControlGroup


class When(Flag):
    """When rows of the table are looked at."""

    CONNECTED = auto()  # the ranks have met; no setup() of a callback has run
    TRAINING_SETUP = auto()  # the model is made, and nothing is measured or sharded
    EVALUATION_SETUP = auto()  # the same for validate(), test() and predict()
    OPTIMIZERS = auto()  # they exist, and nothing is trained
    TRAINING_START = auto()  # behind on_train_start() of the module and of callbacks


@dataclass(frozen=True)
class Situation:
    """What a row may look at; there is no model before it is sharded."""

    view: TrainerView
    module: LightningModule
    optimizers: Sequence[Optimizer] = ()
    model: ShardedModel | None = None


Find = Callable[[Situation], str | None]
ROWS: list[tuple[Find, str, When]] = []
"""What finds something, why it cannot work and what to do instead, and when it is looked at."""


def refuse(when: When, situation: Situation, control: ControlGroup) -> None:
    """Raise on all ranks if a row of the table is found on any of them; collective."""

    def look() -> None:
        for find, remedy, moments in ROWS:
            found = find(situation) if when & moments else None
            if found is not None:
                raise UnsupportedError(f"{found} {remedy}")

    control.together("looking for what cannot work", look)


def _row(remedy: str, when: When = When.TRAINING_SETUP) -> Callable[[Find], Find]:
    """Add a row to the table."""

    def add(find: Find) -> Find:
        ROWS.append((find, remedy, when))
        return find

    return add


def _if_any(names: Iterable[str], sentence: str) -> str | None:
    found = list(names)
    return f"{sentence}: {found[:3]} ({len(found)} in all)." if found else None


# -- the module -----------------------------------------------------------------------------------


@_row(
    "That run was interrupted, so that the whole model could not be gathered. Make a new model and"
    " continue from a checkpoint: fit(model, ckpt_path=...).",
    When.CONNECTED,
)
def shards_of_an_earlier_run(situation: Situation) -> str | None:
    held = (
        name
        for name, parameter in situation.module.named_parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Rows)
    )
    return _if_any(held, f"{type(situation.module).__name__} holds the shards of an earlier run")


@_row(
    "They would never be called: steps compute with gathered copies of parameters. Change gradients"
    " in on_after_backward(), where they are those of the global batch:"
    " `self.layer.weight.grad.clamp_(-1, 1)`. Remove each hook by the handle that registering it"
    " returned.",
    When.TRAINING_SETUP | When.TRAINING_START,
)
def hooks_of_parameters(situation: Situation) -> str | None:
    hooked = (
        name
        for name, parameter in situation.module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
    return _if_any(
        hooked,
        "These parameters have hooks of register_hook() or register_post_accumulate_grad_hook()",
    )


@_row(
    "Microbatches of all ranks meet in the middle of SyncBatchNorm, in steps of automatic"
    " optimization only. Use torch.nn.SyncBatchNorm or Trainer(sync_batchnorm=True), outside of"
    " torch.compile. Or normalise single samples, as GroupNorm does."
)
def layers_that_cannot_meet(situation: Situation) -> str | None:
    is_applied = getattr(situation.view.strategy, "_layer_sync", None) is not None
    named = dict(situation.module.named_modules())
    compiled = [name for name, inner in named.items() if is_compiled(inner)]
    refused = (
        f"{type(layer).__name__} {name}"
        for name, layer in named.items()
        if isinstance(layer, _BatchNorm if is_applied else nn.SyncBatchNorm)
        and (
            not situation.module.automatic_optimization
            or type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
            or any(not each or f"{name}.".startswith(f"{each}.") for each in compiled)
        )
    )
    return _if_any(
        refused,
        "These layers have a forward of their own, or are in a compiled module or in one that"
        " optimizes manually",
    )


@_row(
    "They communicate inside every microbatch, of which ranks have different numbers. Leave it out:"
    " metrics are synchronised at the end of the epoch.",
    When.TRAINING_SETUP | When.EVALUATION_SETUP,
)
def metrics_that_synchronise_inside_a_step(situation: Situation) -> str | None:
    found = (name for name, each in metrics_of(situation.module) if each.dist_sync_on_step)
    return _if_any(found, "These metrics have dist_sync_on_step=True")


@_row(
    "It would pull its own batches, but a batch is divided into microbatches before the step runs."
    " Take the batch as an argument: training_step(self, batch, batch_idx).",
    When.TRAINING_SETUP | When.EVALUATION_SETUP,
)
def steps_that_pull_batches(situation: Situation) -> str | None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(situation.module, name)
        if "dataloader_iter" in inspect.signature(step).parameters:
            return f"{name} has the argument dataloader_iter."
    return None


# -- plugins and callbacks ------------------------------------------------------------------------


@_row(
    "It belongs to another strategy, or replaces layers by ones whose parameters cannot be cut into"
    ' rows. Use Trainer(precision="bf16-true"), "bf16-mixed", "16-mixed", "16-true", "32-true" or'
    ' "64-true", or a plugin of your own.'
)
def precision_plugins_of_other_strategies(situation: Situation) -> str | None:
    known = {"CheckpointHooks", "DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"}
    names = sorted(lightnings_classes(situation.view.precision) - known)
    return f"The plugin {names[0]} does not work under strategy='cephalo'." if names else None


@_row(
    "The backward runs unit by unit for all microbatches, not from the loss that it would get."
    " Change the loss in training_step, and gradients in on_after_backward(). Or set"
    " self.automatic_optimization = False, and call self.manual_backward(loss)."
)
def own_backward(situation: Situation) -> str | None:
    module, plugin = situation.module, situation.view.precision
    if not module.automatic_optimization:
        return None
    if is_overridden("backward", module):
        return f"{type(module).__name__} has a backward() of its own."
    is_own = type(plugin).backward is not Precision.backward
    return f"The plugin {type(plugin).__name__} has a backward() of its own." if is_own else None


_CALLBACKS = {
    "BatchSizeFinder": "BatchSizeFinder (or Tuner.scale_batch_size) would find a size of its own on"
    " each rank. Look for the largest batch by the memory in the plan's table, with other values of"
    " CephaloStrategy(global_batch_size=...) or in `cephalo plan`.",
    "ModelPruning": "ModelPruning replaces parameters in mid-training, but shards and optimizers"
    " belong to those of the start. Prune before fit() with torch.nn.utils.prune, or apply masks in"
    " on_train_batch_end(): `with lightning_cephalo.writable_parameters(self.layer):"
    " self.layer.weight.data.mul_(mask)`.",
}


@_row("Remove it from Trainer(callbacks=...).", When.CONNECTED)
def callbacks_that_change_the_training(situation: Situation) -> str | None:
    there = {name for each in situation.view.callbacks for name in lightnings_classes(each)}
    return next((why for name, why in _CALLBACKS.items() if name in there), None)


# -- optimizers -----------------------------------------------------------------------------------


@_row(
    "Make new optimizers in configure_optimizers(), of self.parameters() or"
    " self.named_parameters(), and continue their state by fit(ckpt_path=...).",
    When.OPTIMIZERS,
)
def optimizers_of_others(situation: Situation) -> str | None:
    units = () if situation.model is None else situation.model.units
    known = {id(parameter) for unit in units for _, parameter in unit.named_sharded()}
    for optimizer in situation.optimizers:
        others = (each for each in parameters_of(optimizer) if id(each) not in known)
        shapes = [tuple(each.shape) for each in others]
        if shapes:
            return (
                f"{type(optimizer).__name__} holds {len(shapes)} parameters that are not the"
                f" model's, of shapes {shapes[:3]}: they are copies, or it was made before fit()"
                " sharded the model, such as in __init__() or for an earlier fit."
            )
    return None


@_row(
    "It would also trace its closure, the whole training step. Leave torch.compile out; fused=True"
    " or foreach=True is about as fast.",
    When.OPTIMIZERS,
)
def compiled_steps_of_optimizers(situation: Situation) -> str | None:
    for optimizer in situation.optimizers:
        step: object = optimizer.step  # or one that it wraps
        while step is not None:
            # Private: torch has no public way to find what it has compiled.
            marks = getattr(step, "__dict__", ())
            # torch also marks the steps that it never compiles, as LBFGS's
            if "_torchdynamo_orig_callable" in marks and "_torchdynamo_disable" not in marks:
                return f"{type(optimizer).__name__}.step is compiled by torch.compile."
            step = getattr(step, "__wrapped__", None)
    return None
