"""Checks that the planner finds the optimum: random small problems against brute force.

    python benchmarks/optimality.py [--problems 2000] [--seed 0]

For each problem the planner must find the same optimum as brute force. Its plan must keep all caps
and the batch. It may exceed the optimum by at most the thousandth that is allowed for headroom. The
planner must refuse exactly the problems for which brute force finds no plan. Exits with 1 if any of
these checks fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

# brute force comes from the tests
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "plan"))

from plan_brute_force import least_step

from lightning_cephalo.plan import InfeasibleError, Problem, RankProfile, predict, solve

_SAME = 1e-9


def random_profile(random: np.random.Generator) -> RankProfile:
    """Draw a rank with unrealistic curves, which fall, jump and repeat."""
    longest = int(random.integers(0, 5))

    def curve() -> list[float]:
        whole = random.random() < 0.5
        return list(random.integers(0, 10, longest) if whole else random.uniform(0, 5, longest))

    keeps = random.random() < 1 / 3
    return RankProfile(
        "r",
        curve(),
        curve(),
        curve(),
        curve(),
        int(random.integers(10, 61)),
        kept_backward_s=curve() if keeps else (),
        kept_compute_bytes=curve() if keeps else (),
        reducing_compute_bytes=curve() if random.random() < 0.5 else (),
        kept_reducing_compute_bytes=curve() if keeps and random.random() < 0.5 else (),
        host_capacity_bytes=float(random.choice([0, 0, 5, 1000])),
        offload_bytes_per_s=float(random.choice([math.inf, 1.0, 0.1])),
    )


def random_problem(random: np.random.Generator) -> Problem:
    """Draw a problem of one to three ranks, the third like the first, with every option set."""
    ranks = [random_profile(random) for _ in range(random.integers(1, 3))]
    if random.random() < 0.5:
        ranks.append(ranks[0])
    state_bytes = float(random.uniform(0, 80))
    return Problem(
        ranks,
        units=int(random.integers(1, 4)),
        gather_s=float(random.choice([0.0, 3.0, 20.0])),
        reduce_s=float(random.choice([0.0, 2.0])),
        even_gather_s=random.choice([None, 1.0]),
        even_reduce_s=random.choice([None, 1.0]),
        padded_bytes=float(random.choice([0.0, 4.0])),
        state_bytes=state_bytes,
        reducing_state_bytes=float(random.choice([0.0, 0.0, 0.25, 1.0])) * state_bytes,
        updating_state_bytes=float(random.choice([0.0, 0.0, 0.5, 1.5])) * state_bytes,
        global_batch_size=int(random.integers(1, 9 if len(ranks) < 3 else 6)),
        boundary_bytes=float(random.choice([0.0, 0.3, 1.0])),
        kept_bytes=float(random.choice([0.0, 0.5])),
        microbatch_bytes=float(random.choice([0.0, 1.5])),
        gathered_bytes=float(random.choice([0.0, 2.0])),
        minimum_microbatch_size=int(random.choice([1, 1, 1, 2])),
        equal_microbatches=bool(random.random() < 1 / 3),
        update_overhead_s=float(random.choice([0.0, 1.0])),
        reshard_after_forward=[True, "auto", False][random.integers(0, 3)],
        unresharded_bytes=float(random.choice([0.0, 5.0])),
    )


def fault(problem: Problem, expected_s: float | None) -> str | None:
    """Return the fault in the planner's answer, or None."""
    try:
        plan = solve(problem)
    except InfeasibleError as error:
        return None if expected_s is None else f"refused what takes {expected_s} s: {error}"
    if expected_s is None:
        return "a plan where brute force finds none"
    prediction = predict(problem, plan)
    for part, profile in zip(prediction.ranks, problem.ranks, strict=True):
        if part.memory_bytes > profile.capacity_bytes:
            return f"{part.memory_bytes} bytes of {profile.capacity_bytes}"
        if part.host_bytes > profile.host_capacity_bytes:
            return f"{part.host_bytes} bytes of host memory of {profile.host_capacity_bytes}"
    if plan.global_batch_size != problem.global_batch_size:
        return f"a batch of {plan.global_batch_size} for {problem.global_batch_size}"
    assert plan.bound_s is not None and plan.step_s is not None
    if plan.gap or not math.isclose(plan.bound_s, expected_s, rel_tol=_SAME, abs_tol=_SAME):
        return f"optimum {plan.bound_s} s with gap {plan.gap}, brute force {expected_s} s"
    if plan.step_s > expected_s * (1.001 + _SAME) + _SAME:
        return f"a step of {plan.step_s} s where {expected_s} s can be had"
    return None


def main() -> int:
    """Print a summary line and the first faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    started, feasible, faults = time.perf_counter(), 0, []
    for index in range(options.problems):
        problem = random_problem(random)
        expected_s = least_step(problem)
        feasible += expected_s is not None
        found = fault(problem, expected_s)
        if found is not None:
            faults.append(f"problem {index}: {found}")
    print(
        f"{options.problems} problems, seed {options.seed}: {feasible} feasible, "
        f"{len(faults)} faults, {time.perf_counter() - started:.0f} s"
    )
    for line in faults[:10]:
        print(line)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
