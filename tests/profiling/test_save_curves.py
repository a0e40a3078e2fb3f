"""The arithmetic between what is measured and the problem."""

import pytest
from torch.distributed import DistBackendError

from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.features.chunked_cross_entropy import largest_call
from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling.memory_model import RetainedBytes
from lightning_cephalo.profiling.probe import Times
from lightning_cephalo.profiling.rank_curves import compute_curve, merge_equal_ranks
from lightning_cephalo.profiling.sweep import (
    Measured,
    Sweep,
    _bends,
    _by_device,
    _expected_s,
    _next_size,
    _rate,
    _together,
    _useful,
    ladder,
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


@pytest.mark.parametrize(
    ("smallest", "limit", "expected"),
    [
        (1, 16, [1, 2, 4, 8, 16]),
        (1, 20, [1, 2, 4, 8, 16, 20]),
        (2, 5, [2, 4, 5]),
        (1, 1, [1]),
    ],
)
def test_sizes_double_and_end_at_the_whole_batch(smallest, limit, expected):
    assert ladder(smallest, limit) == expected


@pytest.mark.parametrize(
    ("known", "useful", "expected"),
    [
        ({"m1": 1.0}, 4.0, 2),
        ({"m1": 1.0, "m2": 2.0}, 4.0, 4),
        ({"m4": 4.0}, 5.0, 0),  # not worth a step
        ({"m4": 4.0}, 7.0, 7),
        ({"m4": 4.0}, 11.0, 11),  # in place of 8 and 11
        ({"m4": 4.0}, 12.0, 8),
        ({"m8": 8.0}, 12.0, 12),
        ({"m16": 16.0}, 99.0, 32),
        ({"m32": 32.0}, 99.0, 64),
        ({"m16": 16.0, "m32": 31.9}, 99.0, 0),  # larger ones gain nothing
        ({"m64": 64.0}, 99.0, 0),
    ],
)
def test_a_rank_measures_up_to_somewhat_more_than_its_share(known, useful, expected):
    assert _next_size(measured(**known), ladder(1, 64), useful) == expected


def test_a_rank_that_runs_its_share_at_once_measures_all_of_it():
    assert _next_size(measured(m4=4.0), ladder(1, 64), 5.0, has_one_microbatch=True) == 5
    no_gain = measured(m16=16.0, m32=31.9)
    assert _next_size(no_gain, ladder(1, 64), 99.0, has_one_microbatch=True) == 64
    assert _next_size(measured(m4=4.0), ladder(1, 64), 4.0, has_one_microbatch=True) == 0


class _OutOfTime:
    """Rank 0 of three equal ones whose time is up; the last one is a size ahead."""

    world_size, rank = 3, 0

    def gather(self, row):
        if len(row) < 5:  # after a size has run
            return [row] * 3
        last = [0.0, *row[1:4], max(2.0 * row[4], 4.0)]
        return [row, row, last]

    def any(self, flag):
        return flag


class _Steps:
    """Runs steps in no time."""

    control, wall_s = _OutOfTime(), 0.0

    def now_s(self):
        return 100.0

    def timed(self, turn):
        return Times(0.01 * turn.samples, 0.0, 0.0)


@pytest.mark.parametrize(("has_one", "largest"), [(True, 4), (False, 1)])
def test_equal_ranks_that_run_their_share_at_once_all_measure_enough_whatever_it_takes(
    has_one, largest
):
    sweep = Sweep(ladder(1, 8), 8, -1.0, ["cpu"] * 3, has_one_microbatch=has_one)
    found = measure_times(_Steps(), sweep)
    assert found.largest == largest
    merged = merge_equal_ranks([rank("cpu", 0.01, found.largest)] * 2 + [rank("cpu", 0.01, 4)])
    reached = sum(profile.largest_microbatch_size for profile in merged)
    assert (reached >= 8) is has_one


def test_a_rank_without_memory_for_a_size_tries_once_or_twice_between():
    found = measured(m8=8.0)
    found.smallest_too_large = 16
    assert _next_size(found, ladder(1, 64), 99.0) == 12
    found.smallest_too_large = 12
    assert _next_size(found, ladder(1, 64), 99.0) == 0
    found.smallest_too_large, found.times[12] = 16, Times(12.0, 0.0, 0.0)
    assert _next_size(found, ladder(1, 64), 99.0) == 0
    found = measured(m4=4.0)
    found.smallest_too_large = 10
    assert _next_size(found, ladder(1, 16), 10.0) == 7
    found.smallest_too_large = 5
    assert _next_size(found, ladder(1, 16), 10.0) == 0
    nothing = measured()
    assert _next_size(nothing, ladder(2, 64), 99.0) == 2
    nothing.smallest_too_large = 2
    assert _next_size(nothing, ladder(2, 64), 99.0) == 0


def test_ranks_run_together_when_their_next_sizes_take_about_as_long():
    assert _together([(1, 0.0), (1, 0.0)], 1, 9.0) == [1, 1]
    assert _together([(8, 1.0), (4, 1.4), (2, 1.6), (0, 0.0)], 1, 9.0) == [8, 4, 0, 0]
    # no time for the last one, which is no reason not to run the first
    assert _together([(8, 1.0), (4, 3.0)], 1, 2.0) == [8, 0]
    assert _together([(8, 3.0), (4, 3.0)], 1, 2.0) == [0, 0]
    assert _together([(1, 0.0), (1, 0.0)], 1, -1.0) == [1, 1]  # the smallest is always measured


def test_a_longer_repetition_is_dropped_part_by_part():
    assert Times(1.0, 5.0, 2.0).least(Times(2.0, 4.0, 2.5)) == Times(1.0, 4.0, 2.0)
    assert Times(1.0, 5.0, 2.0).least(None) == Times(1.0, 5.0, 2.0)


def test_the_time_of_the_next_size_is_expected_on_the_line_of_the_last_two():
    assert _expected_s(measured(), 4) == 0.0
    assert _expected_s(measured(m2=1.0), 4) == pytest.approx(2.0)
    assert _expected_s(measured(m1=1.0, m2=1.5), 4) == pytest.approx(2.5)
    assert _expected_s(measured(m1=1.0, m2=0.9), 4) == pytest.approx(0.9)


def test_slow_ranks_need_not_measure_sizes_that_no_good_plan_gives_them():
    assert _useful(3.0, [3.0, 1.0], 64) == 60
    assert _useful(1.0, [3.0, 1.0], 64) == 20
    assert _useful(1.0, [3.0, 1.0], 4) == 4


def test_ranks_of_one_device_measure_equally_far():
    assert _by_device([3.0, 1.0, 2.0], ["A", "B", "A"]) == [3.0, 1.0, 3.0]


def test_the_best_size_counts_for_how_fast_a_rank_is():
    assert _rate(measured()) == 0.0
    assert _rate(measured(m1=1.0, m2=1.0, m4=8.0)) == pytest.approx(2.0)


def test_memory_between_two_measured_sizes_lies_on_a_line_and_never_falls():
    curve = compute_curve([1, 3], [150.0, 350.0], 4, gathered=50.0, kept=RetainedBytes(10.0, 5.0))
    assert curve == pytest.approx([85.0, 175.0, 265.0, 355.0])
    nothing = RetainedBytes(0.0, 0.0)
    assert compute_curve([1, 2], [150.0, 120.0], 2, 50.0, nothing) == pytest.approx([100.0, 100.0])
    assert compute_curve([1], [10.0], 1, 50.0, nothing) == (0.0,)


def test_what_is_kept_is_told_apart_by_what_samples_and_microbatches_add():
    # 100, and 20 for each microbatch, and 5 for each sample
    assert RetainedBytes.between(130, 190, count=3, size=2, larger=(4, 140)) == RetainedBytes(
        5.0, 20.0
    )
    # with one size there is no telling
    assert RetainedBytes.between(130, 190, count=3, size=2, larger=None) == RetainedBytes(15.0, 0.0)
    assert RetainedBytes.between(130, 120, count=2, size=1, larger=(2, 110)) == RetainedBytes(
        0.0, 0.0
    )


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


@pytest.mark.parametrize(
    ("tokens", "smallest", "expected"),
    [(0, 1, []), (300, 1, [3, 4]), (300, 2, [6, 7]), (1000, 1, [2]), (2048, 1, []), (1024, 4, [5])],
)
def test_sizes_around_a_full_chunk_of_logits_are_measured(monkeypatch, tokens, smallest, expected):
    monkeypatch.setattr(largest_call, "tokens", tokens)
    monkeypatch.setattr(largest_call, "chunk_tokens", 1024)
    assert _bends(smallest) == expected
