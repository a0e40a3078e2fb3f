"""A user's loader is copied with another batch sampler, whatever its class is."""

import pytest
import torch
from simulated_ranks import Numbers, dealt
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.reading import with_batch_size, with_changes


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


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(index) for index in range(5))


def test_lightnings_wrapper_for_predict_is_called_what_we_look_for():
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    wrapper = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(4)), 2, False))

    changed = "Lightning changed what data/reading.py relies on"
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

    assert type(again) is type(make())
    assert [batch.tolist() for batch in again] == [[sign * 3]]


def test_a_stream_gets_another_batch_size():
    again = with_batch_size(DataLoader(Stream(), batch_size=2, drop_last=True), 3)
    assert [batch.tolist() for batch in again] == [[0, 1, 2]]
    assert again.batch_size == 3


def test_a_loader_that_holds_an_iterator_is_refused():
    with pytest.raises(UnsupportedError, match=r"StartedWhenBuilt\.started is an iterator"):
        dealt(StartedWhenBuilt(Numbers(4), batch_size=2), (1, 1))
