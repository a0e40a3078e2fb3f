"""The error of a rank that runs out of memory in a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_cephalo.accelerator.torch_device import OUT_OF_MEMORY_SIGNS
from lightning_cephalo.common.errors import CephaloError

_SIGNS = ("out of memory", "can't allocate memory", *OUT_OF_MEMORY_SIGNS)


class OutOfMemoryInStepError(CephaloError, torch.OutOfMemoryError):
    """A rank ran out of memory; the message gives the place, the plan's estimate and remedies."""


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a device (real or emulated) or the host ran out of memory."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    if isinstance(failure, dist.DistBackendError):
        return False  # whatever the cause, the communicator is broken: a retry cannot help
    text = str(failure)
    return isinstance(failure, RuntimeError) and any(sign in text for sign in _SIGNS)


def explained(
    failure: BaseException, rank: int, place: str, planned: str
) -> OutOfMemoryInStepError:
    """Return the error to raise in place of one that only names the requested bytes."""
    error = OutOfMemoryInStepError(
        f"Rank {rank} ran out of memory in the {place}: {str(failure).rstrip('. ')}."
        f"{' ' + planned if planned else ''} What would help: a lower"
        " CephaloStrategy(memory_cap=...), so that the plan leaves more room; recompute=True; a"
        " smaller global batch. Samples that are larger than those that were profiled (longer"
        " sequences) take more than planned for."
    )
    error.__cause__ = failure
    return error
