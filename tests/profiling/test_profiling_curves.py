"""The arithmetic between what is measured and the problem."""

import pytest

from lightning_cephalo.plan import RankProfile
from lightning_cephalo.profiling.compute import Measured, _disturbed, _expected_s, _useful, ladder
from lightning_cephalo.profiling.errors import is_out_of_memory
from lightning_cephalo.profiling.memory import Kept, compute_curve
from lightning_cephalo.profiling.probe import Times
from lightning_cephalo.profiling.profile import pooled


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
        (1, 16, [1, 2, 3, 4, 6, 8, 12, 16]),
        (1, 20, [1, 2, 3, 4, 6, 8, 12, 16, 20]),
        (2, 5, [2, 3, 4, 5]),
        (1, 1, [1]),
    ],
)
def test_sizes_grow_by_a_half_and_a_third_and_end_at_the_whole_batch(smallest, limit, expected):
    assert ladder(smallest, limit) == expected


def test_a_longer_repetition_is_dropped_part_by_part():
    assert Times(1.0, 5.0, 2.0).least(Times(2.0, 4.0, 2.5)) == Times(1.0, 4.0, 2.0)
    assert Times(1.0, 5.0, 2.0).least(None) == Times(1.0, 5.0, 2.0)


def test_the_time_of_the_next_size_is_expected_on_the_line_of_the_last_two():
    assert _expected_s(measured(), 4) == 0.0
    assert _expected_s(measured(m2=1.0), 4) == pytest.approx(2.0)
    assert _expected_s(measured(m1=1.0, m2=1.5), 4) == pytest.approx(2.5)
    assert _expected_s(measured(m1=1.0, m2=0.9), 4) == pytest.approx(0.9)


def test_a_size_that_costs_more_per_sample_than_a_smaller_one_counts_as_disturbed():
    assert not _disturbed(measured(m1=1.0, m2=1.9, m4=3.8), 4)
    assert _disturbed(measured(m1=1.0, m2=1.9, m4=4.2), 4)


def test_slow_ranks_need_not_measure_sizes_that_no_good_plan_gives_them():
    assert _useful(3.0, [3.0, 1.0], 64) == 60
    assert _useful(1.0, [3.0, 1.0], 64) == 20
    assert _useful(1.0, [3.0, 1.0], 4) == 4


def test_memory_between_two_measured_sizes_lies_on_a_line_and_never_falls():
    curve = compute_curve([1, 3], [150.0, 350.0], 4, gathered=50.0, kept=Kept(10.0, 5.0))
    assert curve == pytest.approx([85.0, 175.0, 265.0, 255.0])
    nothing = Kept(0.0, 0.0)
    assert compute_curve([1, 2], [150.0, 120.0], 2, 50.0, nothing) == pytest.approx([100.0, 100.0])
    assert compute_curve([1], [10.0], 1, 50.0, nothing) == [0.0]


def test_what_is_kept_is_told_apart_by_what_samples_and_microbatches_add():
    # 100, and 20 for each microbatch, and 5 for each sample
    assert Kept.between(130, 190, count=3, size=2, larger=(4, 140)) == Kept(5.0, 20.0)
    # with one size there is no telling
    assert Kept.between(130, 190, count=3, size=2, larger=None) == Kept(15.0, 0.0)
    assert Kept.between(130, 120, count=2, size=1, larger=(2, 110)) == Kept(0.0, 0.0)


def test_equal_devices_get_one_profile_despite_noise():
    found = pooled([rank("A", 1.0), rank("A", 1.04, length=6), rank("B", 3.0), rank("A", 0.98)])
    assert found[0] == found[1] == found[3]
    assert found[0].forward_s == (1.0, 2.0, 3.0, 4.0)
    assert found[2] == rank("B", 3.0)


@pytest.mark.parametrize(
    "other", [rank("A", 1.5), rank("A", 1.0, capacity_bytes=5e8), rank("A", 1.0, length=0)]
)
def test_devices_of_one_name_that_differ_keep_their_own_profiles(other):
    assert pooled([rank("A", 1.0), other]) == [rank("A", 1.0), other]


def test_failures_for_lack_of_memory_are_known_by_type_and_by_text():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))
