"""The tables of a vocabulary, and the columns of logits that a rank computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.vocabulary import columns
from lightning_cephalo.execution.vocabulary.columns import Columns, Gradients, joined
from lightning_cephalo.execution.vocabulary.layers import chunked_heads_of, tables_of
from lightning_cephalo.execution.vocabulary.logits import LazyLogits
from lightning_cephalo.execution.vocabulary.questions import Kind, Question
from lightning_cephalo.sharding.discovery import find_units

CUTS = (0, 4, 4, 7, 9)  # a rank without rows
VOCABULARY, WIDTH = CUTS[-1], 5


class Net(nn.Module):
    """A vocabulary of nine tokens, and layers that look like it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.narrow = nn.Linear(WIDTH, VOCABULARY - 1)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def _tables(net: nn.Module) -> list[list[str]]:
    return [[o.name for o in each.owners] for each in tables_of(net, find_units(net)[0])]


def test_tables_are_the_largest_embeddings_and_the_heads_of_as_many_tokens():
    assert _tables(Net()) == [["embed.weight", "head.weight"], ["other.weight"]]
    net = Net()
    net.decoder = nn.Embedding(VOCABULARY, WIDTH)
    net.decoder.weight = net.embed.weight
    assert _tables(net)[0] == ["embed.weight", "head.weight", "decoder.weight"]
    for embedding in (Scaled(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)):
        net = Net()
        net.embed = embedding
        assert _tables(net) == [["positions.weight"]]  # the largest that is left
    net = Net()
    net.head.forward = lambda hidden: 30.0 * torch.tanh(F.linear(hidden, net.head.weight) / 30.0)
    assert _tables(net) == [["positions.weight"]]
    net = Net()
    net.bias = net.positions.weight
    net.embed = net.blocks
    with pytest.raises(UnsupportedError, match=r"Net has no torch\.nn\.Embedding"):
        _tables(net)


def test_a_head_that_is_compiled_is_refused():
    for name in ("", "head"):
        net = Net()
        net.get_submodule(name).compile(backend="eager")
        for find in (_tables, _heads):
            with pytest.raises(UnsupportedError, match=r"inside of a module that torch\.compile"):
                find(net)


def _heads(net: nn.Module) -> list[str]:
    return [name for name, _ in chunked_heads_of(net, find_units(net)[0])]


def test_heads_are_those_of_the_largest_embedding_whatever_it_computes():
    assert _heads(Net()) == ["head", "other"]
    net = Net()
    net.embed = Scaled(VOCABULARY, WIDTH)
    net.head.weight = net.embed.weight
    assert _heads(net) == ["head", "other"]  # Gemma
    net.other.forward = lambda hidden: hidden
    assert _heads(net) == ["head"]
    net = Net()
    net.embed = net.blocks
    with pytest.raises(UnsupportedError, match=r"chunked_logits=True, but Net has no head outside"):
        _heads(net)


@dataclass
class Head:
    """A head whose columns are all here."""

    weight: Tensor
    name: str = "head"
    computes: str = "is cut along the vocabulary"
    way_out: str = "Use another head."
    vocabulary: int = VOCABULARY
    meeting: int = 0
    has_warned: bool = True

    def ask(self, question: Question, source: Tensor, *, differentiable: bool) -> Tensor:
        assert question.kind is Kind.LOGITS
        with torch.set_grad_enabled(differentiable):
            return F.linear(source, self.weight).view(question.shape)


def _logits() -> LazyLogits:
    hidden = torch.ones(2, 3, WIDTH)
    return LazyLogits(Head(torch.ones(VOCABULARY, WIDTH)), hidden, torch.float32, 2, False)


_WRITES: dict[str, Callable[[Tensor], object]] = {
    "__setitem__": lambda logits: logits.__setitem__((0, 0), 1.0),
    "mul_": lambda logits: logits.__imul__(2.0),
    "add_": lambda logits: logits[:, -1].add_(1.0),
    "zero_": lambda logits: logits.data.zero_(),
    "masked_fill_": lambda logits: logits.view(6, -1).masked_fill_(torch.ones(6, 1) > 0, 1.0),
    "exp": lambda logits: torch.exp(torch.ones(2, 3, VOCABULARY), out=logits),
    "relu": lambda logits: F.relu(logits, inplace=True),
    "copy_": lambda logits: logits.detach().copy_(torch.ones(2, 3, VOCABULARY)),
    "__set__": lambda logits: setattr(logits, "data", torch.ones(2, 3, VOCABULARY)),
}


@pytest.mark.parametrize("name", _WRITES)
def test_writes_to_cut_logits_are_refused_by_name(name: str):
    with pytest.raises(UnitUseError, match=f"{name}' writes to logits of 'head'.*out of place"):
        _WRITES[name](_logits())


def test_what_is_read_of_cut_logits_may_be_written_to_and_is_found_if_they_are_used_again():
    logits = _logits()
    assert logits.shape == (2, 3, VOCABULARY) and not logits.requires_grad
    view = logits[:, -1]
    logits.softmax(-1).zero_()
    torch.ones(2, 3, VOCABULARY).add_(logits)
    assert logits.sum() == 6 * VOCABULARY * WIDTH
    F.relu(logits[..., 1], True)
    for wrong in (logits, view):
        with pytest.raises(UnitUseError, match="All logits of 'head' were written to"):
            wrong.sum()
    with torch.inference_mode():
        logits = _logits()
        logits.hidden.zero_()  # their own copy
        assert logits.sum() == 0


@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
@pytest.mark.parametrize("has_bias", [False, True])
def test_columns_of_all_ranks_together_have_the_loss_and_gradients_of_one_device(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, has_bias: bool
):
    monkeypatch.setattr(columns, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(2)
    like = {"dtype": torch.float64, "requires_grad": True}
    weight, hidden = torch.randn(VOCABULARY, WIDTH, **like), torch.randn(6, WIDTH, **like)
    bias = torch.randn(VOCABULARY, **like) if has_bias else None
    targets = torch.tensor([0, 3, 4, 8, -1, 6])
    gradients = torch.randn(6, 3, dtype=torch.float64)
    logits = F.linear(hidden, weight, bias)
    picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
    expected = torch.stack([logits.logsumexp(1), picked, logits.mean(1)], 1)
    expected.backward(gradients)

    parts = [
        Columns(weight.detach()[a:b], None if bias is None else bias.detach()[a:b], a)
        for a, b in itertools.pairwise(CUTS)
    ]
    statistics = torch.stack([part.statistics(hidden.detach(), targets) for part in parts])
    found, log_sum = joined(statistics, VOCABULARY)
    torch.testing.assert_close(found, expected.detach())
    best = torch.stack([part.best(hidden.detach())[0] for part in parts])
    torch.testing.assert_close(best.amax(0), logits.detach().amax(1))
    of_logits = torch.softmax(logits.detach(), 1)
    for part in parts:
        rows, own = slice(part.first, part.end), torch.zeros_like(part.rows)
        own_bias = None if bias is None else torch.zeros(part.end - part.first).double()
        into = Gradients(own, own_bias, torch.zeros_like(hidden))
        part.backward_of_statistics(hidden.detach(), targets, log_sum, gradients, VOCABULARY, into)
        torch.testing.assert_close(own, weight.grad[rows])
        if bias is not None:
            torch.testing.assert_close(own_bias, bias.grad[rows])
        hidden.grad -= into.hidden
        own.zero_()
        part.backward_of_logits(hidden.detach(), of_logits[:, rows], 0, into)
        torch.testing.assert_close(own, (of_logits.T @ hidden.detach())[rows])
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden))
