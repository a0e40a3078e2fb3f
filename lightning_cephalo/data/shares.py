"""Computes the samples of each rank, and the sizes of its microbatches, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat


def deal(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Deals ``total`` samples in proportion to ``shares`` by largest remainder.

    Exact when ``total == sum(shares)``: the answer is then ``shares``. Equal remainders go to the
    larger share first, then to the lower rank, so that every rank computes the same answer. If
    there are enough samples, every rank with a share above 0 gets one.

    Raises:
        ValueError: a negative argument, or samples to deal while every share is 0.

    Example:
        >>> deal(10, (6, 2, 0)), deal(2, (6, 2, 0))
        ((8, 2, 0), (1, 1, 0))
    """
    if total < 0 or any(share < 0 for share in shares):
        raise ValueError(
            f"Expects counts of 0 or more, but got {total} to deal by {tuple(shares)}."
        )
    whole = sum(shares)
    if whole == 0:
        if total:
            raise ValueError(
                f"Expects a rank with a share above 0 to deal {total} samples to, but got "
                f"{tuple(shares)}."
            )
        return tuple(0 for _ in shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(
        range(len(shares)),
        key=lambda rank: (-(total * shares[rank] % whole), -shares[rank], rank),
    )
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    without = [rank for rank, share in enumerate(shares) if share and not counts[rank]]
    if total >= sum(share > 0 for share in shares):
        for rank in without:
            counts[counts.index(max(counts))] -= 1
            counts[rank] = 1
    return tuple(counts)


def split_sizes(count: int, microbatch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the microbatches of a rank with ``count`` samples in this step.

    Example:
        >>> split_sizes(7, (4, 4, 3)), split_sizes(13, (4, 4, 3))
        ((4, 3), (4, 4, 3, 2))
    """
    if count < 0:
        raise ValueError(f"Expects a count of 0 or more, but got {count}.")
    if count == sum(microbatch_sizes):
        return tuple(microbatch_sizes)
    largest = max(microbatch_sizes, default=0)
    if count and largest < 1:
        raise ValueError(
            f"Expects no samples on a rank that the plan gives none, but got {count}. A loader "
            "that cephalo cannot deal for (not a DataLoader, or batch_size=None) brought them; "
            "give every rank samples in the plan, or let a DataLoader with batch_size=... batch."
        )
    sizes: list[int] = []
    planned = chain(filter(None, microbatch_sizes), repeat(largest))
    while sum(sizes) < count:
        sizes.append(min(next(planned), count - sum(sizes)))
    return tuple(sizes)
