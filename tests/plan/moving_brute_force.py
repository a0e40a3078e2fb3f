"""Every plan of a small problem whose shares of the state take time, tried."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from plan_brute_force import partitions

from lightning_cephalo.plan import (
    InfeasibleError,
    Links,
    Plan,
    Problem,
    RankProfile,
    StateBytes,
    cost,
    moving,
    predict,
    solve,
)
from lightning_cephalo.plan.moving import Exposure


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)

    def profile() -> RankProfile:
        longest = draw.randint(1, 2)
        curves = [[draw.uniform(0, 3) for _ in range(longest)] for _ in range(4)]
        return RankProfile(
            "r",
            *curves,
            draw.uniform(12, 60),
            host_capacity_bytes=draw.choice([0.0, 20.0, 60.0]),
            updated_parameters_per_s=draw.choice([math.inf, 2.0]),
            host_updated_parameters_per_s=draw.choice([0.0, 0.5, 4.0]),
            to_device_bytes_per_s=draw.choice([math.inf, 20.0, 3.0]),
            to_host_bytes_per_s=draw.choice([math.inf, 20.0, 3.0]),
        )

    ranks = [profile() for _ in range(draw.randint(1, 2))]
    units = draw.randint(1, 3)
    sizes = (draw.randint(0, 2), *(draw.randint(1, 2) for _ in range(units)))
    links = Links(draw.choice([0.0, 2.0]), draw.choice([0.0, 1.0]))
    problem = Problem(
        ranks,
        units,
        links=links,
        state=StateBytes(16 * sum(sizes)),
        early_state=StateBytes(12 * sum(sizes), updating_bytes=4 * max(sizes)),
        global_batch_size=draw.randint(1, 4),
        boundary_bytes=draw.choice([0.0, 1.0]),
        gathered_bytes=2.0,
        update_overhead_s=1.0,
        unit_update_s=0.1,
        optimizer_offload=draw.choice(["auto", "auto", True]),
        unit_parameters=sizes,
        moment_bytes=8.0,
        offloads_boundaries=draw.choice([True, False]),
        even_links=draw.choice([None, Links(0.5, links.reduce_s)]),
    )
    return problem.with_early_update() if draw.random() < 0.7 else problem


def least_moving_step(problem: Problem) -> float | None:
    """The shortest step of all plans that may move state: every batch, mode and home is tried."""
    shares = [(problem, 1.0)]
    even = problem.with_even_shares()
    if even.links != problem.links:
        shares.append((even, 1 / len(problem.ranks)))
    steps = [_least(one, most) for one, most in shares]
    return min((step for step in steps if step is not None), default=None)


def _least(problem: Problem, most_share: float) -> float | None:
    ways = []
    for profile in problem.ranks:
        own = []
        sizes = list(range(1, profile.largest_microbatch_size + 1))
        for batch in range(problem.global_batch_size + 1):
            for run in partitions(batch, sizes):
                own += [(profile, batch, run, mode) for mode in cost.modes(problem, profile)]
        ways.append(own)
    best = None
    for choice in itertools.product(*ways):
        if sum(batch for _, batch, _, _ in choice) != problem.global_batch_size:
            continue
        work = [cost.rank_work(problem, profile, run, mode) for profile, _, run, mode in choice]
        slowest = [max(part) for part in zip(*work, strict=True)]
        step_s = cost.step_time(problem, *slowest)
        if best is not None and step_s >= best:
            continue
        homes = [_homes(problem, slowest[1], *each) for each in choice]
        exposed_s = _least_exposed(homes, most_share)
        if exposed_s is not None:
            best = min(step_s + exposed_s, math.inf if best is None else best)
    return best


def _homes(problem, backward_s, profile, _, run, mode) -> list:
    """By way to keep the state, the largest share by bytes, and the seconds of a share."""
    found = []
    needs = [need(problem, profile, mode) for need in cost.DEVICE_NEEDS]
    on_host = cost.host_need(problem, profile, mode).of(run)
    for moved in moving.choices(problem, profile):
        room = 1.0
        limits = [
            (need.state + moved.device_bytes(problem), need.of(run), profile.capacity_bytes)
            for need in needs
        ]
        limits.append((moved.host_bytes(problem), on_host, profile.host_capacity_bytes))
        for slope, used, capacity in limits:
            room = min(room, (capacity - used) / slope if slope > 0 else 1.0)
            if used > capacity:
                room = -math.inf
        found.append((room, moving.exposure(problem, profile, moved, backward_s)))
    return found


def _least_exposed(homes: list, most_share: float) -> float | None:
    def held(exposed_s: float) -> float:
        total = 0.0
        for own in homes:
            shares = [min(room, _share(seconds, exposed_s)) for room, seconds in own]
            if max(room for room, _ in own) < 0:
                return -math.inf
            total += min(max(0.0, *shares), most_share)
        return total

    if held(1e6) < 1 - 1e-9:
        return None
    low, high = 0.0, 1e6
    if held(0.0) >= 1 - 1e-9:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if held(middle) >= 1 - 1e-9 else (middle, high)
    return high


def _share(seconds: Exposure, exposed_s: float) -> float:
    """The largest share that takes so long."""
    limits = [(exposed_s + hidden) / slope for slope, hidden in seconds.lines if slope]
    return min([1.0, *limits])


def checked_plan(problem: Problem, slack: float = 1e-9) -> Plan | None:
    """Return the solver's plan, checked against brute force; None: neither finds one.

    Args:
        problem: A small one, whose state moves or may be searched by the time of shares.
        slack: By how much the bound may pass brute force, which rounds shares, relatively.
    """
    expected = least_moving_step(problem)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return None
    plan = solve(problem)
    assert plan.step_s == predict(problem, plan).step_s, problem
    assert plan.bound_s <= expected * (1 + slack), problem
    assert expected * (1 - 1e-9) <= plan.step_s <= expected * (1.003 + 1e-9), problem
    return plan
