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
        f" the mean and variance of a microbatch, here of {min(sizes)} to {max(sizes)} samples; one"
        f" device takes those of all {sum(sizes)}. The running mean is that of one device, the"
        " running variance is the mean over microbatches. GroupNorm or LayerNorm do not depend on"
        " the division. A layer in eval() takes its running statistics.",
        stacklevel=2,
    )
