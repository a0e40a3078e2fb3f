"""What a rank says that ran out of memory in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cephalo.common.errors import CephaloError

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OutOfMemoryInStepError(CephaloError, torch.OutOfMemoryError):
    """A rank ran out of memory; the message says where, what was planned, and what would help."""


@dataclass(frozen=True)
class Place:
    """Where in a step a rank is.

    Attributes:
        doing: What it does there.
        unit: Name of the unit; empty for the root unit, None where there is none.
        microbatch: Which of this rank's; -1 where all are meant.
        microbatches: How many it has.
    """

    doing: str
    unit: str | None = ""
    microbatch: int = -1
    microbatches: int = 0

    def __str__(self) -> str:
        if self.unit is None:
            return self.doing
        unit = f"unit {self.unit!r}" if self.unit else "the root unit"
        which = ""
        if self.microbatch >= 0:
            which = f", microbatch {self.microbatch + 1} of {self.microbatches}"
        return f"{self.doing} of {unit}{which}"


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a device, real or emulated, or the host had no memory left."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    if isinstance(failure, dist.DistBackendError):
        return False  # whatever NCCL lacked: its communicator is broken, and no other try can help
    text = str(failure)
    return isinstance(failure, RuntimeError) and any(sign in text for sign in _SIGNS)


def explained(
    failure: BaseException, rank: int, place: Place, planned: str
) -> OutOfMemoryInStepError:
    """Return the error to raise in place of one that only says how many bytes were wanted.

    Args:
        failure: What was raised; its message has the bytes.
        rank: This rank.
        place: Where it was raised.
        planned: What the plan counts on, as a sentence; may be empty.
    """
    error = OutOfMemoryInStepError(
        f"Rank {rank} ran out of memory in the {place}: {str(failure).rstrip('. ')}."
        f"{' ' + planned if planned else ''} What would help: a lower"
        " CephaloStrategy(memory_cap=...), so that the plan leaves more room; recompute=True; a"
        " smaller global batch. Samples that are larger than those that were profiled (longer"
        " sequences) take more than planned for."
    )
    error.__cause__ = failure
    return error
