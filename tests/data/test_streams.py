"""Streams are dealt as one device would read them, or the ranks say together that they cannot."""

import dataclasses
import datetime
import decimal
import random
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from simulated_ranks import ThreadGroup, dealt, joined, numbers_of, single_device
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data.batch_layout import BatchLayout, NoSamples
from lightning_cephalo.data.cutting import evaluation_samples
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.loaders import first_batch, refuse_one_pass, sample_batches


class Lines(IterableDataset):
    """Numbers, divided between workers as users divide them."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.tensor(index) for index in range(first, self.count, step))


class ReadyBatches:
    """No DataLoader: ready batches of different sizes, in a list that starts anew."""

    def __init__(self, *sizes):
        ends = np.cumsum(sizes)
        self.batches = [
            torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)
        ]

    def __iter__(self):
        return iter(self.batches)


def of_ranks(make, sizes, *, epochs=1, evaluate=False, **options):
    """Each rank's batches, or the error that it raised."""
    group = ThreadGroup(len(sizes))

    def rank_main(rank):
        common = {"gather": group.gather(rank), "trains": not evaluate, **options}
        loader = dealt(make(rank), sizes, rank, **common)
        try:
            return [numbers_of(batch) for _ in range(epochs) for batch in loader]
        except UnsupportedError as error:
            return str(error)

    return group.run(rank_main)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "sizes", "drop_last"),
    [(0, (6, 2), False), (2, (6, 2), False), (1, (0, 5, 3), True), (0, (8, 0), False)],
)
def test_a_whole_stream_gives_each_step_the_samples_of_one_device(workers, sizes, drop_last):
    def make(batch_size):
        return DataLoader(
            Lines(45), batch_size=batch_size, num_workers=workers, drop_last=drop_last
        )

    ranks = of_ranks(lambda rank: make(2), sizes, epochs=2, global_batch_size=8)

    wanted = single_device(make(8))
    assert joined(zip(*ranks, strict=True)) == 2 * wanted
    assert [len(own[0]) for own in ranks] == list(sizes)


def test_ready_batches_are_cut_by_the_plan():
    ranks = of_ranks(lambda rank: ReadyBatches(8, 8, 3, 1), (6, 2))

    assert ranks[0] == [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13], [16, 17], [19]]
    assert ranks[1] == [[6, 7], [14, 15], [18], []]


def test_evaluation_deals_whole_batches_in_turn_and_repeats_no_sample():
    ranks = of_ranks(lambda rank: DataLoader(Lines(11), batch_size=3), (1, 1), evaluate=True)
    assert ranks == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]

    group = ThreadGroup(2)

    def rank_main(rank):  # batches that nobody can cut
        loader = dealt([7, 8, 9], (1, 1), rank, gather=group.gather(rank), trains=False)
        assert len(loader) == 2
        return list(loader)

    assert group.run(rank_main) == [[7, 9], [8, NoSamples(9)]]


class Shuffled(Lines):
    """Draws from a global generator while it is read."""

    def __iter__(self):
        left = list(range(self.count))
        while left:
            yield torch.tensor(left.pop(random.randrange(len(left))))


class ShuffledBatches(Shuffled):
    def __iter__(self):
        return map(torch.stack, zip(*[super().__iter__()] * 4, strict=True))


def one_after_another(make, sizes, passes=2, **options):
    """Each rank's batches of whole streams that draw; threads would share the generators."""
    found = []
    for rank in range(len(sizes)):
        loader = dealt(make(rank), sizes, rank, **options)
        _auto_add_worker_init_fn(loader, rank)  # as Lightning does next
        found.append([batch for _ in range(passes) for batch in loader])
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dataset", "options"), [(ShuffledBatches, {"batch_size": None}), (Shuffled, {"batch_size": 2})]
)
def test_seeded_workers_read_the_same_stream_on_all_ranks(monkeypatch, dataset, options):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loaders = [DataLoader(dataset(12), num_workers=1, **options) for _ in range(2)]
    _auto_add_worker_init_fn(loaders[1], 1)  # an earlier fit by another strategy

    ranks = one_after_another(lambda rank: loaders[rank], (3, 1))

    order = [index for step in zip(*ranks, strict=True) for part in step for index in part.tolist()]
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    assert order[:12] != order[12:]


def test_a_collate_function_that_draws_does_not_change_the_order_of_a_stream():
    def noisy(samples):
        return torch.stack([torch.tensor((int(s), random.random())) for s in samples])

    def make(rank):
        return DataLoader(Shuffled(12), batch_size=2, collate_fn=noisy)

    ranks = one_after_another(make, (3, 1))

    rows = torch.cat([torch.cat(step) for step in zip(*ranks, strict=True)])
    assert sorted(rows[:12, 0].tolist()) == sorted(rows[12:, 0].tolist()) == list(range(12))
    assert len(rows[:, 1].unique()) == 24  # no two ranks, steps or passes draw the same


def popping(samples):
    """Changes the samples that it is given, as some do."""
    return torch.stack([sample.pop("x") for sample in samples])


class Kept(IterableDataset):
    """Yields the same objects in each pass."""

    def __init__(self):
        self.data = [{"x": torch.tensor(index)} for index in range(6)]

    def __iter__(self):
        return iter(self.data)


def test_a_collate_function_that_changes_its_samples_collates_those_of_a_stream():
    def make(rank):
        return DataLoader(Kept(), batch_size=2, collate_fn=popping)

    loader = make(0)
    read = [batch.tolist() for batch in sample_batches(loader, (7, 5))]
    assert read == [[0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]

    busy, idle = one_after_another(make, (4, 0), passes=1)
    assert [batch.tolist() for batch in busy] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.shown.tolist() for batch in idle] == [[3], [5]]


@pytest.mark.parametrize("seeded", [np.random.default_rng, random.Random])
def test_reading_ahead_keeps_the_generators_that_a_stream_holds(seeded):
    class Held(Lines):
        def __init__(self):
            super().__init__(12)
            self.draws = seeded(3)

        def __iter__(self):
            order = list(range(12))
            self.draws.shuffle(order)
            return map(torch.tensor, order)

    wanted = joined([[part] for part in single_device(DataLoader(Held(), batch_size=4))])
    ranks = [DataLoader(Held(), batch_size=2) for _ in range(2)]
    for loader in ranks:
        sample_batches(loader, (3, 2))
    found = one_after_another(lambda rank: ranks[rank], (3, 1), passes=1)
    assert joined([[p.tolist() for p in step] for step in zip(*found, strict=True)]) == wanted


@pytest.mark.parametrize("ready", [False, True])
def test_each_step_has_a_sample_for_every_rank_or_is_left_out(ready):
    def make(rank):
        return ReadyBatches(8, 2, 4).batches if ready else DataLoader(Lines(14), batch_size=4)

    sizes = (6, 1, 1) if ready else (10, 1, 1)
    with pytest.warns(UserWarning, match="has 2 samples for 3 ranks.*left out"):
        ranks = one_after_another(make, sizes, every_rank=True)
    steps = [[part.tolist() for part in step] for step in zip(*ranks, strict=True)]
    first = [list(range(sizes[0])), [sizes[0]], [sizes[0] + 1]]
    assert steps == 2 * ([first, [[10, 11], [12], [13]]] if ready else [first])


class Parts(Lines):
    """Equal on all ranks at first; from ``first`` on each rank reads samples of its own."""

    def __init__(self, count, rank, first):
        super().__init__(count)
        self.rank, self.first = rank, first

    def __iter__(self):
        for index in range(self.count):
            yield torch.tensor(index + 100 * self.rank * (index >= self.first))


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize(
    ("counts", "first", "step"), [((24, 24), 0, 0), ((24, 24), 12, 1), ((24, 16), 99, 2)]
)
def test_streams_that_differ_are_refused_by_name_on_every_rank(counts, first, step, evaluate):
    def make(rank):
        return DataLoader(Parts(counts[rank], rank, first), batch_size=4)

    ranks = of_ranks(make, (6, 2), evaluate=evaluate)

    assert ranks[0] == ranks[1]
    for part in ("Parts", f"Step {step}", "rank 1", "split_by_node", "use_distributed_sampler"):
        assert part in ranks[0]


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


class Graph:
    def __init__(self, x):
        self.store = {"x": x}


class Circle:
    """Its store refers to the object that holds it, as in PyTorch Geometric."""

    def __init__(self, x):
        self.store = {"x": x, "parent": self}


class Grey:
    """As images of PIL."""

    def __init__(self, pixels):
        self.pixels = pixels

    @property
    def __array_interface__(self):
        return self.pixels.__array_interface__


Pair = namedtuple("Pair", "x y")
CONTENTS = [
    lambda n: torch.arange(300) * n,
    lambda n: np.arange(5) + n,
    lambda n: {"x": [n, None], "y": "same"},
    lambda n: Record(torch.ones(2), f"name {n}"),
    lambda n: Graph(torch.full((2, 2), n)),
    lambda n: Circle(torch.full((2, 2), n)),
    lambda n: Pair(n, b"bytes"),
    lambda n: np.array(["a", n], dtype=object),
    lambda n: torch.zeros(n),
    lambda n: Path("folder", str(n)),
    lambda n: datetime.datetime(2026, 1, n),
    lambda n: decimal.Decimal(n) / 7,
    lambda n: Grey(np.full((5, 4), n)),
    lambda n: torch.full((3,), n, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("content", CONTENTS)
def test_checksums_are_equal_for_equal_content_only(content):
    assert fingerprint(content(2)) == fingerprint(content(2))
    assert fingerprint(content(2)) != fingerprint(content(3))
    assert 0 not in (fingerprint(content(2)), fingerprint(content(3)))


def test_a_stream_whose_content_cannot_be_compared_is_refused():
    class Hidden(Lines):
        def __iter__(self):
            return (lambda: 0 for _ in range(self.count))

    for message in of_ranks(lambda _: DataLoader(Hidden(4), 2, collate_fn=list), (1, 1)):
        assert "Hidden yields batches that cannot be pickled" in message


def test_checksums_do_not_tell_one_object_from_two_equal_ones():
    same = torch.arange(3)
    assert fingerprint([same, same, "ab"]) == fingerprint([same, same.clone(), "".join("ab")])


def test_a_generator_is_refused_because_its_first_batches_would_be_lost():
    with pytest.raises(UnsupportedError, match="is a generator, which can be read once"):
        refuse_one_pass(torch.ones(2) for _ in range(3))


class Sealed:
    """A batch that only its user can cut."""

    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def tolist(self):
        return self.rows


def test_a_ready_batch_that_cephalo_cannot_see_into_is_cut_by_the_users_function():
    def split(batch, sizes):
        ends = np.cumsum(sizes)
        return [Sealed(batch.rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    class Seals(ReadyBatches):
        def __iter__(self):
            return (Sealed(batch.tolist()) for batch in self.batches)

    with pytest.raises(BatchSplitError, match=r"split_batch=function.*needs a len\(\)"):
        first_batch(Seals(8, 4), BatchLayout())
    layout = BatchLayout(splitter=split)
    assert first_batch(Seals(8, 4), layout)[1] == 8
    loaders = [dealt(Seals(8, 4, 1), (6, 2), rank, layout=layout) for rank in range(2)]
    found = [[getattr(batch, "rows", batch) for batch in loader] for loader in loaders]
    shown = found[1].pop()
    assert found[0] == [[0, 1, 2, 3, 4, 5], [8, 9, 10], [12]]
    assert found[1] == [[6, 7], [11]]
    assert isinstance(shown, NoSamples) and shown.shown.rows == [12]
    read = sample_batches(Seals(8, 4), (8, 3), layout)
    assert [batch.rows for batch in read] == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2]]
    assert [evaluation_samples(batch) for batch in read] == [8, 3]
