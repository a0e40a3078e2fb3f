"""What would make a plan possible, tried rather than guessed: the smallest change of each kind."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from lightning_cephalo.common.errors import SolverError
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.columns import RankType, group_types
from lightning_cephalo.plan.solver.search import Search

_TIME_S = 3.0
_MOST_RANKS = 256


def remedies(problem: Problem, types: Sequence[RankType]) -> str:
    """Sentences that name single changes after which there is a plan.

    Tried are a smaller batch, units that are given back after the forward, host memory for boundary
    activations on every rank, and more ranks of each type. What could not be settled within a few
    seconds is said to be open.
    """
    trials = _Trials(time.perf_counter() + _TIME_S)
    found = []
    batch = trials.largest_batch(problem)
    if batch:
        found.append(f"lower global_batch_size to {batch}")
    if trials.resharding_helps(problem):
        found.append(
            f"give units back between forward and backward, reshard_after_forward=True "
            f"({problem.unresharded_bytes / 2**30:.3f} GiB on every rank)"
        )
    if trials.offload_helps(problem):
        host = problem.boundary_bytes * problem.units * problem.global_batch_size
        found.append(
            f"offload boundary activations to host memory, {host / 2**30:.3f} GiB in all "
            f"(host_capacity_bytes of each rank; in cluster.yaml host_memory, and --offload)"
        )
    for name, profile in {kind.profile.name: kind.profile for kind in types}.items():
        more = trials.more_ranks(problem, profile)
        if more:
            found.append(f"add {more} more {name!r}")
    if found:
        return f"What would do: {'; or '.join(found)}."
    remote = "use ranks with more memory, smaller units, or a smaller model"
    if trials.settled:
        return f"No smaller batch, offload or further rank of these types alone would do: {remote}."
    return (
        f"Which smaller batch or how many further ranks would do was not found out within "
        f"{_TIME_S:g} s: lower global_batch_size, add ranks, or {remote}."
    )


class _Trials:
    """Tries changes until ``deadline`` (of time.perf_counter).

    ``settled`` says whether every question so far was answered in time.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.settled = True

    def largest_batch(self, problem: Problem) -> int:
        """The largest smaller global batch that is known to fit; 0 when none is."""
        ranks = len(problem.ranks) if problem.equal_microbatches else 1
        batch = ranks * problem.minimum_microbatch_size
        if batch >= problem.global_batch_size or not self._batch_fits(problem, batch):
            return 0
        step = batch
        while batch + step < problem.global_batch_size and self._batch_fits(problem, batch + step):
            batch += step
            step *= 2
        while step > 1:
            step //= 2
            larger = batch + step
            if larger < problem.global_batch_size and self._batch_fits(problem, larger):
                batch = larger
        return batch

    def resharding_helps(self, problem: Problem) -> bool:
        """Whether there is a plan if units are given back after the forward, where they stay."""
        if problem.reshard_after_forward is not False:
            return False
        return self._fits(dataclasses.replace(problem, reshard_after_forward=True))

    def offload_helps(self, problem: Problem) -> bool:
        """Whether there is a plan if every rank may offload as much as it likes."""
        if not problem.boundary_bytes:
            return False
        ranks = tuple(
            dataclasses.replace(rank, host_capacity_bytes=math.inf) for rank in problem.ranks
        )
        return self._fits(dataclasses.replace(problem, ranks=ranks))

    def more_ranks(self, problem: Problem, profile: RankProfile) -> int:
        """The fewest further ranks like this one that are enough; 0 when none is known."""
        if profile.capacity_bytes <= problem.fixed_bytes:
            return 0
        failed, count = 0, 1
        while not self._fits(_with_more(problem, profile, count)):
            failed, count = count, 2 * count
            if count > _MOST_RANKS or not self.settled:
                return 0
        while count - failed > 1:
            middle = (failed + count) // 2
            if self._fits(_with_more(problem, profile, middle)):
                count = middle
            else:
                failed = middle
        return count

    def _batch_fits(self, problem: Problem, batch: int) -> bool:
        return self._fits(dataclasses.replace(problem, global_batch_size=batch))

    def _fits(self, problem: Problem) -> bool:
        """Whether there is any plan at all, however slow; False when that is not known in time."""
        if any(rank.capacity_bytes < problem.fixed_bytes for rank in problem.ranks):
            return False
        # Without times all that is left of the search is the question of memory.
        timeless = dataclasses.replace(
            problem,
            ranks=tuple(_timeless(rank) for rank in problem.ranks),
            gather_s=0.0,
            reduce_s=0.0,
        )
        try:
            if time.perf_counter() > self.deadline:
                raise SolverError("no time left")
            return Search(timeless, group_types(timeless), self.deadline).run() is not None
        except SolverError:
            self.settled = False
            return False


def _with_more(problem: Problem, profile: RankProfile, count: int) -> Problem:
    return dataclasses.replace(problem, ranks=(*problem.ranks, *(profile,) * count))


def _timeless(rank: RankProfile) -> RankProfile:
    none = (0.0,) * rank.largest_microbatch_size
    return dataclasses.replace(
        rank,
        forward_s=none,
        backward_s=none,
        tail_s=none,
        kept_backward_s=none if rank.kept_backward_s else (),
        offload_bytes_per_s=math.inf,
    )
