"""The simulated NCCL: its results, its streams, and the rules that it keeps."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from launch import torchrun_environments

pytestmark = pytest.mark.simulated


def connect(rank, environments):
    os.environ.update(environments[rank])
    torch.cuda.set_device(rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def run(simulated, world_size, function, *args):
    return simulated.run(world_size, function, torchrun_environments(world_size), *args)


def run_each(simulated, world_size, function, ways):
    """What the ranks do in each way, one after the other in one start."""
    environments = torchrun_environments(world_size)
    outcomes = simulated.run_each(world_size, function, [(environments, way) for way in ways])
    return list(zip(ways, outcomes, strict=True))


def every_form(rank, environments):
    connect(rank, environments)
    world_size = dist.get_world_size()
    x = torch.full((2,), rank + 1.0, device="cuda")
    found = {}
    found["sum"] = x.clone()
    dist.all_reduce(found["sum"])
    found["mean"] = x.clone()
    dist.all_reduce(found["mean"], dist.ReduceOp.AVG)
    found["largest"] = x.clone()
    dist.all_reduce(found["largest"], dist.ReduceOp.MAX)
    found["from 1"] = x.clone()
    dist.broadcast(found["from 1"], 1)
    found["gathered"] = torch.empty(2 * world_size, device="cuda")
    dist.all_gather_single(found["gathered"], x)
    slices = list(torch.empty(sum(range(world_size)), device="cuda").split(list(range(world_size))))
    dist.all_gather(slices, torch.full((rank,), float(rank), device="cuda"))
    found["slices"] = torch.cat(slices)
    found["scattered"] = torch.empty(2, device="cuda")
    dist.reduce_scatter_single(
        found["scattered"], torch.arange(2.0 * world_size, device="cuda") * (rank + 1)
    )
    found["own slice"] = torch.empty(rank, device="cuda")
    dist.reduce_scatter(
        found["own slice"],
        [torch.full((n,), rank + n + 1.0, device="cuda") for n in range(world_size)],
    )
    dist.barrier()
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    found = {name: tensor.tolist() for name, tensor in found.items()}
    dist.destroy_process_group()
    return found, objects


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_form_gives_what_it_should(simulated, world_size):
    total = world_size * (world_size + 1) / 2
    for rank, outcome in enumerate(run(simulated, world_size, every_form)):
        assert not outcome.findings
        found, objects = outcome.value
        assert objects == [{"rank": other} for other in range(world_size)]
        assert found.pop("sum") == [total] * 2
        assert found.pop("mean") == [total / world_size] * 2
        assert found.pop("largest") == [world_size] * 2
        assert found.pop("from 1") == [2.0] * 2
        assert found.pop("gathered") == [o + 1.0 for o in range(world_size) for _ in range(2)]
        assert found.pop("slices") == [float(o) for o in range(world_size) for _ in range(o)]
        assert found.pop("scattered") == [total * 2 * rank, total * (2 * rank + 1)]
        assert found.pop("own slice") == [
            sum(other + rank + 1.0 for other in range(world_size)) for _ in range(rank)
        ]
        assert not found


# -- streams and memory ---------------------------------------------------------------------------


def waits_or_not(rank, environments, way):
    connect(rank, environments)
    x = torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=way != "blocking")
    if way == "waits":
        work.wait()
    elif way == "waits aside":
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
    y = x * 2
    torch.cuda.synchronize()
    return y.tolist()


def test_only_a_wait_on_the_same_stream_orders_what_follows(simulated):
    ways = ["blocking", "waits", "waits aside", "not"]
    for way, outcomes in run_each(simulated, 2, waits_or_not, ways):
        for outcome in outcomes:
            assert outcome.value == [4.0] * 4, way
            kinds = [line.split(":")[0] for line in outcome.findings]
            assert kinds == (["race"] if way in ("not", "waits aside") else []), way


def lets_go(rank, environments, way):
    connect(rank, environments)
    x = torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    if way == "waits aside":
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
    elif way == "waits":
        work.wait()
    del work, x  # kept until the wait
    torch.cuda.synchronize()


def test_tensors_are_kept_until_the_wait_and_no_longer(simulated):
    for way, outcomes in run_each(simulated, 2, lets_go, ["waits", "does not wait", "waits aside"]):
        for outcome in outcomes:
            kinds = [line.split(":")[0] for line in outcome.findings]
            assert kinds == (["freed early"] if way == "waits aside" else []), way


# -- rules ----------------------------------------------------------------------------------------


def breaks(rank, environments, rule):
    connect(rank, environments)
    other = dist.new_group()
    dist.barrier()  # a rank that breaks a rule may be gone before another has made its group
    x = torch.ones(4, device="cuda")
    try:
        if rule == "other order of groups":
            for group in (None, other) if rank else (other, None):
                dist.all_reduce(x, group=group)
        elif rule == "other sizes":
            dist.all_reduce(x[: 4 - rank])
        elif rule == "other dtypes":
            dist.all_reduce(x.half() if rank else x)
        elif rule == "other operations":
            dist.broadcast(x, 0) if rank else dist.all_reduce(x)
        elif rule == "other reductions":
            dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        elif rule == "other roots":
            dist.broadcast(x, rank)
        elif rule == "not contiguous":
            dist.all_reduce(torch.ones(4, 4, device="cuda").t())
        elif rule == "of the host":
            dist.group.WORLD.allreduce([torch.ones(4)])
        elif rule == "of another device":
            dist.all_reduce(x)
            dist.all_reduce(torch.ones(4, device=f"cuda:{rank + 2}"))
        elif rule == "wrong output":
            dist.group.WORLD.all_gather_single(torch.ones(7, device="cuda"), x)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


DIFFER = [
    "other order of groups",
    "other sizes",
    "other dtypes",
    "other operations",
    "other reductions",
    "other roots",
]
REFUSED = {
    "not contiguous": "expected contiguous tensors",
    "of the host": "expected CUDA tensors, got one on cpu",
    "of another device": "the communicator is that of cuda:",
    "wrong output": "expected 4 times 2 elements, got 7",
}


def test_what_breaks_a_rule_is_refused_and_differences_are_told_with_both_sides(simulated):
    for rule, outcomes in run_each(simulated, 2, breaks, [*DIFFER, *REFUSED]):
        for outcome in outcomes:
            said = outcome.value
            assert said is not None and "RuleBroken" in said, rule
            if rule in REFUSED:
                assert REFUSED[rule] in said
                continue
            assert "a hang or wrong data" in said, rule
            sides = [line for line in said.splitlines() if line.startswith("  rank ")]
            assert len(sides) == 2 and sides[0][9:] != sides[1][9:], rule


def overlaps(rank, environments, first_of_rank_1):
    connect(rank, environments)
    pair = dist.new_group([0, 1])
    dist.barrier()
    x = torch.ones(4, device="cuda")
    groups = [None, pair] if rank == 0 or first_of_rank_1 == "all" else [pair, None]
    try:
        for group in groups if rank < 2 else [None]:
            dist.all_reduce(x, group=group)
        dist.barrier()  # the store ends with rank 0
    except RuntimeError as error:
        return str(error)
    return None


def test_groups_that_share_some_ranks_are_called_in_one_order(simulated):
    (_, everywhere), (_, (*both, third)) = run_each(simulated, 3, overlaps, ["all", "pair"])
    for outcome in everywhere:
        assert outcome.value is None and not outcome.findings
    for outcome in both:
        sides = {line[:8] for line in outcome.value.splitlines() if line.startswith("  rank ")}
        assert sides == {"  rank 0", "  rank 1"}
    assert third.value is not None


# -- ends -----------------------------------------------------------------------------------------


def is_left_alone(rank, environments):
    connect(rank, environments)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(3)
        return None
    group = dist.group.WORLD
    threading.Timer(0.5, group.abort).start()
    start_s = time.monotonic()
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error), time.monotonic() - start_s < 2.5


def test_an_abort_ends_a_collective_that_waits_for_others(simulated):
    outcomes = run(simulated, 2, is_left_alone)
    assert outcomes[0].value == ("NCCL communicator was aborted", True)
