"""Ranks that read samples of their own end together, and every sample is seen."""

import pytest
import torch
from simulated_ranks import ThreadGroup, gathered_alone, numbers_of, same
from torch.utils.data import DataLoader, IterableDataset

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.loaders import original_of, own_part
from lightning_cephalo.data.passes import Dealing


class Stream(IterableDataset):
    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __iter__(self):
        return (torch.tensor(index) for index in range(self.start, self.stop))


class SizedStream(Stream):
    def __len__(self):
        return self.stop - self.start


class Ready(Stream):
    def __iter__(self):
        return (torch.arange(index + 1) for index in range(self.start, self.stop))


def run(make, sizes, *, epochs=1, **options):
    """Every rank's batches, and the loaders that yielded them."""
    group = ThreadGroup(len(sizes))

    def rank_main(rank):
        user = make(rank)
        dealing = Dealing(rank, sizes, 0, same, group.gather(rank), **options)
        loader = own_part(user, dealing)
        assert original_of(loader) is user
        return loader, [numbers_of(batch) for _ in range(epochs) for batch in loader]

    return zip(*group.run(rank_main), strict=True)


def alone(loader):
    return own_part(loader, Dealing(0, (2,), 0, same, gathered_alone))


def of_size(kind, starts, stops, **options):
    return lambda rank: DataLoader(kind(starts[rank], stops[rank]), batch_size=4, **options)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_training_goes_on_by_the_plans_sizes_until_the_last_stream_has_run_out(workers, kind):
    make = of_size(kind, (0, 100), (30, 107), num_workers=workers)
    loaders, batches = run(make, (6, 2), epochs=2)

    first = [list(range(start, start + 6)) for start in (0, 6, 12, 18, 24)]
    assert batches == (2 * first, 2 * [[100, 101], [102, 103], [104, 105], [106], []])
    if kind is SizedStream:
        assert [len(loader) for loader in loaders] == [5, 5]
    else:
        with pytest.raises(TypeError, match="no len"):
            len(loaders[0])


@pytest.mark.parametrize(
    ("kind", "starts", "stops", "options", "wanted"),
    [
        # evaluation keeps the users batch size, and a rank may never have a sample
        (Stream, (0, 100), (8, 103), {"trains": False}, ([4, 4], [3, 0])),
        (Stream, (0, 0), (0, 3), {"trains": False}, ([0], [3])),
        (Stream, (0, 100), (9, 107), {"every_rank": True}, ([2, 2, 2, 2], [2, 2, 2, 1])),
    ],
)
def test_no_sample_counts_twice_and_ranks_end_together(kind, starts, stops, options, wanted):
    _, batches = run(of_size(kind, starts, stops), (2, 2), **options)
    assert tuple([len(batch) for batch in own] for own in batches) == wanted


def test_what_yields_ready_batches_keeps_them():
    _, batches = run(lambda rank: DataLoader(Ready(rank, 3), batch_size=None), (3, 1))
    assert batches == ([[0], [0, 1], [0, 1, 2]], [[0, 1], [0, 1, 2], []])

    lists = [[torch.ones(2)] * 3, [torch.ones(1)]]
    loaders, batches = run(lambda rank: lists[rank], (2, 1))
    assert [len(own) for own in (*batches, *loaders)] == [3, 3, 3, 3]


def test_a_plan_that_would_lose_a_ranks_part_is_refused():
    with pytest.raises(UnsupportedError, match=r"gives rank 1 no samples.*would be lost"):
        own_part([torch.ones(1)], Dealing(0, (4, 0), 0, same, gathered_alone))


def test_attributes_are_the_wrapped_loaders_for_reading_and_writing():
    user = DataLoader(Stream(0, 4), batch_size=2)
    loader = alone(user)
    loader.worker_init_fn = print

    assert loader.dataset is user.dataset
    assert loader.loader.worker_init_fn is print
    assert not hasattr(loader, "state_dict")
    with pytest.raises(AttributeError):
        _ = loader.nothing_like_this


def test_a_state_of_the_loaders_own_is_hidden_as_steps_would_be_skipped_twice():
    from lightning.fabric.utilities.types import _Stateful

    class Resumable(list):
        def state_dict(self):
            return {"position": 3}

        def load_state_dict(self, state_dict):
            raise AssertionError

    assert isinstance(Resumable(), _Stateful)
    assert not isinstance(alone(Resumable([torch.ones(1)])), _Stateful)


def test_what_cannot_be_cut_is_shown_as_it_is():
    loaders, group = ([1, 2], [3]), ThreadGroup(2)

    def rank_main(rank):
        dealing = Dealing(rank, (1, 1), 0, same, group.gather(rank), trains=False)
        return list(own_part(loaders[rank], dealing))

    assert group.run(rank_main) == [[1, 2], [3, NoSamples(3)]]


def test_a_rank_without_any_batch_shows_no_none_which_lightning_would_skip():
    loaders, group = ([1], []), ThreadGroup(2)

    def rank_main(rank):
        dealing = Dealing(rank, (1, 1), 0, same, group.gather(rank), trains=False)
        return list(own_part(loaders[rank], dealing))

    assert group.run(rank_main) == [[1], [NoSamples(())]]
