"""Embedding and head that are cut along the vocabulary give what one device gives.

So does a head that is whole, and computes its logits in chunks of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    Allocation,
    batch_size_of,
    forward,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
)
from launch import run_ranks
from torch import Tensor, nn
from toys import assert_idle
from zoo import build, hugging_face_loss

from lightning_cephalo.common.errors import RemoteRankError, UnitUseError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.over_batch import loss_over_batch
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.execution.vocabulary import chunked, rounds
from lightning_cephalo.plan.program import Instruction

UNEVEN = Allocation(((3, 3), (2,)), (0.75, 0.25))
IDLE = Allocation(((3, 2), (3,), ()), (0.3, 0.0, 0.7))
MODELS = ("llama", "gpt2", "masked bert", "t5", "half-frozen gpt2", "frozen llama", "bert")
EXACT = 1e-12  # in double precision
WAYS = {"cut": {"cuts_vocabulary": True}, "chunked": {"chunks_logits": True}}

_Gradients = dict[str, Tensor | None]


# -- unmodified models --------------------------------------------------------------------------


def _of_one_device(model: nn.Module, loss: Tensor) -> tuple[float, _Gradients]:
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


class NeverWhole(Observer):
    """Looks at every instruction that neither a table nor its gradient is whole."""

    def __init__(self, executor: Executor) -> None:
        self._tables = executor.units[0].cuts

    def after(self, instruction: Instruction) -> None:
        for flat in self._tables:
            assert not flat.is_lent and flat.full.untyped_storage().nbytes() == 0
            assert flat.grad_full is None or flat.grad_full.numel() == flat.shard.numel()


def _models(rank: int, allocation: Allocation, expected: dict[str, Any], way: str) -> None:
    chunked.CHUNK_TOKENS = 5
    for number, (name, (loss, gradients)) in enumerate(expected.items()):
        model, batch = build(name, batch_size_of(allocation))
        recompute = bool(number % 2)
        executor = make_executor(model, allocation.fractions, recompute, **WAYS[way])
        if way == "cut":
            executor.attach(NeverWhole(executor))
        else:
            assert executor.hooks.vocabulary.described().startswith("logits in chunks of ")
        parts = microbatches_of(batch, allocation, rank)
        for _ in range(2):  # traced, then replayed
            model.zero_grad()
            own = sharded_step(executor, model, hugging_face_loss, parts)
            assert relative_error(full_gradients(model), gradients) < 1e-6, name
            together = executor.control.gather(own)
            assert sum(together) == pytest.approx(loss, rel=1e-6), name
            assert_idle(executor)
        executor.hooks.uninstall()


def test_unmodified_language_models_have_the_gradients_of_one_device():
    for allocation in (UNEVEN, IDLE):
        expected = {}
        for name in MODELS:
            model, batch = build(name, batch_size_of(allocation))
            expected[name] = _of_one_device(model, hugging_face_loss(model, batch))
        run_ranks(allocation.world_size, _models, allocation, expected, "cut")
        # of a classifier, there is no head to chunk
        language = {name: found for name, found in expected.items() if name != "bert"}
        run_ranks(allocation.world_size, _models, allocation, language, "chunked")


# -- losses -------------------------------------------------------------------------------------

VOCABULARY, WIDTH, LENGTH = 7, 4, 5


class Net(nn.Module):
    """A tied table with a padding token, two blocks, a head with a bias, and one without a tie."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(vocabulary, WIDTH, padding_idx=2)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(WIDTH, vocabulary, bias=False)
        self.extra = nn.Embedding(vocabulary, WIDTH)
        self.double()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x += 1.0  # writes to what a lookup has returned
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def _batch(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shape = (samples, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[1::2, :2] = -100
    labels[6] = -100  # on two ranks, and on three, with others that count
    return {"tokens": tokens, "labels": labels}


_CLASSES = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)


def _plain(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels[..., 1:].reshape(-1))


def _smoothed(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, labels = net(tokens).flatten(0, 1), labels.flatten()
    return nn.CrossEntropyLoss(label_smoothing=0.2)(input=logits, target=labels)


def _by_class(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, labels = net(tokens).transpose(1, 2), labels.clamp(min=3)
    losses = F.cross_entropy(logits, labels, _CLASSES, ignore_index=3, reduction="none")
    assert losses.shape == labels.shape
    return losses.sum() / (labels != 3).sum()


def _with_z(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    z = torch.logsumexp(logits, -1, keepdim=True)[..., 0][labels >= 0]
    return _mean(F.cross_entropy(logits.mT, labels, reduction="sum") + 0.1 * (z**2).sum(), labels)


def _likelihood(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logs = F.log_softmax(net(tokens), dim=-1)
    picked = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    logits = net.other(net.hidden(tokens))[labels >= 0]
    also = F.nll_loss(logits.log_softmax(1), labels[labels >= 0], reduction="sum")
    return _mean(also - (picked * (labels >= 0)).sum(), labels)


def _in_chunks(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    hidden, total = net.hidden(tokens).flatten(0, 1), torch.zeros((), dtype=torch.float64)
    for part, own in zip(hidden.split(4), labels.flatten().split(4), strict=True):
        total = total + F.cross_entropy(net.head(part), own, reduction="sum")
    return _mean(total, labels)


def _accuracy(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    """Weighs tokens by what the head says without a graph; one rank may see none that is right."""
    logits = net(tokens)
    with torch.no_grad():
        right = logits.argmax(-1, keepdim=True)[..., 0] == labels.clamp(min=0)
        confidence = logits.detach().logsumexp(-1)
    losses = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="none")
    return _mean((losses * (confidence + right).flatten()).sum(), labels)


def _whole(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    logits = logits.masked_fill(torch.arange(VOCABULARY) == 3, -1.0)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    loss = F.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="sum")
    return _mean(loss + entropy[labels >= 0].sum(), labels)


def _scored(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    """Reads all logits without a graph before the loss, then with one."""
    hidden = net.hidden(tokens)
    logits = net.head(hidden)
    with torch.no_grad():
        likely = (logits.topk(2).indices == labels.clamp(min=0)[..., None]).any(-1)
        constant = logits[..., :1, :]
    losses = F.cross_entropy(logits.mT, labels, reduction="none") * (1.0 + likely)
    also = logits.softmax(-1).square().sum(-1) + hidden.square().sum(-1)
    also = also * constant.logsumexp(-1)
    return _mean((losses + also)[labels >= 0].sum(), labels)


def _logged(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    """Uses two tables without a gradient, which keep None, so that AdamW skips them."""
    hidden = net.hidden(tokens) + net.extra(tokens).detach()
    F.cross_entropy(net.other(hidden).mT, labels).item()
    return _mean(F.cross_entropy(net.head(hidden).mT, labels, reduction="sum"), labels)


def _over_batch(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss_over_batch(loss_of, net(tokens), labels)


def _mean(total: Tensor, labels: Tensor) -> Tensor:
    return total / (labels >= 0).sum()


_LOSSES: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    _plain: lambda labels: (labels[..., 1:] >= 0).sum(),
    _smoothed: lambda labels: (labels >= 0).sum(),
    _by_class: lambda labels: (labels.clamp(min=3) != 3).sum(),
    _with_z: lambda labels: (labels >= 0).sum(),
    _likelihood: lambda labels: (labels >= 0).sum(),
    _in_chunks: lambda labels: (labels >= 0).sum(),
    _accuracy: lambda labels: (labels >= 0).sum(),
    _whole: lambda labels: (labels >= 0).sum(),
    _scored: lambda labels: (labels >= 0).sum(),
    _logged: lambda labels: (labels >= 0).sum(),
    _over_batch: lambda labels: torch.tensor(len(labels)),
}


def _call(net: Net, loss: Callable[..., Tensor], part: dict[str, Tensor]) -> MicrobatchCall:
    weight = float(_LOSSES[loss](part["labels"]))
    return MicrobatchCall(
        lambda: loss(net, **part), lambda found: (found, weight), samples=len(part["tokens"])
    )


def _losses(rank: int, allocation: Allocation, expected: list[_Gradients], way: str) -> None:
    chunked.CHUNK_TOKENS = 3
    net = Net()
    # a head that is cut is in chunks anyway
    options = {**WAYS[way], "chunks_logits": True}
    executor = make_executor(net, allocation.fractions, False, **options)
    root, names = executor.units[0], executor.hooks.vocabulary.described()
    if way == "cut":
        assert root.full_bytes == root.gradient_bytes == 8 * VOCABULARY  # of the bias alone
        assert names == "cut along the vocabulary of 7 tokens: embed, head, other, extra"
    else:
        assert names.endswith(" tokens: head, other")
    parts = microbatches_of(_batch(8), allocation, rank)
    for loss, gradients in zip(_LOSSES, expected, strict=True):
        executor.forget_order()
        for step in range(2):
            net.zero_grad()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                forward(executor, [_call(net, loss, part) for part in parts])
            assert len(said) == (loss is _whole and bool(parts) and not step), (loss, said)
            executor.backward()
            assert relative_error(full_gradients(net), gradients) < EXACT, loss
            assert_idle(executor)


def test_losses_have_the_gradients_of_one_device_and_only_what_needs_all_logits_warns():
    expected = []
    for loss in _LOSSES:
        net = Net()
        expected.append(_of_one_device(net, loss(net, **_batch(8)))[1])
    for allocation in (UNEVEN, IDLE):
        for way in WAYS:
            run_ranks(allocation.world_size, _losses, allocation, expected, way)


# -- evaluation, failures, misuse ---------------------------------------------------------------


class Fails(Net):
    """Fails behind the embedding, or behind the head, on one rank."""

    place = ""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        _fail_at(self.place, "hidden")
        return x


def _fail_at(place: str, here: str) -> None:
    if place == here and dist.get_rank() == 0:
        raise FloatingPointError("on purpose")


def _wrong_token(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens + VOCABULARY * (dist.get_rank() == 0), labels)


def _wrong_target(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens, labels + VOCABULARY * (dist.get_rank() == 0))


def _reads_table(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens, labels) + net.embed.weight.square().sum()


def _checkpointed(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    x = torch.utils.checkpoint.checkpoint(net.embed, tokens, use_reentrant=False)
    return F.cross_entropy(net.head(x).view(-1, VOCABULARY), labels.view(-1))


def _own_gradient(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    x = net.hidden(tokens).detach().requires_grad_()
    loss = F.cross_entropy(net.head(x).view(-1, VOCABULARY), labels.view(-1))
    return loss + torch.autograd.grad(loss, x)[0].square().sum()


def _writes(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    logits[..., 0] = -5.0
    return logits.sum()


def _writes_to_view(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    logits[:, -1].masked_fill_(labels[:, -1:] < 3, -5.0)
    return F.cross_entropy(logits.mT, labels)


def _writes_to_gathered(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    with torch.no_grad():
        first = logits[..., 0]
        first += 1.0
    return F.cross_entropy(logits.mT, labels)


def _writes_to_hidden(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    hidden = net.hidden(tokens)
    logits = net.head(hidden)
    hidden.mul_(2.0)
    return F.cross_entropy(logits.mT, labels)


def _float_tokens(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens.double() if dist.get_rank() == 0 else tokens, labels)


def _tokens_elsewhere(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens.to("meta") if dist.get_rank() == 0 else tokens, labels)


def _targets_elsewhere(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens, labels.to("meta") if dist.get_rank() == 0 else labels)


def _short_targets(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return _plain(net, tokens, labels.int() if dist.get_rank() == 0 else labels)


def _narrow_hidden(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    hidden = net.hidden(tokens)
    logits = net.head(hidden.float() if dist.get_rank() == 0 else hidden)
    return F.cross_entropy(logits.mT, labels)


_WRONG: dict[Callable[..., Tensor], tuple[type[Exception], str]] = {
    _wrong_token: (IndexError, "'embed' got tokens from 7"),
    _wrong_target: (IndexError, "Target .* is out of bounds"),
    _reads_table: (UnitUseError, "'embed.weight' .*vocabulary_sharding=False.*, where it can be"),
    _checkpointed: (UnitUseError, "cut along the vocabulary is called inside a saved-tensor"),
    _own_gradient: (UnitUseError, "computes a gradient through a unit itself"),
    _writes: (UnitUseError, "'__setitem__' writes to logits of 'head'"),
    _writes_to_view: (UnitUseError, "'masked_fill_' writes to logits of 'head'"),
    _writes_to_gathered: (UnitUseError, "All logits of 'head' were written to"),
    _writes_to_hidden: (UnitUseError, "Hidden states of 'head' were written to"),
    _float_tokens: (RuntimeError, "scalar types: Long, Int; but got torch.float64"),
    _tokens_elsewhere: (RuntimeError, "all tensors to be on the same device"),
    _targets_elsewhere: (RuntimeError, "all tensors to be on the same device"),
    _short_targets: (RuntimeError, "Long or Byte, but got torch.int32"),
    _narrow_hidden: (RuntimeError, "must have the same dtype, but got torch.float32"),
}


def _misuse(rank: int, expected: _Gradients) -> None:
    net = Fails()
    executor = make_executor(net, IDLE.fractions, True, cuts_vocabulary=True)
    parts = microbatches_of(_batch(8), IDLE, rank)
    weights = [float((part["labels"][..., 1:] >= 0).sum()) for part in parts]
    for wrong, (error, match) in _WRONG.items():
        fails_here = rank == 0 or (bool(parts) and error is UnitUseError)
        calls = [
            MicrobatchCall(partial(wrong, net, **part), lambda found: (found, 1.0), samples=2)
            for part in parts
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*needs all logits")
            with pytest.raises(error if fails_here else RemoteRankError, match=match):
                executor.forward(calls)
        assert_idle(executor)
    calls = [_call(net, _plain, part) for part in parts]
    for net.place in ("", "hidden", ""):  # traced, then replayed
        net.zero_grad()
        if net.place:
            with pytest.raises(FloatingPointError if rank == 0 else RemoteRankError):
                executor.forward(calls)
            continue
        outcome = executor.forward(calls)
        net(parts[0]["tokens"] if parts else torch.zeros((1, 1), dtype=torch.long))  # in a hook
        executor.backward()
        assert outcome.weights == tuple(weights)
        assert relative_error(full_gradients(net), expected) < EXACT
    assert_idle(executor)


def test_misuse_and_failures_are_named_on_all_ranks_and_the_next_step_is_right():
    net = Net()
    expected = _of_one_device(net, _plain(net, **_batch(8)))[1]
    run_ranks(IDLE.world_size, _misuse, expected)


def _everything(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    """Asks all kinds of questions."""
    logits = net(tokens)
    right = (logits.argmax(-1) == labels).sum()
    loss = F.cross_entropy(logits.mT, labels, reduction="sum") * (1.0 + right)
    return loss + logits.softmax(-1).square().sum()


class LacksMemory:
    """Lets one call of the collectives of meetings lack memory on this rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.fails_at = 0, -1
        for name in ("all_gather_rows", "all_to_all_rows", "reduce_slices"):
            patch.setattr(rounds, name, partial(self._call, getattr(rounds, name)))

    def _call(self, collective: Callable[..., Any], *args: Any) -> Any:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise torch.OutOfMemoryError("no memory left")
        return collective(*args)


def _without_memory(rank: int, expected: _Gradients) -> None:
    net = Net()
    executor = make_executor(net, IDLE.fractions, True, cuts_vocabulary=True)
    calls = [
        MicrobatchCall(lambda part=part: _everything(net, **part), lambda loss: (loss, 1.0))
        for part in microbatches_of(_batch(8), IDLE, rank)
    ]
    places = 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs all logits")
        lacks = LacksMemory(patch)
        while True:
            lacks.calls, lacks.fails_at = 0, places if rank == 0 else -1
            net.zero_grad()
            try:
                executor.forward(calls)
                executor.backward()
            except (torch.OutOfMemoryError, RemoteRankError) as error:
                assert isinstance(error, torch.OutOfMemoryError) == (rank == 0)
                assert "ran out of memory in the meeting of the root unit" in str(error)
                assert_idle(executor)
                places += 1
                continue
            break
    assert places > 20  # forward and backward
    assert relative_error(full_gradients(net), expected) < EXACT


def test_a_rank_that_lacks_memory_at_a_meeting_is_named_on_all_ranks():
    net, batch = Net(), _batch(8)
    parts = [batch_part for rank in range(2) for batch_part in microbatches_of(batch, IDLE, rank)]
    expected = _of_one_device(net, sum(_everything(net, **part) for part in parts) / len(parts))[1]
    run_ranks(IDLE.world_size, _without_memory, expected)


def _evaluated(net: Net, tokens: Tensor, steps: int) -> dict[str, Any]:
    """Append tokens, as text generation does, and return logits."""
    found = {"logits": net(tokens)}
    for _ in range(steps):
        tokens = torch.cat([tokens, net(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return {**found, "tokens": tokens}


def _evaluates(rank: int, expected: list[dict[str, Tensor]]) -> None:
    net = Net(5).eval()  # fewer tokens than 6 rows of shares would need
    executor = make_executor(net, (0.1, 0.1, 0.8), True, cuts_vocabulary=True)
    executor.attach(NeverWhole(executor))

    def step() -> dict[str, Any]:
        switches_on = rank == 0 and not torch.is_inference_mode_enabled()
        with torch.enable_grad() if switches_on else nullcontext():
            return _evaluated(net, torch.full((2, 1), rank), 3 - rank)

    call = MicrobatchCall(step, lambda found: None)  # the last rank has no samples
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = executor.evaluate(call if rank < 2 else None, "validating")
        for result in outcome.results:
            assert type(result["logits"]) is Tensor
            torch.testing.assert_close(dict(result), expected[rank])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = net(torch.full((2, 1), 1))  # outside of steps: gathered as ever
    assert_idle(executor)
    torch.testing.assert_close(whole, expected[1]["logits"])


def test_evaluation_is_that_of_one_device_where_ranks_call_the_model_differently_often():
    net = Net(5).eval()
    with torch.no_grad():
        expected = [_evaluated(net, torch.full((2, 1), rank), 3 - rank) for rank in range(2)]
    run_ranks(3, _evaluates, expected)
