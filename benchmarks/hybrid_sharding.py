"""Compares whole steps on nodes with slow links between them: hybrid sharding beside other ways.

    python benchmarks/hybrid_sharding.py --nodes 2,2 --mbit-per-s 20    # as root

It makes a network namespace per node, with links of the given rate between nodes; ranks of a node
reach each other at loopback's rate. All contenders train the same model on the same ranks, with
their steps in turn:

- straight: cephalo, all ranks hold the state together.
- hybrid: cephalo, each node holds the whole state.
- DDP, fully_shard: torch's, the latter over all ranks.
- HSDP: fully_shard on a mesh of nodes and ranks, where nodes have equally many ranks.

The bytes that leave a node do not depend on how busy the machine is; seconds do. The model of a
step (docs/planning.md) predicts cephalo's, from compute that is measured before, and from
collectives without compute that are timed in each round, in turn with the steps.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / folder) for folder in ("examples", "tests/distributed")),
]

from side_by_side import links  # noqa: E402
from side_by_side.cases import DDP, MODEL_PARALLEL  # noqa: E402
from side_by_side.contenders import (  # noqa: E402
    CPU,
    Contender,
    ModelSize,
    Part,
    baselines,
    loss_of,
    sharded_step,
)

from lightning_cephalo.accelerator import accelerator_of  # noqa: E402
from lightning_cephalo.execution.sharded_model import ShardedModel  # noqa: E402
from lightning_cephalo.features.install import install  # noqa: E402
from lightning_cephalo.plan import (  # noqa: E402
    Plan,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
)
from lightning_cephalo.plan.cost import predict  # noqa: E402
from lightning_cephalo.plan.state_groups import even_shares  # noqa: E402
from lightning_cephalo.profiling.network import with_network_times  # noqa: E402
from lightning_cephalo.ranks.groups import Groups  # noqa: E402

STRAIGHT, HYBRID, HSDP = "straight", "hybrid", "HSDP"
_TIMEOUT = datetime.timedelta(seconds=600)


def own_contender(
    name: str, size: ModelSize, groups: Groups, nodes: Sequence[int], shares: Sequence[float]
) -> tuple[Contender, ShardedModel]:
    """Make one of cephalo's contenders; hybrid has equal shares of the state in every group."""
    model = size.make()
    state_groups = tuple(nodes) if name == HYBRID else ()
    sharded = ShardedModel(
        model,
        groups,
        accelerator_of(CPU),
        even_shares(state_groups, len(nodes)) if state_groups else shares,
        groups=state_groups,
    )
    install(sharded.executor)
    sharded.executor.recompute = size.recompute

    def backward(parts: Sequence[Part], global_batch_size: int) -> None:
        sharded_step(sharded.executor, model, loss_of, parts)

    return Contender(name, model, backward, sharded=True), sharded


def hsdp(size: ModelSize, nodes: Sequence[int]) -> Contender:
    """Make torch's hybrid sharding: shards inside of a node, copies across nodes."""
    model: Any = size.make()
    count = 1 + max(nodes)
    names = ("nodes", "ranks")
    mesh = init_device_mesh("cpu", (count, len(nodes) // count), mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def backward(parts: Sequence[Part], global_batch_size: int) -> None:
        for part in parts:
            factor = len(nodes) / global_batch_size * len(part["tokens"])
            (loss_of(model, part) * factor).backward()

    return Contender(HSDP, model, backward, sharded=True)


def sent_bytes() -> int:
    """Return the bytes that have left this rank's node, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == links.INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"/proc/self/net/dev has no {links.INTERFACE}")


def compute_s(size: ModelSize, part: Part, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a forward and of a backward, while all ranks compute."""
    model, times = size.make(), []
    for _ in range(1 + rounds):
        dist.barrier()
        begin_s = time.perf_counter()
        loss = loss_of(model, part)
        middle_s = time.perf_counter()
        loss.backward()
        times.append((middle_s - begin_s, time.perf_counter() - middle_s))
    forward, backward = zip(*times[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def update_s(contender: Contender, rounds: int) -> float:
    """Return the slowest rank's median seconds of an update, while all ranks update."""
    times = []
    for _ in range(1 + rounds):
        contender.accumulate()
        dist.barrier()
        begin_s = time.perf_counter()
        contender.update()
        took = torch.tensor(time.perf_counter() - begin_s)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(took.item())
    return statistics.median(times[1:])


def predicted_s(
    sharded: ShardedModel, forward_s: float, backward_s: float, updated_s: float
) -> float:
    """Return what the model of a step says of a contender; collective."""
    units = len(sharded.units) - 1
    own = RankProfile(
        f"rank {sharded.control.rank}",
        [forward_s / units],
        [backward_s / units],
        [0.0],
        [0.0],
        math.inf,
    )
    state_groups = sharded.state_groups
    problem = Problem(
        sharded.control.gather(own),
        units,
        state=StateBytes(1.0),
        global_batch_size=len(sharded.fractions),
        update_overhead_s=updated_s,
        groups=state_groups,
    )
    # without room for shares of another kind
    problem = with_network_times(problem, sharded, accelerator_of(CPU).clock, 0.0)
    for flat in sharded.flats:
        flat.gradient.forget()
    ranks = tuple(RankPlan((1,), share) for share in sharded.fractions)
    return predict(problem, Plan(ranks, groups=state_groups)).step_s


def run_rank(
    rank: int,
    nodes: tuple[int, ...],
    namespaces: Sequence[str],
    folder: str,
    size: ModelSize,
    samples: int,
    rounds: int,
    shares: Sequence[float],
) -> None:
    """Time the steps of all contenders in turn, and write the medians of the slowest rank."""
    links.enter(namespaces[nodes[rank]])
    os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    warnings.simplefilter("ignore")  # deprecations inside torch's own wrappers
    torch.set_num_threads(1)
    world_size = len(nodes)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    groups = Groups.create(_TIMEOUT)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (samples, size.length + 1), generator=generator)
    part = {"tokens": tokens}
    own = [own_contender(name, size, groups, nodes, shares) for name in (STRAIGHT, HYBRID)]
    others = [one for one in baselines(size, world_size)[0] if one.name in (DDP, MODEL_PARALLEL)]
    if len({nodes.count(node) for node in nodes}) == 1:
        others.append(hsdp(size, nodes))
    contenders = [*(one for one, _ in own), *others]
    for contender in contenders:
        contender.prepare([part], samples * world_size)
        contender.step()
    forward_s, backward_s = compute_s(size, part, 3)
    updated_s = {contender.name: update_s(contender, 3) for contender, _ in own}
    predictions: dict[str, list[float]] = {contender.name: [] for contender, _ in own}
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    sent: dict[str, list[int]] = {contender.name: [] for contender in contenders}
    for index in range(rounds):
        first = index % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            gc.collect()
            dist.barrier()
            before, begin_s = sent_bytes(), time.perf_counter()
            contender.step()
            took = torch.tensor(time.perf_counter() - begin_s)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[contender.name].append(took.item())
            sent[contender.name].append(sent_bytes() - before)
        for contender, sharded in own:
            said_s = predicted_s(sharded, forward_s, backward_s, updated_s[contender.name])
            predictions[contender.name].append(said_s)
    if not rank:
        torch.save((times, sent, predictions, forward_s, backward_s), f"{folder}/times")
    groups.meeting.close()
    dist.destroy_process_group()


def main() -> int:
    """Print a table of seconds per step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="2,2", help="ranks of each node")
    parser.add_argument("--shares", help="of the state, such as 3,1; equal ones by default")
    parser.add_argument("--mbit-per-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1, help="samples of a rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    options = parser.parse_args()
    counts = [int(count) for count in options.nodes.split(",")]
    nodes = tuple(node for node, count in enumerate(counts) for _ in range(count))
    weights = [float(part) for part in (options.shares or ",".join("1" * len(nodes))).split(",")]
    if len(weights) != len(nodes):
        parser.error(f"--shares: expected one for each of {len(nodes)} ranks, got {options.shares}")
    shares = [weight / sum(weights) for weight in weights]
    size = ModelSize(options.width, options.depth, 4, options.length)
    numel = sum(parameter.numel() for parameter in size.make().parameters())
    context = multiprocessing.get_context("fork")
    try:
        with (
            links.ShapedHosts(len(counts), options.mbit_per_s, burst_kb=16) as namespaces,
            tempfile.TemporaryDirectory() as folder,
        ):
            given = (nodes, namespaces, folder, size, options.samples, options.rounds, shares)
            ranks = [
                context.Process(target=run_rank, args=(rank, *given)) for rank in range(len(nodes))
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                raise RuntimeError("a rank failed")
            times, sent, predictions, forward_s, backward_s = torch.load(f"{folder}/times")
    except links.LinkError as error:
        print(f"No links can be shaped here: {error}", file=sys.stderr)
        return 1
    print(
        f"{numel * 4 / 1e6:.2f} MB of parameters, ranks by node {options.nodes},"
        f" {options.mbit_per_s:g} Mbit/s between nodes, {options.rounds} rounds; computing takes"
        f" {forward_s + backward_s:.3f} s a step; torch {torch.__version__}"
    )
    rate = options.mbit_per_s / 8  # MB/s
    print(
        "| way | MB out of node 0 a step | seconds at the link's rate | seconds per step: median"
        " (quartiles) | predicted: median (quartiles) | measured / predicted |"
    )
    print("|---|---|---|---|---|---|")
    for name, taken in times.items():
        mbyte, said = statistics.median(sent[name]) / 1e6, "|"
        if name in predictions:
            ratio = statistics.median(taken) / statistics.median(predictions[name])
            said = f"{spread(predictions[name])} | {ratio:.3f}"
        print(f"| {name} | {mbyte:.2f} | {mbyte / rate:.2f} | {spread(taken)} | {said} |")
    return 0


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
    return f"{statistics.median(seconds):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
