"""The published dynamic program: each rank's options, and the search for the fastest choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lightning_cephalo.common.errors import InfeasibleError, SolverError
from lightning_cephalo.plan.problem import Problem

_MOST_UPDATES = 3e9


@dataclass(frozen=True)
class Options:
    """The options of one rank, in the release's order (by size, then count).

    Every array has shape (options,). ``memory_bytes`` is peak plus overhead.
    """

    size: np.ndarray
    count: np.ndarray
    batch: np.ndarray
    seconds: np.ndarray
    memory_bytes: np.ndarray


def least_seconds(problem: Problem, options: Sequence[Options]) -> float:
    """Return the least t at which the options of all ranks can sum to the global batch.

    Memory is ignored.
    """
    batch = problem.global_batch_size

    def spans(limit_s: float) -> bool:
        batches = [own.batch[own.seconds <= limit_s] for own in options]
        if not all(len(own) for own in batches):
            return False
        return (
            sum(int(own.min()) for own in batches)
            <= batch
            <= sum(int(own.max()) for own in batches)
        )

    seconds = np.unique(np.concatenate([own.seconds for own in options]))
    if not spans(float(seconds[-1])):
        raise InfeasibleError(
            f"published program: the {len(options)} ranks cannot take {batch} samples in all, at "
            f"least one each and within their memory. Change global_batch_size."
        )
    low, high = 0, len(seconds) - 1
    while low < high:
        middle = (low + high) // 2
        if spans(float(seconds[middle])):
            high = middle
        else:
            low = middle + 1
    return float(seconds[low])


def search(
    batch: int, options: Sequence[Options], within: Sequence[np.ndarray], room_bytes: float
) -> list[int] | None:
    """Run the dynamic program over the options ``within`` reach; return the chosen rows or None."""
    rows = [np.flatnonzero(mask) for mask in within]
    largest = [int(own.batch[row].max()) for own, row in zip(options, rows, strict=True)]
    smallest = [int(own.batch[row].min()) for own, row in zip(options, rows, strict=True)]
    widest = [int(own.size[row].max()) for own, row in zip(options, rows, strict=True)]
    # The first i ranks together take at least ``low[i]`` and at most ``high[i]`` samples.
    up_to, from_below = _sums(largest), _sums(smallest)
    low = [
        max(less, batch - up_to[-1] + more) for less, more in zip(from_below, up_to, strict=True)
    ]
    high = [
        min(more, batch - from_below[-1] + less)
        for less, more in zip(from_below, up_to, strict=True)
    ]
    sums = _sums(widest)
    updates = sum(
        len(row) * (high[index] - low[index] + 1) * (sums[index] + 1.0)
        for index, row in enumerate(rows)
    )
    if updates > _MOST_UPDATES:
        raise SolverError(
            f"published program: its table for {len(options)} ranks and a global batch of {batch} "
            f"needs {updates:.1e} updates, more than {_MOST_UPDATES:.0e}. Compare on a smaller "
            f"cluster or batch."
        )
    times, choices = np.zeros((1, 1)), []
    for index, (own, row) in enumerate(zip(options, rows, strict=True)):
        table = np.full((high[index + 1] - low[index + 1] + 1, sums[index + 1] + 1), np.inf)
        choice = np.full(table.shape, -1, dtype=np.int32)
        for option in row:
            size, taken = int(own.size[option]), int(own.batch[option])
            first = max(low[index + 1], low[index] + taken)
            last = min(high[index + 1], high[index] + taken)
            if first > last:
                continue
            before = times[first - taken - low[index] : last - taken - low[index] + 1]
            into = np.s_[
                first - low[index + 1] : last - low[index + 1] + 1, size : size + before.shape[1]
            ]
            reached = np.maximum(before, own.seconds[option])
            better = reached < table[into]
            np.copyto(table[into], reached, where=better)
            np.copyto(choice[into], option, where=better)
        times = table
        choices.append(choice)
    # By time, then by sum: the first that fits is the answer.
    for end in np.argsort(times[0], kind="stable"):
        if np.isinf(times[0, end]):
            return None
        chosen = _trace(choices, options, low, int(end))
        memory = sum(float(own.memory_bytes[row]) for own, row in zip(options, chosen, strict=True))
        if memory < room_bytes:
            return chosen
    return None


def _trace(
    choices: Sequence[np.ndarray], options: Sequence[Options], low: Sequence[int], end: int
) -> list[int]:
    chosen = []
    batch, size = low[-1], end
    for index in range(len(choices) - 1, -1, -1):
        row = int(choices[index][batch - low[index + 1], size])
        chosen.append(row)
        batch -= int(options[index].batch[row])
        size -= int(options[index].size[row])
    return chosen[::-1]


def _sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))
