"""What goes wrong on one rank while profiling is said on all of them, within seconds."""

import functools
import os
import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from profiled import GPT, SOON_S, RankFailure, fit, in_ranks, loader, profile

from lightning_cephalo.common.errors import ProfilingError
from lightning_cephalo.sharding.unit import Unit


def refusal(module, data=None, **options):
    """How profiling fails in this rank, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(ProfilingError) as caught:
        fit(module, loader() if data is None else data, **options)
    return str(caught.value), time.monotonic() - started


class Failing(GPT):
    """Fails on rank 1 from microbatches of ``size`` samples on, as told."""

    def __init__(self, what: str, size: int = 2) -> None:
        super().__init__()
        self.what, self.size = what, size

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() != 1 or len(batch[0]) < self.size:
            return loss
        match self.what:
            case "raise":
                raise KeyError("no such column")
            case "die":
                os._exit(1)
            case _:
                raise AssertionError(self.what)


def broken_data():
    data = loader(batch_size=8)
    if int(os.environ["RANK"]) == 1:
        data.collate_fn = partial(_refuse_larger_than, 7)
    return data


class Large(GPT):
    def training_step(self, batch, batch_idx):
        torch.zeros(10_000_000)
        return super().training_step(batch, batch_idx)


@functools.cache
def all_refused():
    """How profiling fails in every rank, by case, and after how many seconds."""

    def each():
        return {
            "raise": refusal(Failing("raise")),
            "data": refusal(GPT(), broken_data()),
            "one unit": refusal(GPT(**SMALL), capacity_bytes=(10**9, 800_000)),
            "a sample": refusal(Large(), capacity_bytes=(10**7, 10**7)),
        }

    return in_ranks(2, each)


def test_a_failing_step_is_named_with_rank_and_size_on_every_rank():
    for message, seconds in (found["raise"] for found in all_refused()):
        assert "Rank 1" in message and "2 samples" in message
        assert "KeyError: 'no such column'" in message and "split_batch=" in message
        assert seconds < SOON_S


def test_a_dataset_that_fails_on_one_rank_is_told_on_every_rank():
    for message, _ in (found["data"] for found in all_refused()):
        assert re.search("Rank 1 .* of (8|9|1[0-6]) samples: .*torn file", message)


def _refuse_larger_than(limit, samples):
    if len(samples) > limit:
        raise OSError("torn file")
    return torch.utils.data.default_collate(samples)


def test_a_rank_that_dies_is_missed_by_the_others_within_seconds():
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        in_ranks(2, lambda: fit(Failing("die"), loader()))
    assert time.monotonic() - started < SOON_S
    assert "rank 1:\ndied without a result" in str(caught.value)
    assert "Rank 1 (process" in str(caught.value) and "is gone" in str(caught.value)


class NoRoomForGradients(GPT):
    """Rank 1 never has the memory in which a reduce of gradients begins."""

    def setup(self, stage):
        if dist.get_rank() == 1:
            Unit.start_reduce = self._no_room  # in this process, which is a rank of this test

    @staticmethod
    def _no_room(unit, scale, apart=(), *, in_place):
        raise torch.OutOfMemoryError("no room")


def test_a_rank_without_memory_for_a_reduce_ends_and_no_rank_waits_for_it():
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        in_ranks(2, lambda: fit(NoRoomForGradients(), loader()))
    assert time.monotonic() - started < SOON_S
    assert "OutOfMemoryInStepError: Rank 1" in str(caught.value)


SMALL = {"width": 64, "depth": 3, "context": 32}


def profiled_in(capacities_bytes, recompute):
    """The largest microbatches of both ranks, for each capacity of the second."""
    found = []
    for capacity_bytes in capacities_bytes:
        data = loader(context=32, batch_size=8)
        options = {"capacity_bytes": (None, capacity_bytes), "strategy": {"recompute": recompute}}
        problem = profile(GPT(**SMALL), data, is_time_shared=False, **options)
        found.append([rank.largest_microbatch_size for rank in problem.ranks])
    return found


@pytest.mark.parametrize(
    ("megabytes", "recompute"),
    [((1.8, 2.2), True), pytest.param((1.8, 2.2, 2.6, 3.0), False, marks=pytest.mark.slow)],
)
def test_a_rank_out_of_memory_goes_on_without_larger_microbatches(megabytes, recompute):
    capacities_bytes = [int(size * 1e6) for size in megabytes]
    first, second = in_ranks(2, profiled_in, capacities_bytes, recompute)
    assert first == second
    for size, (large, small) in zip(megabytes, first, strict=True):
        assert large >= 8, size
        assert small < large, size


def test_a_model_that_no_rank_holds_whole_is_profiled_and_trained():
    def fits_only_shared():
        model = GPT(width=64, depth=6, context=16)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        capacity = int(0.8 * 16 * parameters)
        capacities = {"capacity_bytes": (capacity, capacity), "is_time_shared": False}
        trainer = fit(model, loader(batch_size=2), max_steps=2, **capacities)
        return trainer.global_step

    assert in_ranks(2, fits_only_shared) == [2, 2]


def test_a_rank_that_cannot_hold_one_gathered_unit_is_refused_with_what_is_missing():
    for message, _ in (found["one unit"] for found in all_refused()):
        assert "Rank 1 cannot take part" in message and "MiB are missing" in message


def test_no_rank_with_memory_for_a_sample_is_an_error_that_says_what_helps():
    for message, _ in (found["a sample"] for found in all_refused()):
        assert "No rank has memory for a microbatch of 1 sample" in message
