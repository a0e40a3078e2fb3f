"""Runs the steps of a run for Lightning's hooks: automatic, manual, and those of an evaluation.

``strategy.py`` calls these objects. With automatic optimization a step has one forward, one
backward and one update. With manual optimization the code of ``training_step`` calls its backwards
and updates itself (``features/manual_step.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.logging import StepLog
from lightning_cephalo.adapters.optimizer import local_update
from lightning_cephalo.adapters.precision import loss_scaler
from lightning_cephalo.adapters.repeated_step import Attempts
from lightning_cephalo.adapters.step_notes import StepNotes, TellsRanks
from lightning_cephalo.adapters.step_outputs import outputs_everywhere
from lightning_cephalo.data.cutting import (
    evaluation_samples,
    evaluation_weight,
    joined_result,
    loss_and_weight,
)
from lightning_cephalo.execution.step import ForwardOutcome, MicrobatchCall
from lightning_cephalo.features.manual_step import PhasedSteps
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.preparation.training import Training
from lightning_cephalo.ranks.control import NotCopied

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments of a hook; in a training, those behind the batch."""


Note = Callable[[], Sequence[float]]
"""Returns what this rank tells the others at the end of a forward."""


class Steps(NotCopied, ABC):
    """The steps of a training; ``tells`` adds numbers to the exchange of each."""

    def __init__(self, training: Training, *tells: TellsRanks) -> None:
        self._training = training
        self._session, self._view, self._watch = training.session, training.view, training.watch
        self._notes = StepNotes(training, *tells)

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
    def _forward_of(
        self, calls: Sequence[MicrobatchCall], note: Note, failure: Exception | None
    ) -> ForwardOutcome:
        """Run microbatches, unless this rank has failed; collective."""

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
        note = (lambda: self._notes.of(log.note())) if is_seen else tuple
        with self._view.precision.train_step_context():
            outcome = self._forward_of(calls, note, failure)
        return counts, log, outcome

    def _run_forward(self, batch: Any, arguments: Arguments) -> tuple[list[int], ForwardOutcome]:
        """Run a forward whose logs count; return its microbatches' samples and its outcome."""
        training, memory = self._training, self._session.memory
        memory.before_forward(batch)
        attempts = Attempts(batch, may_repeat=training.repeated.may_repeat)
        run = partial(self._forward, attempts, arguments)
        counts, log, outcome = training.repeated.forward(run)
        self._notes.learn(outcome.notes)
        memory.after_forward()
        with self._view.precision.forward_context():
            self._session.logs.finish(log, outcome)
        return counts, outcome

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        session = self._session
        session.look_for_early_update(optimizer)
        owned, executor = session.updates.of(optimizer), session.model.executor
        update = local_update(optimizer, owned, elsewhere=executor)
        with ExitStack() as after_closure, update:

            def whole_closure() -> Any:
                after_closure.close()  # some optimizers evaluate their closure several times
                outcome = closure()
                after_closure.enter_context(executor.update())
                return outcome

            return self._view.precision.optimizer_step(
                optimizer, model=self._view.module, closure=whole_closure, **options
            )


class AutomaticSteps(Steps):
    """Steps whose backward and update follow ``training_step``."""

    def training_step(self, batch: Any, arguments: Arguments) -> Any:
        self._watch.start_step()
        session, (counts, outcome) = self._session, self._run_forward(batch, arguments)
        joined = joined_result(outcome.results, outcome.weights, counts)
        return outputs_everywhere(
            joined, sum(counts), outcome.losses, session.groups, session.model.device
        )

    def _forward_of(
        self, calls: Sequence[MicrobatchCall], note: Note, failure: Exception | None
    ) -> ForwardOutcome:
        executor = self._session.model.executor
        executor.weighing.steps_per_update = self._view.accumulates
        return executor.forward(calls, loss_scaler(self._view.precision), note, failure)

    def backward(self, loss: Tensor, optimizer: Optimizer | None, arguments: Arguments) -> Tensor:
        executor, view = self._session.model.executor, self._view
        executor.show_held_gradients()
        loss = view.precision.pre_backward(loss, view.module)
        self._training.repeated.backward(partial(executor.backward, float(view.accumulates)))
        return view.precision.post_backward(loss, view.module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> Any:
        memory = self._session.memory
        with memory.step():
            result = self._update(optimizer, closure, options)
        is_repeated = self._training.repeated.repeats > 0
        self._watch.finish_step(counts=not memory.slowed and not is_repeated)
        return result

    def before_norm(self) -> bool:
        return True


class ManualSteps(Steps):
    """Steps whose code calls backwards and updates itself."""

    def __init__(self, phased: PhasedSteps, training: Training, *tells: TellsRanks) -> None:
        super().__init__(training, *tells)
        self._phased = phased

    def training_step(self, batch: Any, arguments: Arguments) -> Any:
        memory = self._session.memory
        self._watch.start_step()
        with memory.step():
            _, outcome = self._run_forward(batch, arguments)
        self._watch.finish_step(counts=not memory.slowed)
        return recursive_detach(outcome.results[0])

    def _forward_of(
        self, calls: Sequence[MicrobatchCall], note: Note, failure: Exception | None
    ) -> ForwardOutcome:
        return self._phased.run(next(iter(calls), None), note, failure)

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


def evaluate(
    session: Session,
    name: str,
    arguments: Arguments,
    tells: TellsRanks,
) -> tuple[Any, int]:
    """Run a module's step without gradients; return its result and this rank's samples in it."""
    user_step, (args, kwargs) = getattr(session.model.module, name), arguments
    samples = 0 if session.batches.are_lacking else evaluation_samples(args[0])
    log, notes = session.logs.of_step([samples]), StepNotes(tells)

    def step() -> Any:
        result = user_step(*args, **kwargs)
        log.weight = evaluation_weight(result, samples)
        return result

    call = _call(step, samples, log) if samples else None
    executor = session.model.executor
    outcome = executor.evaluate(call, f"running {name}", lambda: notes.of(log.note()))
    notes.learn(outcome.notes)
    session.logs.finish(log, outcome)
    view = session.view
    if name != "predict_step" and view.evaluation_loop.batch_progress.is_last_batch:
        executor.reshard()  # hooks at the end of the epoch may write parameters
    return (outcome.results[0] if samples else None), samples


def _call(
    step: Callable[[], Any], samples: int, log: StepLog, microbatch: int = 0
) -> MicrobatchCall:
    """Return a microbatch of ``samples`` samples that logs into the step's log."""
    return MicrobatchCall(
        step,
        partial(loss_and_weight, samples=samples),
        partial(log.resume, microbatch),
        log.pause,
        samples,
    )
