"""Caps on the memory of ranks: the plan obeys them, emulated devices enforce them."""

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

    assert in_ranks(2, greedy, 0.5) == ["", ""]
    for failure in in_ranks(2, greedy, "6 MB"):
        assert "capacity is 6000000 bytes" in failure


class Untrained(GPT):
    """Must not come to train."""

    def on_train_start(self):
        raise AssertionError("training has started")


def refusals(memory_cap, capacity_bytes=(None, None), **options):
    def refused():
        started = time.monotonic()
        try:
            fit(
                Untrained(**SMALL),
                loader(context=32, batch_size=8),
                capacity_bytes=capacity_bytes,
                strategy={"memory_cap": memory_cap, **options},
            )
        except Exception as failure:
            return str(failure), time.monotonic() - started
        return "", 0.0

    found = in_ranks(2, refused)
    for message, seconds in found:
        assert message and seconds < SOON_S, found
    return [message for message, _ in found]


@pytest.mark.parametrize("memory_cap", [1000, "900 kB", {1: 1000}, {0: "1100 kB", 1: "1100 kB"}])
def test_a_cap_that_nothing_fits_is_named_on_every_rank(memory_cap):
    for message in refusals(memory_cap):
        assert "memory_cap allows" in message and "a larger one may do" in message
        assert "MiB" in message


def test_a_cap_that_fits_no_plan_is_named_on_every_rank():
    for message in refusals("1400 kB", recompute=False):
        assert "memory_cap allows rank 0 1.3 MiB, rank 1 1.3 MiB" in message


def test_a_cap_above_the_device_is_refused_on_every_rank():
    for message in refusals({1: 7 * MEGABYTE}, (None, 6 * MEGABYTE)):
        assert "memory_cap of rank 1 is 6.7 MiB" in message
        assert "has 5.7 MiB. Lower the cap" in message
    for message in refusals("1000 TB"):
        assert "memory_cap of rank 0" in message and "Lower the cap" in message


def test_a_cap_of_a_rank_that_is_not_there_is_refused_on_every_rank():
    for message in refusals({1: 0.5, 2: 0.5, 7: 0.5}):
        assert "memory_cap names rank 2, 7" in message and "expected 0 to 1" in message


def test_a_given_plan_that_needs_more_than_the_cap_is_refused_on_every_rank():
    ranks = tuple(replace(rank, memory_bytes=3.0 * 2**20) for rank in BY_HAND.ranks)
    for message in refusals({1: 2**20}, plan=replace(BY_HAND, ranks=ranks)):
        assert "needs 3.0 MiB on rank 1, but memory_cap allows 1.0 MiB" in message
    stay = replace(BY_HAND, reshard_after_forward=False)
    for message in refusals({1: 2**20}, plan=stay):
        assert "Rank 1 cannot take part" in message and "reshard_after_forward=True" in message
    for message in refusals({1: 1000}, plan=BY_HAND):
        assert "Rank 1 cannot take part" in message and "memory_cap allows" in message
