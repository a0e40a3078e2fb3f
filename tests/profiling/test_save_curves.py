"""The arithmetic between what is measured and the problem."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import DistBackendError

from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling.memory_model import Held, RetainedBytes
from lightning_cephalo.profiling.probe import Times
from lightning_cephalo.profiling.rank_curves import compute_curve, merge_equal_ranks
from lightning_cephalo.profiling.sweep import (
    Measured,
    ProfileOptions,
    _measure_retained,
    _together,
    measure_times,
)


def rank(name: str, per_sample_s: float, length: int = 4, capacity_bytes: float = 1e9):
    times = tuple(per_sample_s * size for size in range(1, length + 1))
    return RankProfile(
        name=name,
        forward_s=times,
        backward_s=times,
        tail_s=times,
        compute_bytes=tuple(100.0 * size for size in range(1, length + 1)),
        capacity_bytes=capacity_bytes,
    )


def measured(**seconds: float) -> Measured:
    found = Measured()
    for size, total_s in seconds.items():
        found.times[int(size[1:])] = Times(total_s, 0.0, 0.0)
    return found


def sweep(largest: int = 64, smallest: int = 1, **options) -> ProfileOptions:
    return ProfileOptions(largest, 9.0, smallest, **options)


@pytest.mark.parametrize(
    ("known", "share", "expected"),
    [
        ({"m1": 1.0}, 1.0, 2),
        ({"m1": 1.0, "m2": 2.0}, 1.0, 4),
        ({"m4": 4.0}, 3.2, 0),
        ({"m4": 4.0}, 5.6, 7),
        ({"m4": 4.0}, 8.8, 11),  # in place of 8 and 11
        ({"m4": 4.0}, 9.6, 8),
        ({"m8": 8.0}, 9.6, 12),
        ({"m16": 16.0}, 17.0, 22),
        ({"m16": 16.0}, 16.0, 20),
        ({"m16": 16.0}, 15.0, 0),  # not worth a step
        ({"m32": 32.0}, 99.0, 64),
        ({"m64": 64.0}, 99.0, 0),
    ],
)
def test_a_rank_measures_up_to_somewhat_more_than_its_share(known, share, expected):
    assert sweep().next_size(measured(**known), share) == expected


def test_a_rank_that_runs_the_whole_batch_measures_all_of_it():
    assert sweep(5).next_size(measured(m4=4.0), 5.0) == 5
    assert sweep(19).next_size(measured(m16=4.0), 19.0) == 19
    assert sweep(19).next_size(measured(m19=4.0), 19.0) == 0


class _OutOfTime:
    """Rank 0 of three equal ones whose time is up."""

    world_size, rank = 3, 0

    def gather(self, row):
        return [row] * 3


class _Steps:
    """Runs steps in no time."""

    control, idle = _OutOfTime(), 0
    model = SimpleNamespace(accelerator=SimpleNamespace(now_s=lambda: 100.0))

    def timed(self, size):
        return Times(0.01 * size, 0.0, 0.0)


@pytest.mark.parametrize(("has_one", "largest"), [(True, 4), (False, 1)])
def test_ranks_that_run_their_share_at_once_all_measure_it_whatever_it_takes(has_one, largest):
    late = replace(sweep(8, single_microbatch=has_one), budget_s=-1.0)
    assert measure_times(_Steps(), late, "cpu").largest == largest


def test_a_rank_without_memory_for_a_size_tries_once_or_twice_between():
    found = measured(m8=8.0)
    found.smallest_too_large = 16
    assert sweep().next_size(found, 99.0) == 12
    found.smallest_too_large = 11
    assert sweep().next_size(found, 99.0) == 0
    found.smallest_too_large, found.times[12] = 16, Times(12.0, 0.0, 0.0)
    assert sweep().next_size(found, 99.0) == 0
    nothing = measured()
    assert sweep(smallest=2).next_size(nothing, 99.0) == 2
    nothing.smallest_too_large = 2
    assert sweep(smallest=2).next_size(nothing, 99.0) == 0


def test_ranks_run_together_when_their_next_sizes_take_about_as_long():
    assert _together([(1, 0.0), (1, 0.0)], 1, 9.0) == [1, 1]
    assert _together([(8, 1.0), (4, 1.4), (2, 1.6), (0, 0.0)], 1, 9.0) == [8, 4, 0, 0]
    # no time for the last one, which is no reason not to run the first
    assert _together([(8, 1.0), (4, 3.0)], 1, 2.0) == [8, 0]
    assert _together([(8, 3.0), (4, 3.0)], 1, 2.0) == [0, 0]
    assert _together([(1, 0.0), (1, 0.0)], 1, -1.0) == [1, 1]  # the smallest is always measured


def test_a_longer_repetition_is_dropped_part_by_part():
    found, steps = Measured(), iter([Times(1.0, 5.0, 2.0), Times(2.0, 4.0, 2.5)])
    prober = SimpleNamespace(timed=lambda size: next(steps))
    for _ in range(2):
        found.time(prober, 4)
    assert found.times == {4: Times(1.0, 4.0, 2.0)}
    assert found.expected_s(8) == 14.0 and measured().expected_s(4) == 0.0


class _TwiceAsFast(_OutOfTime):
    """Rank 0 beside one of the same device that seems twice as fast."""

    world_size = 2

    def gather(self, row):
        return [row, (row[0], 2 * row[1]) if isinstance(row[0], str) else row]


def test_ranks_of_one_device_measure_equally_far():
    steps = _Steps()
    steps.control = _TwiceAsFast()
    assert measure_times(steps, sweep(), "cpu").largest == 40  # of half of the batch, not a third


def test_the_best_size_counts_for_how_fast_a_rank_is():
    assert measured().samples_per_s == 0.0
    assert measured(m1=1.0, m2=1.0, m4=8.0).samples_per_s == pytest.approx(2.0)


def curve_of(sizes, peaks, largest, fixed=0.0, per_sample=0.0):
    return compute_curve(sizes, peaks, np.arange(1, largest + 1), fixed, per_sample)


def test_memory_between_two_measured_sizes_lies_on_a_line_and_never_falls():
    curve = curve_of([1, 3], [150.0, 350.0], 4, fixed=55.0, per_sample=10.0)
    assert curve == pytest.approx([85.0, 175.0, 265.0, 355.0])
    assert curve_of([1, 2], [150.0, 120.0], 2, fixed=50.0) == pytest.approx([100.0, 100.0])
    assert curve_of([1], [10.0], 1, fixed=50.0) == pytest.approx([0.0])


@pytest.mark.parametrize("full", [2, 3, 5, 11, 16, 20])
def test_memory_that_stops_growing_at_a_full_chunk_of_logits_is_never_less(full):
    held = [100.0 + 3.0 * size + 20.0 * min(size, full) for size in range(1, 33)]
    sizes = [1, 2, 16, 32]
    found = curve_of(sizes, [held[size - 1] for size in sizes], 32)
    for own, wanted in zip(found, held, strict=True):
        assert wanted - 1e-9 <= own <= 1.1 * wanted


def test_memory_that_grows_faster_from_some_size_on_lies_on_lines():
    sizes, held = [1, 2, 16, 32], [10.0, 11.0, 40.0, 100.0]
    found = curve_of(sizes, held, 32)
    assert found == pytest.approx(np.interp(np.arange(1, 33), sizes, held))


class _Keeps:
    """Two microbatches keep so many bytes; the only rank."""

    def __init__(self, kept_bytes):
        self.kept_bytes, self.control = kept_bytes, SimpleNamespace(gather=lambda row: [row])

    def held(self, size, count):
        assert count == 2
        return Held(kept_bytes=self.kept_bytes)


@pytest.mark.parametrize(
    ("kept", "both", "expected"),
    [
        # 100, and 20 for each microbatch, and 5 for each sample
        ({2: 130, 4: 140}, 160, (5.0, 20.0)),
        # with one size there is no telling
        ({2: 130}, 160, (15.0, 0.0)),
        ({1: 130, 2: 110}, 120, (0.0, 0.0)),
    ],
)
def test_what_is_kept_is_told_apart_by_what_samples_and_microbatches_add(kept, both, expected):
    held = {size: Held(kept_bytes=kept_bytes) for size, kept_bytes in kept.items()}
    found = _measure_retained(_Keeps(both), Measured(held=held), min(kept))
    assert found == RetainedBytes(*expected)


def test_equal_devices_get_one_profile_despite_noise():
    found = merge_equal_ranks(
        [rank("A", 1.0), rank("A", 1.04, length=6), rank("B", 3.0), rank("A", 0.98)]
    )
    assert found[0] == found[1] == found[3]
    assert found[0].forward_s == (1.0, 2.0, 3.0, 4.0)
    assert found[2] == rank("B", 3.0)


@pytest.mark.parametrize(
    "other", [rank("A", 1.5), rank("A", 1.0, capacity_bytes=5e8), rank("A", 1.0, length=0)]
)
def test_devices_of_one_name_that_differ_keep_their_own_profiles(other):
    assert merge_equal_ranks([rank("A", 1.0), other]) == [rank("A", 1.0), other]


def test_failures_for_lack_of_memory_are_known_by_type_and_by_text():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    # its communicator is broken: the step must not go on as if only a microbatch had failed
    assert not is_out_of_memory(
        DistBackendError("NCCL error: Failed to CUDA calloc: out of memory")
    )
    assert not is_out_of_memory(ValueError("out of memory"))
