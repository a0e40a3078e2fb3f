"""Stages and problems of pipelines that several tests use."""

from __future__ import annotations

import random

from lightning_cephalo.offline.estimate.network import Link, Network
from lightning_cephalo.offline.pipeline.problem import Block, PartBytes, PipelineProblem
from lightning_cephalo.offline.pipeline.times import Crossing, StageTimes
from lightning_cephalo.plan import Links, Problem, RankProfile, StateBytes


def random_stage(dice: random.Random, *, last: bool) -> StageTimes:
    """A stage bound by compute, gathers or reduces; it gathers again from three units on."""
    forward_s = dice.uniform(0.5, 3)
    regathers = dice.choice([True, False])
    return StageTimes(
        units=dice.randint(3 if regathers else 1, 12),
        forward_s=forward_s,
        backward_s=forward_s * dice.uniform(1.5, 3.5),
        tail_s=dice.uniform(0, 2) if last else 0.0,
        gather_s=forward_s * dice.choice([0, 0.1, 0.5, 0.9, 1.2, 2]),
        reduce_s=forward_s * dice.choice([0, 0.2, 1, 2.5]),
        regathers=regathers,
        ready_s=dice.uniform(0, 3),
        after_s=dice.uniform(0, 3),
        update_s=dice.uniform(0, 1),
    )


def random_pipeline(dice: random.Random) -> tuple[list[StageTimes], list[Crossing], int]:
    """One to five stages, the links between them, and 1 to 32 waves."""
    count = dice.randint(1, 5)
    stages = [random_stage(dice, last=index == count - 1) for index in range(count)]
    crossings = [
        Crossing(dice.choice([0, 0.5, 3, 20]), dice.uniform(0, 0.2)) for _ in range(count - 1)
    ]
    return stages, crossings, dice.choice([1, 2, 3, 5, 8, 12, 16, 24, 32])


def rank(speed: float, capacity: float, *, sizes: int = 4) -> RankProfile:
    """A rank whose samples take ``1 / speed`` seconds in a forward, and 10 bytes each."""
    size = range(1, sizes + 1)
    return RankProfile(
        f"speed {speed:g}",
        [(0.2 + own) / speed for own in size],
        [(0.6 + 3 * own) / speed for own in size],
        [0.5 * own / speed for own in size],
        [10.0 * own for own in size],
        capacity,
    )


def problem_of(
    *nodes: list[RankProfile],
    units: int = 6,
    batch: int = 8,
    between: float = 10.0,
    inside: float = 1000.0,
    latency_s: float = 0.01,
) -> PipelineProblem:
    """Blocks of one node each; a unit has 20 bytes of parameters and 160 of state.

    Links are in bytes per second.
    """
    link = Link(between, latency_s)
    network = Network(
        tuple(Link(inside, 0.0) for _ in nodes),
        tuple(
            tuple(None if a == b else link for b in range(len(nodes))) for a in range(len(nodes))
        ),
    )
    ranks = {index: len(node) for index, node in enumerate(nodes)}
    gather_s, reduce_s = network.ring_s(ranks, 20.0), network.ring_s(ranks, 40.0)
    unit = PartBytes(gather=20.0, reduce=40.0, state=160.0, buffers=60.0, update=280.0)
    root = PartBytes(gather=10.0, reduce=20.0, state=80.0, buffers=30.0, update=140.0)
    whole = Problem(
        ranks=tuple(each for node in nodes for each in node),
        units=units,
        links=Links(gather_s, reduce_s),
        root_links=Links(network.ring_s(ranks, 10.0), network.ring_s(ranks, 20.0)),
        fill_s=gather_s + reduce_s,
        state=StateBytes(units * 160.0 + 80.0 + 40.0),
        global_batch_size=batch,
        boundary_bytes=2.0,
        gathered_bytes=min(2, units) * 60.0 + 30.0,
        reshard_after_forward="auto",
        unresharded_bytes=max(0, units - 2) * 20.0,
    )
    blocks = tuple(
        Block(f"node {index}", index, tuple(node), update_bytes_per_s=1e4)
        for index, node in enumerate(nodes)
    )
    return PipelineProblem(whole, blocks, network, unit, root=root, crossing_bytes=2.0)
