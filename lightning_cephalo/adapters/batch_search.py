"""Lets Lightning's search for a batch size run on all ranks together.

[Note: searches for a batch size]
``BatchSizeFinder``, and ``Tuner.scale_batch_size`` with it, trains a few steps with ever larger
batches until one runs out of memory. Each process of Lightning's decides by itself. Here all ranks
decide together: what one rank lacks memory for is too large for all of them. So every rank raises
an error that Lightning takes for its own device's, and goes on with the same next size.

A trial is known by the Trainer's callbacks: Lightning takes them all away meanwhile, and nothing
else does. The checkpoint of the weights has a name that each process draws at random: that of rank
0 counts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_cephalo.adapters.averaged_weights import lightnings_classes
from lightning_cephalo.common.errors import (
    CephaloError,
    HostMemoryError,
    InfeasibleError,
    RemoteRankError,
    TooLittleMemoryError,
    UnsupportedError,
)
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError, is_out_of_memory
from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LIGHTNINGS_WORDS = "To Lightning's search this is 'CUDA out of memory'."
_NO_PLAN = (InfeasibleError, TooLittleMemoryError, HostMemoryError)


class BatchDoesNotFitError(CephaloError, RuntimeError):
    """A rank lacks the memory for the batch that a search tries. Every rank raises it.

    Private to Lightning: its search takes an error for one of memory by its text alone.
    """


class LoneMemoryError(CephaloError):
    """A rank ran out of memory in a trial where the other ranks cannot learn of it."""


def batch_size_finders(trainer: Trainer) -> list[Any]:
    """Return the Trainer's callbacks that search for a batch size."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if "BatchSizeFinder" in lightnings_classes(each)]


class BatchSearch:
    """A run in which a callback may search for a batch size; see the note in this module.

    ::

        search = BatchSearch(trainer, control)
        search.asks("train_dataloader()")       # in barrier()
        search.learn(error)                     # once it is known whether the batch has a plan
        search.begin_trial()                    # raises on every rank if it has none
        result = search.step(executor, run)     # parts of steps, whose errors all ranks share

    Args:
        trainer: The trainer, before any of its callbacks searches.
        control: Messages between ranks.

    Attributes:
        asks_for_training: Whether Lightning asks for training dataloaders now, not for others.
        paths: Where rank 0 has written a checkpoint, by the path that Lightning gave this rank.
    """

    def __init__(self, trainer: Trainer, control: ControlGroup) -> None:
        self._trainer, self._control = trainer, control
        self._why_not = ""
        self._alone: LoneMemoryError | None = None
        self._is_first = self._has_tried = False
        self._modes: list[tuple[nn.Module, bool]] = []
        self.asks_for_training = True
        self.paths: dict[str, Any] = {}

    @property
    def is_trying(self) -> bool:
        """Whether a trial runs, and no training."""
        return not self._trainer.callbacks  # type: ignore[attr-defined]

    # -- dataloaders --------------------------------------------------------------------------

    def asks(self, barrier: str) -> None:
        """Note what Lightning is about to let the strategy process: its barrier's name says so.

        The search also makes validation dataloaders anew while the Trainer says that it trains.
        """
        if barrier.endswith("_dataloader()"):
            self.asks_for_training = self._is_first = barrier == "train_dataloader()"

    def takes_first(self) -> bool:
        """Return whether this is the first training dataloader, whose batch size counts; once."""
        first, self._is_first = self._is_first, False
        return first

    def agreed(self, size: int | None) -> int:
        """Return the global batch of the next steps; collective.

        Args:
            size: The dataloader's on this rank; None: it does not say.

        Raises:
            UnsupportedError: On every rank, if it does not say, or ranks have different ones.
        """
        sizes = self._control.gather((size,))
        if size is None or len(set(sizes)) > 1:
            said = ", ".join(f"{each} on rank {rank}" for rank, (each,) in enumerate(sizes))
            raise UnsupportedError(
                "A search for a batch size needs dataloaders of one size on all ranks, but their"
                f" global batches have these samples: {said}. A rank that runs out of memory in a"
                " hook, outside of steps, goes on with a size of its own: give BatchSizeFinder a"
                " lower max_val, or choose the batch size yourself."
            )
        return size

    def learn(self, error: Exception | None) -> None:
        """Learn whether the batch of the next trial has a plan; collective.

        Args:
            error: What stopped this rank from making one; None: nothing has.

        Raises:
            LoneMemoryError: On the rank that lacked memory in a step that is measured.
            Exception: On every rank, if it is anything but a lack of memory.
        """
        if isinstance(error, OutOfMemoryInStepError):
            # measuring tells all ranks of what can be told: the others wait inside of the step
            self._raise_alone(error)
        said = self._control.gather((_is_short(error), str(error or "")))
        why = next((text for is_short, text in said if is_short), "")
        if error is not None and not why:
            raise error
        self._why_not = why

    def ends(self) -> bool:
        """Return whether a search ends with the checkpoint that is loaded; once."""
        tried, self._has_tried = self._has_tried, False
        return tried

    def begin_trial(self) -> None:
        """Begin to train, or to try; equal on every rank.

        Raises:
            BatchDoesNotFitError: If the batch has no plan.
        """
        self._has_tried = self.is_trying
        modules = self._trainer.lightning_module.modules()
        self._modes = [(module, module.training) for module in modules]
        if self._why_not:
            raise BatchDoesNotFitError(
                f"The batch does not fit. {self._why_not} {_LIGHTNINGS_WORDS}"
            )

    # -- steps --------------------------------------------------------------------------------

    def step(self, executor: Executor, run: Callable[[], Any]) -> Any:
        """Run a part of a step that ends on all ranks with a result, or on all with an error.

        Args:
            executor: Knows whether all ranks have raised.
            run: The part.

        Raises:
            BatchDoesNotFitError: On every rank, if any lacked memory.
            LoneMemoryError: On the rank that lacked it, if the others cannot learn of it; here
                and from then on.
        """
        if self._alone is not None:
            raise self._alone  # Lightning makes dataloaders anew behind an error: nobody else comes
        if not self.is_trying:
            return run()
        try:
            return run()
        except BatchDoesNotFitError:  # all ranks have it
            raise
        except Exception as error:
            if self._trainer.state.fn == TrainerFn.FITTING:
                self._end_validation()
            if executor.gave_up:
                executor.gave_up = False
                self._raise_together(executor, error)
            elif _is_short(error):
                self._raise_alone(error)
            raise

    def _end_validation(self) -> None:
        """Let a search go on after an error in the validation of a trial of training.

        The error leaves its stage behind, which Lightning takes for that of the search, and modules
        that do not train.
        """
        self._trainer.training = True
        for module, is_training in self._modes:
            module.training = is_training

    def update(self, executor: Executor, run: Callable[[], Any]) -> Any:
        """Run an optimizer's step, whose end one rank alone may lack memory for; collective.

        Args:
            executor: As for :meth:`step`, like the errors.
            run: The step, with its forward and backward.
        """
        if not self.is_trying:
            return run()
        error: Exception | None = None
        result = None
        try:
            result = run()
        except OutOfMemoryInStepError as failure:  # of the update alone: step() has the others
            error = failure
        self._raise_together(executor, error)
        return result

    def _raise_together(self, executor: Executor, error: Exception | None) -> None:
        """Raise on all ranks if any lacked memory; else return; collective."""
        said = self._control.gather((_is_short(error), _first_line(error)))
        why = next((text for is_short, text in said if is_short), "")
        is_other = error is not None and not _is_short(error)
        if not why or (is_other and not isinstance(error, RemoteRankError)):
            return
        executor.early.forget()  # the search loads the weights of before
        if error is not None:
            # its frames hold activations, whose memory the next trial needs
            traceback.clear_frames(error.__traceback__)
        raise BatchDoesNotFitError(f"The batch does not fit. {why} {_LIGHTNINGS_WORDS}") from error

    def _raise_alone(self, error: Exception) -> NoReturn:
        self._alone = LoneMemoryError(
            f"Rank {self._control.rank} ran out of memory where the other ranks cannot learn of it,"
            f" so that the search for a batch size cannot go on: {_first_line(error)} Give"
            " BatchSizeFinder a lower max_val, or choose the batch size yourself."
        )
        raise self._alone from error

    # -- checkpoints --------------------------------------------------------------------------

    def saved(self, path: Any) -> None:
        """Learn where rank 0 writes a checkpoint; collective.

        Args:
            path: The path that Lightning has given this rank.
        """
        first = self._control.broadcast(path)
        if first != path:
            self.paths[str(path)] = first

    def path_of(self, path: Any) -> Any:
        """Return where rank 0 has written the checkpoint that this rank knows by a path."""
        return self.paths.get(str(path), path)


def _is_short(error: Exception | None) -> bool:
    return error is not None and (isinstance(error, _NO_PLAN) or is_out_of_memory(error))


def _first_line(error: Exception | None) -> str:
    return str(error or "").partition("\n")[0]
