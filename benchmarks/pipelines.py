"""Prints what the advisor for pipelines finds, what that costs, and that brute force is no better.

    python benchmarks/pipelines.py                  the tables of models and of nodes
    python benchmarks/pipelines.py --random 1000    random problems, against brute force; and the
                                                    formula, against the event simulation

Seconds are CPU seconds of this process. Times of devices are estimates from datasheets: nothing
here was measured on a cluster, and the runtime does not run pipelines.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "offline"))

from lightning_cephalo.offline.estimate import Cluster, build_problem, work_of
from lightning_cephalo.offline.pipeline.build import pipeline_problem
from lightning_cephalo.offline.pipeline.closed_form import pipeline_s
from lightning_cephalo.offline.pipeline.search import Planned, advise, least_step_s
from lightning_cephalo.offline.pipeline.simulate import simulate_pipeline
from lightning_cephalo.plan import Plan, RankPlan

MODELS = {
    "6.7B": {"n_layer": 32, "n_embd": 4096, "n_head": 32},
    "2.6B": {"n_layer": 32, "n_embd": 2560, "n_head": 32},
}
CASES = [("6.7B", 12.5), ("6.7B", 6.0), ("6.7B", 3.0), ("6.7B", 1.25), ("2.6B", 1.25)]
# The step of a plan that all pipelines beat: then none is left out.
_SLOW_S = 1e9


def cluster_of(gigabytes_per_s: float, counts: tuple[int, int, int] = (1, 1, 1)) -> Cluster:
    """Nodes of 8 A100, 8 V100 and 8 T4."""
    kinds = (("A100", "250 GB/s"), ("V100", "120 GB/s"), ("T4", "12 GB/s"))
    return Cluster.from_dict(
        {
            "nodes": [
                {"devices": {device: 8}, "link": link, "count": count}
                for (device, link), count in zip(kinds, counts, strict=True)
                if count
            ],
            "between_nodes": f"{gigabytes_per_s} GB/s",
        }
    )


def main() -> None:
    """Print the tables, or compare with brute force."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random problems")
    options = parser.parse_args()
    if options.random:
        _random(options.random)
        return
    works = {
        name: work_of("gpt2", sequence_length=1024, dtype="fp16", **size)
        for name, size in MODELS.items()
    }
    print("today: a bound that no plan of one stage beats; seconds of a step")
    for model, rate in CASES:
        _show(works[model], model, 256, rate, (1, 1, 1))
    _show(works["6.7B"], "6.7B", 512, 3.0, (2, 2, 2))
    _show(works["6.7B"], "6.7B", 512, 3.0, (3, 3, 2))


def _show(work, model: str, batch: int, rate: float, counts: tuple[int, int, int]) -> None:
    cluster = cluster_of(rate, counts)
    whole = build_problem(cluster, work, global_batch_size=batch).problem
    problem = pipeline_problem(cluster, work, whole)
    least_s = least_step_s(whole)
    today = dataclasses.replace(Plan((RankPlan((1,), 1.0),)), step_s=least_s)
    started_s = time.process_time()
    advice = advise(problem, today=today, time_limit_s=math.inf)
    cpu_s = time.process_time() - started_s
    best = advice.best
    pipelines = [] if best is None else best.pipelines
    found = "; ".join(
        " → ".join(
            "+".join(problem.blocks[block].name.split(" × ")[1] for block in each.stage.blocks)
            + f" {each.stage.units} {each.stage.gathering.value}"
            for each in pipeline.stages
        )
        + f", {pipeline.waves} waves"
        for pipeline in pipelines
    )
    step_s = math.inf if best is None else best.step_s
    print(
        f"{model}, batch {batch}, {sum(counts)} nodes, {rate:g} GB/s: today {least_s:.2f}, "
        f"pipeline {step_s:.2f} (bound {advice.bound_s:.2f}): {found}; "
        f"{advice.screened} groupings, {advice.solved} solves, {cpu_s:.2f} CPU s",
        flush=True,
    )


def _random(count: int) -> None:
    from pipeline_brute_force import fastest_s, quick_plan, random_problem
    from pipeline_cases import random_pipeline

    worse = above = infeasible = pairs = 0
    brute_s = search_s = apart = 0.0
    slow = dataclasses.replace(Plan((RankPlan((1,), 1.0),)), step_s=_SLOW_S)
    for seed in range(count):
        problem = random_problem(random.Random(seed))
        started_s = time.process_time()
        best_s = fastest_s(problem)
        between_s = time.process_time()
        advice = advise(
            problem, gap=0.0, planned=Planned(quick_plan), today=slow, time_limit_s=math.inf
        )
        brute_s += between_s - started_s
        search_s += time.process_time() - between_s
        found_s = advice.best.step_s if advice.best else math.inf
        for pipeline in advice.best.pipelines if advice.best else ():
            apart = max(apart, abs(pipeline.step_s / pipeline.simulate().step_s - 1))
        pairs += advice.best is not None and len(advice.best.pipelines) == 2
        infeasible += math.isinf(best_s)
        if found_s > best_s * (1 + 1e-9):
            worse += 1
            print(f"seed {seed}: brute force {best_s}, search {found_s}", flush=True)
        if advice.bound_s > best_s * (1 + 1e-9):
            above += 1
            print(f"seed {seed}: brute force {best_s}, bound {advice.bound_s}", flush=True)
    print(
        f"{count} random problems ({infeasible} without pipelines, {pairs} with two in parallel): "
        f"{worse} worse than brute force, {above} bounds above it; "
        f"{brute_s:.0f} CPU s by brute force, {search_s:.0f} by the search"
    )
    dice = random.Random(0)
    others = 0.0
    for _ in range(count):
        stages, crossings, waves = random_pipeline(dice)
        simulated_s = simulate_pipeline(stages, crossings, waves).step_s
        others = max(others, abs(pipeline_s(stages, crossings, waves) / simulated_s - 1))
    print(
        f"the formula differs from the event simulation by {apart:.1e} at most for the pipelines "
        f"found, and by {others:.1e} for {count} random pipelines"
    )


if __name__ == "__main__":
    main()
