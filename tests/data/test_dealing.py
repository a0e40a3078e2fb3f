"""A rank without samples shows a repeated one, for every dataset and collate function."""

import pickle
import random

import numpy as np
import pytest
import torch
from simulated_ranks import Numbers, dealt, rebuilt_for_ranks
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.dealing import DealtSamples, Idle


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
    dataset = Augmented()
    samples = DealtSamples(dataset, popping_collate)

    for _ in range(2):  # a hook may spoil what it gets
        shown = samples.__getitems__(pickle.loads(pickle.dumps(Idle(3))))  # as a worker gets it
        assert isinstance(shown, NoSamples)
        assert shown.shown["x"].shape == (1, 3) and shown.shown.pop("names") == ["sample 3"]
    assert dataset.reads == 2


def test_the_dataset_stays_of_the_users_class_and_in_workers_too():
    here = DealtSamples(Augmented(), popping_collate)
    for samples in (here, pickle.loads(pickle.dumps(here))):
        assert isinstance(samples, Augmented) and samples.length == len(samples) == 9
        assert samples.__getitems__([1, 4])["names"] == ["sample 1", "sample 4"]


def test_samples_that_are_all_dropped_count_as_none():
    dropping = DealtSamples(Numbers(4), lambda samples: None)
    assert dropping.__getitems__([0, 1]) == NoSamples(())


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


def test_a_wrapped_dataset_shows_its_attributes_and_is_pickled():
    loader = dealt(DataLoader(Fetched(4)), (1, 1))

    loader.dataset.length = 3  # as a function that starts a worker opens files
    assert loader.dataset.length == len(loader.dataset) == loader.dataset.wrapped.length == 3
    copied = pickle.loads(pickle.dumps(loader.dataset))
    assert copied.__getitems__([0, 2]).tolist() == [0, 2]
    assert copied[2] == 2
