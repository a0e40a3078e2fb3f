"""Streams of different lengths end together, and evaluation sees all of them."""

import pytest
import torch
from simulated_ranks import ThreadGroup, alone, gathered_alone, same
from torch.utils.data import DataLoader, IterableDataset

from lightning_cephalo.data import (
    LockStepLoader,
    original_of,
    rebuild_eval_loader,
    rebuild_train_loader,
)
from lightning_cephalo.data.batch_layout import NoSamples

DIVIDED = "ignore:The training stream"
EVALUATED = "ignore:The evaluation stream"


class Stream(IterableDataset):
    def __init__(self, start, stop):
        self.start, self.stop = start, stop
        self.pulled = 0

    def __iter__(self):
        for index in range(self.start, self.stop):
            self.pulled += 1
            yield torch.tensor(index)


class SizedStream(Stream):
    def __len__(self):
        return self.stop - self.start


def run(loaders_of_rank, world_size, *, batch_sizes=None, epochs=1, **options):
    """Every rank's batches by epoch, and the loaders that yielded them."""
    group = ThreadGroup(world_size)

    def rank_main(rank):
        common = {
            "rank": rank,
            "seed": 0,
            "broadcast": same,
            "all_have_next": group.all_have_next(rank),
            "gather": group.gather(rank),
            **options,
        }
        user = loaders_of_rank(rank)
        if batch_sizes is None:
            loader = rebuild_eval_loader(user, world_size=world_size, **common)
        else:
            loader = rebuild_train_loader(user, batch_sizes=batch_sizes, **common)
        assert original_of(loader) is user
        seen = lambda b: getattr(b, "tolist", lambda: [] if isinstance(b, NoSamples) else b)()  # noqa: E731
        passes = [[seen(b) for b in loader] for _ in range(epochs)]
        return loader, passes

    results = group.run(rank_main)
    return [loader for loader, _ in results], [passes for _, passes in results]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset", DIVIDED)
def test_training_continues_everywhere_until_the_last_stream_has_run_out(workers, kind):
    ends = (30, 107)
    loaders, batches = run(
        lambda rank: DataLoader(kind(100 * rank, ends[rank]), batch_size=4, num_workers=workers),
        2,
        batch_sizes=(6, 2),
        epochs=2,
    )

    assert batches[0][0] == [list(range(start, start + 6)) for start in (0, 6, 12, 18, 24)]
    assert batches[1][0] == [[100, 101], [102, 103], [104, 105], [106], []]
    assert all(passes[0] == passes[1] for passes in batches)
    if kind is SizedStream:
        assert [len(loader) for loader in loaders] == [5, 5]
    else:
        with pytest.raises(TypeError, match="no len"):
            len(loaders[0])


@pytest.mark.filterwarnings(DIVIDED)
def test_an_idle_rank_goes_on_with_empty_batches_and_pulls_one_sample_for_their_shape():
    streams = [Stream(0, 7), Stream(50, 60)]
    loaders, batches = run(
        lambda rank: DataLoader(streams[rank], batch_size=2), 2, batch_sizes=(4, 0)
    )

    assert batches == [[[[0, 1, 2, 3], [4, 5, 6]]], [[[], []]]]
    assert streams[1].pulled == 1 + 8 + 1  # to compare the streams, and to see that they begin anew
    with pytest.raises(TypeError, match="no len"):
        len(loaders[1])


@pytest.mark.filterwarnings(EVALUATED)
def test_evaluation_goes_on_until_the_last_stream_has_run_out():
    ends = (8, 103)
    loaders, batches = run(
        lambda rank: DataLoader(SizedStream(100 * rank, ends[rank]), batch_size=2), 2
    )

    assert batches[0] == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert batches[1] == [[[100, 101], [102], [], []]]
    assert [len(loader) for loader in loaders] == [4, 4]


@pytest.mark.filterwarnings(EVALUATED)
def test_evaluation_of_a_rank_that_never_had_a_sample_gives_it_an_empty_list():
    _, batches = run(lambda rank: DataLoader(Stream(0, 3 * rank), batch_size=2), 2)

    assert batches == [[[[], []]], [[[0, 1], [2]]]]


@pytest.mark.filterwarnings(DIVIDED)
def test_ready_batches_of_a_divided_stream_are_each_ranks_own():
    class Ready(Stream):
        def __iter__(self):
            return (torch.arange(index + 1) for index in range(self.start, self.stop))

    _, batches = run(
        lambda rank: DataLoader(Ready(rank, 3), batch_size=None), 2, batch_sizes=(3, 1)
    )

    assert batches == [[[[0], [0, 1], [0, 1, 2]]], [[[0, 1], [0, 1, 2], []]]]


@pytest.mark.filterwarnings(DIVIDED)
def test_what_is_no_dataloader_is_kept_in_step():
    lists = [[torch.ones(2), torch.ones(2), torch.ones(2)], [torch.ones(1)]]
    loaders, batches = run(lambda rank: lists[rank], 2, batch_sizes=(2, 1))

    assert [len(passes[0]) for passes in batches] == [3, 3]
    assert [len(loader) for loader in loaders] == [3, 3]


def test_attributes_are_the_wrapped_loaders_for_reading_and_writing():
    user = DataLoader(Stream(0, 4), batch_size=2)
    loader = LockStepLoader(user, all_have_next=alone)
    loader.worker_init_fn = print
    loader.note = "kept"

    assert loader.dataset is user.dataset
    assert user.worker_init_fn is print
    assert user.note == "kept"
    assert not hasattr(loader, "state_dict")
    with pytest.raises(AttributeError):
        _ = loader.nothing_like_this


def test_it_passes_for_an_instance_of_the_users_class():
    class Loader(list):
        pass

    loaders = [DataLoader(Stream(0, 4)), Loader([1]), [1]]
    kinds = [DataLoader, Loader, list]
    wrapped = [LockStepLoader(loader, all_have_next=alone) for loader in loaders]
    found = [isinstance(loader, kind) for loader, kind in zip(wrapped, kinds, strict=True)]
    assert found == [True, True, False]  # a list of loaders would be taken apart
    assert all(isinstance(loader, LockStepLoader) for loader in wrapped)


def test_a_stateful_loader_stays_stateful():
    from lightning.fabric.utilities.types import _Stateful

    class Resumable(list):
        def state_dict(self):
            return {"position": 3}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    user = Resumable([torch.ones(1)])
    loader = rebuild_train_loader(
        user,
        rank=0,
        batch_sizes=(1,),
        seed=0,
        broadcast=same,
        all_have_next=alone,
        gather=gathered_alone,
    )
    loader.load_state_dict(loader.state_dict())

    assert isinstance(loader, _Stateful)
    assert user.loaded == {"position": 3}
    assert not isinstance(LockStepLoader([], all_have_next=alone), _Stateful)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 1000])
def test_the_agreed_length_is_found_by_asking(length):
    assert len(LockStepLoader(range(length), all_have_next=alone)) == length


def test_an_idle_rank_of_batches_without_tensors_shows_one_of_them():
    loader = LockStepLoader([["a"], ["b"]], all_have_next=alone, idle=True)

    assert loader._shown() == NoSamples(["a"])
    assert (list(loader), len(loader)) == ([], 0)  # nobody has samples
