"""Compares the loss of a batch with that of its parts, once in each training.

Before a job is measured, a few samples are compared on every rank. With a given plan each rank
compares a microbatch of its first step with its halves. No trace is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.user_gathers import UserGathers
from lightning_cephalo.adapters.user_module import step_on
from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.cutting import BatchCutter
from lightning_cephalo.data.reading import (
    global_batch_size,
    has_custom_lists,
    is_stream,
    original_of,
)
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.plan import Problem
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.profiling.additivity import (
    SAMPLES,
    Piece,
    compared,
    warn_if_any_differs,
)
from lightning_cephalo.profiling.isolation import expect_samples, isolated, moved_to_device
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.ranks.control import not_connected

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_UNKNOWN = "The loss of a batch was not compared with that of its parts"

Parted = tuple[Piece | None, Sequence[Piece]]
"""A batch, and its two parts; without any, it is not compared."""


class LossCheck:
    """Compares losses once: when a job is measured, else in its first step, on every rank.

    Args:
        gathers: Refuses the user's collectives, as some ranks may have no microbatch to compare.
        manual: Runs steps that call their backwards themselves; None: the executor runs both.
    """

    def __init__(
        self,
        job: Job,
        model: ShardedModel,
        trainer: Trainer,
        gathers: UserGathers,
        manual: PhasedSteps | None = None,
    ) -> None:
        self._job, self._model, self._trainer = job, model, trainer
        self._manual = manual
        self._gathers = gathers
        # a batch that is left whole is that of one device
        self._is_due = not job.leaves_batches_whole

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy, as of a session."""
        return not_connected, ()

    def of_samples(self, problem: Problem) -> None:
        """Warn if the loss of a few samples is not the weighted mean of its halves'; collective."""
        if not self._is_due:
            return
        self._is_due = False
        job, half = self._job, SAMPLES // 2
        have_room = all(rank.largest_microbatch_size >= SAMPLES for rank in problem.ranks)
        if not have_room or problem.minimum_microbatch_size > half:
            self._warn(f"{_UNKNOWN}: that takes microbatches of {half} and {SAMPLES} samples.")
            return
        module: Any = self._model.module

        def halves() -> Parted:
            batch = job.loaders.read(SAMPLES, job.layouts)
            expect_samples(self._trainer, SAMPLES)
            batch = moved_to_device(self._trainer, module, batch)
            return _in_two(job, batch, self._model.control.world_size)

        self._compare(partial(step_on, module), halves, nullcontext())

    def of_first_step(
        self, batch: Any, pieces: Sequence[Piece], step: Callable[[Any], Any]
    ) -> None:
        """Warn if a microbatch's loss is not the weighted mean of its halves'; collective, once."""
        if not self._is_due:
            return
        self._is_due = False
        control = self._model.control
        refused: AbstractContextManager[None] = nullcontext()
        if self._manual is None and control.world_size > 1:
            refused = self._gathers.refused()
        # without a microbatch on each rank, a manual step itself fails on every rank
        if self._manual is None or control.all(bool(pieces)):
            self._compare(step, partial(self._halves, batch, pieces), refused)

    def _halves(self, batch: Any, pieces: Sequence[Piece]) -> Parted:
        """Return the largest microbatch and its halves; of small ones, the batch's first rows."""
        job = self._job
        if not pieces:
            return None, ()
        first, (whole, samples) = pieces[0], max(pieces, key=lambda piece: piece[1])
        # of two dataloaders that steps divide otherwise, three rows are divided otherwise, too
        fewest = 3 if job.loaders.spec is not None else 2
        if _rows(job, whole) < fewest:
            rows = _rows(job, batch)
            if rows < 2:
                expect_samples(self._trainer, first[1])
                return first if self._manual is not None else None, ()
            fewest = min(fewest, rows)
            whole, samples = _cut(job, batch, (fewest, rows - fewest))[0]
        if job.loaders.spec is None and samples > 2 and samples % 2:
            # copies of halves of the same size show small terms
            whole, samples = _cut(job, whole, (samples - 1, 1))[0]
        expect_samples(self._trainer, samples)
        return _in_two(job, whole, self._model.control.world_size)

    def _warn(self, text: str) -> None:
        Progress(self._job.options.verbose and self._model.control.rank == 0).warn(text)

    def _compare(
        self,
        step: Callable[[Any], Any],
        parted: Callable[[], Parted],
        refused: AbstractContextManager[None],
    ) -> None:
        model, trainer, manual = self._model, self._trainer, self._manual
        loaders, control = self._job.loaders, model.control
        in_half, is_manual = "16" in str(trainer.precision), manual is not None
        context = trainer.precision_plugin.train_step_context
        is_repeated = loaders.spec is None and not is_manual
        repeated = self._job.layouts[0].repeated if is_repeated else None
        failure = ""  # the error itself would keep activations
        with ExitStack() as undo:
            try:
                # one rank alone may lack the memory for copies
                isolate = isolated(trainer, model.module, model.accelerator)
                control.together("copying what modules hold", partial(undo.enter_context, isolate))
                with refused:
                    whole, parts = control.together("cutting a batch", parted)
                    found = compared(model, step, context, whole, parts, in_half, repeated, manual)
            except Exception as error:  # on every rank
                failure = f"{type(error).__name__}: {error}"
            control.together("putting back what modules hold", undo.close)
        if failure:
            how = "steps without updates" if is_manual else "steps without gradients"
            self._warn(f"{_UNKNOWN} ({how}, in evaluation mode). {failure}")
        elif control.rank == 0:
            warn_if_any_differs(found, in_half, is_manual)


def _in_two(job: Job, batch: Any, world_size: int) -> Parted:
    """Cut a batch into halves; into others for one loader, if steps divide several so."""
    leaves = _leaves(job, batch)
    counts = [0 if leaf is None else layout.batch_size(leaf) for leaf, layout in leaves]
    sizes = [(count - count // 2, count // 2) for count in counts]
    spec, rows = job.loaders.spec, sum(counts)
    if spec is None:
        return (batch, rows), _cut(job, batch, sizes[0])
    has_rows = max(counts) > 2 and min(filter(None, counts)) > 1
    if has_rows and not _are_divided_alike(job, world_size):
        largest = counts.index(max(counts))
        sizes[largest] = (1, counts[largest] - 1)
    cut = [
        (None, None) if leaf is None else layout.split(leaf, size)
        for (leaf, layout), size in zip(leaves, sizes, strict=True)
    ]
    halves = zip(zip(*cut, strict=True), zip(*sizes, strict=True), strict=True)
    return (batch, rows), [(pytree.tree_unflatten(own, spec), sum(size)) for own, size in halves]


def _leaves(job: Job, batch: Any) -> list[tuple[Any, BatchLayout]]:
    """Return each dataloader's part of a batch; None where it has ended."""
    spec = job.loaders.spec
    return list(
        zip([batch] if spec is None else spec.flatten_up_to(batch), job.layouts, strict=True)
    )


def _are_divided_alike(job: Job, world_size: int) -> bool:
    """Return whether each microbatch has the same part of every loader's batch; False: unknown."""
    if job.loaders.mode == "sequential":
        return True
    found = []
    for loader in map(original_of, job.loaders.flat):
        size = job.options.global_batch_size or global_batch_size(loader, world_size)
        if not size:
            return False
        samples, drop_last = _samples_of(loader), bool(getattr(loader, "drop_last", False))
        has_rest = not drop_last and (samples is None or samples % size > 0)
        found.append((size, samples, has_rest))
    if any(has_rest for *_, has_rest in found):
        # all come to the same rest in the same step
        return len(set(found)) == 1 and found[0][1] is not None
    first, parts = found[0][0], [1]
    if job.plan is not None:
        parts = [size for rank in job.plan.ranks for size in rank.microbatch_sizes]
    return all(size * part % first == 0 for size, *_ in found for part in parts)


def _samples_of(loader: Any) -> int | None:
    """Return the samples of a loader in one pass; None: unknown."""
    if is_stream(loader) or has_custom_lists(loader) or loader.batch_sampler is None:
        return None
    try:
        return len(loader.sampler)
    except TypeError:  # a sampler of any length
        return None


def _rows(job: Job, batch: Any) -> int:
    """Return the rows of a batch; of several dataloaders, those of the longest one."""
    return max(
        0 if leaf is None else layout.batch_size(leaf) for leaf, layout in _leaves(job, batch)
    )


def _cut(job: Job, batch: Any, sizes: tuple[int, int]) -> list[tuple[Any, int]]:
    wanted = tuple(size for size in sizes if size)
    parts = BatchCutter(job.layouts, job.loaders.spec, wanted).cut(batch)
    if len(parts) != len(wanted):
        raise ValueError(f"its batch is cut in {len(parts)} parts, not in {len(wanted)}")
    return parts
