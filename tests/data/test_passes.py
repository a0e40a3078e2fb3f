"""A loader begins where another run's has stopped, whatever the plan and the number of ranks."""

import io
import random

import numpy as np
import pytest
import torch
from simulated_ranks import Numbers, joined, rebuilt_for_ranks, steps_of
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from lightning_cephalo.data.passes import Continue, Position

SAMPLES, WHOLE = 45, 12


class Drawing(Sampler):
    """A user's sampler that draws each sample from a generator of its own, and knows the epoch."""

    def __init__(self, generator):
        self.generator, self.epoch = generator, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(SAMPLES):
            if isinstance(self.generator, random.Random):
                drawn = self.generator.randrange(10)
            else:
                drawn = int(self.generator.random() * 10)
            yield (index + drawn + self.epoch) % SAMPLES

    def __len__(self):
        return SAMPLES


def seeded():
    return torch.Generator().manual_seed(3)


DATA = Numbers(SAMPLES)
KINDS = {
    "sequential": lambda: DataLoader(DATA, batch_size=6),
    "shuffle": lambda: DataLoader(DATA, batch_size=6, shuffle=True),
    "generator": lambda: DataLoader(DATA, batch_size=6, shuffle=True, generator=seeded()),
    "drop_last": lambda: DataLoader(
        DATA, batch_size=6, shuffle=True, generator=seeded(), drop_last=True
    ),
    "workers": lambda: DataLoader(
        DATA, batch_size=6, shuffle=True, generator=seeded(), num_workers=2
    ),
    "workers that stay": lambda: DataLoader(
        DATA,
        batch_size=6,
        shuffle=True,
        generator=seeded(),
        num_workers=1,
        persistent_workers=True,
    ),
    "weighted": lambda: DataLoader(
        DATA, batch_size=6, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 15, SAMPLES)
    ),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 6, False)
    ),
    "lists": lambda: DataLoader(DATA, batch_sampler=[[i, i + 1, i + 2] for i in range(0, 45, 3)]),
    "numpy": lambda: DataLoader(DATA, batch_size=6, sampler=Drawing(np.random.default_rng(4))),
    "old numpy": lambda: DataLoader(DATA, batch_size=6, sampler=Drawing(np.random.RandomState(4))),
    "python": lambda: DataLoader(DATA, batch_size=6, sampler=Drawing(random.Random(4))),
}

SAME_SAMPLES = {"workers": "generator"}
"""Loaders that start no process, and give what one of those above gives."""


def ranks_of(kind, sizes):
    """Loaders of ranks whose steps have 12 samples, or 4 lists of the user's."""
    scaled = {"global_batch_size": WHOLE}
    return rebuilt_for_ranks(KINDS[kind], sizes, **scaled)


def saved_position(loader, trained):
    """A position as it comes out of a file of weights."""
    position = loader.batch_sampler.passes.position(trained, len(loader), cycles=False, ahead=5)
    file = io.BytesIO()
    torch.save(vars(position), file)
    file.seek(0)
    return Position(**torch.load(file, weights_only=True))


def some_steps(loaders, count):
    """The first steps of a pass that goes on, by rank."""
    running = [iter(loader) for loader in loaders]
    for _ in range(count):
        for each in running:
            next(each)
    return running


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_goes_on_at_its_step_and_later_epochs_follow(kind):
    loaders = ranks_of(SAME_SAMPLES.get(kind, kind), (8, 4))
    wanted = [joined(steps_of(loaders, epoch)) for epoch in range(4)]
    loaders = ranks_of(kind, (8, 4))
    steps_of(loaders, 0)
    for loader in loaders:
        loader.batch_sampler.sampler.set_epoch(1)
    running = some_steps(loaders, 2)
    position = saved_position(loaders[0], 2)
    del running

    resumed = ranks_of(kind, (3, 0, 9))
    for loader in resumed:
        loader.batch_sampler.passes.continue_at(position, Continue.INSIDE)

    # Lightning may count an epoch more than it trains
    assert joined(steps_of(resumed, 2)) == wanted[1][2:]
    assert joined(steps_of(resumed, 3)) == wanted[2]
    assert joined(steps_of(resumed, 4)) == wanted[3]


@pytest.mark.processes
@pytest.mark.parametrize("way", [Continue.BEHIND, Continue.AT_END])
@pytest.mark.parametrize("kind", ["generator", "shuffle", "numpy", "workers", "workers that stay"])
def test_an_ended_epoch_is_followed_by_the_next(kind, way):
    loaders = ranks_of(SAME_SAMPLES.get(kind, kind), (8, 4))
    wanted = [joined(steps_of(loaders, epoch)) for epoch in range(3)]
    loaders = ranks_of(kind, (8, 4))
    steps_of(loaders, 0)
    position = saved_position(loaders[0], len(wanted[0]))

    resumed = ranks_of(kind, (12,))
    for loader in resumed:
        stay = loader.persistent_workers
        loader.batch_sampler.passes.continue_at(position, way, undoes_draws=stay)
        if way is Continue.AT_END:
            loader.batch_sampler.sampler.set_epoch(0)
            assert list(loader) == []

    assert joined(steps_of(resumed, 1)) == wanted[1]
    assert joined(steps_of(resumed, 2)) == wanted[2]


def test_passes_within_an_epoch_go_on_too():
    (loader,) = ranks_of("generator", (12,))
    passes = [joined(steps_of([loader])) for _ in range(3)]
    (loader,) = ranks_of("generator", (12,))
    steps_of([loader])
    running = some_steps([loader], 1)
    position = loader.batch_sampler.passes.position(
        len(loader) + 1, len(loader), cycles=True, ahead=1
    )
    del running
    assert (position.number, position.step) == (1, 1)

    resumed = ranks_of("generator", (4, 8))
    for each in resumed:
        each.batch_sampler.passes.continue_at(position, Continue.INSIDE)
    assert joined(steps_of(resumed)) == passes[1][1:]
    assert joined(steps_of(resumed)) == passes[2]


def test_a_position_is_unknown_once_something_else_has_iterated_the_loader():
    (loader,) = ranks_of("shuffle", (12,))
    running = some_steps([loader], 1)
    assert loader.batch_sampler.passes.position(1, 4, cycles=False, ahead=1) is not None
    list(loader)
    assert loader.batch_sampler.passes.position(1, 4, cycles=False, ahead=1) is None
    del running


def test_a_sampler_with_other_generators_is_refused():
    (loader,) = ranks_of("generator", (12,))
    (other,) = ranks_of("shuffle", (12,))
    position = loader.batch_sampler.passes.position(0, 4, cycles=False, ahead=1)
    with pytest.raises(ValueError, match="generators"):
        other.batch_sampler.passes.continue_at(position, Continue.INSIDE)
