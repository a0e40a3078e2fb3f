"""A job whose vocabulary stays cut is measured and planned, and what the plan says comes true."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from profiled import fit, in_ranks, measured_by
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import Plan, RankPlan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.execution.vocabulary import columns
from lightning_cephalo.execution.vocabulary.questions import Kind
from lightning_cephalo.execution.vocabulary.rounds import Asked
from lightning_cephalo.plan import cost
from lightning_cephalo.profiling import vocabulary_time

VOCABULARY, WIDTH, LENGTH = 4096, 64, 32
TOTAL = 1e13


class Llama(LightningModule):
    """A small Llama, unmodified, with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
        self.model: nn.Module = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Descending(Llama):
    """Moves every weight by its gradient: AdamW would make much of rounding."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batch_size=8):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (64, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


class Peak(Callback):
    """Most bytes alive at once in the last training step, by the emulated device's own count."""

    peak_bytes = 0

    def on_train_batch_start(self, *_):
        active_device().reset_peak()

    def on_train_batch_end(self, *_):
        self.peak_bytes = active_device().peak_bytes


def halves(*sizes):
    return tuple(RankPlan(own, share) for own, share in zip(sizes, (0.75, 0.25), strict=True))


CASES = {
    "one": halves((12,), (4,)),
    "uneven": halves((8, 2), (4, 2)),
    "without data": halves((8, 8), ()),
    "small": halves((1,) * 12, (1,) * 4),
}


def found_by_a_rank():
    """Problems, plans, and what came of them, with a cut vocabulary and with a whole one."""
    outcome = {}
    columns.CHUNK_BYTES = 2**16  # as small beside this model as the real one beside real models
    common = {"speeds": (3.0, 1.0), "total_flops_per_s": TOTAL}
    problems = {}

    def measured_once(measure, arguments):
        cuts = bool(arguments["model"].units[0].cuts)
        if cuts not in problems:
            problems[cuts] = measure(**arguments)
        return problems[cuts]

    for cuts in (True, False):
        options = {"vocabulary_sharding": cuts, "replan": False}
        model = Descending()
        with measured_by(measured_once):
            trainer = fit(model, data(), strategy=options, max_steps=4, **common)
        plan, step_s = trainer.strategy.plan, trainer.strategy.measured_step_s
        values = {name: value.detach().clone() for name, value in model.named_parameters()}
        problem = problems[cuts]
        updated = problem.with_early_update()
        memory = {}
        for name, ranks in CASES.items():
            peak, given = Peak(), Plan(ranks, reshard_after_forward=True)
            fit(
                Llama(),
                data(),
                strategy={**options, "plan": given},
                callbacks=[peak],
                max_steps=2,
                is_time_shared=False,
                **common,
            )
            rank = cost.predict(updated, given).ranks[dist.get_rank()]
            memory[name] = (rank.memory_bytes, peak.peak_bytes)
        outcome[cuts] = (problem.to_dict(), plan, step_s, memory, model.losses, values)
    model = Descending()
    with measured_by(measured_once):
        options = {"vocabulary_sharding": "auto", "chunked_logits": True}
        trainer = fit(model, data(), strategy=options, max_steps=4, **common)
    outcome["auto"] = trainer.strategy.plan, model.losses
    return outcome


@functools.cache
def both_ranks():
    return in_ranks(2, found_by_a_rank)


@functools.cache
def on_one_device():
    def alone():
        model = Descending()
        fit(model, data(16), world_size=1, max_steps=4)
        return model.losses, {name: value.detach() for name, value in model.named_parameters()}

    return in_ranks(1, alone)[0]


def test_the_profile_has_the_price_of_the_cut():
    cut, whole = (both_ranks()[0][cuts][0] for cuts in (True, False))
    assert cut["vocabulary_sharding"] and "vocabulary_sharding" not in whole
    fast, slow = (rank["columns_s"] for rank in cut["ranks"])
    assert slow == pytest.approx(3 * fast, rel=0.1)
    # four products of all rows
    tokens = 16 * LENGTH
    assert fast == pytest.approx(4 * 2 * tokens * VOCABULARY * WIDTH / TOTAL, rel=0.1)
    assert cut["hidden_bytes"] == tokens * (4 * WIDTH + 8 + 4)
    # what is of the head counts once
    for with_cut, without in zip(cut["ranks"], whole["ranks"], strict=True):
        assert with_cut["tail_s"][0] < 0.2 * without["tail_s"][0]


@pytest.mark.parametrize("cuts", [True, False])
def test_a_plan_is_made_and_its_step_time_comes_true(cuts):
    _, plan, step_s, *_ = both_ranks()[0][cuts]
    assert (plan.vocabulary_sharding is True) == cuts
    assert plan.step_s == pytest.approx(step_s, rel=0.1)
    if cuts:
        assert plan.ranks[0].state_fraction == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("name", CASES)
def test_memory_is_never_less_than_held_and_within_a_tenth_for_large_microbatches(name):
    for rank in both_ranks():
        for cuts in (True, False):
            predicted, held = rank[cuts][3][name]
            assert held <= predicted, (cuts, predicted, held)
            # smaller microbatches than those that were measured hold less
            if name != "small":
                assert predicted <= 1.1 * held, (cuts, predicted, held)


def test_the_plan_may_choose_the_shorter_step_and_trains_as_on_one_device():
    losses, _ = on_one_device()
    step_s = {cuts: both_ranks()[0][cuts][1].step_s for cuts in (True, False)}
    for rank in both_ranks():
        plan, own = rank["auto"]
        assert (plan.vocabulary_sharding is True) == (step_s[True] < step_s[False]), step_s
        assert own == pytest.approx(losses, rel=1e-6)


def test_a_plan_that_was_measured_trains_as_on_one_device():
    losses, values = on_one_device()
    for rank in both_ranks():
        assert rank[True][4] == pytest.approx(losses, rel=1e-6)
        for name, value in rank[True][5].items():
            torch.testing.assert_close(value, values[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, MemoryError])
def test_columns_are_timed_for_as_many_tokens_as_there_is_memory(monkeypatch, failure):
    rows, counts = torch.empty(2**16, 1), []

    def timed(layer, asked, count, *_):
        counts.append(count)
        if count > 64:
            raise failure("out of memory")
        return 1e-6 * count

    monkeypatch.setattr(vocabulary_time, "_timed", timed)
    layer = SimpleNamespace(rows=rows, vocabulary=2 * len(rows))
    for kind in (Kind.STATISTICS, Kind.LOGITS):
        asked = Asked(0, kind, torch.float32, True)
        found = vocabulary_time._columns_s(layer, asked, 1000.0, None, torch.device("cpu"))
        assert found == pytest.approx(2 * 1e-3)
    # all logits of a question are there at once: no more than a chunk of them is timed
    monkeypatch.setattr(columns, "CHUNK_BYTES", 4 * rows.numel() * 16)
    counts.clear()
    vocabulary_time._columns_s(layer, asked, 1000.0, None, torch.device("cpu"))
    assert max(counts) == 16
