"""The tables of a vocabulary, and the columns of logits that a rank computes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.vocabulary import columns
from lightning_cephalo.execution.vocabulary.columns import Columns, Gradients, joined
from lightning_cephalo.execution.vocabulary.layers import tables_of
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
    net.bias = net.positions.weight
    net.embed = net.blocks
    with pytest.raises(UnsupportedError, match=r"Net has no torch\.nn\.Embedding"):
        _tables(net)


def test_a_head_that_is_compiled_is_refused():
    for name in ("", "head"):
        net = Net()
        net.get_submodule(name).compile(backend="eager")
        with pytest.raises(UnsupportedError, match=r"inside of a module that torch\.compile"):
            _tables(net)


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
