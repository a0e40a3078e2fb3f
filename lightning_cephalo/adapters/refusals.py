"""The table of what is refused by name before training, on all ranks together.

A row names what cannot work, finds it, and says why and what to do instead. :func:`refuse` is the
only place that walks the table. ``tests/lightning/test_refusals.py`` has a row for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cephalo.adapters import batch_norm
from lightning_cephalo.adapters.averaged_weights import averaging_callbacks, lightnings_classes
from lightning_cephalo.adapters.scope import parameters_of
from lightning_cephalo.adapters.torchmetrics import metrics_of
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.placement import Rows

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

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

    trainer: Trainer
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


def _if_any(names: Sequence[str], sentence: str) -> str | None:
    return f"{sentence}: {list(names[:3])} ({len(names)} in all)." if names else None


# -- the module -----------------------------------------------------------------------------------


def _shards(situation: Situation) -> str | None:
    held = [
        name
        for name, parameter in situation.module.named_parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Rows)
    ]
    return _if_any(held, f"{type(situation.module).__name__} holds the shards of an earlier run")


def _without_shape(situation: Situation) -> str | None:
    module = situation.module
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    return _if_any(lazy, "These tensors have no shape yet")


def _hooks_of_parameters(situation: Situation) -> str | None:
    hooked = [
        name
        for name, parameter in situation.module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    return _if_any(
        hooked,
        "These parameters have hooks of register_hook() or register_post_accumulate_grad_hook()",
    )


def _synchronised(situation: Situation) -> dict[str, nn.Module]:
    """Return the layers that are torch.nn.SyncBatchNorm, or become it by the Trainer's option."""
    kind = _BatchNorm if _plugin_of_layers(situation) is not None else nn.SyncBatchNorm
    return {n: inner for n, inner in situation.module.named_modules() if isinstance(inner, kind)}


def _plugin_of_layers(situation: Situation) -> object | None:
    return getattr(situation.trainer.strategy, "_layer_sync", None)


def _other_layer_sync(situation: Situation) -> str | None:
    plugin = _plugin_of_layers(situation)
    is_other = plugin is not None and type(plugin) is not TorchSyncBatchNorm
    return f"The plugin {type(plugin).__name__} synchronises layers." if is_other else None


def _replaced_forward(situation: Situation) -> str | None:
    if _plugin_of_layers(situation) is None:
        return None
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    for name, layer in _synchronised(situation).items():
        if not isinstance(layer, nn.SyncBatchNorm) and type(layer).forward not in known:
            return f"{name!r} is a {type(layer).__name__} with a forward of its own."
    return None


def _changed_forward(situation: Situation) -> str | None:
    for name, layer in _synchronised(situation).items():
        is_of_torch = type(layer).forward is nn.SyncBatchNorm.forward
        if isinstance(layer, nn.SyncBatchNorm) and not is_of_torch:
            changes = "which changes the forward of torch.nn.SyncBatchNorm"
            return f"{name!r} is a {type(layer).__name__}, {changes}."
    return None


def _synchronised_in_manual(situation: Situation) -> str | None:
    layers = [] if situation.module.automatic_optimization else [*_synchronised(situation)]
    return _if_any(layers, "The module optimizes manually and has torch.nn.SyncBatchNorm")


def _synchronised_in_a_group(situation: Situation) -> str | None:
    for name, layer in _synchronised(situation).items():
        if getattr(layer, "process_group", None) is not None:
            return f"The torch.nn.SyncBatchNorm {name!r} has a process_group."
    return None


def _synchronised_compiled(situation: Situation) -> str | None:
    named = dict(situation.module.named_modules())
    compiled = [name for name, inner in named.items() if batch_norm.is_compiled(inner)]
    for name in _synchronised(situation):
        if any(not each or name == each or name.startswith(f"{each}.") for each in compiled):
            return f"{name!r} is a torch.nn.SyncBatchNorm inside of a compiled module."
    return None


def _synchronising_metrics(situation: Situation) -> str | None:
    metrics = metrics_of(situation.module)
    found = [name for name, metric in metrics if metric.dist_sync_on_step]
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
    names = sorted(kinds & lightnings_classes(situation.trainer.precision_plugin))
    return f"The plugin {names[0]} does not work under strategy='cephalo'." if names else None


def _has_callback(situation: Situation, name: str) -> bool:
    callbacks = situation.trainer.callbacks  # type: ignore[attr-defined]
    return any(name in lightnings_classes(each) for each in callbacks)


def _pruning(situation: Situation) -> str | None:
    is_there = _has_callback(situation, "ModelPruning")
    return "Trainer(callbacks=...) has the callback ModelPruning." if is_there else None


def _batch_size_search(situation: Situation) -> str | None:
    is_there = _has_callback(situation, "BatchSizeFinder")
    return (
        "BatchSizeFinder (or Tuner.scale_batch_size) searches for a batch size."
        if is_there
        else None
    )


def _averaged_statistics(situation: Situation) -> str | None:
    if situation.trainer.world_size == 1 or _plugin_of_layers(situation) is not None:
        return None
    averaging = [
        type(each).__name__
        for each in averaging_callbacks(situation.trainer.callbacks)  # type: ignore[attr-defined]
        if "StochasticWeightAveraging" in lightnings_classes(each)
    ]
    names = batch_norm.batch_norms(situation.module)
    if not averaging:
        return None
    again = f"The callback {averaging[0]} computes the running statistics of batch normalisation"
    return _if_any(names, f"{again} again")


# -- optimizers -----------------------------------------------------------------------------------


def _other_parameters(situation: Situation) -> str | None:
    model = situation.model
    assert model is not None
    known = model.sharded_parameters()
    for optimizer in situation.optimizers:
        # one that was made before the model was sharded holds what the module held before
        others = [each for each in parameters_of(optimizer) if id(each) not in known]
        shapes = [tuple(p.shape) for p in others if model.sharded_in_place_of(p) is None]
        if shapes:
            return (
                f"{type(optimizer).__name__} holds {len(shapes)} parameters that are not the"
                f" model's, of shapes {shapes[:3]}."
            )
    return None


def _by_kind(
    is_refused: Callable[[Optimizer], bool], sentence: str
) -> Callable[[Situation], str | None]:
    """Return what finds an optimizer and names its class in a sentence."""

    def found(situation: Situation) -> str | None:
        names = [type(each).__name__ for each in situation.optimizers if is_refused(each)]
        return sentence.format(names[0]) if names else None

    return found


def _is_differentiable(optimizer: Optimizer) -> bool:
    return any(group.get("differentiable") for group in optimizer.param_groups)


def _has_compiled_step(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step, or one that it wraps, is compiled."""
    step: object = optimizer.step
    while step is not None:
        # Private: torch has no public way to find what it has compiled.
        marks = getattr(step, "__dict__", ())
        # torch also marks the steps that it never compiles, as LBFGS's
        if "_torchdynamo_orig_callable" in marks:
            return "_torchdynamo_disable" not in marks
        step = getattr(step, "__wrapped__", None)
    return False


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
        "plugins that synchronise layers",
        _other_layer_sync,
        "It communicates inside every microbatch, of which ranks have different numbers.",
        "Use Trainer(sync_batchnorm=True).",
    ),
    Refusal(
        "sync_batchnorm of a layer with a forward of its own",
        _replaced_forward,
        "sync_batchnorm=True would replace it by a layer without that forward.",
        "Leave sync_batchnorm out, or write the layer as a torch.nn.SyncBatchNorm and what follows"
        " it.",
    ),
    Refusal(
        "subclasses of SyncBatchNorm",
        _changed_forward,
        "It may communicate there, and ranks have different numbers of microbatches.",
        "Use torch.nn.SyncBatchNorm itself.",
    ),
    Refusal(
        "SyncBatchNorm with manual optimization",
        _synchronised_in_manual,
        "There, ranks meet at backwards and updates only.",
        "Use torch.nn.BatchNorm, GroupNorm, or automatic optimization.",
    ),
    Refusal(
        "SyncBatchNorm of some ranks",
        _synchronised_in_a_group,
        "Its statistics can be those of all ranks only.",
        "Leave process_group out.",
    ),
    Refusal(
        "compiled SyncBatchNorm",
        _synchronised_compiled,
        "Microbatches of all ranks meet in its middle, which cannot be compiled.",
        "Leave torch.compile out there, or use GroupNorm.",
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
        _batch_size_search,
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
        "ModelPruning",
        _pruning,
        "In mid-training it replaces parameters by others and by masks, and shards and optimizers"
        " belong to those of the start.",
        "Remove it from Trainer(callbacks=...). Prune before fit() with torch.nn.utils.prune, or"
        " keep masks of your own and apply them in on_train_batch_end(): `with"
        " lightning_cephalo.writable_parameters(self.layer): self.layer.weight.data.mul_(mask)`.",
    ),
    Refusal(
        "StochasticWeightAveraging with batch normalisation",
        _averaged_statistics,
        "Under strategy='cephalo' their statistics are those of microbatches.",
        "Use Trainer(sync_batchnorm=True), or group or layer normalisation. Or average in a"
        " callback of your own: make a torch.optim.swa_utils.AveragedModel in on_fit_start(), and"
        " call update_bn() at the end.",
    ),
    Refusal(
        "optimizers of other parameters",
        _other_parameters,
        "They are copies, or belong to an earlier fit.",
        "Call self.parameters() or self.named_parameters() inside configure_optimizers().",
        When.OPTIMIZERS,
    ),
    Refusal(
        "differentiable optimizers",
        _by_kind(_is_differentiable, "{}(differentiable=True) keeps a graph of its update."),
        "Parameters in shards are no part of graphs.",
        "Leave differentiable=True out.",
        When.OPTIMIZERS,
    ),
    Refusal(
        "SparseAdam",
        _by_kind(
            lambda optimizer: isinstance(optimizer, torch.optim.SparseAdam),
            "{} needs sparse gradients.",
        ),
        "Gradients of all ranks are summed as dense ones.",
        "Use AdamW or Adam, with or without sparse=True of the embedding: each updates all rows.",
        When.OPTIMIZERS,
    ),
    Refusal(
        "compiled steps of optimizers",
        _by_kind(_has_compiled_step, "{}.step is compiled by torch.compile."),
        "It would also trace its closure, the whole training step.",
        "Leave torch.compile out; fused=True or foreach=True is about as fast.",
        When.OPTIMIZERS,
    ),
)
