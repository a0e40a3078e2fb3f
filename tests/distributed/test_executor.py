"""Gradients are those of one device, whatever a model does with its units."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import (
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from shared_start import SharedStart
from torch import Tensor, nn
from toys import UNEVEN, WIDTH, Base, Block, assert_idle, make_batch, mean_loss

from lightning_cephalo.execution.visits import Visits

# -- ways to use units ------------------------------------------------------------------------


class Residuals(Base):
    def through(self, x):
        first = x
        for block in self.blocks:
            x = x + block(x)
        return x * first


class UNet(Base):
    blocks_of = staticmethod(lambda: [Block(), Block(), Block(), Block(2), Block(2)])

    def through(self, x):
        a = self.blocks[0](x)
        b = self.blocks[1](a)
        c = self.blocks[2](b)
        d = self.blocks[3](c, b * 2)
        return self.blocks[4](d, a) + x


class EncoderIntoEveryDecoder(Base):
    blocks_of = staticmethod(lambda: [Block(), Block(), Block(2), Block(2), Block(2)])

    def through(self, x):
        memory = self.blocks[1](self.blocks[0](x))
        y = x.flip(-1)
        for block in self.blocks[2:]:
            y = block(y, memory)
        return y


class SharedBias(Base):
    blocks_of = staticmethod(lambda: [Block(2) for _ in range(3)])

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.raw = nn.Parameter(torch.randn(4, WIDTH))

    def through(self, x):
        shared = torch.sin(self.bias)
        for index, block in enumerate(self.blocks):
            x = block(x, shared.expand_as(x) if index else self.raw.sum(0).expand_as(x))
        return x


class ParameterAsArgument(Base):
    blocks_of = staticmethod(lambda: [Block(2) for _ in range(2)])

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, WIDTH))

    def through(self, x):
        for block in self.blocks:
            x = block(x, self.bias)
        return x + self.bias


class CalledTwice(Base):
    def through(self, x):
        a, b, c = self.blocks
        return a(c(c(b(a(x)))))


class SkippedInTheLoss(Base):
    """The last block's output is not used: its parameters get no gradient."""

    def through(self, x):
        y = self.blocks[1](self.blocks[0](x))
        self.blocks[2](y)
        return y


class UnusedParameters(Base):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)
        for block in self.blocks:
            block.spare = nn.Parameter(torch.ones(5))


class Teacher(Base):
    def through(self, x):
        with torch.no_grad():
            target = self.blocks[1](self.blocks[0](x))
        return super().through(x) * target


class TeacherLast(Base):
    def through(self, x):
        y = super().through(x)
        with torch.no_grad():
            weight = self.blocks[2](x)
        return y * weight


class InferenceTeacher(Base):
    def through(self, x):
        with torch.inference_mode():
            target = self.blocks[1](self.blocks[0](x))
        return super().through(x) * target.clone()


class NoGradEmbedding(Base):
    """The first block's inputs need no gradient, its parameters do."""

    def forward(self, x):
        with torch.no_grad():
            x = self.embed(x)
        return self.head(self.through(x))


class LinearBlock(Block):
    def forward(self, x):
        return self.linears[0](torch.tanh(x))


class SkipsInPlace(Base):
    """Glue that changes a unit's output in place, as much code does."""

    blocks_of = staticmethod(lambda: [LinearBlock() for _ in range(3)])

    def through(self, x):
        for block in self.blocks:
            y = block(x * 1)
            y += x
            x = y.mul_(0.5)
        return x


class DictBlock(Block):
    def forward(self, state, *, scale=None):
        x = super().forward(state["x"])
        return {"x": x, "history": [*state["history"], x], "none": None, "count": len(state)}


class Dicts(Base):
    blocks_of = staticmethod(lambda: [DictBlock() for _ in range(3)])

    def through(self, x):
        state = {"x": x, "history": []}
        for block in self.blocks:
            state = block(state, scale=None)
            assert state["none"] is None and isinstance(state["count"], int)
        return state["x"] + sum(state["history"])


@dataclasses.dataclass(frozen=True)
class State:
    x: Tensor
    extra: list[Tensor]
    steps: Tensor
    label: str = "state"
    nothing: Tensor | None = None


class DataclassBlock(Block):
    def forward(self, state: State) -> State:
        x = super().forward(state.x)
        return State(x, [*state.extra, x * 2], state.steps + 1, "block")


class Dataclasses(Base):
    blocks_of = staticmethod(lambda: [DataclassBlock() for _ in range(3)])

    def through(self, x):
        state = State(x, [], torch.zeros(1, dtype=torch.long))
        for block in self.blocks:
            state = block(state)
            assert isinstance(state, State) and state.label == "block"
        assert state.steps.item() == 3 and state.steps.dtype == torch.long
        return state.x + sum(state.extra)


class TupleBlock(Block):
    def forward(self, x, mask, order):
        y = super().forward(x) * mask
        # a result, a tensor of integers, an input as it came, nothing, and the result again
        return y, y.argmax(-1), mask, None, (x, y)


class Tuples(Base):
    blocks_of = staticmethod(lambda: [TupleBlock() for _ in range(3)])

    def through(self, x):
        mask = torch.sigmoid(x)
        order = torch.arange(len(x))
        total = 0.0
        for block in self.blocks:
            x, largest, mask, nothing, (before, again) = block(x, mask, order)
            assert nothing is None and largest.dtype == torch.long and not largest.requires_grad
            total = total + before * again
        return x + mask + total


class ComplexBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return x * self.weight


class Complex(Base):
    blocks_of = staticmethod(lambda: [ComplexBlock() for _ in range(3)])

    def through(self, x):
        return super().through(torch.complex(x, x.flip(-1))).real


class ScalarBlock(Block):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.unused_gain = nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        return super().forward(x) * self.gain


class Scalars(Base):
    blocks_of = staticmethod(lambda: [ScalarBlock() for _ in range(3)])

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def through(self, x):
        return super().through(x) / self.temperature


class TokenBlock(Block):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, padding_idx=0)

    def forward(self, x, tokens):
        return super().forward(x) + self.table(tokens)


class Embeddings(Base):
    blocks_of = staticmethod(lambda: [TokenBlock() for _ in range(2)])

    def through(self, x):
        tokens = (x[:, 0] * 10).long().abs() % 9
        for block in self.blocks:
            x = block(x, tokens)
        return x


class LSTMBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Recurrent(Base):
    blocks_of = staticmethod(lambda: [LSTMBlock() for _ in range(2)])

    def __init__(self):
        super().__init__()
        self.last = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def through(self, x):
        return self.last(super().through(torch.stack([x, x * 2, x + 1], 1)))[0][:, -1]


class TorchTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 2, 2, 2, dim_feedforward=8, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        source = torch.stack([x, x * 2], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        target = torch.stack([x, x * 3, x - 1], 1)
        y = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(y[:, -1])


class Dispatching(Base):
    """Block 1 is passed by every microbatch with other keyword arguments than block 0."""

    blocks_of = staticmethod(lambda: [KeywordBlock() for _ in range(2)])

    def through(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](hidden=x, add=x * 2)


class KeywordBlock(Block):
    def forward(self, hidden, add=None):
        y = super().forward(hidden)
        return y if add is None else y + add


class FrozenBetween(Base):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.embed.weight.requires_grad_(False)
        self.blocks[2].linears[0].bias.requires_grad_(False)


class FrozenFront(Base):
    """No gradient is wanted before the last block."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class Attention(Base):
    """Tied across units and with the root."""

    def __init__(self):
        super().__init__()
        self.blocks[2].linears[0].weight = self.blocks[0].linears[0].weight


MODELS = {
    model.__name__: model
    for model in (
        Base,
        Residuals,
        UNet,
        EncoderIntoEveryDecoder,
        SharedBias,
        ParameterAsArgument,
        CalledTwice,
        SkippedInTheLoss,
        UnusedParameters,
        Teacher,
        TeacherLast,
        InferenceTeacher,
        NoGradEmbedding,
        SkipsInPlace,
        Dicts,
        Dataclasses,
        Tuples,
        Complex,
        Scalars,
        Embeddings,
        Recurrent,
        TorchTransformer,
        Dispatching,
        FrozenBetween,
        FrozenFront,
        Attention,
    )
}


WAYS = [(True, True), (False, True), (True, False), (False, False)]
"""With recompute and without, with units given back after the forward and without."""

IN_RANKS = SharedStart(run_ranks, UNEVEN.world_size)


@IN_RANKS.each(*((name,) for name in MODELS))
def _equals_all_ways(rank: int, name: str) -> None:
    """One executor for all ways: to make one takes as long as a step."""
    torch.manual_seed(3)
    single = MODELS[name]()
    model = copy.deepcopy(single)
    expected = mean_loss(single, make_batch(batch_size_of(UNEVEN)))
    expected.backward()
    wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
    executor = make_executor(model, UNEVEN.fractions, True)
    assert len(executor.units) > 2
    parts = microbatches_of(make_batch(batch_size_of(UNEVEN)), UNEVEN, rank)
    for executor.recompute, executor.reshard_after_forward in WAYS:
        model.zero_grad()
        executor._visits = Visits()  # the first step is traced again
        losses = []
        for times in (1, 2):  # the first step is traced; the second replays it and adds to it
            losses.append(sharded_step(executor, model, mean_loss, parts))
            sums = {key: None if g is None else times * g for key, g in wanted.items()}
            found = full_gradients(model)
            assert relative_error(found, sums) <= 1e-5
            assert_idle(executor)
        total = torch.tensor(losses)
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach().expand(2))
        for key, gradient in sums.items():
            if gradient is not None:
                torch.testing.assert_close(found[key], gradient)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_one_device_however_units_are_used(name):
    IN_RANKS.of(_equals_all_ways, name)
