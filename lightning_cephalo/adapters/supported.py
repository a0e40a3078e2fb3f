"""Rejects unsupported features before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cephalo.adapters.averaged_weights import averaging_callbacks, lightnings_classes
from lightning_cephalo.adapters.batch_norm import batch_norms, refuse_synchronised
from lightning_cephalo.adapters.batch_search import batch_size_finders
from lightning_cephalo.adapters.compiled_step import is_compiled, step_before_compiling
from lightning_cephalo.adapters.sparse_gradients import takes_sparse_gradients
from lightning_cephalo.common.errors import PlanError, UnsupportedError
from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.reading import original_of
from lightning_cephalo.plan import Plan
from lightning_cephalo.ranks import launch
from lightning_cephalo.sharding.placement import Rows

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_cephalo.execution.sharded_model import ShardedModel

_BATCH_SIZE_FINDER = (
    "The callback BatchSizeFinder (also Tuner.scale_batch_size) changes the batch size of the"
    " training dataloader, but {}. {}. Remove it from Trainer(callbacks=...) to keep the batch"
    " size."
)
READY_BATCHES = _BATCH_SIZE_FINDER.format(
    "the training dataloader yields batches that its dataset has made, of a size that only the"
    " dataset knows",
    "Give DataLoader(dataset, batch_size=self.batch_size) with single samples",
)
_MODEL_PRUNING = (
    "The callback ModelPruning does not work under strategy='cephalo': in mid-training it replaces"
    " parameters by others and by masks, and shards and optimizers belong to those of the start."
    " Remove it from Trainer(callbacks=...). Prune before fit() with torch.nn.utils.prune, or keep"
    " masks of your own and apply them in on_train_batch_end():"
    " `with lightning_cephalo.writable_parameters(self.layer): self.layer.weight.data.mul_(mask)`."
)


_PRECISIONS = (
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "FSDPPrecision",
    "TransformerEnginePrecision",
    "XLAPrecision",
)


def refuse_precision(plugin: Any) -> None:
    """Raise for Lightning's plugins that belong to other strategies, or quantise parameters.

    Raises:
        UnsupportedError: The message names the plugin and the way out.
    """
    names = sorted(set(lightnings_classes(plugin)) & set(_PRECISIONS))
    if names:
        raise UnsupportedError(
            f"The plugin {names[0]} does not work under strategy='cephalo': it belongs to another"
            " strategy, or replaces layers by ones whose parameters cannot be cut into rows. Use"
            ' Trainer(precision="bf16-true"), "bf16-mixed", "16-mixed", "16-true", "32-true" or'
            ' "64-true", or a plugin of your own.'
        )


def refuse_searching(trainer: Trainer, fixed: Mapping[str, str]) -> None:
    """Raise where a search for a batch size cannot work; before callbacks' ``setup``.

    Args:
        trainer: The trainer that runs.
        fixed: What fixes the batch size in training, and the way out.

    Raises:
        UnsupportedError: The message names the callback, the reason and the way out.
    """
    finders = batch_size_finders(trainer)
    if not finders:
        return
    if trainer.state.fn == TrainerFn.FITTING:
        for reason, remedy in fixed.items():
            raise UnsupportedError(_BATCH_SIZE_FINDER.format(reason, remedy))
    if any(finder._early_exit for finder in finders) and launch.forks(trainer.strategy):
        raise UnsupportedError(
            "Tuner.scale_batch_size() returns what its own process has found, but start_method"
            " starts all ranks in other processes. Use start_method='popen' or torchrun, or the"
            " callback BatchSizeFinder in Trainer(callbacks=...)."
        )


def warn_of_throughput(callbacks: Sequence[Any], plan: Plan) -> None:
    """Warn if Lightning's callback would count rank 0's samples as those of every rank."""
    found = any("ThroughputMonitor" in lightnings_classes(callback) for callback in callbacks)
    own, ranks = plan.ranks[0].batch_size, plan.world_size
    if found and own * ranks != plan.global_batch_size:
        rank_zero_warn(
            "ThroughputMonitor multiplies what rank 0 counts by the number of ranks: it would"
            f" report {own * ranks} samples a step in place of {plan.global_batch_size}. Count the"
            " mean of the ranks in training: ThroughputMonitor(batch_size_fn=lambda batch:"
            f" {plan.global_batch_size} / {ranks} if trainer.training else len(batch)), and"
            " length_fn and flops_per_batch likewise.",
            category=UserWarning,
        )


def warn_of_combined_evaluation(loader: Any) -> None:
    """Warn if an evaluation leaves samples out, or repeats some, by the length of a rank's part.

    Args:
        loader: Lightning's CombinedLoader of the evaluation that begins.
    """
    mode = loader._mode
    if mode not in ("min_size", "max_size_cycle"):
        return
    lengths = [known_length(original_of(each)) for each in loader.flattened]
    if len(lengths) < 2 or (None not in lengths and len(set(lengths)) == 1):
        return
    ends = "ends with the shortest" if mode == "min_size" else "repeats the shorter ones"
    rank_zero_warn(
        "The dataloaders of this evaluation have different lengths, and"
        f" CombinedLoader(..., {mode!r}) {ends}. Each rank does so with its own part, so that other"
        " samples count than on one device. Use the mode 'sequential' or 'max_size', which take"
        " every sample once.",
        category=UserWarning,
    )


def refuse_unsupported(trainer: Trainer, module: LightningModule) -> None:
    """Raise for unsupported features, before anything is measured or sharded.

    Raises:
        UnsupportedError: The message names the feature, the reason and the way out.
    """
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UnsupportedError(
            "A LightningModule compiled as a whole cannot be cut into units. Compile its blocks"
            " instead: `for i, block in enumerate(blocks): blocks[i] = torch.compile(block)`."
        )
    refuse_lazy(module)
    refuse_parameter_hooks(module)
    refuse_precision(trainer.precision_plugin)
    refuse_synchronised(module, is_manual=not module.automatic_optimization)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if "ModelPruning" in lightnings_classes(callback):
            raise UnsupportedError(_MODEL_PRUNING)
    _refuse_averaged_statistics(trainer, module)


def refuse_lazy(module: nn.Module) -> None:
    """Raise for parameters and buffers without a shape, which nobody can divide.

    Raises:
        UnsupportedError: The message names one and the way out.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise UnsupportedError(
            f"{lazy[0]!r} ({len(lazy)} in all) has no shape yet: a lazy module (nn.LazyLinear) gets"
            " it in its first forward, but units and plans need it before. Call the model once on a"
            " few samples in configure_model() or before fit(), or use the module with its sizes"
            " (nn.Linear)."
        )


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Raise for hooks on parameters, which no backward would call.

    Raises:
        UnsupportedError: The message names one and the way out.
    """
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise UnsupportedError(
            f"The parameter {hooked[0]!r} ({len(hooked)} in all) has a hook of register_hook() or"
            " register_post_accumulate_grad_hook(). It would never be called: steps compute with"
            " gathered copies of parameters, whose gradients are then summed over microbatches and"
            " ranks. Change gradients in on_after_backward(), where they are those of the global"
            " batch: `self.layer.weight.grad.clamp_(-1, 1)`. Remove the hook by the handle that"
            " registering it returned."
        )


_TOGETHER_WITH_VOCABULARY = {
    "replan=True": "the pace of columns of logits is not watched: leave replan out",
    "optimizer_offload": "leave optimizer_offload out",
    "reduce_dtype": "leave reduce_dtype out",
    "hybrid sharding": "leave hybrid_sharding, and state_groups of the plan, out",
    "manual optimization": "ranks meet at backwards and updates only: use automatic optimization",
}


def refuse_with_vocabulary_sharding(given: Mapping[str, bool]) -> None:
    """Raise for what does not go together with ``vocabulary_sharding=True``.

    Args:
        given: What there is, by name.

    Raises:
        UnsupportedError: The message names it and the way out.
    """
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedError(
                f"vocabulary_sharding=True does not work with {name} so far;"
                f" {_TOGETHER_WITH_VOCABULARY[name]}, or use vocabulary_sharding=False."
            )


def check_planned_vocabulary(plan: Plan, is_cut: bool, replans: bool) -> None:
    """Compare a plan that is given with whether a vocabulary stays cut here; equal on all ranks.

    Warns if the plan's predictions are those of another training.

    Args:
        plan: The plan.
        is_cut: Whether an embedding or a head stays cut.
        replans: Whether the plan may change by itself, which measures this training.

    Raises:
        PlanError: If it may, and has to be compared with what it does not count on.
    """
    if plan.vocabulary_sharding and not is_cut:
        said = "The plan says vocabulary_sharding: true, but no embedding or head stays cut here"
        remedy = "Use CephaloStrategy(vocabulary_sharding=True) on several ranks, or another plan."
        if replans:
            raise PlanError(
                f"{said}: replan=True cannot compare it with what is measured. {remedy}"
            )
        rank_zero_warn(
            f"{said}: its predictions of time and memory are not those of this training. {remedy}"
        )
    elif is_cut and plan.step_s is not None and not plan.vocabulary_sharding:
        rank_zero_warn(
            "An embedding or a head stays cut here, but the plan does not say vocabulary_sharding:"
            " true: its predictions of time and memory are not those of this training. Use a plan"
            " that was solved with CephaloStrategy(vocabulary_sharding=True), or leave plan out."
        )


def refuse_other_layer_sync(layer_sync: Any) -> None:
    """Raise for a plugin that synchronises layers in its own way.

    Raises:
        UnsupportedError: The message gives the way out.
    """
    if layer_sync is not None and type(layer_sync) is not TorchSyncBatchNorm:
        raise UnsupportedError(
            f"The plugin {type(layer_sync).__name__} synchronises layers by communicating inside"
            " every microbatch, of which ranks have different numbers. Use"
            " Trainer(sync_batchnorm=True)."
        )


def _refuse_averaged_statistics(trainer: Trainer, module: LightningModule) -> None:
    """Raise if a callback computes running statistics again, which are those of microbatches.

    Those that average what the model has leave an average of buffers that all ranks hold alike.
    """
    averaging = [
        each
        for each in averaging_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        if "StochasticWeightAveraging" in lightnings_classes(each)
    ]
    names = batch_norms(module)
    if trainer.world_size > 1 and averaging and names:
        raise UnsupportedError(
            f"The callback {type(averaging[0]).__name__} computes the running statistics of batch"
            f" normalisation again. {type(module).__name__} has such layers:"
            f" {names[:3]} ({len(names)} in all). Under strategy='cephalo' their statistics are"
            " those of microbatches. Use Trainer(sync_batchnorm=True), or group or layer"
            " normalisation. Or average in a callback of your own: make a"
            " torch.optim.swa_utils.AveragedModel in on_fit_start(), and call update_bn() at the"
            " end."
        )


def refuse_shards(module: LightningModule) -> None:
    """Raise for a model that an earlier run has left in shards.

    It communicates nothing: an error at different places leaves all ranks with shards, and some of
    them perhaps without connections.

    Raises:
        UnsupportedError: The message gives the way out.
    """
    held = [
        name
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Rows)
    ]
    if held:
        raise UnsupportedError(
            f"{type(module).__name__} holds the shards of an earlier run ({held[0]} and"
            f" {len(held) - 1} other parameters). That run was interrupted, or its ranks failed at"
            " different places, so that the whole model could not be gathered. Make a new model and"
            " continue from a checkpoint: fit(model, ckpt_path=...)."
        )


def refuse_synchronising_metrics(metrics: Sequence[tuple[str, Any]]) -> None:
    """Raise for torchmetrics that communicate inside a step.

    Raises:
        UnsupportedError: The message names the metrics and the way out.
    """
    found = [name for name, metric in metrics if metric.dist_sync_on_step]
    if found:
        raise UnsupportedError(
            f"The metrics {found} have dist_sync_on_step=True: they communicate inside every"
            " microbatch, of which ranks have different numbers. Leave it out: metrics are"
            " synchronised at the end of the epoch."
        )


def warn_of_other_optimizers(saved: int, present: int) -> None:
    """Warn if a checkpoint is of another number of optimizers; Lightning pairs those that it can.

    Args:
        saved: Number of optimizers whose state the checkpoint has.
        present: Number of optimizers of this training.
    """
    if saved != present:
        paired = min(saved, present)
        rank_zero_warn(
            f"The checkpoint has the state of {saved} optimizers, and configure_optimizers returned"
            f" {present}. {paired} of them are restored, in this order, as on one device;"
            f" {present - paired} start anew."
        )


def check_optimizers(optimizers: Sequence[Optimizer], model: ShardedModel) -> None:
    """Raise if an optimizer cannot work on shards or holds parameters other than the model's.

    Raises:
        UnsupportedError: The message names the optimizer and the way out.
    """
    if len(optimizers) > 1 and model.module.automatic_optimization:
        raise UnsupportedError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization"
            " works with one. Use one optimizer with several parameter groups, or manual"
            " optimization (self.automatic_optimization = False)."
        )
    known = model.sharded_parameters()
    for optimizer in optimizers:
        _check_options(optimizer)
        strangers = [
            tuple(parameter.shape)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]
        if strangers:
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds {len(strangers)} parameters that are not the"
                f" model's (shapes {strangers[:3]}...): they are copies, or belong to an earlier"
                " fit. Call self.parameters() or self.named_parameters() inside"
                " configure_optimizers()."
            )


def _check_options(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam) and not takes_sparse_gradients(optimizer):
        raise UnsupportedError(
            f"{name} is a subclass of SparseAdam. Gradients of all ranks are summed as dense ones,"
            " and only torch's own SparseAdam gets sparse ones of its rows. Use"
            " torch.optim.SparseAdam."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"{name}(differentiable=True) keeps a graph of its update, and parameters in shards are"
            " no part of graphs. Leave differentiable=True out."
        )
    before = step_before_compiling(optimizer)
    if is_compiled(before or optimizer.step):
        raise UnsupportedError(
            f"{name}.step is compiled by torch.compile in its class, or in another wrapper. It"
            " would also trace its closure, the whole training step. Leave torch.compile out;"
            " fused=True or foreach=True is about as fast."
        )
    if before is not None:
        rank_zero_warn(
            f"{name}.step is compiled by torch.compile, and runs as it was before: compiled, it"
            " would also trace its closure, the whole training step. The updates are the same;"
            " fused=True or foreach=True makes them about as fast."
        )
