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
from lightning_cephalo.preparation.prepare import Job
from lightning_cephalo.profiling import additivity
from lightning_cephalo.profiling.isolation import expect_samples, isolated, moved_to_device
from lightning_cephalo.profiling.measure import read_batch
from lightning_cephalo.profiling.progress import Progress
from lightning_cephalo.ranks.control import not_connected

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_UNKNOWN = "The loss of a batch was not compared with that of its parts"

Parted = tuple[Any, list[tuple[Any, int]]]
"""A batch, and its parts with their numbers of samples."""


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
        """Compare a few samples of the dataset, once; collective. See :func:`check_measured`."""
        if not self._is_due:
            return
        self._is_due = False
        check_measured(self._job, problem, self._model, self._trainer, self._manual)

    def of_first_step(
        self, batch: Any, pieces: Sequence[tuple[Any, int]], step: Callable[[Any], Any]
    ) -> None:
        """Warn if a microbatch's loss is not the weighted mean of its halves'; collective, once."""
        if not self._is_due:
            return
        self._is_due = False
        if self._manual is None:
            halves = partial(self._halves, batch, pieces)
            _compare(self._job, self._model, self._trainer, step, halves, self._gathers)
        elif self._model.control.all(bool(pieces)):  # else the step itself fails on every rank
            parted = partial(self._halves_or_whole, batch, pieces)
            _compare(self._job, self._model, self._trainer, step, parted, manual=self._manual)

    def _halves_or_whole(self, batch: Any, pieces: Sequence[tuple[Any, int]]) -> Parted:
        halves = self._halves(batch, pieces)
        if halves is not None:
            return halves
        whole, samples = pieces[0]
        expect_samples(self._trainer, samples)
        return whole, [(whole, samples)]

    def _halves(self, batch: Any, pieces: Sequence[tuple[Any, int]]) -> Parted | None:
        whole, samples = max(pieces, key=lambda piece: piece[1], default=(None, 0))
        if not pieces:
            return None
        # of two dataloaders that steps divide otherwise, three rows are divided otherwise, too
        fewest = 3 if self._job.loaders.spec is not None else 2
        if _rows(self._job, whole) < fewest:
            rows = _rows(self._job, batch)
            if rows < 2:
                return None
            fewest = min(fewest, rows)
            whole, samples = _cut(self._job, batch, (fewest, rows - fewest))[0]
        if self._job.loaders.spec is None and samples > 2 and samples % 2:
            # copies of halves of the same size show small terms
            whole, samples = _cut(self._job, whole, (samples - 1, 1))[0]
        expect_samples(self._trainer, samples)
        return whole, _in_two(self._job, whole, self._model.control.world_size)


def check_measured(
    job: Job,
    problem: Problem,
    model: ShardedModel,
    trainer: Trainer,
    manual: PhasedSteps | None = None,
) -> None:
    """Warn if the loss of a few samples is not the weighted mean of its halves'; collective."""
    half = additivity.SAMPLES // 2
    progress = Progress(job.options.verbose and model.control.rank == 0)
    have_room = all(rank.largest_microbatch_size >= 2 * half for rank in problem.ranks)
    if not have_room or problem.minimum_microbatch_size > half:
        progress.warn(f"{_UNKNOWN}: that takes microbatches of {half} and {2 * half} samples.")
        return
    module: Any = model.module

    def halves() -> Parted:
        batch = read_batch(job.loaders.source, 2 * half, job.layouts)
        expect_samples(trainer, 2 * half)
        batch = moved_to_device(trainer, module, batch)
        return batch, _in_two(job, batch, model.control.world_size)

    _compare(job, model, trainer, partial(step_on, module), halves, manual=manual)


def _in_two(job: Job, batch: Any, world_size: int) -> list[tuple[Any, int]]:
    """Cut a batch into halves; into others for one loader, if steps divide several so."""
    if job.loaders.spec is None:
        rows = job.layouts[0].batch_size(batch)
        return _cut(job, batch, (rows - rows // 2, rows // 2))
    leaves = job.loaders.spec.flatten_up_to(batch)
    pairs = list(zip(leaves, job.layouts, strict=True))
    counts = [0 if leaf is None else layout.batch_size(leaf) for leaf, layout in pairs]
    sizes = [(count - count // 2, count // 2) for count in counts]
    has_rows = max(counts) > 2 and min(filter(None, counts)) > 1
    if has_rows and not _are_divided_alike(job, world_size):
        largest = counts.index(max(counts))
        sizes[largest] = (1, counts[largest] - 1)
    cut = [
        (None, None) if leaf is None else layout.split(leaf, size)
        for (leaf, layout), size in zip(pairs, sizes, strict=True)
    ]
    return [
        (
            pytree.tree_unflatten([piece[half] for piece in cut], job.loaders.spec),
            sum(size[half] for size in sizes),
        )
        for half in (0, 1)
    ]


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
    if job.loaders.spec is None:
        return job.layouts[0].batch_size(batch)
    leaves = zip(job.loaders.spec.flatten_up_to(batch), job.layouts, strict=True)
    return max(0 if leaf is None else layout.batch_size(leaf) for leaf, layout in leaves)


def _cut(job: Job, batch: Any, sizes: tuple[int, int]) -> list[tuple[Any, int]]:
    wanted = tuple(size for size in sizes if size)
    parts = BatchCutter(job.layouts, job.loaders.spec, wanted).cut(batch)
    if len(parts) != len(wanted):
        raise ValueError(f"its batch is cut in {len(parts)} parts, not in {len(wanted)}")
    return parts


def _compare(
    job: Job,
    model: ShardedModel,
    trainer: Trainer,
    step: Callable[[Any], Any],
    parted: Callable[[], Parted | None],
    gathers: UserGathers | None = None,
    manual: PhasedSteps | None = None,
) -> None:
    control = model.control
    is_first = control.rank == 0
    refused: AbstractContextManager[None] = nullcontext()
    if gathers is not None and control.world_size > 1:
        refused = gathers.refused()
    in_half = "16" in str(trainer.precision)
    failure = ""  # the error itself would keep activations
    with ExitStack() as undo:
        try:
            # one rank alone may lack the memory for copies
            isolate = isolated(trainer, model.module, model.accelerator)
            control.together("copying what modules hold", partial(undo.enter_context, isolate))
            with refused:
                own = control.together("cutting a batch", parted)
                context = trainer.precision_plugin.train_step_context
                batch, parts = own or (None, [])
                if manual is None:
                    repeated = job.layouts[0].repeated if job.loaders.spec is None else None
                    found = additivity.compared(
                        model, step, context, batch, parts, in_half, repeated
                    )
                else:
                    of_backwards = additivity.compared_manually(
                        model, manual, step, context, batch, parts, in_half
                    )
        except Exception as error:  # on every rank
            failure = f"{type(error).__name__}: {error}"
        control.together("putting back what modules hold", undo.close)
    if failure:
        how = "steps without gradients" if manual is None else "steps without updates"
        Progress(job.options.verbose and is_first).warn(
            f"{_UNKNOWN} ({how}, in evaluation mode). {failure}"
        )
        return
    if is_first and manual is None:
        additivity.warn_if_any_differs(found, in_half)
    elif is_first:
        additivity.warn_if_any_backward_differs(of_backwards, in_half)
