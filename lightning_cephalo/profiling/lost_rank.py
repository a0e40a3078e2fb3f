"""Explains a lost connection to another rank while profiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_cephalo.common.errors import ProfilingError
from lightning_cephalo.ranks.crash_report import is_lost_connection


@contextmanager
def lost_rank_explained(rank: int, doing: str) -> Iterator[None]:
    """Replace the error of a lost connection by one that explains it."""
    try:
        yield
    except RuntimeError as failure:
        if isinstance(failure, ProfilingError) or not is_lost_connection(failure):
            raise
        raise ProfilingError(
            f"Rank {rank} lost the connection to another rank while {doing}: {failure}"
        ) from failure
