"""Names batch normalisation, whose statistics are those of microbatches."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.plan import Plan


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalise by the statistics of their batch."""
    return [
        name
        for name, inner in module.named_modules()
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None)
    ]


def smallest_microbatch(module: nn.Module) -> int:
    """Return 2 if batch normalisation needs more than one value per channel, else 1."""
    # layers in eval() count too: a hook may switch them to training after the plan is made
    return 2 if any(isinstance(inner, _BatchNorm) for inner in module.modules()) else 1


def refuse_synchronised(module: nn.Module) -> None:
    """Raise for layers that communicate in every forward.

    Raises:
        UnsupportedError: The message names them and the way out.
    """
    names = [n for n, inner in module.named_modules() if isinstance(inner, nn.SyncBatchNorm)]
    if names:
        raise UnsupportedError(
            f"The layers {names[:3]} ({len(names)} in all) are torch.nn.SyncBatchNorm: they"
            " communicate inside every microbatch, of which ranks have different numbers. Use"
            " torch.nn.BatchNorm, which takes the statistics of a microbatch, or GroupNorm."
        )


def warn_of_microbatches(module: nn.Module, plan: Plan, rank: int) -> None:
    """Warn on rank 0 if batch normalisation sees parts of the global batch.

    Args:
        module: The user's module.
        plan: The plan to train by.
        rank: This rank.
    """
    names = batch_norms(module)
    sizes = [size for each in plan.ranks for size in each.microbatch_sizes]
    if rank or not names or len(sizes) < 2:
        return
    warnings.warn(
        f"The layers {names[:3]} ({len(names)} in all) are batch normalisation. Each normalises by"
        f" the mean and variance of a microbatch, which has {min(sizes)} to {max(sizes)} samples."
        f" One device takes those of all {sum(sizes)} samples. The running mean is that of one"
        " device. The running variance is the mean of those of microbatches. GroupNorm, LayerNorm"
        " and layers in eval() do not depend on the division.",
        stacklevel=2,
    )
