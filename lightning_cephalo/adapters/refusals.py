"""The table of what is refused by name before training, on all ranks together.

A row names what cannot work, finds it, and says why and what to do instead. :func:`refuse` is the
only place that walks the table. ``tests/lightning/test_refusals.py`` has a row for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cephalo.adapters.averaged_weights import lightnings_classes
from lightning_cephalo.adapters.checkpoint import holds_earlier_rows
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
    """The moments at which rows of the table are looked at."""

    CONNECTED = auto()  # the ranks have met; no setup() of a callback has run
    TRAINING_SETUP = auto()  # the model is made, and nothing is measured or sharded
    EVALUATION_SETUP = auto()  # the same for validate(), test() and predict()
    OPTIMIZERS = auto()  # they exist, and nothing is trained
    TRAINING_START = auto()  # behind on_train_start() of the module and of callbacks


SETUP = When.TRAINING_SETUP | When.EVALUATION_SETUP


@dataclass(frozen=True)
class Situation:
    """What a row may look at; there is no model before it is sharded."""

    view: TrainerView
    module: LightningModule
    optimizers: Sequence[Optimizer] = ()
    model: ShardedModel | None = None


@dataclass(frozen=True)
class Refusal:
    """A row of the table."""

    name: str
    found: Callable[[Situation], str | None]
    why: str
    remedy: str
    when: When = When.TRAINING_SETUP


def refuse(when: When, situation: Situation, control: ControlGroup) -> None:
    """Raise on all ranks if a row of the table is found on any of them; collective."""

    def look() -> None:
        for row in ROWS:
            found = row.found(situation) if when & row.when else None
            if found is not None:
                raise UnsupportedError(f"{found} {row.why} {row.remedy}")

    control.together("looking for what cannot work", look)


def _if_any(names: Iterable[str], sentence: str) -> str | None:
    found = list(names)
    return f"{sentence}: {found[:3]} ({len(found)} in all)." if found else None


# -- the module -----------------------------------------------------------------------------------


def _shards(situation: Situation) -> str | None:
    held = (
        name
        for name, parameter in situation.module.named_parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Rows)
    )
    return _if_any(held, f"{type(situation.module).__name__} holds the shards of an earlier run")


def _without_shape(situation: Situation) -> str | None:
    module = situation.module
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = (name for name, tensor in named if is_lazy(tensor))
    return _if_any(lazy, "These tensors have no shape yet")


def _hooks_of_parameters(situation: Situation) -> str | None:
    hooked = (
        name
        for name, parameter in situation.module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
    return _if_any(
        hooked,
        "These parameters have hooks of register_hook() or register_post_accumulate_grad_hook()",
    )


def _synchronised(situation: Situation) -> str | None:
    """Find layers that are SyncBatchNorm, or become it, but cannot meet in their middle."""
    plugin = getattr(situation.view.strategy, "_layer_sync", None)
    if plugin is not None and type(plugin) is not TorchSyncBatchNorm:
        return f"The plugin {type(plugin).__name__} synchronises layers."
    kind = nn.SyncBatchNorm if plugin is None else _BatchNorm
    named = dict(situation.module.named_modules())
    layers = {name: inner for name, inner in named.items() if isinstance(inner, kind)}
    if layers and not situation.module.automatic_optimization:
        return _if_any(layers, "The module optimizes manually and has torch.nn.SyncBatchNorm")
    compiled = [name for name, inner in named.items() if is_compiled(inner)]
    for name, layer in layers.items():
        own = f"The {type(layer).__name__} {name!r}"
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            return f"{own} has a forward of its own."
        if getattr(layer, "process_group", None) is not None:
            return f"{own} has a process_group."
        if any(not each or f"{name}.".startswith(f"{each}.") for each in compiled):
            return f"{own} is inside of a compiled module."
    return None


def _own_backward(situation: Situation) -> str | None:
    module, plugin = situation.module, situation.view.precision
    if not module.automatic_optimization:
        return None
    if is_overridden("backward", module):
        return f"{type(module).__name__} has a backward() of its own."
    is_own = type(plugin).backward is not Precision.backward
    return f"The plugin {type(plugin).__name__} has a backward() of its own." if is_own else None


def _synchronising_metrics(situation: Situation) -> str | None:
    found = (name for name, each in metrics_of(situation.module) if each.dist_sync_on_step)
    return _if_any(found, "These metrics have dist_sync_on_step=True")


def _pulling_steps(situation: Situation) -> str | None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(situation.module, name)
        if "dataloader_iter" in inspect.signature(step).parameters:
            return f"{name} has the argument dataloader_iter, by which it pulls its own batches."
    return None


# -- plugins and callbacks ------------------------------------------------------------------------


def _precision(situation: Situation) -> str | None:
    kinds = {
        "BitsandbytesPrecision",
        "DeepSpeedPrecision",
        "FSDPPrecision",
        "TransformerEnginePrecision",
        "XLAPrecision",
    }
    names = sorted(kinds & lightnings_classes(situation.view.precision))
    return f"The plugin {names[0]} does not work under strategy='cephalo'." if names else None


def _callback(name: str, sentence: str) -> Callable[[Situation], str | None]:
    """Return what finds a callback of Lightning."""

    def found(situation: Situation) -> str | None:
        is_there = any(name in lightnings_classes(each) for each in situation.view.callbacks)
        return sentence if is_there else None

    return found


# -- optimizers -----------------------------------------------------------------------------------


def _other_parameters(situation: Situation) -> str | None:
    model = situation.model
    if model is None:
        return None
    for optimizer in situation.optimizers:
        # one that was made before the model was sharded holds what the module held before
        known, in_place_of = model.sharded_parameters(), model.sharded_in_place_of
        others = [each for each in parameters_of(optimizer) if id(each) not in known]
        shapes = [tuple(each.shape) for each in others if in_place_of(each) is None]
        if shapes:
            return (
                f"{type(optimizer).__name__} holds {len(shapes)} parameters that are not the"
                f" model's, of shapes {shapes[:3]}."
            )
    return None


def _earlier_state(situation: Situation) -> str | None:
    names = [type(each).__name__ for each in situation.optimizers if holds_earlier_rows(each)]
    return f"{names[0]} has state in the rows of an earlier run." if names else None


def _compiled_steps(situation: Situation) -> str | None:
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


ROWS = (
    Refusal(
        "shards of an earlier run",
        _shards,
        "That run was interrupted, or its ranks failed at different places, so that the whole"
        " model could not be gathered.",
        "Make a new model and continue from a checkpoint: fit(model, ckpt_path=...).",
        When.CONNECTED,
    ),
    Refusal(
        "lazy modules",
        _without_shape,
        "A lazy module (nn.LazyLinear) gives them one in its first forward, but units and plans"
        " need it before.",
        "Call the model once on a few samples in configure_model() or before fit(), or use the"
        " module with its sizes (nn.Linear).",
    ),
    Refusal(
        "hooks of parameters",
        _hooks_of_parameters,
        "They would never be called: steps compute with gathered copies of parameters, whose"
        " gradients are then summed over microbatches and ranks.",
        "Change gradients in on_after_backward(), where they are those of the global batch:"
        " `self.layer.weight.grad.clamp_(-1, 1)`. Remove each hook by the handle that registering"
        " it returned.",
        When.TRAINING_SETUP | When.TRAINING_START,
    ),
    Refusal(
        "SyncBatchNorm that cannot meet",
        _synchronised,
        "Microbatches of all ranks meet in its middle, in steps of automatic optimization only.",
        "Use torch.nn.SyncBatchNorm or Trainer(sync_batchnorm=True), outside of torch.compile and"
        " without process_group. Or normalise single samples, as GroupNorm does.",
    ),
    Refusal(
        "metrics that synchronise inside a step",
        _synchronising_metrics,
        "They communicate inside every microbatch, of which ranks have different numbers.",
        "Leave it out: metrics are synchronised at the end of the epoch.",
        SETUP,
    ),
    Refusal(
        "steps that pull batches",
        _pulling_steps,
        "A batch is divided into microbatches before the step runs.",
        "Take the batch as an argument: training_step(self, batch, batch_idx).",
        SETUP,
    ),
    Refusal(
        "searches for a batch size",
        _callback(
            "BatchSizeFinder",
            "BatchSizeFinder (or Tuner.scale_batch_size) searches for a batch size.",
        ),
        "Lightning refuses that under its own distributed strategies, too: each process would"
        " find a size of its own, and every size needs a plan.",
        "Remove it. Look for the largest batch that fits by the memory in the plan's table, here"
        " with other values of CephaloStrategy(global_batch_size=...) or in `cephalo plan`. Or"
        " search on one device, without this strategy.",
        When.CONNECTED,
    ),
    Refusal(
        "precision plugins of other strategies",
        _precision,
        "It belongs to another strategy, or replaces layers by ones whose parameters cannot be cut"
        " into rows.",
        'Use Trainer(precision="bf16-true"), "bf16-mixed", "16-mixed", "16-true", "32-true" or'
        ' "64-true", or a plugin of your own.',
    ),
    Refusal(
        "own backward()",
        _own_backward,
        "The backward runs unit by unit for all microbatches, not from the loss that it would get.",
        "Change the loss in training_step, and gradients in on_after_backward(). Or set"
        " self.automatic_optimization = False, and call self.manual_backward(loss).",
    ),
    Refusal(
        "ModelPruning",
        _callback("ModelPruning", "Trainer(callbacks=...) has the callback ModelPruning."),
        "In mid-training it replaces parameters by others and by masks, and shards and optimizers"
        " belong to those of the start.",
        "Remove it from Trainer(callbacks=...). Prune before fit() with torch.nn.utils.prune, or"
        " keep masks of your own and apply them in on_train_batch_end(): `with"
        " lightning_cephalo.writable_parameters(self.layer): self.layer.weight.data.mul_(mask)`.",
    ),
    Refusal(
        "optimizers of other parameters",
        _other_parameters,
        "They are copies, or belong to an earlier fit.",
        "Call self.parameters() or self.named_parameters() inside configure_optimizers().",
        When.OPTIMIZERS,
    ),
    Refusal(
        "optimizers with state of an earlier run",
        _earlier_state,
        "Rows of this run are others.",
        "Make new optimizers in configure_optimizers(), and continue their state by"
        " fit(ckpt_path=...).",
        When.OPTIMIZERS,
    ),
    Refusal(
        "compiled steps of optimizers",
        _compiled_steps,
        "It would also trace its closure, the whole training step.",
        "Leave torch.compile out; fused=True or foreach=True is about as fast.",
        When.OPTIMIZERS,
    ),
)
