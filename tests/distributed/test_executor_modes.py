"""What torch keeps per thread or in buffers is right for every microbatch and in the recompute."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import (
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import UNEVEN, WIDTH, Base, Block, assert_idle, make_batch, mean_loss


def both_ways(rank, make_model, loss_of, steps=2):
    """Full gradients, models and random states after steps with recompute and without."""
    batch = make_batch(batch_size_of(UNEVEN))
    results = []
    for recompute in (True, False):
        torch.manual_seed(3)
        model = make_model()
        executor = make_executor(model, UNEVEN.fractions, recompute)
        torch.manual_seed(100 + rank)
        parts = microbatches_of(batch, UNEVEN, rank)
        for _ in range(steps):
            sharded_step(executor, model, loss_of, parts)
            assert_idle(executor)
        results.append((full_gradients(model), dict(model.named_buffers()), torch.get_rng_state()))
    return results


def assert_identical(results):
    (gradients, buffers, random), (others, other_buffers, other_random) = results
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name
        assert gradient.abs().sum() > 0
    for name, buffer in buffers.items():
        assert torch.equal(buffer, other_buffers[name]), name
    assert torch.equal(random, other_random)


# -- random numbers ---------------------------------------------------------------------------


class DropoutBlock(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5) + torch.rand(1)


class Dropout(Base):
    blocks_of = staticmethod(lambda: [DropoutBlock() for _ in range(3)])

    def through(self, x):
        return F.dropout(super().through(F.dropout(x, 0.3)), 0.3)


def _dropout(rank):
    assert_identical(both_ways(rank, Dropout, mean_loss))


def test_dropout_in_units_and_glue_is_bit_identical_with_and_without_recompute():
    run_ranks(3, _dropout)


# -- autocast ---------------------------------------------------------------------------------


def autocast_around_the_step(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return mean_loss(model, batch)


def autocast_around_the_model(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch["x"])
    assert y.dtype == torch.bfloat16
    again = model.head(torch.ones(1, WIDTH))
    assert again.dtype == torch.float32
    return F.mse_loss(y.float(), batch["y"]) + again.mean() * 0


def autocast_without_cache(model, batch):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return mean_loss(model, batch)


class FullPrecisionInside(Base):
    """The middle block runs in fp32 whatever is around it; the first under another autocast."""

    def through(self, x):
        with torch.autocast("cpu", torch.float16):
            x = self.blocks[0](x)
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            x = self.blocks[1](x.float())
            assert x.dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        return self.blocks[2](x)


def _autocast(rank):
    for model in (Base, FullPrecisionInside):
        for loss_of in (
            autocast_around_the_step,
            autocast_around_the_model,
            autocast_without_cache,
        ):
            assert_identical(both_ways(rank, model, loss_of))


def test_autocast_gives_the_same_with_and_without_recompute_and_is_left_as_it_was():
    run_ranks(3, _autocast)


def _autocast_against_one_device(rank):
    torch.manual_seed(3)
    model = FullPrecisionInside()
    single = copy.deepcopy(model)
    batch = make_batch(batch_size_of(UNEVEN))
    executor = make_executor(model, UNEVEN.fractions, True)
    parts = microbatches_of(batch, UNEVEN, rank)
    sharded_step(executor, model, autocast_around_the_step, parts)
    # sample by sample, as bf16 rounds a batch's gradient elsewhere than its parts'
    for start in range(4):
        one = {key: value[start : start + 1] for key, value in batch.items()}
        (autocast_around_the_step(single, one) / 4).backward()
    wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
    assert relative_error(full_gradients(model), wanted) < 0.02


def test_gradients_under_autocast_are_those_of_one_device_to_the_precision_of_bf16():
    run_ranks(3, _autocast_against_one_device)


# -- modes that the user's step opens around units ----------------------------------------------


class Recorder(nn.Module):
    """A block that writes down the modes it finds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.found = []

    def forward(self, x):
        self.found.append(
            (
                torch.is_autocast_enabled("cpu"),
                torch.backends.cuda.math_sdp_enabled(),
                torch.backends.cuda.flash_sdp_enabled(),
                torch.get_default_dtype(),
            )
        )
        return self.linear(x).float()


class Modes(Base):
    blocks_of = staticmethod(lambda: [Recorder() for _ in range(3)])

    def through(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
        assert not torch.is_autocast_enabled("cpu")
        with sdpa_kernel(SDPBackend.MATH):
            x = self.blocks[1](x)
            assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        torch.set_default_dtype(torch.float64)
        x = self.blocks[2](x)
        torch.set_default_dtype(torch.float32)
        return x


def _modes(rank):
    for recompute in (True, False):
        model = Modes()
        executor = make_executor(model, UNEVEN.fractions, recompute)
        parts = microbatches_of(make_batch(4), UNEVEN, rank)
        for _ in range(2):
            sharded_step(executor, model, mean_loss, parts)
            assert_idle(executor)
            assert torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
            assert torch.get_default_dtype() == torch.float32
        count = len(parts) * (4 if recompute else 2)
        first, second, third = (block.found for block in model.blocks)
        assert first == [(True, True, True, torch.float32)] * count
        assert second == [(False, True, False, torch.float32)] * count
        assert third == [(False, True, True, torch.float64)] * count


def test_each_microbatch_and_each_recompute_finds_the_modes_its_own_step_opened():
    run_ranks(3, _modes)


# -- buffers ------------------------------------------------------------------------------------


class NormBlock(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", None)

    def forward(self, x):
        self.calls += 1
        y = self.norm(super().forward(x).repeat(2, 1) * torch.tensor([[1.0]]))[: len(x)]
        # a buffer that is replaced, and that the result depends on
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        return y + self.mean * y + self.calls * 0.1


class Norms(Base):
    blocks_of = staticmethod(lambda: [NormBlock() for _ in range(3)])


def _mean_of_microbatches(start, batch):
    """The mean over the samples of what each microbatch of each rank leaves, alone, of a model."""
    left = {}
    sizes = [size for rank in UNEVEN.microbatches for size in rank]
    everything = [part for rank in range(3) for part in microbatches_of(batch, UNEVEN, rank)]
    for part, size in zip(everything, sizes, strict=True):
        alone = copy.deepcopy(start)
        mean_loss(alone, part)
        for name, buffer in alone.named_buffers():
            left[name] = left.get(name, 0.0) + buffer.double() * size / sum(sizes)
    with torch.no_grad():
        for name, buffer in start.named_buffers():
            buffer.copy_(left[name])


def _buffers(rank):
    results = both_ways(rank, Norms, mean_loss, steps=3)
    assert_identical(results)
    torch.manual_seed(3)
    single = Norms()
    for _ in range(3):
        _mean_of_microbatches(single, make_batch(4))
    expected = dict(single.named_buffers())
    assert expected["blocks.0.calls"] == 3
    assert expected["blocks.2.norm.num_batches_tracked"] == 3
    for name, buffer in results[0][1].items():
        torch.testing.assert_close(buffer, expected[name], msg=name)


def test_buffers_count_a_step_once_and_the_recompute_starts_from_what_they_were():
    run_ranks(3, _buffers)


class LateBlock(Block):
    """Its buffer changes from the second step on only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.counting = False

    def forward(self, x):
        if self.counting:
            self.calls += 1
        return super().forward(x)


class Late(Base):
    blocks_of = staticmethod(lambda: [LateBlock() for _ in range(2)])


def _late(rank):
    model = Late()
    executor = make_executor(model, UNEVEN.fractions, True)
    parts = microbatches_of(make_batch(4), UNEVEN, rank)
    for step in range(4):
        for block in model.blocks:
            block.counting = step > 0
        sharded_step(executor, model, mean_loss, parts)
        assert model.blocks[1].calls == step


def test_a_buffer_that_changes_late_still_counts_a_step_once():
    run_ranks(3, _late)


class Spectral(Base):
    blocks_of = staticmethod(
        lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    )


def _spectral(rank):
    assert_identical(both_ways(rank, Spectral, mean_loss))


def test_spectral_norm_which_learns_in_its_forward_is_identical_with_recompute():
    run_ranks(3, _spectral)


# -- Hugging Face caches ------------------------------------------------------------------------


def _cached(rank, name):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=True,
    )
    model = LlamaForCausalLM(config).train()
    single = copy.deepcopy(model)
    single.config.use_cache = False
    tokens = torch.randint(0, 17, (4, 5))
    batch = {"input_ids": tokens, "labels": tokens}
    parts = microbatches_of(batch, UNEVEN, rank)
    single(**batch).loss.backward()
    wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
    for recompute in (True, False):
        twin = copy.deepcopy(model)
        executor = make_executor(twin, UNEVEN.fractions, recompute)
        sharded_step(executor, twin, lambda model, part: model(**part).loss, parts)
        assert relative_error(full_gradients(twin), wanted) <= 1e-5

    def with_prefix(model, part):
        cache = DynamicCache(config=config)
        for layer in range(2):
            prefix = torch.ones(len(part["labels"]), 1, 3, 4)
            cache.update(prefix, prefix, layer)
        return model(**part, past_key_values=cache).loss

    twin = copy.deepcopy(model)
    executor = make_executor(twin, UNEVEN.fractions, True)
    with pytest.raises(RuntimeError, match="filled DynamicCache"):
        sharded_step(executor, twin, with_prefix, parts)


def test_hugging_face_models_train_exactly_though_they_cache_by_default():
    import transformers.models.llama.modeling_llama  # noqa: F401  (not in every forked rank)

    run_ranks(3, _cached, "llama")


# -- arguments that a unit changes --------------------------------------------------------------


class InPlaceBlock(Block):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class AppendingBlock(Block):
    def forward(self, x, losses):
        losses.append(x.mean(-1, keepdim=True))
        return super().forward(x)


class Appending(Base):
    blocks_of = staticmethod(lambda: [AppendingBlock() for _ in range(2)])

    def through(self, x):
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class InPlace(Base):
    blocks_of = staticmethod(lambda: [InPlaceBlock() for _ in range(2)])


def _changes_arguments(rank):
    parts = microbatches_of(make_batch(4), UNEVEN, rank)
    for recompute, message in (
        (True, "changed in place, by the unit or by the code after it"),
        (False, "modified by an inplace operation"),  # as on one device
    ):
        model = InPlace()
        executor = make_executor(model, UNEVEN.fractions, recompute)
        with pytest.raises(RuntimeError, match=message):
            sharded_step(executor, model, mean_loss, parts)
        assert_idle(executor)


def test_a_unit_that_changes_its_input_in_place_is_refused():
    run_ranks(3, _changes_arguments)


def _appends(rank, expected):
    parts = microbatches_of(make_batch(4), UNEVEN, rank)
    for recompute in (True, False):
        torch.manual_seed(3)
        model = Appending()
        executor = make_executor(model, UNEVEN.fractions, recompute)
        for _ in range(2):
            model.zero_grad()
            sharded_step(executor, model, mean_loss, parts)
            assert relative_error(full_gradients(model), expected) < 1e-6


def test_a_unit_may_append_to_a_list_that_it_is_called_with():
    torch.manual_seed(3)
    model = Appending()
    mean_loss(model, make_batch(4)).backward()
    run_ranks(3, _appends, {name: p.grad for name, p in model.named_parameters()})
