"""Compares the simulated step with the closed form of plan/cost.py, on random plans.

    python benchmarks/simulator.py [--plans 300] [--seed 0]

Prints the difference in per cent of the closed form by number of units, and the time to simulate
1,024 ranks. Exits with 1 if a plan of 24 units or more differs by more than 3 %, or if any step is
longer than the closed form. Plans of fewer units, and ranks whose passes differ much in relative
length, are not judged by the first. There is no link contention. :func:`random_case` defines the
distribution.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import numpy as np

from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, predict

CLAIM = 0.03
CLAIM_FROM_UNITS = 24
_ROUNDING = 1e-12
_UNITS = (2, 6, 12, 24, 32, 48, 96)
_SPREAD, _WIDE_SPREAD = 0.2, 1.0
_MIB = 2**20
_LONGEST = 8
_BOUNDARY_BYTES = 16.0 * _MIB


@dataclasses.dataclass(frozen=True)
class Model:
    """The common ratios of the ranks' profiles, relative to a unit's forward of one sample.

    Attributes:
        backward: A unit's backward without recompute.
        tail: The root's forward and backward.
        spread: A rank's own ratios are these times or divided by up to 1 + ``spread``.
    """

    backward: float
    tail: float
    spread: float

    def profile(self, random: np.random.Generator) -> RankProfile:
        """Draw a rank of up to 5 times the slowest speed.

        A microbatch takes a fixed time and a time per sample. The rank can retain activations and
        offload boundaries.
        """
        forward_s = 4e-3 / random.uniform(1, 5)
        backward, tail = (
            ratio * (1 + self.spread) ** random.uniform(-1, 1)
            for ratio in (self.backward, self.tail)
        )
        size = np.arange(1, _LONGEST + 1) + random.uniform(0, 1)
        compute_bytes = (50 + 100 * size) * _MIB
        return RankProfile(
            name=f"{4e-3 / forward_s:.1f}x",
            forward_s=forward_s * size,
            backward_s=forward_s * (backward + 1) * size,
            tail_s=forward_s * tail * size,
            compute_bytes=compute_bytes,
            capacity_bytes=np.inf,
            kept_backward_s=forward_s * backward * size,
            kept_compute_bytes=compute_bytes,
            host_capacity_bytes=np.inf,
            # copying a unit's boundaries takes 2 to 100 % of its forward
            offload_bytes_per_s=_BOUNDARY_BYTES / (forward_s * random.uniform(0.02, 1)),
        )


def random_case(
    random: np.random.Generator, units: int, *, spread: float = _SPREAD
) -> tuple[Problem, Plan]:
    """Draw a problem and a plan of 2 to 12 ranks.

    Each rank has its own speed and mode, and microbatches of up to 8 samples. Half of the plans
    share the samples by speed, with up to 12 microbatches on a rank. The others draw up to 6
    microbatches at random. A unit's gather takes up to 1.5 times the slowest rank's forward of it,
    its reduce half to twice the gather. Three in ten plans hold even shares.
    """
    model = Model(random.uniform(2, 2.3), random.uniform(0.5, 6), spread)
    ranks = int(random.integers(2, 13))
    profiles = [model.profile(random) for _ in range(ranks)]
    fractions = (
        random.dirichlet(np.ones(ranks)) if random.random() < 0.7 else np.ones(ranks) / ranks
    )
    most = 8 * 6 / max(1 / profile.forward_s[0] for profile in profiles)
    balanced = random.random() < 0.5
    parts = []
    for profile, fraction in zip(profiles, fractions, strict=True):
        if balanced:
            samples = max(1, round(most / profile.forward_s[0]))
            count = -(-samples // int(random.integers(4, 9)))
            sizes = [samples // count + (index < samples % count) for index in range(count)]
        else:
            sizes = random.integers(1, 9, size=int(random.integers(0, 7))).tolist()
        offload = bool(random.random() < 0.3)
        parts.append(
            RankPlan(
                sizes,
                float(fraction),
                recompute=offload or bool(random.random() < 0.6),
                offload=offload,
            )
        )
    if not any(part.batch_size for part in parts):
        parts[0] = dataclasses.replace(parts[0], microbatch_sizes=(4,))
    problem = Problem(
        profiles,
        units,
        state_bytes=units * 200.0 * _MIB,
        global_batch_size=sum(part.batch_size for part in parts),
        boundary_bytes=_BOUNDARY_BYTES,
        kept_bytes=8 * _BOUNDARY_BYTES,
    )
    forward_s = max(rank.forward_s for rank in predict(problem, parts).ranks)
    gather_s = forward_s * random.uniform(0, 1.5)
    reduce_s = gather_s * random.uniform(0.5, 2)
    both_s = gather_s + reduce_s
    problem = dataclasses.replace(
        problem,
        gather_s=gather_s,
        reduce_s=reduce_s,
        gather_and_reduce_s=random.choice([None, max(gather_s, reduce_s), 1.2 * both_s]),
        even_gather_s=0.8 * gather_s,
        even_reduce_s=0.8 * reduce_s,
        fill_s=both_s,  # as in profiles and estimates
        root_gather_s=gather_s * random.uniform(0, 2),
        root_reduce_s=reduce_s * random.uniform(0, 2),
        update_overhead_s=forward_s * random.uniform(0, 1),
        gathered_bytes=800.0 * _MIB,
    )
    return problem, Plan(parts)


def difference(problem: Problem, plan: Plan) -> float:
    """Return the simulated step over the closed form's, less 1."""
    return simulate(problem, plan).step_s / predict(problem, plan).step_s - 1


def large_case(kinds: int) -> tuple[Problem, Plan]:
    """Return a problem and a plan of 1,024 ranks of ``kinds`` kinds, 48 units, 4 microbatches."""
    random = np.random.default_rng(0)
    model = Model(2.0, 3.0, _SPREAD)
    profiles = [model.profile(random) for _ in range(kinds)]
    ranks = [profiles[index % kinds] for index in range(1024)]
    problem = Problem(
        ranks,
        48,
        gather_s=5e-3,
        reduce_s=5e-3,
        state_bytes=1e12,
        global_batch_size=1024 * 16,
        boundary_bytes=_BOUNDARY_BYTES,
    )
    return problem, Plan([RankPlan((4,) * 4, 1 / 1024) for _ in ranks])


def main() -> int:
    """Print both tables; return 1 if the claim is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plans", type=int, default=300, help="random plans per number of units")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    broken = longer = 0
    print(f"{'units':>18} {'plans':>6} {'median':>8} {'95 % within':>12} {'least':>8} {'most':>8}")
    for units, spread in (*((units, _SPREAD) for units in _UNITS), (24, _WIDE_SPREAD)):
        found = np.array(
            [difference(*random_case(random, units, spread=spread)) for _ in range(arguments.plans)]
        )
        judged = units >= CLAIM_FROM_UNITS and spread == _SPREAD
        broken += judged and int((abs(found) > CLAIM).sum())
        longer += int((found > _ROUNDING).sum())
        label = str(units) if spread == _SPREAD else f"{units}, unlike ranks"
        print(
            f"{label:>18} {len(found):6} {np.median(found):+8.2%} "
            f"{np.quantile(abs(found), 0.95):12.2%} {found.min():+8.2%} {found.max():+8.2%}"
        )
    for kinds in (6, 1024):
        problem, plan = large_case(kinds)
        started = time.perf_counter()
        simulate(problem, plan)
        print(f"1,024 ranks of {kinds} kinds, 48 units: {time.perf_counter() - started:.2f} s")
    print(
        f"plans of {CLAIM_FROM_UNITS} units or more that differ by more than {CLAIM:.0%}: {broken}"
    )
    print(f"plans whose step is longer than the closed form: {longer}")
    return 1 if broken or longer else 0


if __name__ == "__main__":
    sys.exit(main())
