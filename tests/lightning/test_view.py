"""The private names of Lightning that ``adapters/view.py`` reads."""

import math

import pytest
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_cephalo.adapters.view import TrainerView


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int, float]] = []

    def training_step(self, batch):
        view = TrainerView(self.trainer)
        self.seen.append((view.step, view.epoch, view.batch, view.steps_left))
        assert view.is_training and view.results is view.epoch_loop._results
        assert view.batches_ready == view.batch + 1
        return self.layer(batch.float()[:, None]).mean()

    def validation_step(self, batch):
        view = TrainerView(self.trainer)
        assert view.is_fitting and not view.is_training
        assert view.results is view.evaluation_loop._results

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


@pytest.fixture
def trainer(tmp_path):
    return Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )


def test_a_view_follows_a_run(trainer):
    model, loader = Model(), DataLoader(range(8), batch_size=2)
    trainer.fit(model, loader, loader)
    assert model.seen[:3] == [(0, 0, 0, 3.5), (0, 0, 1, 3.0), (1, 0, 2, 2.5)]
    assert model.seen[-1] == (3, 1, 3, 0.0)


def test_options_show_as_they_are_now(trainer):
    view = TrainerView(trainer)
    assert (view.clip_value, view.clips_by_value, view.accumulates) == (1.0, False, 2)
    assert not view.skips_backward
    trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 0, "value"
    trainer.accumulate_grad_batches = 3
    assert (view.clip_value, view.clips_by_value, view.accumulates) == (None, True, 3)
    assert not view.computes_in_half


def test_steps_without_an_end_are_infinite(tmp_path):
    trainer = Trainer(max_epochs=-1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert TrainerView(trainer).steps_left == math.inf


def test_connectors_have_their_names(trainer):
    view = TrainerView(trainer)
    assert view.training_loaders is None and view.loader_source is not None
    assert hasattr(view.connector("logger"), "_first_loop_iter")
    assert hasattr(view.connector("signal"), "_original_handlers")
    assert hasattr(view.connector("checkpoint"), "_loaded_checkpoint")
    assert view.connector("accelerator").use_distributed_sampler
