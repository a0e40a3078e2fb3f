"""Asks the planner when ranks of several kinds pay, since all of them communicate over gloo.

    python benchmarks/mixed_kinds.py

Two GPUs that communicate over NCCL are compared with two, with two and a CPU, and with four GPUs
that communicate over gloo, for global batches of several sizes. The model has 24 units of 12.6
million parameters. Speeds and rates are assumed (below), not measured.
"""

from __future__ import annotations

from lightning_cephalo.plan import Problem, RankProfile, solve

UNITS, UNIT_NUMEL = 24, 12.6e6
NCCL_BYTES_PER_S, GLOO_BYTES_PER_S = 10e9, 1e9
FORWARD_S, LAUNCH_S = 0.0015, 0.0003
CPU_IS_SLOWER = 30
SIZES = range(1, 33)


def profile(name: str, slower: float, capacity_bytes: float) -> RankProfile:
    """A device whose forward of a unit takes a constant and a time per sample."""
    forward_s = [slower * FORWARD_S * size + LAUNCH_S for size in SIZES]
    return RankProfile(
        name=name,
        forward_s=forward_s,
        backward_s=[3 * seconds for seconds in forward_s],
        tail_s=[2 * seconds for seconds in forward_s],
        compute_bytes=[2e8 * size for size in SIZES],
        capacity_bytes=capacity_bytes,
    )


GPU = profile("GPU", 1, 24e9)
CPU = profile("CPU", CPU_IS_SLOWER, 256e9)
CASES = {
    "2 GPUs, NCCL": ((GPU, GPU), NCCL_BYTES_PER_S),
    "2 GPUs, gloo": ((GPU, GPU), GLOO_BYTES_PER_S),
    "2 GPUs and a CPU, gloo": ((GPU, GPU, CPU), GLOO_BYTES_PER_S),
    "2 and 2 GPUs of two makers, gloo": ((GPU,) * 4, GLOO_BYTES_PER_S),
}


def step(ranks: tuple[RankProfile, ...], bytes_per_s: float, global_batch_size: int) -> str:
    """Return the step's seconds and samples by rank in the best plan."""
    gather_s = UNIT_NUMEL * 4 * (len(ranks) - 1) / len(ranks) / bytes_per_s
    plan = solve(
        Problem(
            ranks=ranks,
            units=UNITS,
            gather_s=gather_s,
            reduce_s=gather_s,
            state_bytes=UNITS * UNIT_NUMEL * 16,
            global_batch_size=global_batch_size,
            boundary_bytes=1e6,
            gathered_bytes=6e8,
            fill_s=2 * gather_s,
        )
    )
    samples = ":".join(str(sum(rank.microbatch_sizes)) for rank in plan.ranks)
    return f"{plan.step_s:.2f} s ({samples})"


def main() -> None:
    """Print the table."""
    print("| global batch |", " | ".join(CASES), "|")
    print("|---" * (len(CASES) + 1) + "|")
    for batch in (16, 64, 256, 1024):
        cells = [step(ranks, rate, batch) for ranks, rate in CASES.values()]
        print(f"| {batch} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
