"""What early updates would gain where gradients are clipped by norm, on estimated clusters.

    python benchmarks/clipped_updates.py [--between-steps | --host-updates]

With clipping by norm all updates follow the backward, as the norm is known last. Exact speculation
would update with the factor that is expected, write what is new beside what is old, and swap when
the norm is known. This prices five kinds of plans by the planner's own model, from data sheets:

- late: all gradients stay on the devices until the norm is known.
- leaving: gradients of units that the host updates leave the device at their reduce, and the host
  waits for the norm, as training does with clipping. Nothing is speculated.
- by the host: the host does not wait for the norm, if that pays: it updates into a second set of
  moments as gradients arrive, and parameters go back when the norm is known.
- speculated: the host's updates and the ways of state hide as those of early updates do. Gradients
  and old values are kept until the norm is known: devices hold what they hold with late updates.
- early: without clipping. No speculation can be faster.

With ``--between-steps`` it prints what leaving plans could save by moving streamed state outside of
the updates: the last unit's way back in the next step, and the first two units' way there before
the norm is known. The two buffers that streamed state passes through hold no more.

With ``--host-updates`` it times AdamW on this machine's processors: in place, and with the copies
of old moments that an update before the norm needs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.offline.estimate import Cluster, build_problem, work_of
from lightning_cephalo.plan import InfeasibleError, Plan, Problem, predict, solve
from lightning_cephalo.plan.moving import moved_by, moving_exposure
from lightning_cephalo.plan.state_homes import STAGED_UNITS, StateHome
from lightning_cephalo.plan.updates import least_update_s, with_updates

# Nodes, and the link between them.
CLUSTERS = {
    "4 A10G + 4 T4": "{devices: {A10G: 4, T4: 4}, link: 12 GB/s, host_memory: 384 GiB}",
    "4 A10G (32 GiB of host) + 2 T4": (
        "{devices: {A10G: 4}, link: 12 GB/s, host_memory: 32 GiB}",
        "{devices: {T4: 2}, link: 12 GB/s, host_memory: 384 GiB}",
    ),
    "2 RTX 3090": "{devices: {RTX 3090: 2}, link: 12 GB/s, host_memory: 128 GiB}",
    "4 V100 + 4 P100": (
        "{devices: {V100: 4}, link: 130 GB/s, host_memory: 256 GiB}",
        "{devices: {P100: 4}, link: 12 GB/s, host_memory: 256 GiB}",
    ),
    "8 A100 40GB": "{devices: {A100 40GB: 8}, link: 200 GB/s, host_memory: 1024 GiB}",
}
_LLAMA: dict[str, Any] = {"vocab_size": 32000}
MODELS = {
    "1.3B": {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5504},
    "2.8B": {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 6912},
    "6.7B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008},
    "13B": {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 13824},
}
BATCHES = (16, 64, 256)
ELEMENTS, ROUNDS, WARM_UP = 2**24, 40, 4
TOKENS = 1024


def clusters() -> Iterator[tuple[str, Cluster]]:
    """Yield the clusters by name."""
    for name, nodes in CLUSTERS.items():
        listed = (nodes,) if isinstance(nodes, str) else nodes
        text = f"nodes: [{', '.join(listed)}]"
        yield name, Cluster.from_yaml(f"{text}\nbetween_nodes: 25 Gb/s\n")


def kinds(problem: Problem) -> dict[str, Problem]:
    """Return the problems by kind, from that with late updates."""
    early = problem.with_early_update()
    speculated = replace(
        early, state_bytes=problem.state_bytes, reducing_state_bytes=0.0, updating_state_bytes=0.0
    )
    # the devices' own updates wait for the norm, those of even shares
    even_s = least_update_s(speculated, 1 / len(problem.ranks))
    speculated = replace(with_updates(speculated, even_s), unit_update_s=0.0)
    return {
        "late": problem,
        "leaving": replace(problem, sends_gradients=True),
        "by the host": replace(problem, sends_gradients=True, may_speculate=True),
        "speculated": speculated,
        "early": early,
    }


def _solved(problem: Problem) -> Plan | None:
    try:
        return solve(problem, time_limit_s=20)
    except InfeasibleError:
        return None


def between_steps(problem: Problem, plan: Plan) -> tuple[float, float, float]:
    """Return the seconds that moving adds to a step, without the last store, and the first fetches.

    Args:
        problem: A problem with late updates.
        plan: A solution.
    """
    found = [0.0, 0.0, 0.0]
    for profile, rank in zip(problem.ranks, plan.ranks, strict=True):
        moved, share = moved_by(problem, rank), rank.state_fraction
        exposed_s = moving_exposure(problem, profile, moved, 0.0).of(share)
        nbytes = [
            share * size * problem.moment_bytes
            for size, home in zip(moved.sizes, moved.homes, strict=True)
            if size and home is StateHome.STREAMED
        ]
        store_s = sum(nbytes[-1:]) / profile.to_host_bytes_per_s
        fetches_s = sum(nbytes[:STAGED_UNITS]) / profile.to_device_bytes_per_s
        hidden = (0.0, store_s, fetches_s)
        found = [max(f, exposed_s - h) for f, h in zip(found, hidden, strict=True)]
    return found[0], found[1], found[2]


def time_host_updates() -> None:
    """Print how much longer an update takes that leaves old moments as they are."""
    rows, gradient = torch.randn(ELEMENTS), torch.randn(ELEMENTS) * 1e-2
    old, new = ([torch.zeros(ELEMENTS) for _ in range(2)] for _ in range(2))
    step = torch.zeros(())

    def update(moments: Sequence[Tensor], part: slice) -> None:
        torch._fused_adamw_(
            [rows[part]],
            [gradient[part]],
            [moments[0][part]],
            [moments[1][part]],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def copied(piece: int) -> None:
        for start in range(0, ELEMENTS, piece):
            part = slice(start, start + piece)
            for target, source in zip(new, old, strict=True):
                target[part].copy_(source[part])
            update(new, part)

    kinds: dict[str, Callable[[], None]] = {
        "in place": lambda: update(old, slice(None)),
        "moments copied": lambda: copied(ELEMENTS),
        "copied and updated in pieces of 2^20": lambda: copied(2**20),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        step += 1
        for name, run in kinds.items():
            start_s = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start_s)
    in_place = taken["in place"][WARM_UP:]
    print(f"{torch.get_num_threads()} threads, {ELEMENTS} elements")
    for name, seconds in taken.items():
        ratios = [s / of for s, of in zip(seconds[WARM_UP:], in_place, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        took_ms = statistics.median(seconds[WARM_UP:]) * 1e3
        print(f"| {name} | {took_ms:.1f} ms | {middle:.2f} ({low:.2f} to {high:.2f}) |")


def main() -> None:
    """Print one row for each cluster, model and batch for which any plan moves state."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--between-steps", action="store_true")
    arguments.add_argument("--host-updates", action="store_true")
    given = arguments.parse_args()
    if given.host_updates:
        time_host_updates()
        return
    is_between = given.between_steps
    if is_between:
        columns = ["leaving", "moving", "store in the next step", "fetches before the norm"]
    else:
        columns = ["late", "of it moving", "leaving", "by the host", "speculated", "early"]
    print(f"| {' | '.join(['cluster', 'model', 'batch', *columns])} |")
    print("|---" * (3 + len(columns)) + "|", flush=True)
    works = {
        name: work_of(
            "llama",
            sequence_length=TOKENS,
            dtype="fp16",
            num_attention_heads=16 if name == "1.3B" else 32,
            num_key_value_heads=16 if name == "1.3B" else 32,
            **_LLAMA,
            **options,
        )
        for name, options in MODELS.items()
    }
    for cluster_name, cluster in clusters():
        for model, work in works.items():
            for batch in BATCHES:
                problem = build_problem(
                    cluster,
                    work,
                    global_batch_size=batch,
                    choose_recompute=False,
                    optimizer_offload="auto",
                    largest_microbatch_size=8,
                ).problem
                if is_between:
                    _show_between(cluster_name, model, batch, kinds(problem)["leaving"])
                    continue
                plans = {kind: _solved(each) for kind, each in kinds(problem).items()}
                if not any(plan and plan.moves_state for plan in plans.values()):
                    continue
                print(_row(cluster_name, model, batch, problem, plans), flush=True)


def _show_between(cluster: str, model: str, batch: int, problem: Problem) -> None:
    plan = _solved(problem)
    if plan is None or not plan.moves_state or plan.step_s is None:
        return
    now_s, *without = between_steps(problem, plan)
    saved = [f"{(each - now_s) / plan.step_s:.1%}" for each in without]
    parts = [f"{plan.step_s:.2f} s", f"{now_s / plan.step_s:.1%}", *saved]
    print(f"| {' | '.join([cluster, model, str(batch), *parts])} |", flush=True)


def _row(
    cluster: str, model: str, batch: int, problem: Problem, plans: dict[str, Plan | None]
) -> str:
    late = plans["late"]
    cells = [cluster, model, str(batch)]
    if late is None or late.step_s is None:
        cells += ["none", "–"]
    else:
        moving_s = max(rank.exposed_s for rank in predict(problem, late).ranks)
        cells += [f"{late.step_s:.2f} s", f"{moving_s:.2f} s"]
    for kind in ("leaving", "by the host", "speculated", "early"):
        plan = plans[kind]
        if plan is None or plan.step_s is None:
            cells.append("none")
        elif late is None or late.step_s is None:
            cells.append(f"{plan.step_s:.2f} s")
        else:
            cells.append(f"{plan.step_s / late.step_s - 1:+.1%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
