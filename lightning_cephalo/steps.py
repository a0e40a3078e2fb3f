"""Runs the steps of a run for Lightning's hooks: automatic, manual, and those of an evaluation.

``strategy.py`` calls these objects. With automatic optimization a step has one forward, one
backward and one update. With manual optimization the code of ``training_step`` calls its backwards
and updates itself (``features/manual_step.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.logging import StepLog
from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.adapters.precision import loss_scaler
from lightning_cephalo.adapters.repeated_step import Attempts
from lightning_cephalo.adapters.step_notes import StepNotes, TellsRanks
from lightning_cephalo.adapters.step_outputs import outputs_everywhere
from lightning_cephalo.data.cutting import (
    detached,
    evaluation_samples,
    evaluation_weight,
    joined_result,
    loss_and_weight,
)
from lightning_cephalo.execution.step import ForwardOutcome, MicrobatchCall
from lightning_cephalo.execution.updates import LateUpdates
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.preparation.training import Training
from lightning_cephalo.ranks.control import not_connected

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a hook passes on behind the batch: positional and named arguments."""


@dataclass(frozen=True)
class _Forward:
    """The microbatches of a forward, what this rank tells the others at its end, and a failure."""

    calls: Sequence[MicrobatchCall]
    note: Callable[[], Sequence[float]]
    failure: Exception | None


class Steps(ABC):
    """The steps of a training.

    Args:
        reduce: Lightning's function that reduces values over the ranks.
        tells: What else adds numbers to the exchange of each step.
    """

    def __init__(
        self, training: Training, reduce: Callable[..., Any], tells: Sequence[TellsRanks]
    ) -> None:
        self._training, self._reduce = training, reduce
        self._session, self._view, self._watch = training.session, training.view, training.watch
        self._notes = StepNotes(training, *tells)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Make None of a copy, as of a session."""
        return not_connected, ()

    @abstractmethod
    def training_step(self, batch: Any, arguments: Arguments) -> Any:
        """Run ``training_step`` on a batch of this rank, and return what Lightning gets of it."""

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer | None, arguments: Arguments) -> Tensor:
        """Run a backward, and return the loss."""

    @abstractmethod
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        """Run an optimizer's step, and return what it returns."""

    @abstractmethod
    def before_norm(self) -> bool:
        """Let all ranks come before gradients are clipped; return whether to clip at all."""

    @abstractmethod
    def _forward_of(self, forward: _Forward) -> ForwardOutcome:
        """Run microbatches; collective."""

    def _forward(
        self, attempts: Attempts, arguments: Arguments, is_seen: bool
    ) -> tuple[list[int], StepLog, ForwardOutcome]:
        """Run a forward, and return its microbatches' samples, its log and its outcome."""
        session, batch = self._session, attempts.next()
        rest, kwargs = arguments
        step = self._view.module.training_step
        pieces, failure = session.batches.cut(batch)
        failure = attempts.cut_into(pieces) or failure
        counts = [count for _, count in pieces]
        self._training.compare_losses(batch, pieces, lambda piece: step(piece, *rest, **kwargs))
        log = session.logs.of_step(counts, is_seen=is_seen)
        calls = [
            _call(partial(step, piece, *rest, **kwargs), count, log, index)
            for index, (piece, count) in enumerate(pieces)
        ]
        session.user_collectives.before_step(len(calls), trains=True, failed=failure is not None)
        note = (lambda: self._notes.of(log.note())) if is_seen else tuple
        with self._view.precision.train_step_context():
            outcome = self._forward_of(_Forward(calls, note, failure))
        return counts, log, outcome

    def _run_forward(
        self, batch: Any, arguments: Arguments
    ) -> tuple[list[int], StepLog, ForwardOutcome]:
        training, memory = self._training, self._session.memory
        memory.before_forward(batch)
        attempts = Attempts(batch, may_repeat=training.may_repeat)
        found = training.forward(partial(self._forward, attempts, arguments))
        self._notes.learn(found[2].notes)
        memory.after_forward()
        return found

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        session = self._session
        session.look_for_early_update(optimizer)
        elsewhere = None if session.moved is None else LateUpdates(session.model.executor)
        update = local_update(optimizer, session.updates.of(optimizer), elsewhere)
        with ExitStack() as after_closure, update:

            def whole_closure() -> Any:
                after_closure.close()  # some optimizers evaluate their closure several times
                outcome = closure()
                after_closure.enter_context(session.model.executor.update())
                return outcome

            return self._view.precision.optimizer_step(
                optimizer, model=self._view.module, closure=whole_closure, **options
            )


class AutomaticSteps(Steps):
    """Steps whose backward and update follow ``training_step``."""

    def training_step(self, batch: Any, arguments: Arguments) -> Any:
        session = self._session
        self._watch.start_step()
        counts, log, outcome = self._run_forward(batch, arguments)
        with self._view.precision.forward_context():
            session.logs.finish(log, outcome, outcome.weights, self._reduce)
        joined = joined_result(outcome.results, outcome.weights, counts)
        return outputs_everywhere(
            joined, sum(counts), outcome.losses, session.groups, session.model.device
        )

    def _forward_of(self, forward: _Forward) -> ForwardOutcome:
        executor = self._session.model.executor
        executor.weighing.steps_per_update = self._view.accumulates
        scale_loss = loss_scaler(self._view.precision)
        return executor.forward(forward.calls, scale_loss, forward.note, forward.failure)

    def backward(self, loss: Tensor, optimizer: Optimizer | None, arguments: Arguments) -> Tensor:
        executor, view = self._session.model.executor, self._view
        executor.show_held_gradients()
        loss = view.precision.pre_backward(loss, view.module)
        self._training.backward(partial(executor.backward, float(view.accumulates)))
        return view.precision.post_backward(loss, view.module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        memory = self._session.memory
        with memory.step():
            result = self._update(optimizer, closure, options)
        is_repeated = self._training.step_was_repeated
        self._watch.finish_step(counts=not memory.slowed and not is_repeated)
        return result

    def before_norm(self) -> bool:
        return True


class ManualSteps(Steps):
    """Steps whose code calls backwards and updates itself."""

    def __init__(self, phased: PhasedSteps, *args: Any) -> None:
        super().__init__(*args)
        self._phased = phased

    def training_step(self, batch: Any, arguments: Arguments) -> Any:
        session = self._session
        self._watch.start_step()
        with session.memory.step():
            _, log, outcome = self._run_forward(batch, arguments)
            with self._view.precision.forward_context():
                session.logs.finish(log, outcome, outcome.weights, self._reduce)
        self._watch.finish_step(counts=not session.memory.slowed)
        return detached(outcome.results[0])

    def _forward_of(self, forward: _Forward) -> ForwardOutcome:
        return self._phased.run(next(iter(forward.calls), None), forward.note, forward.failure)

    def backward(self, loss: Tensor, optimizer: Optimizer | None, arguments: Arguments) -> Tensor:
        self._phased.check_is_running()
        plugin, module, (args, kwargs) = self._view.precision, self._view.module, arguments
        if not self._phased.calls_hooks:
            plugin.backward(loss, module, optimizer, *args, **kwargs)
            return loss.detach()
        loss = plugin.pre_backward(loss, module)
        # ends in loss.backward(), perhaps in a backward() of the user's
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        return plugin.post_backward(loss, module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        if self._phased.is_measured:
            return closure()
        self._training.settle()
        with self._phased.updating(optimizer):
            return self._update(optimizer, self._phased.closure(closure), options)

    def before_norm(self) -> bool:
        if self._phased.is_measured:  # ranks without samples are not here
            return False
        self._phased.meet()
        return True


class EvaluationSteps:
    """Steps without gradients: of a validation, a test or a prediction."""

    def __init__(
        self,
        session: Session,
        module: LightningModule,
        reduce: Callable[..., Any],
        tells: TellsRanks,
    ) -> None:
        self._session, self._module, self._reduce, self._tells = session, module, reduce, tells

    def run(self, name: str, batch: Any, arguments: Arguments) -> tuple[Any, int]:
        """Run one of the module's steps; return its result and this rank's samples in it."""
        session, user_step = self._session, getattr(self._module, name)
        rest, kwargs = arguments
        samples = 0 if session.batches.are_lacking else evaluation_samples(batch)
        log = session.logs.of_step([samples])

        def step() -> Any:
            result = user_step(batch, *rest, **kwargs)
            log.weight = evaluation_weight(result, samples)
            return result

        call = _call(step, samples, log) if samples else None
        session.user_collectives.before_step(1 if samples else 0, trains=False)
        notes = StepNotes(self._tells)
        executor = session.model.executor
        outcome = executor.evaluate(call, f"running {name}", lambda: notes.of(log.note()))
        notes.learn(outcome.notes)
        session.logs.finish(log, outcome, (log.weight,) if samples else (), self._reduce)
        return (outcome.results[0] if samples else None), samples


def _call(
    step: Callable[[], Any], samples: int, log: StepLog, microbatch: int = 0
) -> MicrobatchCall:
    """Return a microbatch of ``samples`` samples that logs into the step's log."""
    return MicrobatchCall(
        step,
        partial(loss_and_weight, samples=samples),
        partial(log.resume, microbatch),
        partial(log.pause, microbatch),
        samples,
    )
