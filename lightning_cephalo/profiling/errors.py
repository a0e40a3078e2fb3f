"""What goes wrong while profiling."""

from __future__ import annotations


class ProfilingError(RuntimeError):
    """Profiling cannot go on; every rank raises it, naming the rank, the size and the reason."""


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a device, real or emulated, or the host had no memory left."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    text = str(failure)
    return isinstance(failure, RuntimeError) and any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )
