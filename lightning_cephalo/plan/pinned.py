"""How much pinned host memory pieces take at most, without knowing their exact sizes.

torch rounds pinned memory up to powers of two. ``accelerator/host_room.py`` puts pieces into chunks
of such sizes, the largest first, each into the first chunk with room. It tries every power of two
as the size of a chunk, and takes the best.

Let the largest piece be 1, all pieces be ``total``, and a chunk be c. A chunk is left behind only
when a piece does not fit, so that all chunks but the last hold more than ``c - 1``. The last one is
rounded up to less than the double of what it holds. So q full chunks and the last take no more than
``q c + min(c, 2 (total - q (c - 1)))``, whatever the pieces. Where the largest piece lies between
two powers of two is not known: the worst place counts.
"""

from __future__ import annotations

import functools
import itertools
import math

_PLACES = 64


@functools.lru_cache(maxsize=4096)
def most_taken(total: float) -> float:
    """Return by how much what is taken may exceed what is needed, 1 to 2.

    >>> most_taken(1.0), round(most_taken(8.0), 2), round(most_taken(32.0), 2)
    (2.0, 1.51, 1.26)
    """
    if total <= 1.0:
        return 2.0
    steps = [2 ** (place / _PLACES) for place in range(_PLACES + 1)]
    doublings = range(1, math.ceil(math.log2(total)) + 2)
    worst = 0.0
    for low, high in itertools.pairwise(steps):
        best = min(_taken(low * 2**n, high * 2**n, total) for n in doublings)
        worst = max(worst, best)
    return min(2.0, worst / total)


def _taken(low: float, high: float, total: float) -> float:
    """Return the most that chunks of a size between two limits take for these pieces."""
    least = max(0, math.ceil(total / high) - 1)
    most = max(least, math.floor(total / (low - 1)))
    # straight but where the last chunk begins to be smaller than the others
    bend = math.floor((total - high / 2) / (low - 1))
    counts = {least, most, *(min(max(least, count), most) for count in (bend, bend + 1))}
    return max(full * high + min(high, 2 * max(0.0, total - full * (low - 1))) for full in counts)
