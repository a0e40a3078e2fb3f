"""What would make a plan possible, tried rather than guessed: the smallest change of each kind."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from ._columns import RankType, group_types
from ._search import Search
from .errors import SolverError
from .problem import Problem, RankProfile

_TIME_S = 3.0
_MOST_RANKS = 256


def remedies(problem: Problem, types: Sequence[RankType]) -> str:
    """Sentences that name every single change after which there is a plan.

    Tried are a smaller batch, offloading boundary activations where no rank may, and more ranks of
    each type. What could not be settled within a few seconds is left out.
    """
    deadline = time.perf_counter() + _TIME_S
    found = []
    batch = _largest_batch(problem, deadline)
    if batch:
        found.append(f"lower global_batch_size to {batch} or less")
    if _offload_helps(problem, deadline):
        host = problem.boundary_bytes * problem.units * problem.global_batch_size
        found.append(
            f"offload boundary activations to host memory ({host / 2**30:.3f} GiB in all; give "
            f"host_capacity_bytes)"
        )
    for kind in types:
        more = _more_ranks(problem, kind.profile, deadline)
        if more:
            found.append(f"add {more} more {kind.profile.name!r}")
    if not found:
        return (
            "No smaller batch, offload or further rank of these types alone would do: use ranks "
            "with more memory, smaller units, or a smaller model."
        )
    choices = "; or ".join(found)
    return f"What would do: {choices}. (Recomputation helps too where it is off.)"


def fits(problem: Problem, deadline: float) -> bool:
    """Whether there is any plan at all, however slow.

    Raises SolverError when time is up.
    """
    # Without times all that is left of the search is the question of memory.
    ranks: list[RankProfile] = []
    for rank in problem.ranks:
        none = (0.0,) * rank.largest_microbatch_size
        kept = none if rank.kept_backward_s else ()
        ranks.append(
            dataclasses.replace(
                rank,
                forward_s=none,
                backward_s=none,
                tail_s=none,
                kept_backward_s=kept,
                offload_bytes_per_s=math.inf,
            )
        )
    timeless = dataclasses.replace(
        problem,
        ranks=tuple(ranks),
        gather_s=0.0,
        reduce_s=0.0,
        even_gather_s=None,
        even_reduce_s=None,
    )
    if any(rank.capacity_bytes < problem.gathered_bytes for rank in ranks):
        return False
    return Search(timeless, group_types(timeless), deadline).run() is not None


def _largest_batch(problem: Problem, deadline: float) -> int:
    """The largest smaller global batch that fits; 0 when none is known to."""

    def enough(batch: int) -> bool:
        smaller = dataclasses.replace(problem, global_batch_size=max(batch, 1))
        return batch > 0 and _known_to_fit(smaller, deadline)

    if not enough(1):
        return 0
    return _last(enough, problem.global_batch_size)


def _offload_helps(problem: Problem, deadline: float) -> bool:
    if any(rank.host_capacity_bytes > 0 for rank in problem.ranks) or not problem.boundary_bytes:
        return False
    ranks = tuple(dataclasses.replace(rank, host_capacity_bytes=math.inf) for rank in problem.ranks)
    return _known_to_fit(dataclasses.replace(problem, ranks=ranks), deadline)


def _more_ranks(problem: Problem, profile: RankProfile, deadline: float) -> int:
    """The fewest further ranks like this one with which the batch fits; 0 when no number helps."""

    def fails(count: int) -> bool:
        ranks = (*problem.ranks, *(profile,) * count)
        return not _known_to_fit(dataclasses.replace(problem, ranks=ranks), deadline)

    if profile.capacity_bytes <= problem.gathered_bytes:
        return 0
    count = 1
    while fails(count):
        count *= 2
        if count > _MOST_RANKS:
            return 0
    return _last(fails, count) + 1


def _last(holds: Callable[[int], bool], beyond: int) -> int:
    """The largest number below ``beyond`` for which it holds, which it does up to some number."""
    low, high = 0, beyond
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _known_to_fit(problem: Problem, deadline: float) -> bool:
    if time.perf_counter() > deadline:
        return False
    try:
        return fits(problem, deadline)
    except SolverError:
        return False
