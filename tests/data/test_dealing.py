"""A rank without samples shows a repeated one, for every dataset and collate function."""

import random

import numpy as np
import pytest
import torch
from simulated_ranks import Numbers, dealt, rebuilt_for_ranks
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import NoSamples


class Augmented(Dataset):
    """Samples are dicts that draw from every global generator."""

    def __init__(self, length=9):
        self.length = length
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        noise = torch.rand(3) + np.random.rand() + random.random()
        return {"x": noise.float(), "name": f"sample {index}"}


class Fetched(Numbers):
    """Reads many samples at once, and fails when asked for none."""

    def __getitems__(self, indices):
        return list(torch.stack([self[index] for index in indices]))


def popping_collate(samples):
    """Changes the samples that it is given, as some do."""
    names = [sample.pop("name") for sample in samples]
    return {**default_collate(samples), "names": names}


def test_a_rank_without_samples_shows_a_sample_of_the_step_read_anew():
    user = DataLoader(Augmented(6), batch_size=2, collate_fn=popping_collate)
    loader = dealt(user, (1, 0), rank=1)

    assert loader.dataset is user.dataset
    names = []
    for batch in loader:
        assert isinstance(batch, NoSamples) and batch.shown["x"].shape == (1, 3)
        names += batch.shown.pop("names")  # a hook may spoil what it gets
    assert names == ["sample 3", "sample 5"]
    assert user.dataset.reads == 2


def test_samples_that_are_all_dropped_count_as_none_but_on_one_device():
    user = DataLoader(Numbers(4), batch_size=2, collate_fn=lambda samples: None)
    assert list(dealt(user, (1, 1))) == [NoSamples(())]
    assert list(dealt(user, (2,))) == [None, None]


class Repeats(DataLoader):
    times, inside = 2, False

    def __iter__(self):
        for _ in range(self.times):
            for batch in super().__iter__():
                yield from [batch, batch] if self.inside else [batch]


def test_a_loader_that_repeats_its_passes_is_dealt_and_one_that_repeats_batches_refused():
    user = Repeats(Numbers(5), batch_size=2)
    found = [list(dealt(user, (1, 1), rank)) for rank in range(2)]
    assert [batch.tolist() for batch in found[0]] == 2 * [[0, 1], [4]]
    assert [batch.shown.tolist() for batch in found[1][1::2]] == [[4], [4]]

    user.inside = True
    with pytest.raises(UnsupportedError, match=r"Repeats\.__iter__ yields a batch"):
        list(dealt(user, (1, 1), 1))


def test_keys_need_not_be_numbers():
    loaders = rebuilt_for_ranks(
        lambda: DataLoader({"a": 1, "b": 2}, batch_sampler=[["a"], ["b"]]), (2, 0)
    )

    assert [[batch.shown for batch in loader] for loader in loaders[1:]] == [[torch.tensor([2])]]


@pytest.mark.processes
@pytest.mark.parametrize("dataset", [Numbers, Fetched, Augmented])
@pytest.mark.parametrize("workers", [0, 1])
def test_idle_ranks_and_ragged_steps_work_with_every_way_of_fetching(dataset, workers):
    def rows(batch):
        if isinstance(batch, NoSamples):
            return 0
        return len(batch["x"] if isinstance(batch, dict) else batch)

    loaders = rebuilt_for_ranks(
        lambda: DataLoader(dataset(9), batch_size=2, num_workers=workers), (4, 4, 0), seed=1
    )

    sizes = [[rows(batch) for batch in loader] for loader in loaders]

    assert sizes == [[3, 2], [3, 1], [0, 0]]
