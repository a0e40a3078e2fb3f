"""Measures the planning time on clusters of growing size, with solver start-up, without imports.

    python benchmarks/planner.py [--published FOLDER [--rows]]

Prints seconds, gap and how near the plan is to the ideal sum of speeds. Then prints the peak memory
of this process, and the time of importing the solver once, which the other times exclude. The
curves are synthetic: affine with one per cent of noise, as in measurements. They are seeded and the
same on every machine.

With ``--published``, the planner is compared with the paper's instead (``paper/comparison.py``), on
the profiles of its release in FOLDER. Exits with 1 if a claim is broken.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from paper.comparison import compare

from lightning_cephalo.plan import Links, Problem, RankProfile, StateBytes, solve

_GIB = 2**30
# Seconds of a collective that compute hides, and of one that sets the pace.
_FAST_S, _SLOW_S = 5e-3, 0.1
# Speed of a rank relative to the slowest, and memory in GiB: roughly cards of three generations.
_KINDS = {
    "A6000": (4.7, 48),
    "A10G": (3.8, 22.5),
    "L4": (3.4, 22.5),
    "V100": (2.6, 16),
    "P40": (1.5, 22.5),
    "T4": (1.0, 15),
}


def profile(name: str, seed: int, longest: int = 24, noise: float = 0.01) -> RankProfile:
    """Make a rank with a fixed time per microbatch and a time per sample, with noise."""
    speed, memory = _KINDS[name]
    random = np.random.default_rng(seed)
    size = np.arange(1, longest + 1)

    def curve(per_sample: float) -> np.ndarray:
        return per_sample / speed * (0.3 + size) * (1 + noise * random.standard_normal(longest))

    return RankProfile(
        name=name,
        forward_s=curve(4e-3),
        backward_s=curve(11e-3),
        tail_s=curve(30e-3),
        compute_bytes=(0.4 + 0.25 * size) * _GIB,
        capacity_bytes=memory * 0.9 * _GIB,
    )


def problem(
    counts: dict[str, int],
    batch: int,
    *,
    distinct: bool,
    full: float,
    collective_s: float = _FAST_S,
) -> Problem:
    """Make a problem of ``counts`` ranks of each kind.

    With ``distinct``, every rank has curves of its own. The state takes the fraction ``full`` of
    all memory. A gather takes ``collective_s``, and so does a reduce.
    """
    ranks, seed = [], 0
    for name, count in counts.items():
        for _ in range(count):
            ranks.append(profile(name, seed))
            seed += distinct
        seed += 1
    capacity = sum(rank.capacity_bytes for rank in ranks)
    return Problem(
        ranks,
        units=32,
        links=Links(collective_s, collective_s),
        fill_s=2 * collective_s,
        state=StateBytes(full * capacity),
        global_batch_size=batch,
        boundary_bytes=2 * 2**20,
        gathered_bytes=0.5 * _GIB,
    )


def main() -> int:
    """Time the planner, or compare it with the published one; return 1 if a claim is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="compare with the paper's")
    parser.add_argument("--rows", action="store_true", help="print every problem of the comparison")
    options = parser.parse_args()
    if options.published is None:
        timings()
        return 0
    return 0 if compare(options.published, show=options.rows) else 1


def timings() -> None:
    """Print one row per cluster."""
    started = time.perf_counter()
    import cvxpy  # noqa: F401  (its import is not the solver's time)

    import_s = time.perf_counter() - started
    small = {"L4": 2, "A6000": 1, "P40": 3, "T4": 2}
    middle = {"V100": 16, "A10G": 16, "T4": 32}
    large = {"A6000": 128, "A10G": 128, "L4": 256, "V100": 128, "P40": 128, "T4": 256}
    print(f"{'cluster':34} {'memory':>7} {'seconds':>8} {'gap':>8} {'of ideal':>8}")
    for title, counts, batch, distinct, collective_s in (
        ("8 ranks, batch 128", small, 128, False, _FAST_S),
        ("8 ranks, slow link, batch 128", small, 128, False, _SLOW_S),
        ("8 ranks, all distinct, batch 128", small, 128, True, _FAST_S),
        ("64 ranks, 3 types, batch 2048", middle, 2048, False, _FAST_S),
        ("64 ranks, all distinct, batch 2048", middle, 2048, True, _FAST_S),
        ("1024 ranks, 6 types, batch 16384", large, 16384, False, _FAST_S),
    ):
        for full in (0.3, 0.6, 0.8):
            case = problem(counts, batch, distinct=distinct, full=full, collective_s=collective_s)
            started = time.perf_counter()
            plan = solve(case)
            taken = time.perf_counter() - started
            print(
                f"{title:34} {full:7.0%} {taken:8.3f} {plan.gap:8.1e} "
                f"{ideal(case) / plan.step_s:8.1%}"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak / _GIB:.2f} GiB; import of cvxpy {import_s:.1f} s, once a process")


def ideal(case: Problem) -> float:
    """Return the seconds of a step with divisible samples and every rank at its best size."""
    speeds = 0.0
    for rank in case.ranks:
        size = np.arange(1, rank.largest_microbatch_size + 1)
        unit = np.array(rank.forward_s) + np.array(rank.backward_s)
        speeds += float((size / (case.units * unit + np.array(rank.tail_s))).max())
    return case.global_batch_size / speeds


if __name__ == "__main__":
    sys.exit(main())
