"""A rank without samples shows a repeated one, for every dataset and collate function."""

import pickle
import random

import numpy as np
import pytest
import torch
from simulated_ranks import Numbers, dealt, rebuilt_for_ranks
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.dealing import RankCollate


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


class BadlyFetched(Numbers):
    """Answers a fetch of nothing with something else than no samples."""

    def __getitems__(self, indices):
        return [self[index] for index in indices] or {"x": []}


def popping_collate(samples):
    """Changes the samples that it is given, as some do."""
    names = [sample.pop("name") for sample in samples]
    return {**default_collate(samples), "names": names}


def test_a_rank_without_samples_shows_one_of_the_dataset_read_anew():
    dataset = Augmented()
    collate = RankCollate(popping_collate, dataset)

    for _ in range(2):  # a hook may spoil what it gets
        shown = collate([])
        assert isinstance(shown, NoSamples)
        assert shown.shown["x"].shape == (1, 3) and shown.shown.pop("names") == ["sample 0"]
    assert dataset.reads == 2


def test_what_is_shown_leaves_the_global_generators_alone():
    collate = RankCollate(default_collate, Augmented())
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    collate([])

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_samples_that_are_all_dropped_count_as_none_and_a_kept_one_is_shown():
    def above_one(samples):
        return default_collate([each for each in samples if each > 1]) if max(samples) > 1 else None

    shown = RankCollate(above_one, Numbers(4))([torch.tensor(0), torch.tensor(1)])
    assert isinstance(shown, NoSamples) and shown.shown.tolist() == [2]
    with pytest.raises(RuntimeError, match="collate_fn drops"):
        RankCollate(lambda samples: None, Numbers(4))([torch.tensor(0)])


def test_a_dataset_that_cannot_show_a_sample_is_named():
    with pytest.raises(RuntimeError, match=r"KeyError.*drop_last=True"):
        RankCollate(default_collate, {"a": 1})([])


@pytest.mark.processes
@pytest.mark.parametrize("dataset", [Numbers, Fetched, BadlyFetched, Augmented])
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

    assert loader.dataset.length == len(loader.dataset) == 4
    copied = pickle.loads(pickle.dumps(loader.dataset))
    assert copied.__getitems__([]) == []
    assert copied[2] == 2
