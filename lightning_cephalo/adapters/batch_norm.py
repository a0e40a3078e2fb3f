"""Names batch normalisation, whose statistics are those of microbatches or of the global batch.

``torch.nn.SyncBatchNorm`` takes those of the global batch: ``features/normalisation.py``.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cephalo.plan import Plan


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalise by the statistics of a microbatch."""
    return [
        name
        for name, inner in module.named_modules()
        if isinstance(inner, _BatchNorm)
        and not (isinstance(inner, nn.SyncBatchNorm) and inner.training)
        and (inner.training or inner.running_mean is None)
    ]


def smallest_microbatch(module: nn.Module) -> int:
    """Return 2 if batch normalisation needs more than one value per channel, else 1."""
    # layers in eval() count too: a hook may switch them to training after the plan is made
    return 2 if any(isinstance(inner, _BatchNorm) for inner in module.modules()) else 1


def synchronised(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalise by the statistics of the global batch."""
    return [n for n, inner in module.named_modules() if isinstance(inner, nn.SyncBatchNorm)]


def warn_of_microbatches(module: nn.Module, plan: Plan, rank: int) -> None:
    """Warn on rank 0 if batch normalisation sees parts of the global batch."""
    names = batch_norms(module)
    sizes = [size for each in plan.ranks for size in each.microbatch_sizes]
    if rank == 0 and names and len(sizes) > 1:
        warnings.warn(
            f"The layers {names[:3]} ({len(names)} in all) are batch normalisation. Each normalises"
            f" by the statistics of a microbatch of {min(sizes)} to {max(sizes)} samples, one"
            f" device by those of all {sum(sizes)}. The running variance is the mean of those of"
            " microbatches. Trainer(sync_batchnorm=True) takes the statistics of all samples, by"
            " two exchanges for each layer and step. GroupNorm and LayerNorm need none.",
            stacklevel=2,
        )
