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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_cephalo.accelerator.generators import GeneratorsOfSteps, write_generators
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.data.containers import own_copy
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.execution.sharded_model import ShardedModel

MOST_REPEATS = 2


class Relief(Protocol):
    """Makes room after an error, on all ranks together; ``preparation/relief.py`` has one."""

    def __call__(self, error: Exception, refused: str) -> None:
        """Let the next attempt take less memory; collective."""


class RepeatedStep:
    """Runs the forwards and backwards of a training, some of them again."""

    def __init__(self, model: ShardedModel, metrics: Sequence[tuple[str, Metric]]) -> None:
        self._model = model
        self._metrics = [metric for _, metric in metrics]
        self._evaluations = self._repeats = 0
        self._run: Callable[[bool], Any] | None = None
        self._random: tuple[Any, ...] | None = None
        self._generators = GeneratorsOfSteps(model.accelerator)
        self._counted: list[Callable[[], None]] = []
        model.executor.overlay.keeps_start = True

    def begin_batch(self) -> None:
        """Begin a batch, whose closure has not been evaluated yet."""
        self._evaluations = self._repeats = 0

    @property
    def was_repeated(self) -> bool:
        """Whether the running step is a repeated one, so that its time says nothing."""
        return self._repeats > 0

    def forward(self, run: Callable[[bool], Any], relief: Relief | None) -> Any:
        """Return what a forward returns, which runs again if a rank lacks the memory.

        ``run`` gets whether the step goes on from it. Without relief the error is raised.
        """
        self._evaluations += 1
        self._run = run
        self._random = self._generators.read()
        self._counted = [_states_of(metric) for metric in self._metrics]
        while True:
            error, result = _attempt(run, True)
            if error is None:
                self._counted = []
                return result
            self._relieve(error, relief, "")
            for put_back in self._counted:
                put_back()

    def backward(self, run: Callable[[], None], relief: Relief | None) -> None:
        """Run a backward; if a rank lacks the memory, repeat the forward and the backward."""
        flats = self._model.flats
        holds_gradients = any(p.grad is not None for flat in flats for p in flat.sharded)
        error, _ = _attempt(run)
        while error is not None:
            refused = ""
            if holds_gradients:
                refused = (
                    "The step cannot be repeated: gradients add up over several batches, and its"
                    " backward may have added some already."
                )
            self._relieve(error, relief, refused)
            error, _ = _attempt(self._both, run)
        self.end()

    def _both(self, run: Callable[[], None]) -> None:
        assert self._run is not None
        with self._unseen():
            self._run(False)
        run()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Leave metrics and the place of the step as the first forward has left them.

        Private: ``self.log`` asks where it is called, and Lightning is in its backward now.
        """
        module: Any = self._model.module
        counted = [_states_of(metric) for metric in self._metrics]
        name, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            yield
        finally:
            module._current_fx_name = name
            for put_back in counted:
                put_back()

    def _relieve(self, error: Exception, relief: Relief | None, refused: str) -> None:
        """Make room and put back what the step has changed, or raise the error."""
        executor = self._model.executor
        if not executor.failure.gave_up:
            raise error  # the other ranks are elsewhere
        if executor.updates.left_half_updated or self._evaluations > 1:
            raise error  # on every rank
        if self._repeats == MOST_REPEATS:
            refused = f"The step was repeated {MOST_REPEATS} times already."
        if relief is None:
            raise error
        if not refused:
            executor.updates.forget_sent()
        try:
            relief(error, refused)
        except Exception as failure:
            executor.failure.gave_up = failure is error
            raise
        executor.failure.gave_up = False  # the next attempt may fail before its pass
        self._repeats += 1
        executor.updates.repeat()
        executor.overlay.put_back()
        assert self._random is not None
        write_generators(self._model.accelerator, self._random)

    def end(self) -> None:
        """End a step, and let go of all that a repetition would need."""
        self._run = self._random = None
        self._model.executor.overlay.forget_start()


class Attempts:
    """A rank's batch for each attempt at its step, in the containers of before the step.

    Code may pop labels. Tensors are the same ones: a copy would cost memory in every step.
    """

    def __init__(self, batch: Any, *, may_repeat: bool) -> None:
        self._batch, self._is_first = batch, True
        self._before = own_copy(batch, with_arrays=False) if may_repeat else batch
        self._may_repeat = may_repeat
        self._parts: list[tuple[Tensor, int]] = []

    def next(self) -> Any:
        """Return the batch for the next attempt."""
        if self._is_first or not self._may_repeat:
            self._is_first = False
            return self._batch
        return own_copy(self._before, with_arrays=False)

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


def _states_of(metric: Metric) -> Callable[[], None]:
    """Return a function that gives a metric its present states again.

    Private attributes of torchmetrics, as in ``torchmetrics.py``.
    """
    if not metric._update_count:
        return metric.reset
    states = {name: _copy_of(getattr(metric, name)) for name in metric._defaults}
    kept = {
        name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")
    }

    def put_back() -> None:
        for name, state in states.items():
            setattr(metric, name, _copy_of(state))  # it may be put back once more
        for name, value in kept.items():
            setattr(metric, name, value)

    return put_back


def _copy_of(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
