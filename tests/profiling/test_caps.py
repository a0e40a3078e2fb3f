"""Caps on the memory of ranks: the plan obeys them, emulated devices enforce them."""

import functools
import time
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from profiled import GPT, SOON_S, fit, in_ranks, loader

from lightning_cephalo import Plan, RankPlan
from lightning_cephalo.emulation import active_device

SMALL = {"width": 64, "depth": 3, "context": 32}
BY_HAND = Plan(
    ranks=(
        RankPlan(microbatch_sizes=(4, 4), state_fraction=0.5),
        RankPlan(microbatch_sizes=(4, 4), state_fraction=0.5),
    )
)
MEGABYTE = 10**6


class Watch(Callback):
    """This rank's device while training."""

    def on_train_end(self, trainer, module):
        self.device = active_device()
        self.capacity_bytes = self.device.capacity_bytes
        self.peak_bytes = self.device.peak_bytes


def capped(memory_cap, capacity_bytes=(None, None)):
    """The capacity in the plan, while training and afterwards, and the peak, of this rank."""
    watch = Watch()
    trainer = fit(
        GPT(**SMALL),
        loader(context=32, batch_size=8),
        capacity_bytes=capacity_bytes,
        callbacks=[watch],
        max_steps=2,
        strategy={"memory_cap": memory_cap},
        is_time_shared=False,
    )
    planned = trainer.strategy.plan.ranks[trainer.global_rank].capacity_bytes
    return planned, watch.capacity_bytes, watch.device.capacity_bytes, watch.peak_bytes


def test_the_plan_obeys_a_cap_and_an_emulated_device_enforces_it():
    cap = int(2.4 * MEGABYTE)
    (free, *_), (planned, enforced, afterwards, peak) = in_ranks(2, capped, {1: cap})
    assert planned == enforced == cap < free
    assert afterwards is None
    assert peak <= cap


@pytest.mark.slow
def test_a_fraction_is_of_each_ranks_device():
    found = in_ranks(2, capped, 0.5, (16 * MEGABYTE, 6 * MEGABYTE))
    for total, (planned, enforced, afterwards, peak) in zip((16, 6), found, strict=True):
        assert planned == enforced == total * MEGABYTE / 2
        assert afterwards == total * MEGABYTE
        assert peak <= planned


class Greedy(GPT):
    """Takes eight megabytes in the second step of training."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            torch.zeros(2 * MEGABYTE)


def test_what_is_above_the_cap_is_refused_though_the_device_has_it():
    def greedy(memory_cap):
        failure = ""
        try:
            fit(
                Greedy(**SMALL),
                loader(context=32, batch_size=8),
                capacity_bytes=(64 * MEGABYTE, 64 * MEGABYTE),
                max_steps=2,
                strategy={"plan": BY_HAND, "memory_cap": memory_cap},
                is_time_shared=False,
            )
        except torch.OutOfMemoryError as refused:
            failure = str(refused)
        return failure

    for free, failure in in_ranks(2, lambda: [greedy(cap) for cap in (0.5, "6 MB")]):
        assert free == "" and "capacity is 6000000 bytes" in failure


class Untrained(GPT):
    """Must not come to train."""

    def on_train_start(self):
        raise AssertionError("training has started")


REFUSED = {
    "a thousand bytes": {"memory_cap": 1000},
    "900 kB": {"memory_cap": "900 kB"},
    "too few on one rank": {"memory_cap": {1: 1000}},
    "too few on each": {"memory_cap": {0: "1100 kB", 1: "1100 kB"}},
    "no plan": {"memory_cap": "1400 kB", "recompute": False},
    "more than emulated": {"memory_cap": {1: 7 * MEGABYTE}, "capacity_bytes": (None, 6 * MEGABYTE)},
    "more than the machine has": {"memory_cap": "1000 TB"},
    "no such rank": {"memory_cap": {1: 0.5, 2: 0.5, 7: 0.5}},
    "less than a plan says": {
        "memory_cap": {1: 2**20},
        "plan": replace(
            BY_HAND, ranks=tuple(replace(rank, memory_bytes=3.0 * 2**20) for rank in BY_HAND.ranks)
        ),
    },
    "less than units that stay": {
        "memory_cap": {1: 2**20},
        "plan": replace(BY_HAND, reshard_after_forward=False),
    },
    "too few for a plan": {"memory_cap": {1: 1000}, "plan": BY_HAND},
}
"""Options of the strategy, and the capacities of emulated devices."""


def refused(capacity_bytes=(None, None), **options):
    """What a start says, and after how many seconds."""
    started = time.monotonic()
    try:
        fit(
            Untrained(**SMALL),
            loader(context=32, batch_size=8),
            capacity_bytes=capacity_bytes,
            strategy=options,
        )
    except Exception as failure:
        return str(failure), time.monotonic() - started
    return "", 0.0


@functools.cache
def all_refused():
    return in_ranks(2, lambda: {name: refused(**options) for name, options in REFUSED.items()})


def refusals(name):
    """What every rank says in a case."""
    found = [own[name] for own in all_refused()]
    for message, seconds in found:
        assert message and seconds < SOON_S, found
    return [message for message, _ in found]


@pytest.mark.parametrize("name", list(REFUSED)[:4])
def test_a_cap_that_nothing_fits_is_named_on_every_rank(name):
    for message in refusals(name):
        assert "memory_cap" in message and "A larger limit may do" in message
        assert "MiB" in message


def test_a_cap_that_fits_no_plan_is_named_on_every_rank():
    for message in refusals("no plan"):
        assert "The memory of rank 0, 1 is limited by memory_cap (1.3 MiB)." in message


def test_a_cap_above_the_device_is_refused_on_every_rank():
    for message in refusals("more than emulated"):
        assert "memory_cap of rank 1 is 6.7 MiB" in message
        assert "has 5.7 MiB. Lower the cap" in message
    for message in refusals("more than the machine has"):
        assert "memory_cap of rank" in message and "Lower the cap" in message


def test_a_cap_of_a_rank_that_is_not_there_is_refused_on_every_rank():
    for message in refusals("no such rank"):
        assert "memory_cap: expected ranks (0 to 1) as keys, but got 2" in message


def test_a_given_plan_that_needs_more_than_the_cap_is_refused_on_every_rank():
    for message in refusals("less than a plan says"):
        assert "needs 3.0 MiB on rank 1, but memory_cap allows 1.0 MiB" in message
    for message in refusals("less than units that stay"):
        assert "Rank 1 cannot take part" in message and "reshard_after_forward=True" in message
    for message in refusals("too few for a plan"):
        assert "Rank 1 cannot take part" in message and "limited by memory_cap" in message
