"""Profiling leaves no trace: every kind of state is as it was, and nothing is logged."""

import random
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from profiled import GPT, BatchNormNet, fit, in_ranks, loader
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.preparation import prepare as planning
from lightning_cephalo.profiling.isolation import Saved

CPU = accelerator_of(torch.device("cpu"))


@dataclass
class Notes:
    count: int = 0
    seen: list = field(default_factory=list)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.calls = 0
        self.number, self.ratio, self.text, self.nothing = 1, 0.5, "a", None
        self.tensor, self.array = torch.ones(3), np.ones(3)
        self.register_buffer("buffer", torch.zeros(2))
        self.list, self.set, self.deque = [1, [2]], {1}, deque([1], maxlen=3)
        self.dict, self.counter = {"a": {"b": torch.zeros(2)}}, Counter("aab")
        self.defaultdict = defaultdict(list, a=[1])
        self.notes = Notes()
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.metric = MeanMetric()
        self.metric.update(1.0)
        self.stranger = object()
        self.hidden_module = [nn.BatchNorm1d(2)]

    def change_everything(self):
        self.inner.calls += 1
        self.number, self.ratio, self.text, self.nothing = 2, 1.5, "b", 3
        self.tensor.add_(1)
        self.array += 1
        self.buffer.add_(1)
        self.list[1].append(3)
        self.list.insert(0, 9)
        self.set.add(2)
        self.deque.extend([4, 5, 6])
        self.dict["a"]["b"] += 1
        self.dict["new"] = 1
        self.counter.update("abc")
        self.defaultdict["b"].append(2)
        self.notes.count += 1
        self.notes.seen.append(1)
        torch.rand(2, generator=self.generator)
        self.numpy_generator.random()
        self.metric.update(5.0)
        self.hidden_module[0](torch.randn(4, 2))
        self.stranger = object()
        self.added = 1


def described(module):
    """All that `change_everything` changes, as plain values."""
    return {
        "calls": module.inner.calls,
        "atoms": (module.number, module.ratio, module.text, module.nothing),
        "tensor": module.tensor.tolist(),
        "array": module.array.tolist(),
        "buffer": module.buffer.tolist(),
        "list": repr(module.list),
        "set": sorted(module.set),
        "deque": list(module.deque),
        "dict": repr(module.dict),
        "counter": dict(module.counter),
        "defaultdict": dict(module.defaultdict),
        "notes": repr(module.notes),
        "generator": module.generator.get_state().tolist(),
        "numpy_generator": repr(module.numpy_generator.bit_generator.state),
        "metric": (float(module.metric.mean_value), module.metric._update_count),
        "hidden": module.hidden_module[0].running_mean.tolist(),
        "stranger": id(module.stranger),
        "added": hasattr(module, "added"),
    }


STATES = sorted(described(Stateful()))


@contextmanager
def preserved_state(module):
    saved = Saved(CPU)
    saved.reach(module)
    try:
        yield
    finally:
        saved.put_back()


@pytest.fixture(scope="module")
def before_and_after():
    module = Stateful()
    before = described(module)
    with preserved_state(module):
        module.change_everything()
        changed = described(module)
    return before, changed, described(module)


@pytest.mark.parametrize("name", STATES)
def test_every_kind_of_state_is_put_back(before_and_after, name):
    before, changed, after = before_and_after
    assert changed[name] != before[name]
    assert after[name] == before[name]


class Mapped(np.ndarray):
    """An array that is too large to be copied, as one of a file may be."""

    def copy(self, *_: object) -> Any:
        raise MemoryError("planted: no memory")


def test_arrays_that_nobody_can_write_to_are_not_copied():
    module = Stateful()
    module.array = np.ones(3).view(Mapped)
    module.array.flags.writeable = False
    with preserved_state(module):
        module.number += 1
    assert module.number == 1


def test_objects_that_others_hold_too_stay_the_same_objects():
    module = Stateful()
    held = [module.tensor, module.list, module.dict, module.buffer, module.notes, module.metric]
    with preserved_state(module):
        module.change_everything()
        module.tensor, module.list = torch.zeros(1), []
    now = [module.tensor, module.list, module.dict, module.buffer, module.notes, module.metric]
    assert all(a is b for a, b in zip(held, now, strict=True))


def around_profiling(module, data, look, **options):
    """What ``look(trainer)`` sees before and after profiling in this rank, and the trainer."""
    seen = []
    measure = planning.measure

    def looking(**arguments):
        seen.append(look(arguments["view"].of))
        problem = measure(**arguments)
        seen.append(look(arguments["view"].of))
        return problem

    planning.measure = looking
    try:
        trainer = fit(module, data, **options)
    finally:
        planning.measure = measure
    return seen[0], seen[1], trainer


class Counting(GPT):
    """Counts, draws, logs in every way, and keeps metrics."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.tokens = torch.zeros(())
        self.losses = []
        self.perplexity = Perplexity()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.tokens += batch[0].numel()
        self.losses.append(str(float(loss.detach())))  # a number would be warned of
        random.random(), np.random.rand(), torch.rand(1)
        with torch.no_grad():
            self.perplexity(self.network(batch[0])[:, :-1], batch[0][:, 1:])
        self.log("perplexity", self.perplexity, on_step=True, on_epoch=True)
        self.log("shown", loss, prog_bar=True, sync_dist=True)
        if self.logger is not None:
            self.logger.log_metrics({"direct": 1.0})
        return loss


def look_at_counting(trainer):
    module = trainer.lightning_module
    loop = trainer.fit_loop
    return {
        "parameters": sum(float(p.detach().full_tensor().sum()) for p in module.parameters()),
        "gradients": [p.grad is None for p in module.parameters()],
        "counters": (module.steps, float(module.tokens), list(module.losses)),
        "metric": (module.perplexity._update_count, float(module.perplexity.total_log_probs)),
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "numpy": repr(np.random.get_state()),
        "python": hash(random.getstate()),
        "results": (id(loop.epoch_loop._results), dict(loop.epoch_loop._results)),
        "logged": (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics),
        "loggers": [id(logger) for logger in trainer.loggers],
        "hook": module._current_fx_name,
        "trainer": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "progress": repr(loop.epoch_loop.batch_progress),
        "optimizers": [(id(own), dict(own.state), own.defaults) for own in trainer.optimizers],
        "schedules": [(id(own), own.scheduler.last_epoch) for own in trainer.lr_scheduler_configs],
        "gathered": [unit.state.value for unit in trainer.strategy.session.model.units],
    }


def test_through_lightning_profiling_leaves_no_trace(tmp_path):
    def counted():
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
        before, after, trainer = around_profiling(
            Counting(), loader(), look_at_counting, logger=logger, log_every_n_steps=1
        )
        own = trainer.strategy.plan.ranks[trainer.global_rank].microbatch_sizes
        assert trainer.lightning_module.steps == 1
        calls = len(trainer.lightning_module.losses), len(own)
        return before, after, calls, dict(trainer.callback_metrics)

    for before, after, (calls, planned), metrics in in_ranks(2, counted):
        for name in before:
            assert after[name] == before[name], name
        assert calls == planned  # the step of training itself; the plan may leave a rank idle
        assert {"perplexity_epoch", "shown"} <= metrics.keys()
    rows = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "shown" in rows


@pytest.mark.filterwarnings("ignore:The layers .* are batch normalisation")
def test_batch_normalisation_has_counted_only_training():
    def normalised():
        data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)

        def look(trainer):
            return {name: value.tolist() for name, value in trainer.model.named_buffers()}

        before, after, trainer = around_profiling(BatchNormNet(), data, look)
        trained = int(trainer.lightning_module.blocks[0].norm.num_batches_tracked)
        return before, after, trained

    for before, after, trained in in_ranks(2, normalised):
        assert after == before
        assert trained == 1, "one step, whatever the microbatches"


class Reading(GPT):
    """Notes the first tokens that training sees."""

    def __init__(self):
        super().__init__()
        self.first = []

    def on_train_batch_start(self, batch, batch_idx):
        self.first.append(batch[0][:, 0].tolist())


def samples_seen(plan_given):
    torch.manual_seed(11)
    source = loader().dataset
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(source, batch_size=4, sampler=RandomSampler(source, generator=generator))
    module = Reading()
    trainer = fit(module, data, max_steps=2, strategy={"plan": plan_given})
    return module.first, trainer.strategy.plan


def test_training_sees_the_same_samples_as_without_profiling():
    measured = in_ranks(2, samples_seen, None)
    given = in_ranks(2, samples_seen, measured[0][1])
    assert [first for first, _ in measured] == [first for first, _ in given]


class Transferring(GPT):
    """Its batches arrive changed by every transfer hook."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] // 2]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2]

    def training_step(self, batch, batch_idx):
        assert not (batch[0] % 2).any()
        return super().training_step(batch, batch_idx)


def test_the_users_transfer_hooks_see_the_batches_of_profiling():
    assert in_ranks(2, lambda: fit(Transferring(), loader()).global_step) == [1, 1]


def test_private_names_of_lightning_that_profiling_replaces_exist():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert type(trainer.fit_loop.epoch_loop._results) is _ResultCollection
    assert vars(trainer._logger_connector).keys() >= {"_current_fx", "_first_loop_iter"}
    module = LightningModule()
    assert module._current_fx_name is None
    assert callable(module._on_before_batch_transfer)
    assert trainer.strategy.optimizers == [] and trainer.strategy.lr_scheduler_configs == []
