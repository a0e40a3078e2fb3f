"""A head that computes its logits in chunks of tokens gives what all logits give."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cephalo.accelerator.emulated import MemoryTracker
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.vocabulary import chunked
from lightning_cephalo.execution.vocabulary.chunked import ChunkedHead

VOCABULARY, WIDTH, SAMPLES, LENGTH = 11, 6, 3, 4
TARGETS = torch.tensor([[0, 10, 3, -100], [-100] * 4, [5, 5, -100, 1]])
CLASSES = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)

_Loss = Callable[[Tensor], Tensor]


class Layers:
    """What a head asks about the step: by default, code between units runs."""

    def __init__(self) -> None:
        self.microbatch: Any = SimpleNamespace(computes_glue=True)

    def running(self) -> Any:
        return self.microbatch


def _head(linear: nn.Linear) -> ChunkedHead:
    return ChunkedHead(Layers(), "head", linear)


def _tensors(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(3)
    hidden = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)


def _cross_entropy(**options: Any) -> _Loss:
    return lambda logits: F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), **options)


def _shifted(logits: Tensor) -> Tensor:
    """As causal models of Hugging Face compute it."""
    shifted = F.pad(TARGETS, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.view(-1, VOCABULARY), shifted.view(-1), reduction="sum") / 3.0


def _with_z(logits: Tensor) -> Tensor:
    z = logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits.transpose(1, 2), TARGETS) + 0.1 * z


def _likelihood(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(-1).gather(-1, TARGETS.clamp(min=0)[..., None])[..., 0]
    return -(logs * (TARGETS >= 0)).sum() + F.nll_loss(F.log_softmax(logits, -1).mT, TARGETS)


def _of_tokens(logits: Tensor) -> Tensor:
    """Weighs tokens by what the head says without a graph."""
    with torch.no_grad():
        weights = 1.0 + (logits.argmax(-1) == 10) + logits.logsumexp(-1)
        mean = F.cross_entropy(logits.mT, TARGETS)
    losses = F.cross_entropy(logits.mT, TARGETS, reduction="none")
    return (losses * weights).sum() + mean * logits[TARGETS == 5].logsumexp(-1).sum()


def _hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2.0 * gradient)
    return _cross_entropy()(logits)


def _looked_into(logits: Tensor) -> Tensor:
    """Asks for a gradient of its own, for an adaptive weight."""
    loss = _cross_entropy()(logits)
    of_logits = torch.autograd.grad(logits.square().sum(), logits, retain_graph=True)[0]
    return loss * of_logits.norm()


_LOSSES: dict[str, _Loss] = {
    "mean": _cross_entropy(),
    "sum": lambda logits: F.cross_entropy(
        logits.mT, TARGETS.clamp(min=5), reduction="sum", ignore_index=5
    ),
    "smoothed": _cross_entropy(label_smoothing=0.3),
    "by class": _cross_entropy(weight=CLASSES),
    "shifted": _shifted,
    "z": _with_z,
    "likelihood": _likelihood,
    "tokens": _of_tokens,
}
_NEED_ALL: dict[str, _Loss] = {
    "'softmax'": lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(),
    "'cross_entropy'": _cross_entropy(weight=CLASSES, label_smoothing=0.1),
    "'gt'": lambda logits: _cross_entropy()(logits.masked_fill(logits > 1.0, -1.0)),
    "'register_hook'": _hooked,
    "'square'": _looked_into,
}


def _gradients(tensors: list[Tensor]) -> list[Tensor | None]:
    found = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    return found


def _assert_same(name: str, found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        assert (own is None) == (wanted is None), name
        if own is not None:
            torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight"])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_have_the_gradients_of_all_logits_and_only_what_needs_these_warns(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, frozen: str, bias: bool
):
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", chunk_tokens)
    hidden, linear = _tensors(bias=bias)
    tensors = [hidden, *linear.parameters()]
    if frozen:
        (hidden if frozen == "hidden" else linear.weight).requires_grad_(False)
    for name, loss_of in {**_LOSSES, **_NEED_ALL}.items():
        wanted = loss_of(linear(hidden))
        (3.0 * wanted).backward()
        expected = _gradients(tensors)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = loss_of(_head(linear)(hidden))
        needs_all = [f"{name} needs all logits of 'head', which computes"] * (name in _NEED_ALL)
        assert [str(each.message)[: len(needs_all[0])] for each in said] == needs_all
        (3.0 * found).backward(retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        _assert_same(name, _gradients(tensors), expected)
        (3.0 * found).backward()
        _assert_same(name, _gradients(tensors), expected)


def test_hooks_that_would_miss_gradients_are_refused_by_name():
    hidden, linear = _tensors()
    for use in (_cross_entropy(), lambda logits: logits[:, -1], lambda logits: logits.logsumexp(2)):
        for name in ("register_hook", "retain_grad"):
            logits = _head(linear)(hidden)
            use(logits)
            with pytest.raises(UnitUseError, match=f"'{name}' of logits of 'head' behind their"):
                getattr(logits, name)(*[print] * (name == "register_hook"))
    logits = _head(linear)(hidden)
    with torch.no_grad():
        assert logits.argmax(-1).shape == logits.detach().logsumexp(-1).shape
    with pytest.warns(UserWarning, match="'retain_grad' needs all logits"):
        logits.retain_grad()
    _cross_entropy()(logits).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaled_loss_have_the_gradients_of_all_logits(dtype: torch.dtype):
    hidden, linear = _tensors(torch.float32)
    tensors = [hidden, *linear.parameters()]
    found = []
    for head in (linear, _head(linear)):
        with torch.autocast("cpu", dtype):
            logits = head(hidden.to(dtype))  # as behind another layer
            assert logits.dtype == dtype
            assert (type(logits) is Tensor) == (head is linear)
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                head(hidden.double())  # which autocast leaves as it is
        loss = _shifted(logits)  # outside of it, as in some models
        with torch.autocast("cpu", dtype):
            loss = loss + _cross_entropy()(logits) + _with_z(logits)
        assert loss.dtype == torch.float32
        (1024.0 * loss).backward()
        found.append((loss.detach(), *_gradients(tensors)))
    for own, wanted in zip(found[1], found[0], strict=True):
        assert own.dtype == wanted.dtype == torch.float32
        assert float((own - wanted).norm() / wanted.norm()) < 0.01


def test_weights_in_half_precision_have_gradients_that_add_up_in_single_precision(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", 2)
    hidden, linear = _tensors(torch.bfloat16)
    for parameter in linear.parameters():
        parameter.grad_dtype = torch.float32  # as those of gathered parameters
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    wide, plain = _tensors(torch.bfloat16)
    wide, plain = wide.detach().float().requires_grad_(), plain.float()
    _shifted(_head(linear)(hidden)).backward()
    _shifted(plain(wide)).backward()
    for own, wanted in zip(linear.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and own.grad.dtype == torch.float32
        assert float((own.grad - wanted.grad).norm() / wanted.grad.norm()) < 0.01


def test_only_one_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", 8)
    linear = nn.Linear(16, 4096, bias=False)
    hidden = torch.randn(128, 16, requires_grad=True)
    targets = torch.randint(4096, (128,))
    peaks = []
    for head in (linear, _head(linear)):
        linear.weight.grad = hidden.grad = None
        with MemoryTracker() as tracker:
            F.cross_entropy(head(hidden).float(), targets).backward()
        peaks.append(tracker.peak_bytes)
    logits, weight, chunk = 4 * 128 * 4096, 4 * 16 * 4096, 4 * 8 * 4096
    assert peaks[0] > 2 * logits
    assert peaks[1] < 2 * weight + 2 * chunk + 64 * 1024 < logits / 2


def test_code_without_gradients_outside_of_steps_or_inside_of_units_gets_all_logits(
    monkeypatch: pytest.MonkeyPatch,
):
    hidden, linear = _tensors()
    head = _head(linear)
    frozen = _head(nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(False))
    assert type(frozen(hidden.detach())) is Tensor
    logits = head(hidden)
    assert type(logits) is not Tensor
    head._layers.microbatch.computes_glue = False
    assert type(head(hidden)) is Tensor
    head._layers.microbatch = None
    assert type(head(hidden)) is Tensor
    for use in (lambda: logits.logsumexp(-1), lambda: _cross_entropy()(logits)):
        with pytest.raises(UnitUseError, match=r"'head' are used behind their step.*=False"):
            use()
    monkeypatch.setattr(chunked, "LARGE_BYTES", 4 * SAMPLES * LENGTH * VOCABULARY)
    large = ChunkedHead(Layers(), "head", linear, only_large=True)
    assert type(large(hidden)) is Tensor
    assert type(large(torch.cat([hidden, hidden[:1]]))) is not Tensor
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        _head(linear)(hidden.float())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _head(linear)(hidden[..., 1:])
