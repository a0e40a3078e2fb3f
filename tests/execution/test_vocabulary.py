"""The heads of a model, and logits that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.vocabulary.layers import chunked_heads_of
from lightning_cephalo.execution.vocabulary.logits import LazyLogits
from lightning_cephalo.execution.vocabulary.questions import Kind, Question
from lightning_cephalo.sharding.discovery import find_units

VOCABULARY, WIDTH = 9, 5


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


def test_a_head_that_is_compiled_is_refused():
    for name in ("", "head"):
        net = Net()
        net.get_submodule(name).compile(backend="eager")
        with pytest.raises(UnsupportedError, match=r"inside of a module that torch\.compile"):
            _heads(net)


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
    computes: str = "computes its logits in chunks of tokens"
    way_out: str = "Use another head."
    vocabulary: int = VOCABULARY
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
def test_writes_to_lazy_logits_are_refused_by_name(name: str):
    with pytest.raises(UnitUseError, match=f"{name}' writes to logits of 'head'.*out of place"):
        _WRITES[name](_logits())


def test_what_is_read_of_lazy_logits_may_be_written_to_and_is_found_if_they_are_used_again():
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
