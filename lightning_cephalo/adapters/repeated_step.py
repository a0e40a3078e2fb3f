"""Repeats a step in which a rank ran out of memory, as if it had not begun.

[Note: repeated steps]
Until the optimizer's update a step changes nothing that lasts but what is put back here. So it can
run once more on the same samples, by another plan: a forward inside of the strategy's
``training_step``, a backward with its forward inside of ``backward``. Hooks run once, and the
results and logs of the first forward stay. Raised are an error in the optimizer's update, or behind
an early one; a backward whose gradients add to those of earlier batches; a closure that is
evaluated again in the middle of an update.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_cephalo.accelerator.generators import GeneratorsOfSteps, write_generators
from lightning_cephalo.adapters.torchmetrics import metrics_of
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.data.batch_layout import own_copy
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.execution.sharded_model import ShardedModel

MOST_REPEATS = 2

Relief = Callable[[Exception, str], None]
"""Makes room after an error, on all ranks together, or raises it with why there is none."""


class RepeatedStep:
    """Runs the forwards and backwards of a training, some of them again.

    Without ``relief`` an error ends the run.

    Attributes:
        may_repeat: Whether a step may run again.
        repeats: How often the running step was repeated, so that its time says nothing.
    """

    def __init__(self, model: ShardedModel, relief: Relief | None = None) -> None:
        self._model, self._relief, self.may_repeat = model, relief, relief is not None
        self._metrics = [metric for _, metric in metrics_of(model.module)] if relief else []
        self._generators = GeneratorsOfSteps(model.accelerator)
        self._evaluations = self.repeats = 0
        self._forward: Callable[[bool], Any] = bool
        self._random: tuple[Any, ...] = ()
        model.executor.overlay.keeps_start = self.may_repeat

    def begin_batch(self) -> None:
        """Begin a batch, whose closure has not been evaluated yet."""
        self._evaluations = self.repeats = 0

    def forward(self, run: Callable[[bool], Any]) -> Any:
        """Return what a forward returns, which runs again if a rank lacks the memory.

        ``run`` gets whether the step goes on from it.
        """
        if not self.may_repeat:
            return run(True)
        self._evaluations += 1
        self._forward, self._random = run, self._generators.read()
        counted = _states_of(self._metrics)
        while True:
            error, result = _attempt(run, True)
            if error is None:
                return result
            self._relieve(error, "")
            _put_back(counted)

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward; if a rank lacks the memory, repeat the forward and the backward."""
        if not self.may_repeat:
            return run()
        refused, flats = "", self._model.flats
        if any(p.grad is not None for flat in flats for p in flat.sharded):
            refused = (
                "The step cannot be repeated: gradients add up over several batches, and its"
                " backward may have added some already."
            )
        error, _ = _attempt(run)
        while error is not None:
            self._relieve(error, refused)
            error, _ = _attempt(self._both, run)
        self._forward, self._random = bool, ()
        return self._model.executor.overlay.forget_start()

    def _both(self, run: Callable[[], None]) -> None:
        """Run a forward that leaves metrics as the first one has left them, and a backward.

        Private: ``self.log`` asks where it is called, and Lightning is in its backward now.
        """
        module: Any = self._model.module
        counted = _states_of(self._metrics)
        name, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            self._forward(False)
        finally:
            module._current_fx_name = name
            _put_back(counted)
        run()

    def _relieve(self, error: Exception, refused: str) -> None:
        """Make room and put back what the step has changed, or raise the error."""
        executor = self._model.executor
        if self._relief is None or not executor.failure.gave_up:
            raise error  # the other ranks may be elsewhere
        if executor.updates.left_half_updated or self._evaluations > 1:
            raise error  # on every rank
        if self.repeats == MOST_REPEATS:
            refused = f"The step was repeated {MOST_REPEATS} times already."
        try:
            self._relief(error, refused)
        except Exception as failure:
            executor.failure.gave_up = failure is error
            raise
        executor.failure.gave_up = False  # the next attempt may fail before its pass
        self.repeats += 1
        executor.updates.repeat()
        executor.overlay.put_back()
        write_generators(self._model.accelerator, self._random)


class Attempts:
    """A rank's batch for each attempt at its step, in containers that it alone holds.

    Code may pop labels. Tensors are the same ones: a copy would cost memory in every step.
    """

    def __init__(self, batch: Any, *, may_repeat: bool) -> None:
        self._batch, self._may_repeat = batch, may_repeat
        self._parts: list[tuple[Tensor, int]] = []

    def next(self) -> Any:
        """Return the batch for the next attempt."""
        return own_copy(self._batch, with_arrays=False) if self._may_repeat else self._batch

    def cut_into(self, pieces: Sequence[tuple[Any, int]]) -> UnsupportedError | None:
        """Note what an attempt's microbatches are; return why it cannot run, if it cannot."""
        written = [part for part, version in self._parts if part._version != version]
        if written:
            shapes = sorted({tuple(part.shape) for part in written})
            return UnsupportedError(
                f"training_step has written to tensors of its batch in place (shapes: {shapes})."
                " This step has to run again, and would change them twice. Make new tensors, as in"
                " x = x / 255 rather than x.div_(255)."
            )
        if self._may_repeat:
            leaves = pytree.tree_leaves([piece for piece, _ in pieces])
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._parts = [(part, part._version) for part in tensors if not part.is_inference()]
        return None


def _attempt(function: Callable[..., Any], *args: Any) -> tuple[Exception | None, Any]:
    """Return the error of a function, which holds no activations, and its result."""
    try:
        return None, function(*args)
    except Exception as failure:
        if isinstance(failure, (OutOfMemoryInStepError, RemoteRankError)):
            # its frames hold activations, whose memory is needed
            traceback.clear_frames(failure.__traceback__)
        return failure, None


# private attributes of torchmetrics, as in ``torchmetrics.py``
_COUNTS = ("_update_count", "_computed", "_forward_cache")


def _states_of(metrics: Sequence[Metric]) -> list[tuple[Metric, dict[str, Any]]]:
    """Return what metrics hold; their own copies are of all entries of lists, in every step."""
    return [
        (metric, {name: _copy_of(getattr(metric, name)) for name in (*metric._defaults, *_COUNTS)})
        for metric in metrics
    ]


def _put_back(states: list[tuple[Metric, dict[str, Any]]]) -> None:
    for metric, values in states:
        for name, value in values.items():
            setattr(metric, name, _copy_of(value))  # it may be put back once more


def _copy_of(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    return [*state] if isinstance(state, list) else state
