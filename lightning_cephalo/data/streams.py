"""Deals streams: loaders whose samples have no index, so that no sampler can deal them.

Every rank reads the whole stream, and cuts its part out of each global batch. So a step has the
samples of one device, in the same order, with any number of workers. Checksums of every global
batch are compared, so that a stream that differs between ranks is refused.

With ``Trainer(use_distributed_sampler=False)`` each rank reads a part of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_cephalo.common.errors import BatchSplitError, UnsupportedError
from lightning_cephalo.data.batch_layout import NoSamples
from lightning_cephalo.data.containers import known_length, own_copy
from lightning_cephalo.data.dealing import Dealing
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.passes import Passes, is_stateful
from lightning_cephalo.data.randomness import generators_of
from lightning_cephalo.data.samplers import warn_of_too_few_samples
from lightning_cephalo.data.shares import deal

_END: Any = object()
_OWN_PART = (
    " If it divides itself between ranks, give Trainer(use_distributed_sampler=False): each rank"
    " then trains its own part."
)


class RankLoader(ABC):
    """Iterates ``loader`` on every rank; its attributes are those of the wrapped loader.

    Creating and iterating it is collective. ``original`` is the user's loader.
    """

    def __init__(self, loader: Iterable[Any], dealing: Dealing, original: object) -> None:
        self.loader, self.original, self._dealing = loader, original, dealing
        if is_stateful(loader):  # as Lightning looks for
            for name in ("state_dict", "load_state_dict"):
                object.__setattr__(self, name, getattr(loader, name))
        own = self._own_length()
        everyones = [row[0] for row in dealing.gather([-1.0 if own is None else float(own)])]
        longest = min(everyones) if dealing.every_rank else max(everyones)
        self._length = None if min(everyones) < 0 else int(longest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("loader", "original"):
            object.__setattr__(self, name, value)
        else:  # such as Lightning's worker_init_fn
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return self._length

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches."""

    def _own_length(self) -> int | None:
        return known_length(self.loader)


class OwnPart(RankLoader):
    """Yields this rank's own samples, on every rank until the last one has run out.

    Ranks that have run out continue with `NoSamples`, so that every sample counts once. With
    ``every_rank`` all end with the first.
    """

    _sample: Any = None

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.loader)
        batch: Any = None
        while True:
            batch = next(batches, _END) if batch is not _END else _END
            is_batch = batch is not _END and batch is not None
            if self._sample is None and is_batch:
                self._sample = batch
                with suppress(BatchSplitError):
                    self._sample = self._dealing.layout.take(batch, 0, 1)
                self._sample = own_copy(self._sample, with_arrays=True)
            everyones = [bool(row[0]) for row in self._dealing.gather([float(batch is not _END)])]
            if not (all(everyones) if self._dealing.every_rank else any(everyones)):
                return
            # Lightning skips a step whose batch is None, and the other ranks would wait for it
            yield batch if is_batch else self._shown()

    def _shown(self) -> NoSamples:
        if self._sample is None:  # nothing can be shown of a part that has nothing at all
            return NoSamples(())
        # a hook may change the containers that it gets
        return NoSamples(own_copy(self._sample, with_arrays=True))


class _Step(NamedTuple):
    """A rank's part of a global batch, the batch's checksum, and its samples; 0 at the end."""

    part: Any = None
    fingerprint: float = 0.0
    samples: int = 0
    is_left_out: bool = False


class DealtStream(RankLoader):
    """Yields this rank's part of each global batch of a stream that every rank reads whole.

    ``items`` is the samples of a global batch, 0 if they have any sizes. A batch that cannot be cut
    is left whole in evaluation, where ranks take turns. On iteration all ranks raise
    UnsupportedError if they read different samples.
    """

    def __init__(self, loader: Any, dealing: Dealing, original: object, items: int) -> None:
        stateful = is_stateful(loader)
        self._passes = Passes(dealing, items, others=generators_of(loader), is_stateful=stateful)
        self._turn = 0
        super().__init__(loader, dealing, original)

    @property
    def sampler(self) -> Passes:
        """What sets the epoch; Lightning calls its ``set_epoch``."""
        return self._passes

    passes = sampler

    def __iter__(self) -> Iterator[Any]:
        own, number = self._passes.begin(), 0
        # Ranks draw different amounts in training, and a stream may draw in this process.
        with own.randomness.active():
            batches: Iterator[Any] = iter(self.loader)
        while True:
            with own.randomness.active():
                batch = next(batches, _END)
            step = _Step() if batch is _END else self._dealt(batch, own.sizes_of(own.steps))
            is_skipped = batch is not _END and own.steps < own.skipped
            own.steps += batch is not _END and not step.is_left_out
            if is_skipped:
                continue
            self._compare(step, batch is not _END, number)
            if batch is _END:
                return
            number += 1
            if step.is_left_out:
                warn_of_too_few_samples(step.samples, len(self._dealing.sizes))
            else:
                yield step.part

    def _dealt(self, batch: Any, sizes: tuple[int, ...]) -> _Step:
        rank, layout = self._dealing.rank, self._dealing.layout
        if batch is None:  # on all ranks: Lightning skips the step, as on one device
            return _Step()
        if len(sizes) == 1:
            return _Step(batch, 0.0, 1)
        checksum = float(fingerprint(batch))
        try:
            count = layout.batch_size(batch)
            if self._dealing.every_rank and 0 < count < len(sizes):
                return _Step(None, checksum, count, is_left_out=True)
            dealt = deal(count, sizes)
            if dealt[rank] == count:
                return _Step(batch, checksum, count)
            start = min(sum(dealt[:rank]), count - 1)
            part = layout.take(batch, start, start + max(dealt[rank], 1))
            return _Step(part if dealt[rank] else NoSamples(part), checksum, count)
        except BatchSplitError:
            if self._dealing.trains:
                raise
        turn, self._turn = self._turn % len(sizes), self._turn + 1
        return _Step(batch if turn == rank else NoSamples(batch), checksum, 1)

    def _own_length(self) -> int | None:
        # steps that are left out would count, and no epoch would end
        return None if self._dealing.every_rank else super()._own_length()

    def _compare(self, step: _Step, is_batch: bool, number: int) -> None:
        """Raises on every rank if ranks read different samples; collective."""
        everyones = self._dealing.gather([float(is_batch), float(step.samples), step.fingerprint])
        kind = self.original.dataset if isinstance(self.original, DataLoader) else self.original
        if len(everyones) > 1 and step.samples and not step.fingerprint:
            raise UnsupportedError(
                f"The stream {type(kind).__name__} yields batches without visible content, so that"
                " ranks cannot see whether they read the same ones. Yield tensors, arrays, numbers,"
                f" strings, or objects that hold these.{_OWN_PART}"
            )
        if all(row == everyones[0] for row in everyones):
            return
        rows = "; ".join(
            f"rank {rank}: {f'{int(row[1])} samples, checksum {int(row[2])}' if row[0] else 'none'}"
            for rank, row in enumerate(everyones)
        )
        raise UnsupportedError(
            f"Step {number} of the stream {type(kind).__name__} has other samples on some ranks"
            f" ({rows}). Every rank must read the whole stream, in the same order, and it is dealt"
            " by the plan. So leave out split_dataset_by_node (Hugging Face), split_by_node"
            " (WebDataset: nodesplitter=None) or code of your own that reads the rank, and seed"
            f" what shuffles. Division between DataLoader workers may stay.{_OWN_PART}"
        )
