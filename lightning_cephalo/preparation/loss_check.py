"""Compares the loss of a microbatch with those of its halves, in the first step of a training.

Microbatches change a loss that is no weighted mean over samples: one that compares samples with
each other, that divides by a number of the batch which is not returned as "weight", or that has a
term about the whole batch. The comparison leaves no trace.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_cephalo.common.texts import printable
from lightning_cephalo.data.batch_layout import own_copy
from lightning_cephalo.data.cutting import BatchCutter, loss_and_weight
from lightning_cephalo.execution.overlay_slots import TrainingModes
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.features.over_batch import was_called
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.profiling.isolation import forget_gradients, isolated
from lightning_cephalo.ranks.crash_report import is_lost_connection

# Relative: of sums in another order, by the dtype of computing; and of the same sums again.
_ROUNDING, _ROUNDING_IN_HALF, _NOISE = 1e-4, 3e-2, 1e-5
_TINY = 1e-12

_SPLIT_BATCH = (
    "If a tensor without a row per sample was cut, such as class weights of as many rows, give"
    " CephaloStrategy(split_batch=function)."
)
_WAYS_OUT = (
    "If the loss is a mean over tokens, or over samples with weights, return"
    ' {"loss": loss, "weight": number of tokens or sum of weights}. If it compares samples with'
    " each other, has a term about the whole batch, or adds means over several dataloaders, whose"
    " batches are not always divided alike, let lightning_cephalo.loss_over_batch(function,"
    f" *tensors) compute that. {_SPLIT_BATCH}"
)
_MANUAL_WAYS_OUT = (
    "Losses that compare samples, advantages that are normalised over the batch, means over tokens"
    " and weights from gradients of the batch are of this kind. Compute statistics of the whole"
    " batch in on_train_batch_start, where every rank may communicate, or use automatic"
    " optimization with lightning_cephalo.loss_over_batch."
)

Piece = tuple[Any, int]
"""A batch, and its number of samples."""
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Compared:
    """The loss of a batch, that of its parts, and that of the batch once more."""

    whole: float
    parts: float
    again: float
    sizes: tuple[int, ...]

    def differs(self, in_half: bool = False) -> bool:
        """Whether the loss is no weighted mean; of one that changes by chance nothing is known."""
        if not math.isclose(self.whole, self.again, rel_tol=_NOISE, abs_tol=_TINY):
            return False
        tolerance = _ROUNDING_IN_HALF if in_half else _ROUNDING
        return not math.isclose(self.whole, self.parts, rel_tol=tolerance, abs_tol=_TINY)

    def warn(self, backward: int | None) -> None:
        """Warn of the loss; ``backward`` is its number in a manual step."""
        what = "The loss of"
        if backward is not None:
            what = f"The loss of backward {backward} in training_step for"
        parts = " and ".join(map(str, self.sizes))
        warnings.warn(
            f"{what} {sum(self.sizes)} samples is {self.whole:.6g}, but the weighted mean over"
            f" parts of {parts} samples is {self.parts:.6g}. Microbatches are such parts, so that"
            f" training will differ from one device. {_MANUAL_WAYS_OUT if backward else _WAYS_OUT}",
            stacklevel=2,
        )


def compare_losses(session: Session, batch: Any, pieces: Sequence[Piece], step: Step) -> None:
    """Warn if a microbatch's loss is not the weighted mean of its halves'; collective."""
    control, is_manual = session.control, session.manual is not None
    if control.world_size == len(pieces) == 1:  # the batch is that of one device
        return
    failure, undo, found = "", ExitStack(), tuple[Compared, ...]()
    try:
        runs = control.together("cutting a batch", partial(_runs, session, batch, pieces))
        # a manual step runs on every rank or on none
        if not is_manual or control.all(runs[0] is not None):
            found = _compared(session, step, runs, _evaluate(session, undo))
    except BaseException as error:
        if is_lost_connection(error) or not isinstance(error, Exception):
            undo.close()  # the other ranks are elsewhere
            raise
        # on every rank; the error itself would keep activations
        failure = f"{type(error).__name__}: {error}"
    control.together("putting back what modules hold", undo.close)
    rows = control.gather(found)
    if control.rank == 0 and failure:
        text = (
            "The loss of a batch was not compared with that of its parts (steps in evaluation mode,"
            f" without updates). {failure}. {_SPLIT_BATCH}"
        )
        if session.job.options.verbose:
            print(printable(text), flush=True)
    elif control.rank == 0:
        in_half = session.view.computes_in_half
        pairs = [pair for row in rows for pair in enumerate(row, start=1)]
        for number, each in [pair for pair in pairs if pair[1].differs(in_half)][:1]:
            each.warn(number if is_manual else None)


def _runs(session: Session, batch: Any, pieces: Sequence[Piece]) -> list[Piece | None]:
    """Return the largest microbatch, its halves, and it once more; of single samples, take two.

    A rank that has only one runs it each time, or none.
    """
    layouts, spec = session.job.loaders.layouts, session.job.loaders.spec

    def cut(piece: Any, rows: int) -> list[Piece]:
        return BatchCutter(layouts, spec, (rows,)).cut(piece)

    def rows_of(piece: Any) -> int:
        pairs = zip(spec.flatten_up_to(piece), layouts, strict=True)
        return max(layout.batch_size(leaf) for leaf, layout in pairs if leaf is not None)

    whole = max(pieces, key=lambda piece: piece[1], default=None)
    if whole is not None and rows_of(whole[0]) < 2:
        whole = cut(batch, 2)[0]
    rows = 0 if whole is None else rows_of(whole[0])
    if whole is None or rows < 2:
        return [None if session.manual is None else whole] * 4
    return [whole, *cut(whole[0], rows - rows // 2), whole]


def _evaluate(session: Session, undo: ExitStack) -> Callable[[], None]:
    """Begin the comparison; return what puts back the state that a step has found.

    In evaluation mode dropout and batch normalisation change nothing. ``torch.compile`` would
    compile for other sizes.
    """
    model, view = session.model, session.view
    # one rank alone may lack the memory for copies
    enter = partial(undo.enter_context, isolated(view, model.accelerator))
    restore = session.control.together("copying what modules hold", enter)
    modes = TrainingModes([*model.module.modules()])
    undo.callback(modes.show, modes.now())
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    undo.enter_context(view.precision.train_step_context())
    if session.manual is None:
        undo.enter_context(torch.no_grad())

    def put_back() -> None:
        restore()
        model.module.eval()

    return put_back


def _compared(
    session: Session,
    step: Step,
    pieces: Sequence[Piece | None],
    put_back: Callable[[], None],
) -> tuple[Compared, ...]:
    """Run a batch, its halves and the batch once more; return what each backward shows."""
    losses = []
    for piece in pieces:
        put_back()  # each run finds buffers and numbers as the first one has found them
        losses.append(_losses(session, step, piece))
    sizes = tuple(piece[1] for piece in pieces[1:3] if piece is not None)
    # code that takes another way with fewer samples is not compared
    if len({len(own) for own in losses}) > 1:
        return ()
    found = []
    for (whole, _), *halves, (again, _) in zip(*losses, strict=True):
        weight = sum(weight for _, weight in halves)
        if weight > 0.0:
            mean = sum(loss * weight for loss, weight in halves if weight) / weight
            found.append(Compared(whole, mean, again, sizes))
    return tuple(found)


def _losses(session: Session, step: Step, piece: Piece | None) -> Sequence[tuple[float, float]]:
    """Return the losses of a step with their weights; a rank without a piece takes part."""
    executor, manual = session.model.executor, session.manual
    unused = (torch.zeros(()), 0.0)
    if piece is None:
        return executor.evaluate(None, "checking the loss of training_step").results
    batch, samples = piece

    def run() -> Any:
        result = step(own_copy(batch, with_arrays=True))
        # an error in the step is known to all ranks, one behind it would not be
        return result if manual is not None else _loss_of(result, samples)

    call = MicrobatchCall(run, lambda _: unused, samples=samples)
    if manual is None:
        return executor.evaluate(call, "checking the loss of training_step").results
    with manual.measuring(calls_hooks=False):
        manual.run(call)
        found = [(float(loss), float(samples)) for loss in manual.losses if loss.numel() == 1]
    forget_gradients(session.model.module)
    return found


def _loss_of(result: Any, samples: int) -> tuple[float, float]:
    loss, weight = loss_and_weight(result, samples)
    # one over the whole batch is meant to be over all samples
    return (math.nan, math.nan) if was_called() else (float(loss), float(weight))
