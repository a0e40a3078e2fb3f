"""Rebuilding the user's loaders for training and evaluation, and reading what they tell."""

import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from simulated_ranks import Numbers, dealt, joined, rebuilt_for_ranks, same, single_device, steps_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data.loaders import (
    agreed_seed,
    global_batch_size,
    learn_layout,
    original_of,
    sample_batches,
    with_batch_size,
    with_changes,
)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(index) for index in range(5))


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


class Pairs(Sampler):
    """A custom batch sampler."""

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5], [6]])

    def __len__(self):
        return 4


class OwnCollate(DataLoader):
    """Sets its own collate function whatever it is given, as PyTorch Geometric's loader does."""

    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, collate_fn=lambda samples: -torch.stack(samples), **kwargs)


class Closed(DataLoader):
    """Does not say what it was created with, and makes its own dataset."""

    def __init__(self, secret):
        super().__init__(Numbers(secret), batch_size=2)


class StartedWhenBuilt(DataLoader):
    """Holds its iterator from the beginning, as some endless loaders do."""

    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, **kwargs)
        object.__setattr__(self, "started", super().__iter__())

    def __iter__(self):
        return self.started


def negated(samples):
    return -torch.stack(samples)


def test_it_shows_the_users_sampler_and_options():
    class Told(RandomSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    told = []
    mine = Told(Numbers(10), generator=torch.Generator())
    loader = DataLoader(Numbers(10), batch_size=4, sampler=mine, drop_last=True)
    for epoch, rebuilt in enumerate(rebuilt_for_ranks(lambda: loader, (3, 1))):
        assert rebuilt.sampler is mine
        _set_sampler_epoch(rebuilt, epoch)
        assert told[-1] == epoch
        assert (rebuilt.batch_size, rebuilt.drop_last) == (4, True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 12, 23])
def test_evaluation_sees_every_sample_once_evenly_and_in_order(world_size, length):
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(length), batch_size=2), (1,) * world_size, evaluate=True
    )

    steps = steps_of(loaders)

    one = DataLoader(Numbers(length), batch_size=2 * world_size)
    assert joined(steps) == single_device(one)
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_evaluation_of_a_custom_batch_sampler():
    lists = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(11), batch_sampler=lists), (1, 1), evaluate=True
    )

    assert steps_of(loaders) == [[[0, 1], [2, 3]], [[4, 5, 6], [7, 8, 9]], [[10], []]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
def test_predict_records_the_indices_that_each_rank_saw(workers, custom):
    def make():
        if custom:
            loader = DataLoader(Numbers(7), batch_sampler=Pairs(), num_workers=workers)
        else:
            loader = DataLoader(Numbers(7), batch_size=2, drop_last=True, num_workers=workers)
        # what Lightning does to a predict loader before the strategy sees it
        return _update_dataloader(loader, loader.sampler, mode=RunningStage.PREDICTING)

    loaders = rebuilt_for_ranks(make, (1, 1), evaluate=True)
    steps = steps_of(loaders)

    assert joined(steps) == [[0, 1, 2, 3], [4, 5, 6]]
    for rank, loader in enumerate(loaders):
        from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

        assert isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper)
        assert loader.batch_sampler.seen_batch_indices == [step[rank] for step in steps]
        assert len(loader) == 2
        assert original_of(loader) is not loader


def test_a_second_loader_is_dealt_by_the_same_shares():
    loaders = rebuilt_for_ranks(lambda: DataLoader(Numbers(16), batch_size=2), (9, 3))

    assert [tuple(map(len, step)) for step in steps_of(loaders)] == [(3, 1)] * 4


def test_ready_batches_of_a_map_style_dataset_are_refused_with_the_remedy():
    loader = DataLoader(Numbers(4), batch_size=None)
    for trains in (True, False):
        with pytest.raises(ValueError, match=r"__getitems__.*DataLoader\(batch_size=\.\.\.\)"):
            dealt(loader, (2,), trains=trains)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("evaluate", [False, True])
def test_a_distributed_sampler_is_refused_with_the_remedy(inside, evaluate):
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    loader = (
        DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False))
        if inside
        else DataLoader(Numbers(8), batch_size=2, sampler=sampler)
    )

    with pytest.raises(ValueError, match=r"DistributedSampler for 2 ranks.*Remove it"):
        rebuilt_for_ranks(lambda: loader, (2, 2), evaluate=evaluate)


def test_a_rebuilt_loader_is_traced_back_to_the_users():
    user = DataLoader(Numbers(12), batch_size=2)
    combined = CombinedLoader([user])
    for plan in ((3, 1), (2, 2)):
        combined.flattened = [dealt(combined.flattened[0], plan)]
        assert original_of(combined.flattened[0]) is user
        assert [len(batch) for batch in combined.flattened[0]] == [plan[0]] * 3


def test_the_seed_is_lightnings_or_rank_zeros(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert agreed_seed(same) == torch.initial_seed()
    assert agreed_seed(lambda _: 5) == 5
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert agreed_seed(same) == 17


def test_ranks_that_built_different_samplers_are_told():
    generators = iter([torch.Generator(), None])
    with pytest.raises(ValueError, match="Build the same sampler on every rank"):
        rebuilt_for_ranks(
            lambda: DataLoader(
                Numbers(8),
                batch_size=2,
                sampler=RandomSampler(range(8), generator=next(generators)),
            ),
            (2, 2),
        )


@pytest.mark.parametrize(
    "generator",
    [
        lambda seed: random.Random(seed),
        lambda seed: np.random.default_rng(seed),
        lambda seed: np.random.RandomState(seed),
        lambda seed: torch.Generator().manual_seed(seed),
    ],
)
def test_generators_of_a_custom_sampler_are_shared(generator):
    class Own(SubsetRandomSampler):
        def __init__(self, seed):
            super().__init__(range(12))
            self.own = generator(seed)

        def __iter__(self):
            draw = {
                random.Random: lambda: self.own.randrange(12),
                np.random.Generator: lambda: int(self.own.integers(12)),
                np.random.RandomState: lambda: int(self.own.randint(12)),
                torch.Generator: lambda: int(torch.randint(12, (), generator=self.own)),
            }[type(self.own)]
            return (draw() for _ in range(12))

    seeds = iter([1, 2])
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(12), batch_size=3, sampler=Own(next(seeds))), (4, 2)
    )

    for _ in range(2):
        one = joined(steps_of(loaders))
        assert len(one) == 2
    expected = DataLoader(Numbers(12), batch_size=6, sampler=Own(1))
    loaders = rebuilt_for_ranks(
        lambda: DataLoader(Numbers(12), batch_size=3, sampler=Own(1)), (4, 2)
    )
    assert joined(steps_of(loaders)) == single_device(expected)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: DataLoader(Numbers(9), batch_size=4), 4),
        (lambda: DataLoader(Stream(), batch_size=3), 3),
        (lambda: DataLoader(Stream(), batch_size=None), None),
        (lambda: DataLoader(Numbers(9), batch_sampler=[[0, 1, 2], [3]]), 3),
        (lambda: DataLoader(Numbers(9), batch_sampler=BatchSampler(range(9), 5, False)), 5),
        (lambda: DataLoader(Numbers(9), batch_sampler=iter([[0, 1], [2]])), None),
        (lambda: DataLoader(Numbers(9), batch_sampler=[]), None),
        (lambda: [torch.ones(2)], None),
    ],
)
def test_the_batch_size_that_a_loader_tells(make, size):
    assert global_batch_size(make(), 3) == (None if size is None else 3 * size)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(9), batch_size=4, collate_fn=negated),
        lambda: DataLoader(Numbers(9), batch_size=4, collate_fn=negated, shuffle=True),
        lambda: DataLoader(Numbers(9), batch_sampler=[[0, 1], [2], [3, 4]], collate_fn=negated),
        lambda: DataLoader(Stream(), batch_size=2, collate_fn=negated),
    ],
)
def test_sample_batches_are_the_first_samples_collated(make):
    assert [batch.tolist() for batch in sample_batches(make(), (3, 1))] == [[0, -1, -2], [0]]


def test_sample_batches_repeat_a_small_dataset_and_refuse_an_empty_one():
    small = sample_batches(DataLoader(Numbers(2)), (5,))

    assert small[0].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="Numbers gave none"):
        sample_batches(DataLoader(Numbers(0)), (1,))
    with pytest.raises(ValueError, match="Empty gave none"):
        sample_batches(DataLoader(Empty()), (1,))


def test_sample_batches_of_ready_batches():
    ready = [torch.arange(6).reshape(3, 2)]

    assert [batch.tolist() for batch in sample_batches(ready, (2, 1))] == [
        [[0, 1], [2, 3]],
        [[0, 1]],
    ]
    with pytest.raises(ValueError, match="batches of at least 4 samples"):
        sample_batches(ready, (4,))


def test_reading_leaves_every_generator_and_the_loaders_position_alone():
    class Drawing(Numbers):
        def __getitem__(self, index):
            torch.rand(1), np.random.rand(), random.random()
            return super().__getitem__(index)

    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(
        Drawing(9), batch_size=2, sampler=SubsetRandomSampler(range(9), generator=generator)
    )
    before = (
        torch.get_rng_state(),
        generator.get_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
    )
    sample_batches(loader, (4, 2))
    learn_layout(loader)
    global_batch_size(loader, 1)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert (np.random.get_state()[1] == before[2]).all()
    assert random.getstate() == before[3]
    assert loader._iterator is None


def test_the_layout_is_learned_from_the_loader():
    def dropping(samples):
        return torch.stack([sample for sample in samples if int(sample) != 3])

    assert learn_layout(DataLoader(Numbers(9), batch_size=2)).rows == {()}
    assert learn_layout([torch.ones(3)], splitter=len).splitter is len
    with pytest.raises(BatchSplitError, match=r"Tensor\[6\] for 7 samples.*split_batch"):
        learn_layout(DataLoader(Numbers(9), batch_size=2, collate_fn=dropping))


def test_lightnings_wrapper_for_predict_is_called_what_we_look_for():
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    wrapper = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(4)), 2, False))

    changed = "Lightning changed what data/loaders.py relies on"
    assert type(wrapper).__name__ == "_IndexBatchSamplerWrapper", changed
    assert isinstance(wrapper._batch_sampler, BatchSampler), changed
    assert (list(wrapper), wrapper.seen_batch_indices) == ([[0, 1], [2, 3]],) * 2, changed


@pytest.mark.processes
def test_options_and_later_attributes_are_kept_and_the_users_loader_stays_as_it_is():
    options = {
        "num_workers": 1,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "timeout": 90,
        "worker_init_fn": abs,
        "generator": torch.Generator(),
        "drop_last": True,
        "in_order": False,
    }
    loader = DataLoader(Numbers(4), 2, True, multiprocessing_context="fork", **options)
    loader.remark = "set later"
    list(loader)
    running, lists = loader._iterator, loader.batch_sampler

    again = with_changes(loader, batch_sampler=[[3], [1, 0]])

    assert type(again) is DataLoader and again.remark == "set later"
    for name, value in options.items():
        assert getattr(again, name) is value
    assert again.multiprocessing_context.get_start_method() == "fork"
    assert [batch.tolist() for batch in again] == [[3], [1, 0]]
    assert loader._iterator is running is not again._iterator
    assert loader.batch_sampler is lists and len(list(loader)) == 2


@pytest.mark.parametrize(
    ("make", "sign"),
    [(lambda: OwnCollate(Numbers(4), batch_size=2), -1), (lambda: Closed(4), 1)],
)
def test_subclasses_are_dealt_as_themselves(make, sign):
    again = dealt(make(), (3, 1), rank=1)

    assert isinstance(again, DataLoader) and type(again.loader) is type(make())
    assert [batch.tolist() for batch in again] == [[sign * 3]]


def test_a_stream_gets_another_batch_size():
    again = with_batch_size(DataLoader(Stream(), batch_size=2, drop_last=True), 3)
    assert [batch.tolist() for batch in again] == [[0, 1, 2]]
    assert again.batch_size == 3


def test_a_loader_that_holds_an_iterator_is_refused():
    with pytest.raises(UnsupportedError, match="create iterators in __iter__"):
        list(dealt(StartedWhenBuilt(Numbers(4), batch_size=2), (1, 1)))
