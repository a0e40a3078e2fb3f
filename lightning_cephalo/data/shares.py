"""Computes the samples of each rank, and the sizes of its microbatches, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat


def deal(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Deals ``total`` samples in proportion to ``shares``, which are not all 0.

    Exact when ``total == sum(shares)``: the answer is then ``shares``. Equal remainders go to the
    larger share first, then to the lower rank, so that every rank computes the same answer. If
    there are enough samples, every rank with a share above 0 gets one.

    Example:
        >>> deal(10, (6, 2, 0)), deal(2, (6, 2, 0))
        ((8, 2, 0), (1, 1, 0))
    """
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(
        range(len(shares)),
        key=lambda rank: (-(total * shares[rank] % whole), -shares[rank], rank),
    )
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    if total >= sum(share > 0 for share in shares):
        for rank, share in enumerate(shares):
            if share and not counts[rank]:
                counts[counts.index(max(counts))] -= 1
                counts[rank] = 1
    return tuple(counts)


def split_sizes(count: int, microbatch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the microbatches of a rank with ``count`` samples in this step.

    Example:
        >>> split_sizes(7, (4, 4, 3)), split_sizes(13, (4, 4, 3))
        ((4, 3), (4, 4, 3, 2))
    """
    sizes: list[int] = []
    for planned in chain(microbatch_sizes, repeat(max(microbatch_sizes))):
        if sum(sizes) == count:
            break
        sizes.append(min(planned, count - sum(sizes)))
    return tuple(sizes)
