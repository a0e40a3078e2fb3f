"""What a rank iterates of a user's loader.

Streams have no index, so no sampler can deal them: every rank reads the whole stream. In training
it cuts its part out of each global batch, so a step has the samples of one device, with any number
of workers. In an evaluation it takes every batch whose turn is its own. Checksums of every step are
compared, so that a stream that differs between ranks is refused. With
``Trainer(use_distributed_sampler=False)`` each rank reads a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import chain, islice, repeat
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.batch_layout import NoSamples, own_copy
from lightning_cephalo.data.fingerprints import fingerprint
from lightning_cephalo.data.passes import Dealing, Pass, Passes, warn_of_too_few_samples
from lightning_cephalo.data.shares import deal

_END: Any = object()
# passes resume a loader by its steps; with a state of its own, too, they would be skipped twice
_HIDDEN = ("state_dict", "load_state_dict")
_OWN_PART = (
    " If it divides itself between ranks, give Trainer(use_distributed_sampler=False): each rank"
    " then trains its own part."
)


class RankLoader:
    """Iterates ``loader`` on every rank; its attributes are those of the wrapped loader.

    ``dealt_from`` is the user's loader. ``passes`` is None if each rank reads a part of its own.
    """

    def __init__(
        self, loader: Any, dealing: Dealing, dealt_from: object, passes: Passes | None = None
    ) -> None:
        vars(self).update(loader=loader, dealt_from=dealt_from, passes=passes, _dealing=dealing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _HIDDEN or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)  # such as Lightning's worker_init_fn

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.dealt_from,)  # of a Trainer that is copied

    def __len__(self) -> int:
        return len(self.loader)


class DealtSamples(RankLoader):
    """Yields the batches of a DataLoader; `NoSamples` in steps without samples for this rank."""

    __class__: type[Any] = DataLoader  # for users' isinstance

    def __iter__(self) -> Iterator[Any]:
        own: Pass | None = None
        for index, batch in enumerate(self.loader):
            if own is None or not own.idle:
                own = self.passes.running
            if not own.idle:
                raise UnsupportedError(
                    f"{type(self.loader).__name__}.__iter__ yields a batch that its batch sampler"
                    " has not chosen. Yield one for each list, and create iterators in __iter__."
                )
            is_idle = own.idle.popleft()
            seen = getattr(self.batch_sampler, "seen_batch_indices", [])
            if is_idle and index < len(seen):
                seen[index] = []  # Lightning gives them to a writer of predictions
            # Lightning would skip a step whose batch is None, on this rank alone
            is_idle = is_idle or (batch is None and len(self._dealing.sizes) > 1)
            yield NoSamples(() if batch is None else batch) if is_idle else batch


class _Stream(RankLoader):
    """Iterates in lock step with the other ranks: creating and iterating it is collective."""

    def __init__(
        self, loader: Any, dealing: Dealing, dealt_from: object, passes: Passes | None = None
    ) -> None:
        super().__init__(loader, dealing, dealt_from, passes)
        length = sized_len(loader)
        if passes is not None:
            vars(self).update(sampler=passes)  # Lightning sets the epoch of what is called so
            if dealing.every_rank:
                length = None  # steps that are left out would count, and no epoch would end
            elif length is not None and not dealing.trains:
                length = -(-length // len(dealing.sizes))
        everyones = [row[0] for row in dealing.gather([-1.0 if length is None else float(length)])]
        longest = min(everyones) if dealing.every_rank else max(everyones)
        vars(self).update(_length=None if min(everyones) < 0 else int(longest))

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return int(self._length)


class OwnPart(_Stream):
    """Yields this rank's own samples, then `NoSamples` until the last rank has run out."""

    def __iter__(self) -> Iterator[Any]:
        own = vars(self)
        # where every rank must have samples, all end with the first
        ends = all if self._dealing.every_rank else any
        for batch in chain(self.loader, repeat(_END)):
            is_batch = batch is not _END and batch is not None
            if is_batch and "_shown" not in own:
                own["_shown"] = own_copy(batch, with_arrays=True)
            if not ends(row[0] for row in self._dealing.gather([float(batch is not _END)])):
                return
            # Lightning skips a step whose batch is None, and the other ranks would wait for it.
            # A hook may change the containers that it gets.
            yield (
                batch if is_batch else NoSamples(own_copy(own.get("_shown", ()), with_arrays=True))
            )


class DealtStream(_Stream):
    """Yields this rank's part of each step of a stream that every rank reads whole."""

    def __iter__(self) -> Iterator[Any]:
        own, number, ranks = self.passes.begin(), 0, len(self._dealing.sizes)
        # Ranks draw different amounts in training, and a stream may draw in this process.
        with own.randomness.active():
            batches: Iterator[Any] = iter(self.loader)
        while True:
            with own.randomness.active():
                read = list(islice(batches, 1 if self._dealing.trains else ranks))
            part, samples, checksum = self._part(read, own.sizes_of(own.steps))
            is_left_out = self._dealing.every_rank and 0 < samples < ranks
            is_skipped = own.steps < own.skipped
            own.steps += bool(read) and not is_left_out
            if read and is_skipped:
                continue
            self._compare([float(bool(read)), float(samples), float(checksum)], number)
            if not read:
                return
            number += 1
            if is_left_out:
                warn_of_too_few_samples(samples, ranks)
            else:
                yield part

    def _part(self, read: list[Any], sizes: tuple[int, ...]) -> tuple[Any, int, int]:
        """Returns this rank's part of a step, and the whole step's samples and checksum."""
        rank, layout, batch = self._dealing.rank, self._dealing.layout, next(iter(read), None)
        if len(sizes) == 1:
            return batch, len(read), 0
        if not self._dealing.trains:
            mine = read[rank] if rank < len(read) else NoSamples(batch)
            return mine, len(read), fingerprint(read)
        if batch is None:  # on all ranks: Lightning skips the step, as on one device
            return None, 0, 0
        count = layout.batch_size(batch)
        dealt = deal(count, sizes)
        start = min(sum(dealt[:rank]), count - 1)
        part = layout.take(batch, start, start + max(dealt[rank], 1))
        return part if dealt[rank] else NoSamples(part), count, fingerprint(batch)

    def _compare(self, own: list[float], number: int) -> None:
        """Raises on every rank if ranks read different samples; collective."""
        everyones = self._dealing.gather(own)
        kind = type(getattr(self.dealt_from, "dataset", self.dealt_from)).__name__
        if len(everyones) > 1 and own[1] and not own[2]:
            raise UnsupportedError(
                f"The stream {kind} yields batches that cannot be pickled, to compare them between"
                f" ranks. Yield tensors, arrays, numbers, strings, or objects of these.{_OWN_PART}"
            )
        if all(row == everyones[0] for row in everyones):
            return
        rows = "; ".join(
            f"rank {rank}: {row[1]:.0f} samples, checksum {row[2]:.0f}"
            for rank, row in enumerate(everyones)
        )
        raise UnsupportedError(
            f"Step {number} of the stream {kind} has other samples on some ranks ({rows}). Every"
            " rank must read the whole stream in the same order. So seed what shuffles, and leave"
            " out split_dataset_by_node (Hugging Face), split_by_node (WebDataset:"
            f" nodesplitter=None) or code of your own that reads the rank.{_OWN_PART}"
        )
