"""What this package reads of Lightning's Trainer, and writes to it: one value that is handed on.

[Note: private names of Lightning] Loops, their loaders and results, and connectors have no public
names. They are named here, so that one file follows another version of Lightning;
``tests/lightning/test_view.py`` fails when they change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from torch.optim import Optimizer


@dataclass(frozen=True)
class TrainerView:
    """A live view of a Trainer: options that code changes between steps show here."""

    of: Trainer

    @classmethod
    def of_module(cls, module: LightningModule) -> TrainerView:
        """Return the view of the Trainer that runs a module."""
        return cls(module.trainer)

    # -- what runs ----------------------------------------------------------------------------

    @property
    def module(self) -> LightningModule:
        return self.of.lightning_module

    @property
    def strategy(self) -> Any:
        return self.of.strategy

    @property
    def precision(self) -> Precision:
        return self.of.precision_plugin

    @property
    def computes_in_half(self) -> bool:
        return "16" in str(self.of.precision)

    @property
    def callbacks(self) -> Sequence[Any]:
        return self.of.callbacks  # type: ignore[attr-defined]

    @property
    def loggers(self) -> Sequence[Any]:
        return self.of.loggers

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self.of.optimizers

    @property
    def is_fitting(self) -> bool:
        """Whether ``fit`` runs, with its validations."""
        return self.of.state.fn == TrainerFn.FITTING

    @property
    def is_training(self) -> bool:
        """Whether the training loop runs, and no validation inside of it."""
        return self.of.state.stage == RunningStage.TRAINING

    @property
    def is_interrupted(self) -> bool:
        return self.of.state.status == TrainerStatus.INTERRUPTED

    # -- clipping and accumulation ------------------------------------------------------------

    @property
    def clip_value(self) -> float | None:
        """``gradient_clip_val``; None: gradients are not clipped."""
        return self.of.gradient_clip_val or None

    @property
    def clips_by_value(self) -> bool:
        return self.of.gradient_clip_algorithm == "value"

    @property
    def accumulates(self) -> int:
        return self.of.accumulate_grad_batches

    @property
    def skips_backward(self) -> bool:
        """Whether steps run for statistics only, as in the last pass of SWA."""
        return self.of.fit_loop._skip_backward

    # -- where it stands ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.of.global_step

    @property
    def epoch(self) -> int:
        return self.of.current_epoch

    @property
    def batch(self) -> int:
        return int(self.epoch_loop.batch_idx)

    @property
    def batches_ready(self) -> int:
        """Batches of the epoch that the loop has taken from the loader."""
        return int(self.epoch_loop.batch_progress.current.ready)

    @property
    def steps_left(self) -> float:
        """Updates that are left; infinite if unknown."""
        left, epochs = math.inf, self.of.max_epochs
        if self.of.max_steps >= 0:
            left = float(self.of.max_steps - self.step)
        if epochs is not None and epochs >= 0:
            batches = (epochs - self.epoch) * float(self.of.num_training_batches)
            left = min(left, (batches - self.batches_ready) / self.accumulates)
        return max(left, 0.0)

    # -- loops --------------------------------------------------------------------------------

    @property
    def fit_loop(self) -> Any:
        return self.of.fit_loop

    @property
    def epoch_loop(self) -> Any:
        return self.of.fit_loop.epoch_loop

    @property
    def evaluation_loop(self) -> Any:
        """The loop of the validation or test that runs."""
        return self.of._evaluation_loop

    @property
    def training_loaders(self) -> Any:
        """The CombinedLoader of training; None: the loop has not begun."""
        return self.of.fit_loop._combined_loader

    @property
    def loader_source(self) -> Any:
        """What gives the training dataloaders: ``fit``'s argument, or a hook of the user's."""
        return self.of.fit_loop._data_source

    def request_loaders(self) -> Any:
        """Return the training dataloaders, which Lightning's loop will then get, too.

        A resumed loader would start anew if the loop's ``setup_data`` were called early.
        """
        source = self.loader_source
        vars(source).pop("dataloader", None)  # of a run that has failed before its loop began
        found = _request_dataloader(source)

        def dataloader() -> Any:
            del source.dataloader  # later requests call the user's hook
            return found

        if source.is_module():
            source.dataloader = dataloader  # on the instance, for one call
        return found

    @property
    def results(self) -> Any:
        """The result collection of the running loop; None between loops."""
        return self.of._results

    def connector(self, kind: str) -> Any:
        """Return the connector of an accelerator, of checkpoints, of loggers or of signals."""
        return getattr(self.of, f"_{kind}_connector")


def result_metric(meta: Any, is_tensor: bool) -> Any:
    """Return a metric of a result collection, which has the value of nothing."""
    return _ResultMetric(meta, is_tensor)
