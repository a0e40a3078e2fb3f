"""Several ranks in one process: loaders built for rank 0 to W-1, and control between threads."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.loaders import dealt_loader
from lightning_cephalo.data.passes import Dealing, RankBatchSampler


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor(index)


def same(value: Any) -> Any:
    """Broadcast for ranks that already hold the same."""
    return value


def gathered_alone(numbers: list[float]) -> list[list[float]]:
    """ControlGroup.gather of one rank."""
    return [numbers]


def dealt(loader, sizes, rank=0, **options):
    """A loader that is dealt to a rank, whose collectives return what it gives."""
    common = {"seed": 0, "broadcast": same, "gather": gathered_alone, **options}
    return dealt_loader(loader, Dealing(rank, tuple(sizes), **common))


def ranked(source, rank, sizes, seed=0, drop_last=False):
    """A rank's sampler of a source of keys."""
    dealing, whole = Dealing(rank, tuple(sizes), seed, same, gathered_alone), sum(sizes)
    return RankBatchSampler(BatchSampler(source, whole, drop_last), dealing, items=whole)


def keys_of(sampler):
    """A rank's keys in each step of a pass; none where a key is only shown."""
    steps = list(sampler)
    return [
        [] if is_idle else keys
        for keys, is_idle in zip(steps, sampler.passes.running.idle, strict=True)
    ]


def rebuilt_for_ranks(make_loader, batch_sizes, *, seed=7, evaluate=False, **options):
    """One rebuilt loader per rank, each from a loader of its own, with rank 0's generators."""
    states: list[Any] = []

    def broadcast(value: Any) -> Any:
        states.append(copy.deepcopy(value))
        return states[0]

    loaders = []
    for rank in range(len(batch_sizes)):
        # what training has drawn from the global generators differs between ranks
        torch.rand(rank * 3 + 1)
        common = {"seed": seed, "broadcast": broadcast, "trains": not evaluate, **options}
        loaders.append(dealt(make_loader(), batch_sizes, rank, **common))
    return loaders


def numbers_of(batch: Any) -> list[Any]:
    """The samples of a batch; none of what only hooks see."""
    return [] if isinstance(batch, NoSamples) else batch.tolist()


def steps_of(loaders, epoch=None) -> list[list[list[int]]]:
    """Samples by step and rank; checks that all ranks take the announced number of steps."""
    by_rank = []
    for rank, loader in enumerate(loaders):
        torch.rand(rank * 5 + 2)
        if epoch is not None:
            loader.batch_sampler.sampler.set_epoch(epoch)
        by_rank.append([numbers_of(batch) for batch in loader])
    assert len({len(steps) for steps in by_rank}) == 1
    return [list(step) for step in zip(*by_rank, strict=True)]


def joined(steps) -> list[list[int]]:
    """Samples of each global step in order of ranks."""
    return [[index for part in step for index in part] for step in steps]


def single_device(loader: DataLoader) -> list[list[int]]:
    """Samples of each step of an ordinary loader."""
    return [batch.tolist() for batch in loader]


class ThreadGroup:
    """Runs one function per rank in threads, with an all-reduce between them.

    One runs at a time, until it waits for the others. A worker of a loader is a fork: if another
    thread held the lock of a generator of random numbers meanwhile, the worker would wait forever.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.numbers: list[list[float]] = [[]] * world_size
        self.barrier = threading.Barrier(world_size, timeout=100)
        self.turn = threading.Lock()

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def gather(self, rank: int):
        def gathered(numbers: list[float]) -> list[list[float]]:
            self.numbers[rank] = numbers
            self._wait()
            everyones = list(self.numbers)
            self._wait()
            return everyones

        return gathered

    def run(self, function) -> list[Any]:
        def in_turn(rank: int) -> Any:
            with self.turn:
                return function(rank)

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(in_turn, range(self.world_size)))
