"""Rejects unsupported features before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import steps_locally
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.placement import Rows

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_cephalo.execution.sharded_model import ShardedModel

_CALLBACKS = {
    "StochasticWeightAveraging": "it averages full weights, and each rank holds a part",
    "WeightAveraging": "it copies and averages full weights, and each rank holds a part",
    "EMAWeightAveraging": "it copies and averages full weights, and each rank holds a part",
    "ModelPruning": "it masks full weights, and each rank holds a part",
    "BatchSizeFinder": "the batch of each rank is planned, not searched",
}

_OPTIMIZERS = {
    "LBFGS": "it multiplies whole gradients with one another, of which each rank holds a part",
    "SparseAdam": "it needs sparse gradients, and gradients are summed over ranks as dense ones",
    "Adafactor": "it keeps row and column means of whole matrices, of which each rank holds rows",
    "Muon": "it multiplies whole matrices, of which each rank holds rows",
    "Rprop": "it writes through masks, for which DTensor has no rule",
}

_FUSED = ("Adam", "AdamW")


def refuse_unsupported(trainer: Trainer, module: LightningModule) -> None:
    """Raise for unsupported features, before anything is measured or sharded.

    Raises:
        UnsupportedError: The message names the feature, the reason and the way out.
    """
    if not module.automatic_optimization:
        raise UnsupportedError(
            "Manual optimization does not work under strategy='cephalo': training_step runs once"
            " per microbatch, so that its own backward() and step() would run once per microbatch"
            " too. Use automatic optimization (return the loss), or strategy='ddp'."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) pulls its own batches, so that they cannot be dealt."
            " Use training_step(batch, batch_idx)."
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UnsupportedError(
            "A LightningModule compiled as a whole cannot be cut into units. Compile its blocks"
            " instead: `for i, block in enumerate(blocks): blocks[i] = torch.compile(block)`."
        )
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        raise UnsupportedError(
            "sync_batchnorm=True communicates inside every microbatch, of which ranks have"
            " different numbers. Leave it out, or replace batch by group normalisation."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                raise UnsupportedError(
                    f"The callback {type(callback).__name__} does not work under"
                    f" strategy='cephalo': {_CALLBACKS[kind.__name__]}. Remove it from"
                    " Trainer(callbacks=...)."
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
            f" {len(held) - 1} other parameters). That run ended with an error that ranks raised at"
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


def check_optimizers(optimizers: Sequence[Optimizer], model: ShardedModel) -> None:
    """Raise if an optimizer cannot work on shards or holds parameters other than the model's.

    Raises:
        UnsupportedError: The message names the optimizer and the way out.
    """
    if len(optimizers) > 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization"
            " works with one. Use one optimizer with several parameter groups."
        )
    known = model.sharded_parameters()
    for optimizer in optimizers:
        for kind in type(optimizer).__mro__:
            if kind.__name__ in _OPTIMIZERS:
                raise UnsupportedError(
                    f"The optimizer {type(optimizer).__name__} cannot work on shards:"
                    f" {_OPTIMIZERS[kind.__name__]}. Use an element-wise one such as AdamW or SGD."
                )
        fused = any(group.get("fused") for group in optimizer.param_groups)
        over_dtensors = not steps_locally(optimizer)
        if fused and over_dtensors and type(optimizer).__name__ not in _FUSED:
            raise UnsupportedError(
                f"{type(optimizer).__name__}(fused=True) cannot work on shards: torch's DTensor has"
                f" rules for the fused kernels of {' and '.join(_FUSED)} only. Leave fused=True"
                " out; foreach=True is about as fast."
            )
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
