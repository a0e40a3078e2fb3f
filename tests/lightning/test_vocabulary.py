"""A Trainer with vocabulary_sharding=True trains as on one device, and refuses what it cannot.

So does one with chunked_logits=True.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Cases, on_one_device
from common import (
    assert_same_optimizer_state,
    assert_same_tensors,
    in_ranks,
    trainer,
    values_of,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from plans import GLOBAL_BATCH, PLANS, QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo import gpt2

from lightning_cephalo import CephaloStrategy, Plan
from lightning_cephalo.common.errors import PlanError, UnsupportedError
from lightning_cephalo.execution.vocabulary import chunked

TOLERANCE = 2e-5
CUT, CHUNKED = {"vocabulary_sharding": True}, {"chunked_logits": True}


def _rows(count: int) -> list[dict[str, Tensor]]:
    """Sequences of which different parts count; of those of one microbatch, none does."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for index in range(count):
        tokens = torch.randint(61, (6,), generator=generator)
        labels = tokens.clone()
        labels[: 6 if index in (6, 7) else index % 5] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Language(LightningModule):
    """An unmodified GPT-2; weighs microbatches by their tokens, and logs its accuracy."""

    automatic = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns of its own deprecations
            self.model = gpt2()
        self.automatic_optimization = self.automatic
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out = self.model(**batch)
        counted = batch["labels"][:, 1:] >= 0
        right = (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:])[counted]
        if len(right):
            self.log("right", right.float().mean(), batch_size=len(right), sync_dist=True)
        return {"loss": out.loss, "weight": counted.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch["input_ids"]
        self.log("val", self.model(tokens, labels=tokens).loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).logits[:, -1]

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append((float(metrics["right"]), float(metrics.get("val", 0.0))))

    def configure_optimizers(self) -> Any:
        # with torch's eps, gradients of 1e-8 move weights as far as others do: rounding shows
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, foreach=False)


def _loader(count: int) -> DataLoader:
    return DataLoader(_rows(count), batch_size=8)


class Changes(Callback):
    """Lets rows move in the middle of training."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if isinstance(trainer.strategy, CephaloStrategy) and trainer.global_step == 1:
            ranks = trainer.strategy.plan.ranks
            turned = [rank.state_fraction for rank in reversed(ranks)]
            plan = [replace(r, state_fraction=f) for r, f in zip(ranks, turned, strict=True)]
            trainer.strategy.change_plan(Plan(tuple(plan)))


def _fit(plan: str | None, folder: str, given: dict[str, Any]) -> Any:
    """Train, save, and go on from the file of the other way of training."""
    chunked.CHUNK_TOKENS = 7
    model = Language()
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "callbacks": [Changes()]}
    run = trainer(plan, given, max_epochs=2, **options)
    run.fit(model, _loader(24), _loader(8))
    path = Path(folder) / f"{plan}{[*given]}.ckpt"
    run.save_checkpoint(path)
    values = values_of(model)
    with warnings.catch_warnings():
        if given == CUT:  # others give all logits anyway
            warnings.filterwarnings("ignore", message=".*needs all logits")
        predicted = run.predict(model, _loader(8))
    assert all(type(each) is Tensor and each.shape[1:] == (61,) for each in predicted)
    more = trainer(plan, given, max_epochs=3, **options)
    again = Language()
    more.fit(again, _loader(24), _loader(8), ckpt_path=str(Path(folder) / "None[].ckpt"))
    return torch.tensor(model.seen + again.seen), values, values_of(again)


# two rows have seven counted tokens each time, like a number of samples that is not theirs
@pytest.mark.filterwarnings("ignore:.*batch_size=7. gives this number")
def test_training_and_checkpoints_are_those_of_one_device(tmp_path: Path):
    expected = on_one_device(_fit, str(tmp_path), {})
    ways = [("3:1", CUT), ("no data", CUT), ("3:1", CHUNKED)]
    fits = Cases({f"{plan}{[*given]}": (plan, _fit, str(tmp_path), given) for plan, given in ways})
    for case in fits.cases:
        found = fits[case][0]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        for values, wanted in zip(found[1:], expected[1:], strict=True):
            assert_same_tensors(values, wanted, TOLERANCE)
        own, other = (
            torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in (case, "None[]")
        )
        assert_same_tensors(own["state_dict"], other["state_dict"], TOLERANCE)
        states = [file["optimizer_states"][0] for file in (own, other)]
        assert_same_optimizer_state(*states, TOLERANCE)


class Descending(Language):
    """Moves every weight by its gradient: AdamW would make much of rounding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _in_precision() -> list[float]:
    """Return how far other roots lead from one that is gathered, as a part of the way."""
    chunked.CHUNK_TOKENS = 7
    found = []
    for precision in ("bf16-mixed", "bf16-true"):
        ends = []
        for given in ({}, CUT, CHUNKED):
            model = Descending()
            begin = torch.cat([each.flatten() for each in values_of(model).values()])
            run = trainer("3:1", given, precision=precision)
            run.fit(model, _loader(16), _loader(8))
            ends.append(torch.cat([each.flatten() for each in values_of(model).values()]) - begin)
        found += [float((each - ends[0]).norm() / ends[0].norm()) for each in ends[1:]]
    return found


def test_half_precision_leads_where_a_root_that_is_gathered_leads():
    assert max(in_ranks(2, _in_precision)[0]) < 0.01


class Scaled(Descending):
    """Trains in half precision with a scaled loss, and generates while it is evaluated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = self.model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
        assert type(tokens) is Tensor and tokens.shape == (len(batch["input_ids"]), 8)
        logits = self.model(batch["input_ids"]).logits
        assert type(logits) is Tensor
        logits[..., 0] = -5.0  # they are its own

    def on_train_epoch_end(self) -> None:
        assert "forward" not in vars(copy.deepcopy(self.model).lm_head)


def _with_scaler() -> float:
    """Return where training leads, with all logits and with chunks of them."""
    chunked.CHUNK_TOKENS = 7
    ends = []
    for given in ({}, CHUNKED):
        model, scaler = Scaled(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = MixedPrecision("16-mixed", "cpu", scaler)
        trainer("3:1", given, plugins=plugins).fit(model, _loader(16), _loader(8))
        assert scaler.get_scale() == 1024.0
        ends.append(torch.cat([each.flatten() for each in values_of(model).values()]))
    begin = torch.cat([each.flatten() for each in values_of(Scaled()).values()])
    return float((ends[1] - ends[0]).norm() / (ends[0] - begin).norm())


def test_a_scaled_loss_in_chunks_leads_where_all_logits_lead():
    assert max(in_ranks(2, _with_scaler)) < 0.01


class Tokens(LightningModule):
    """Fewer tokens than ranks, or more than all blocks have parameters; the head has its own table.

    Args:
        tokens: The size of the vocabulary.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = tokens
        self.embed = nn.Embedding(tokens, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, tokens)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embed(batch)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def _tokens(plan: str | None, tokens: int) -> Any:
    model, layers = Tokens(tokens), []
    generator = torch.Generator().manual_seed(7)
    rows = list(torch.randint(tokens, (24, 5), generator=generator))
    notes = LambdaCallback(
        on_train_start=lambda run, _: layers.extend(run.strategy.session.model.executor.hooks
                                                    .vocabulary.forwards)
    )  # fmt: skip
    options = {} if plan is None else {"callbacks": [notes]}
    trainer(plan, {"vocabulary_sharding": True}, **options).fit(model, DataLoader(rows, 8))
    return model.losses, values_of(model), [layer.name for layer in layers]


def test_small_and_large_vocabularies_are_cut_with_a_head_of_their_own():
    fits = Cases({tokens: ("three", _tokens, tokens) for tokens in (2, 200)})
    for tokens in fits.cases:
        losses, values, _ = on_one_device(_tokens, tokens)
        for own_losses, own_values, layers in fits[tokens]:
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert_same_tensors(own_values, values, TOLERANCE)
            assert layers == ["embed", "head"]


class Manual(Language):
    automatic = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        optimizer, found = self.optimizers(), super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(found["loss"])
        optimizer.step()
        return {**found, "logits": self.model(**batch).logits}  # a result is real

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        assert type(outputs["logits"]) is Tensor


def _manually(plan: str | None) -> Any:
    model = Manual()
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in _rows(16)]
    loader = DataLoader(rows, batch_size=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs all logits")
        trainer(plan, CHUNKED, max_epochs=1).fit(model, loader, loader)
    return values_of(model)


def test_manual_optimization_in_chunks_trains_as_on_one_device():
    expected = on_one_device(_manually)
    for found in in_ranks(2, _manually, "whole"):
        assert_same_tensors(found, expected, TOLERANCE)


class Headless(Language):
    """A model that embeds tokens, and classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.model.lm_head = torch.nn.Linear(self.model.config.n_embd, 2)


def _refused() -> None:
    cases: list[tuple[dict[str, Any], type[LightningModule], str]] = [
        ({"replan": True}, Language, "replan=True"),
        ({"optimizer_offload": "auto"}, Language, "optimizer_offload"),
        ({"reduce_dtype": "bfloat16"}, Language, "reduce_dtype"),
        ({}, Manual, "manual optimization"),
    ]
    for options, kind, what in cases:
        given = {"vocabulary_sharding": True, **options}
        with pytest.raises(UnsupportedError, match=f"does not work with {what}"):
            trainer("even", given).fit(kind(), _loader(8), _loader(8))
    one_line = r"^chunked_logits=True, but Headless has no head [^\n]*chunked_logits=False\)\.$"
    with pytest.raises(UnsupportedError, match=one_line):
        trainer("even", CHUNKED).fit(Headless(), _loader(8), _loader(8))
    # plans of another training: named before anything is measured
    cut = replace(PLANS["even"], vocabulary_sharding=True)
    with pytest.raises(PlanError, match="replan=True cannot compare"):
        _with_plan(cut, replan=True).fit(Language(), _loader(8), _loader(8))
    whole = replace(PLANS["even"], step_s=1.0)
    for plan, is_cut in ((cut, False), (whole, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _with_plan(plan, vocabulary_sharding=is_cut).fit(Language(), _loader(8), _loader(8))
        said = [each for each in caught if "are not those of this training" in str(each.message)]
        assert len(said) == (int(os.environ["RANK"]) == 0)


def _with_plan(plan: Plan, **options: Any) -> Any:
    given = CephaloStrategy(plan=plan, global_batch_size=GLOBAL_BATCH, verbose=False, **options)
    return Trainer(strategy=given, accelerator="cpu", devices=2, **QUIET)


def test_what_does_not_go_together_is_refused_by_name_on_all_ranks():
    in_ranks(2, _refused)
