"""The loss in chunks of tokens: value and gradients of all logits, of which it holds few."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cephalo import chunked_cross_entropy
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.unit_hooks import UnitForward

TOKENS, WIDTH, VOCABULARY = 11, 5, 13
LIKE = {"dtype": torch.float64}
CHUNKS = [1, 4, TOKENS, 1024]


class Wrapped(nn.Module):
    """A frozen head with a trained part beside it, dropout, and a cap, as LoRA and Gemma have."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False, **LIKE)
        self.up = nn.Linear(2, VOCABULARY, **LIKE)
        self.unused = nn.Linear(2, 2, **LIKE)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden) + self.up(self.down(self.dropout(hidden)))
        return 3.0 * torch.tanh(logits / 3.0)


def _case(dtype: torch.dtype = torch.float64, bias: bool = True):
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, bias, dtype=dtype)
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (1, TOKENS))
    targets[0, 2] = -100
    return head, hidden, targets


def _gradients(loss: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor | None]:
    leaves = [hidden, *(each for each in head.parameters() if each.requires_grad)]
    factor = torch.linspace(1.0, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return list(torch.autograd.grad(loss, leaves, factor, allow_unused=True))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.2},
        {"weight": torch.rand(VOCABULARY, **LIKE)},
        {"weight": torch.rand(VOCABULARY, **LIKE), "label_smoothing": 0.1, "ignore_index": 4},
    ],
)
def test_value_and_gradients_are_those_of_all_logits(options, reduction, chunk_tokens):
    head, hidden, targets = _case()
    targets[0, 5], options = 4, {**options, "reduction": reduction}
    targets[targets < 0] = options.get("ignore_index", -100)
    logits = head(hidden).flatten(0, 1)
    wanted = functional.cross_entropy(logits, targets.flatten(), **options)
    wanted = wanted.view(targets.shape) if reduction == "none" else wanted
    found = chunked_cross_entropy(head, hidden, targets, chunk_tokens=chunk_tokens, **options)
    torch.testing.assert_close(found, wanted)
    pairs = zip(_gradients(found, head, hidden), _gradients(wanted, head, hidden), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other)
    with torch.no_grad():
        bare = chunked_cross_entropy(head, hidden, targets, chunk_tokens=chunk_tokens, **options)
    assert not bare.requires_grad and torch.equal(bare, found)


def test_a_wrapped_head_draws_the_same_numbers_in_the_backward():
    head, hidden, targets = _case()
    wrapped = Wrapped(head)
    torch.manual_seed(5)
    logits = torch.cat([wrapped(hidden[0, :6]), wrapped(hidden[0, 6:])])
    wanted = functional.cross_entropy(logits, targets[0])
    torch.manual_seed(5)
    found = chunked_cross_entropy(wrapped, hidden[0], targets[0], chunk_tokens=6)
    torch.testing.assert_close(found, wanted)
    after = torch.get_rng_state()
    own = _gradients(found, wrapped, hidden)
    assert torch.equal(torch.get_rng_state(), after)
    for each, other in zip(own, _gradients(wanted, wrapped, hidden), strict=True):
        assert (each is None) == (other is None)  # an unused parameter gets no gradient
        if each is not None:
            torch.testing.assert_close(each, other)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_bfloat16_loses_no_more_than_all_logits_in_float32(is_autocast):
    dtype = torch.float32 if is_autocast else torch.bfloat16
    head, hidden, targets = _case(dtype)

    def compared(loss_of) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = loss_of()
            again = head(hidden).float().sum()  # no cast of the loss may be left in the cache
        return [loss, *_gradients(loss, head, hidden), *_gradients(again, head, hidden)]

    wanted = compared(
        lambda: functional.cross_entropy(head(hidden).flatten(0, 1).float(), targets.flatten())
    )
    found = compared(lambda: chunked_cross_entropy(head, hidden, targets, chunk_tokens=4))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], wanted[0])
    for own, other in zip(found[1:], wanted[1:], strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, rtol=2e-2, atol=1e-3)


def test_frozen_and_tied_heads():
    head, hidden, targets = _case(bias=False)
    embedding = nn.Embedding(VOCABULARY, WIDTH, **LIKE)
    head.weight = embedding.weight
    ids = targets.clamp(min=0)
    chunked_cross_entropy(head, embedding(ids), targets).backward()
    wanted = functional.cross_entropy(head(embedding(ids[0])), targets[0])
    (gradient,) = torch.autograd.grad(wanted, embedding.weight)
    torch.testing.assert_close(embedding.weight.grad, gradient)
    head.requires_grad_(False)
    chunked_cross_entropy(head, hidden, targets).backward()
    assert hidden.grad is not None
    assert not chunked_cross_entropy(head, hidden.detach(), targets).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_tokens_that_all_count_for_nothing_give_what_torch_gives(tokens, reduction):
    head, hidden, _ = _case()
    targets = torch.full((tokens,), -100)
    own = chunked_cross_entropy(head, hidden[0, :tokens], targets, reduction=reduction)
    logits = head(hidden[0, :tokens])
    wanted = functional.cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(own, wanted, equal_nan=True)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_in_forward_and_backward():
    head = nn.Linear(2, 100)
    hidden, targets = torch.randn(64, 2, requires_grad=True), torch.randint(100, (64,))
    saved: list[int] = []
    with _Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: saved.append(each.numel()) or each, lambda each: each
        ):
            loss = chunked_cross_entropy(head, hidden, targets, chunk_tokens=8)
        loss.backward()
    assert largest.numel == 8 * 100
    assert max(saved) == head.weight.numel()


def test_what_cannot_be_right_is_refused_by_name():
    head, hidden, targets = _case()
    given = {"head": head, "hidden": hidden, "targets": targets}
    for error, message, wrong in (
        (TypeError, "head: expected a torch.nn.Module", {"head": lambda x: head(x)}),
        (TypeError, "targets: expected class indices", {"targets": targets.double()}),
        (ValueError, "Shift both by one token", {"targets": targets[:, 1:]}),
        (ValueError, "reduction: expected", {"reduction": "max"}),
        (ValueError, "chunk_tokens: expected 1", {"chunk_tokens": 0}),
    ):
        with pytest.raises(error, match=message):
            chunked_cross_entropy(**{**given, **wrong})
    loss = chunked_cross_entropy(**given)
    with pytest.raises(UnitUseError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_units_in_a_head_and_hooks_of_one_that_is_a_unit_are_refused_by_name():
    head, hidden, targets = _case()
    head.forward = object.__new__(UnitForward)
    with pytest.raises(UnitUseError, match=r"contains the unit '0'.* Name the head itself"):
        chunked_cross_entropy(nn.Sequential(head), hidden, targets)
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(UnitUseError, match="is a unit and has forward hooks"):
        chunked_cross_entropy(head, hidden, targets)


class _Scaled(nn.Module):
    """A head whose weight is a result of other code."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scaled = 2.0 * weight

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.scaled)


def test_a_head_that_uses_the_graph_of_other_code_is_refused_by_name():
    head, hidden, targets = _case(bias=False)
    loss = chunked_cross_entropy(_Scaled(head.weight), hidden, targets)
    with pytest.raises(UnitUseError, match=r"shape \(13, 5\) that is none of its parameters"):
        loss.backward()


def test_writes_between_forward_and_backward_are_found():
    for index in itertools.count():
        head, hidden, targets = _case()
        written = [head.weight, head.bias, hidden]
        if index == len(written):
            return
        loss = chunked_cross_entropy(head, hidden, targets)
        with torch.no_grad():
            written[index].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
