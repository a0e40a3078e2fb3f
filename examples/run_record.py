"""Writes a run's plan and figures to its folder."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class RunRecord(Callback):
    """Times every step, and writes ``plan.yaml`` and ``metrics.json`` on rank 0.

    A step lasts from the end of the previous step (or of the validation between them) to its own
    end: data, communication and optimizer included. The first ``warmup_steps`` are not counted.
    """

    def __init__(self, folder: Path, global_batch_size: int, warmup_steps: int = 3) -> None:
        self.folder = folder
        self.global_batch_size = global_batch_size
        self.warmup_steps = warmup_steps
        self.step_s: list[float] = []
        self.train_loss: list[float] = []
        self._since = 0.0

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not None and trainer.is_global_zero:
            plan.save(self.folder / "plan.yaml")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.step_s.append(now - self._since)
        self._since = now
        self.train_loss.append(float(trainer.callback_metrics["train_loss"]))

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        # later than on_train_end, in which the strategy shares what all ranks have measured
        if trainer.is_global_zero:
            figures = json.dumps(self.metrics(trainer), indent=2)
            (self.folder / "metrics.json").write_text(figures + "\n")

    def metrics(self, trainer: Trainer) -> dict[str, Any]:
        """Return the run's figures: times in seconds, losses in nats per byte."""
        steady = self.step_s[self.warmup_steps :] or self.step_s
        median_step_s = statistics.median(steady)
        validation = trainer.callback_metrics.get("val_loss")
        plan = getattr(trainer.strategy, "plan", None)
        return {
            "strategy": type(trainer.strategy).__name__,
            "ranks": trainer.world_size,
            "global_batch_size": self.global_batch_size,
            "steps": len(self.step_s),
            "median_step_s": median_step_s,
            "predicted_step_s": None if plan is None else plan.step_s,
            "samples_per_s": self.global_batch_size / median_step_s,
            "first_train_loss": self.train_loss[0],
            "last_train_loss": self.train_loss[-1],
            "val_loss": None if validation is None else float(validation),
            "bytes_per_parameter": bytes_per_parameter(trainer),
            "step_s": self.step_s,
            "train_loss": self.train_loss,
        }


def bytes_per_parameter(trainer: Trainer) -> list[dict[str, float]] | None:
    """Return what each rank holds for a parameter, as measured; None if it was not."""
    found = []
    report = getattr(trainer.strategy, "report", None)
    for memory in (None if report is None else report.memory) or ():
        if memory.bytes_per_parameter is None:
            return None
        between_steps, within_a_step = memory.bytes_per_parameter
        found.append(
            {
                "parameters": memory.parameters,
                "between_steps": between_steps,
                "within_a_step": within_a_step,
            }
        )
    return found or None
