"""What every stage does with a sharded model: evaluation, logs, checkpoints, what it holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.accelerator.device import host_memory
from lightning_cephalo.adapters import checkpoint, supported
from lightning_cephalo.adapters.logging import StepLog
from lightning_cephalo.adapters.user_gathers import UserGathers
from lightning_cephalo.data import BatchLayout
from lightning_cephalo.data.cutting import empty_like, evaluation_weight, loss_and_weight
from lightning_cephalo.data.split import BatchSplitError
from lightning_cephalo.execution.call import ForwardOutcome, MicrobatchCall
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe.memory_account import RankMemory
from lightning_cephalo.observe.memory_meter import MemoryMeter
from lightning_cephalo.plan import Plan
from lightning_cephalo.preparation.prepare import Preparation
from lightning_cephalo.ranks.processes import RanksStrategy


class ShardedStrategy(RanksStrategy):
    """Evaluates, saves and loads a sharded model; arguments are those of its base."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._engine: ShardedModel | None = None
        self._preparation: Preparation | None = None
        self._user_gathers: UserGathers | None = None
        self._meter: MemoryMeter | None = None
        self._measured_memory: tuple[RankMemory, ...] | None = None
        self._metrics: list[tuple[str, Any]] = []
        self._microbatch_count = 0
        self._combining_log = False
        self._empty_predictions: dict[tuple[Any, ...], Any] = {}

    @property
    def plan(self) -> Plan | None:
        """The plan of the running or last training, known after ``setup``."""
        return self._preparation.plan if self._preparation is not None else None

    @property
    def engine(self) -> ShardedModel:
        """The sharded model; between ``setup`` and ``teardown``."""
        if self._engine is None:
            raise RuntimeError("The model is not sharded now: this works only while training runs.")
        return self._engine

    @property
    def measured_memory(self) -> tuple[RankMemory, ...] | None:
        """What every rank held, by kind; known after training of two steps or more."""
        return self._measured_memory

    @property
    def meter(self) -> MemoryMeter:
        """Measures what this rank holds; while training runs."""
        assert self._meter is not None
        return self._meter

    def _exchange_measured_memory(self) -> None:
        own = self.meter.measured()
        found = self.engine.control.gather(own)
        if all(rank is not None for rank in found):
            self._measured_memory = tuple(found)

    def forget_groups(self) -> None:
        super().forget_groups()
        self._engine = self._preparation = self._user_gathers = self._meter = None

    # -- evaluation ---------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(
        self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self.lightning_module is not None
        rows = _rows(args[0])
        count = 1 if rows is None else rows
        log = StepLog(self.lightning_module.trainer._results, [count], self._metrics)

        def step() -> Any:
            result = getattr(self.lightning_module, name)(*args, **kwargs)
            log.weight = evaluation_weight(result, count)
            return result

        call = None
        if count:
            call = MicrobatchCall(
                step,
                partial(loss_and_weight, samples=count),
                partial(log.resume, 0),
                partial(log.pause, 0),
            )
        assert self._user_gathers is not None
        self._user_gathers.before_step("evaluation", 1 if count else 0)
        with context():
            outcome = self.engine.runner.evaluate(call, f"running {name}", log.note)
        self._finish_log(log, outcome, (log.weight,) if call else ())
        result = outcome.results[0] if outcome.results else None
        if name == "predict_step":
            return self._prediction(result, count, tuple(args[2:]))
        return result

    def _prediction(self, result: Any, count: int, dataloader: tuple[Any, ...]) -> Any:
        """A step's predictions; none, but of the same kind, from a rank without samples in it."""
        if count and dataloader not in self._empty_predictions:
            self._empty_predictions[dataloader] = empty_like(result, count)
        return result if count else self._empty_predictions.get(dataloader)

    def on_validation_start(self) -> None:
        self._share_changed_buffers()

    def on_test_start(self) -> None:
        self._share_changed_buffers()

    def on_validation_end(self) -> None:
        self.engine.runner.reshard()

    def on_test_end(self) -> None:
        self.engine.runner.reshard()

    def on_predict_start(self) -> None:
        self._share_changed_buffers()
        self._empty_predictions = {}

    def on_predict_end(self) -> None:
        self.engine.runner.reshard()

    def _share_changed_buffers(self) -> None:
        """Running statistics differ between ranks: those of one that has data count for all."""
        if self.plan is not None and supported.has_running_statistics(self.engine.module):
            sizes = [rank.batch_size for rank in self.plan.ranks]
            self.engine.share_buffers(sizes.index(max(sizes)))

    # -- checkpoints --------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is not None:
            self._engine.runner.reshard()
            self._share_changed_buffers()
        with host_memory():
            return checkpoint.full_state_dict(self.lightning_module, keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint_: Any, strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._engine is not None:
            self._engine.runner.reshard()
        checkpoint.load_full_state_dict(self.lightning_module, checkpoint_["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        with host_memory():
            return checkpoint.full_optimizer_state(optimizer, keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint_: Any) -> None:
        states = checkpoint_["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            checkpoint.load_full_optimizer_state(optimizer, state)

    # -- logs -----------------------------------------------------------------------------------

    def _finish_log(
        self, log: StepLog, outcome: ForwardOutcome, weights: tuple[float, ...]
    ) -> None:
        assert self.lightning_module is not None
        self._combining_log = True
        try:
            # in the step's default dtype: a key that this rank takes over from others must have
            # theirs, or the ranks would exchange numbers of different sizes
            with self.precision_plugin.forward_context():
                log.finish(
                    weights,
                    outcome.notes,
                    self.engine.control,
                    self.lightning_module,
                    self.reduce,
                    outcome.total_weight or None,  # evaluation knows none: it is in the notes
                )
        finally:
            self._combining_log = False

    # -- communication that users and Lightning ask for ---------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if self._combining_log or (
            self._engine is not None and self._engine.runner.inside_microbatch
        ):
            return tensor  # metrics are combined over microbatches and ranks after the step
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()  # Lightning #21859: the mean of integers would be cut off
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        inside = self._engine is not None and self._engine.runner.inside_microbatch
        if inside:
            assert self._user_gathers is not None and self.lightning_module is not None
            training = self.lightning_module.trainer.training
            counts = None
            if self.plan is not None:
                counts = [len(rank.microbatch_sizes) for rank in self.plan.ranks]
            self._user_gathers.called(training, counts, self._microbatch_count)
        if sync_grads:
            return super().all_gather(tensor, group=group, sync_grads=True)
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        return torch.stack(parts)


def _rows(batch: Any) -> int | None:
    """Samples of an evaluation batch, None if it does not tell."""
    try:
        return BatchLayout().batch_size(batch)
    except BatchSplitError:
        return None
