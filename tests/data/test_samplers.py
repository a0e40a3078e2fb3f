"""The samples of every step, joined over ranks, are those of one device with the global batch."""

import math
import pickle
import random
from functools import partial
from itertools import count, islice, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from simulated_ranks import (
    Numbers,
    joined,
    keys_of,
    ranked,
    rebuilt_for_ranks,
    single_device,
    steps_of,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_cephalo.data.randomness import preserved_randomness

PLANS = [(4, 4), (6, 2), (8, 0), (5, 3, 0), (1, 6, 1)]


class EveryThird(Sampler):
    """A custom sampler without randomness."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return (index for start in range(3) for index in range(start, self.length, 3))

    def __len__(self):
        return self.length


class GloballyRandom(Sampler):
    """A custom sampler that draws from all three global generators."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        for index in order:
            yield (index + int(np.random.randint(3)) + int(torch.randint(3, ()))) % self.length

    def __len__(self):
        return self.length


class EpochRecorder(SequentialSampler):
    def __init__(self, dataset):
        super().__init__(dataset)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Buckets(BatchSampler):
    """A batch sampler of lists of unequal lengths."""

    def __init__(self, length):
        super().__init__(SequentialSampler(range(length)), 2, False)
        self.length = length

    def __iter__(self):
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size % 4 + 1

    def __len__(self):
        return sum(1 for _ in self)


def whole(plan):
    """What the plan's loader is dealt in: its batch size times the ranks."""
    return sum(plan) // len(plan) * len(plan)


def seeded():
    return torch.Generator().manual_seed(3)


def shuffled(length, size, **options):
    return DataLoader(Numbers(length), size, shuffle=True, generator=seeded(), **options)


def of_batch_sampler(length, size, drop_last=False):
    lists = BatchSampler(SequentialSampler(range(length)), size, drop_last)
    return DataLoader(Numbers(length), batch_sampler=lists)


def of_distributed_sampler(length, size):
    sampler = DistributedSampler(Numbers(length), num_replicas=1, rank=0, seed=4)
    return DataLoader(Numbers(length), batch_size=size, sampler=sampler)


ORDERS = {
    "sequential": lambda length, size: DataLoader(Numbers(length), size),
    "drop_last": lambda length, size: DataLoader(Numbers(length), size, drop_last=True),
    "shuffle": shuffled,
    "own sampler": lambda length, size: DataLoader(
        Numbers(length), size, sampler=EveryThird(length)
    ),
    "batch sampler": of_batch_sampler,
    "batch sampler, drop_last": partial(of_batch_sampler, drop_last=True),
    "distributed sampler of one rank": of_distributed_sampler,
}
WITH_WORKERS = {
    "a worker": partial(shuffled, num_workers=1),
    "a worker that stays": partial(shuffled, num_workers=1, persistent_workers=True),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("order", "plan", "length"),
    [
        *product(ORDERS, PLANS, [61, 9]),
        *product(WITH_WORKERS, [(6, 2), (5, 3, 0)], [21]),
    ],
)
def test_each_step_has_the_samples_of_one_device_in_every_epoch(order, plan, length):
    make = {**ORDERS, **WITH_WORKERS}[order]
    loaders = rebuilt_for_ranks(lambda: make(length, sum(plan) // len(plan)), plan)
    one = make(length, whole(plan))

    for epoch in range(2):
        _set_sampler_epoch(one, epoch)
        assert joined(steps_of(loaders, epoch)) == single_device(one)
    assert {len(loader) for loader in loaders} == {len(one)}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_shuffle_without_a_generator_covers_all_samples_once_in_an_order_that_changes(workers):
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(23), batch_size=4, shuffle=True, num_workers=workers), (5, 3)
    )

    orders = [[i for step in joined(steps_of(loaders, epoch)) for i in step] for epoch in range(3)]

    for order in orders:
        assert sorted(order) == list(range(23))
        assert order != sorted(order)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 10, 26),
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 10, 26, replacement=False),
        lambda: SubsetRandomSampler(list(range(26))),
        lambda: RandomSampler(range(30), replacement=True, num_samples=26),
        lambda: GloballyRandom(26),
    ],
)
def test_samplers_that_draw_globally_agree_between_ranks_that_trained_differently(sampler):
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(30), batch_size=4, sampler=sampler()), (6, 2, 4)
    )
    one_rank = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(30), batch_size=12, sampler=sampler()), (12,)
    )

    for epoch in range(2):
        steps = joined(steps_of(loaders, epoch))
        assert steps == joined(steps_of(one_rank, epoch))
        assert [len(step) for step in steps] == [12, 12, 2]


def test_drawing_the_order_leaves_the_global_generators_alone():
    sampler = ranked(GloballyRandom(50), 0, (3, 2), seed=1)
    with preserved_randomness():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        undisturbed = [(torch.rand(()).item(), np.random.rand(), random.random()) for _ in range(4)]
    with preserved_randomness():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        disturbed = [
            (torch.rand(()).item(), np.random.rand(), random.random())
            for _, _ in zip(sampler, range(4), strict=False)
        ]

    assert disturbed == undisturbed


def test_the_order_does_not_depend_on_what_training_draws_in_between():
    def drawn(disturbance):
        keys = []
        for step in ranked(GloballyRandom(40), 1, (3, 2), seed=1):
            keys.append(step)
            torch.rand(disturbance), np.random.rand(disturbance), random.random()
        return keys

    assert drawn(1) == drawn(7)


def test_starting_again_within_an_epoch_draws_a_new_order_and_set_epoch_returns_to_the_first():
    sampler = ranked(RandomSampler(range(30)), 0, (30,), seed=1)
    first, second = list(sampler), list(sampler)
    sampler.sampler.set_epoch(0)
    third = list(sampler)
    sampler.sampler.set_epoch(1)
    sampler.sampler.set_epoch(0)

    assert first != second != third != first
    assert list(sampler) == first


def test_endless_samplers_are_read_lazily_and_have_no_length():
    class Endless(Sampler):
        def __iter__(self):
            return count()

    sampler = ranked(Endless(), 1, (2, 1))

    assert list(islice(sampler, 3)) == [[2], [5], [8]]
    with pytest.raises(TypeError):
        len(sampler)


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("source", [range(10), Unsized()])
def test_every_rank_has_a_sample_and_a_rest_without_is_left_out_with_a_warning(source):
    def make():
        return DataLoader(Numbers(10), 1, sampler=source)

    with pytest.warns(UserWarning, match="has 2 samples for 3 ranks"):
        loaders = rebuilt_for_ranks(make, (2, 1, 1), every_rank=True, global_batch_size=4)
        found = steps_of(loaders)
    assert isinstance(source, Unsized) or {len(loader) for loader in loaders} == {2}
    assert found == [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]


def test_set_epoch_reaches_the_users_sampler_through_lightning():
    users = EpochRecorder(range(8))
    (loader,) = rebuilt_for_ranks(lambda: DataLoader(Numbers(8), batch_size=2, sampler=users), (2,))
    _set_sampler_epoch(loader, 3)

    assert users.epochs[-1] == 3
    assert loader.batch_sampler.passes.epoch == 3


@pytest.mark.parametrize("plan", [(6, 2), (4, 4), (8, 0), (1, 2, 3)])
@pytest.mark.parametrize("length", [24, 23, 2])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_custom_batch_sampler_gives_world_size_lists_per_step_in_proportion(
    plan, length, as_list
):
    lists = list(Buckets(length))
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(
            Numbers(length), batch_sampler=list(lists) if as_list else Buckets(length)
        ),
        plan,
    )

    steps = steps_of(loaders)

    ranks = len(plan)
    grouped = [lists[start : start + ranks] for start in range(0, len(lists), ranks)]
    assert joined(steps) == [[i for part in group for i in part] for group in grouped]
    assert {len(loader) for loader in loaders} == {len(grouped)}
    for step in steps:
        total = sum(map(len, step))
        for part, share in zip(step, plan, strict=True):
            assert abs(len(part) - total * share / sum(plan)) < 1


def test_a_global_batch_that_no_whole_lists_make_is_refused():
    with pytest.raises(ValueError, match="multiple of the batch sampler's lists"):
        rebuilt_for_ranks(
            lambda: DataLoader(Numbers(9), batch_sampler=[[0, 1], [2, 3]]),
            (2, 1),
            global_batch_size=3,
        )


def test_a_global_batch_of_several_lists_per_rank():
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(8), batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]]),
        (6, 2),
        global_batch_size=8,
    )

    assert steps_of(loaders) == [[[0, 1, 2, 3, 4, 5], [6, 7]]]


def test_batch_sizes_can_be_replaced_for_later_passes():
    sampler = ranked(range(8), 0, (3, 1))
    running = iter(sampler)
    assert next(running) == [0, 1, 2]

    sampler.passes.running.change((1, 3), math.inf)

    assert next(running) == [4, 5, 6]
    assert list(sampler) == [[0], [4]]


def test_batch_sizes_change_at_a_step_of_the_running_pass_and_in_later_ones():
    samplers = [ranked(range(16), rank, (3, 1)) for rank in range(2)]
    running = [iter(sampler) for sampler in samplers]
    first = [next(each) for each in running]
    next(running[0])  # a worker is ahead

    assert [sampler.passes.dealt_steps(1, ahead=3) for sampler in samplers] == [2, 1]
    assert samplers[0].passes.dealt_steps(6, ahead=3) is None  # somebody else has iterated it
    for sampler in samplers:
        sampler.passes.running.change((1, 3), 2)

    assert first == [[0, 1, 2], [3]]
    assert list(running[0]) == [[8], [12]]
    assert list(running[1]) == [[7], [9, 10, 11], [13, 14, 15]]
    assert [next(iter(sampler)) for sampler in samplers] == [[0], [1, 2, 3]]
    samplers[0].passes.running.change((20, 20), 9)
    assert [len(keys) for keys in samplers[0]] == [2] * 4


def test_the_sampler_pickles_and_goes_on_the_same():
    sampler = ranked(GloballyRandom(20), 1, (3, 2), seed=3)
    copy = pickle.loads(pickle.dumps(sampler))

    assert list(copy) == list(sampler)


@given(
    length=st.integers(0, 60),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    drop_last=st.booleans(),
)
def test_slices_partition_every_step_in_order(length, sizes, drop_last):
    samplers = [
        ranked(range(length), rank, sizes, drop_last=drop_last) for rank in range(len(sizes))
    ]
    steps = list(zip(*map(keys_of, samplers), strict=True))

    whole_order = [index for step in steps for part in step for index in part]
    kept = length // sum(sizes) * sum(sizes) if drop_last else length
    assert whole_order == list(range(kept))
    assert {len(sampler) for sampler in samplers} == {len(steps)}
