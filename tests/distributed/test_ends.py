"""Embeddings and heads are units, which are there while they are needed."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    Allocation,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
    sharded_step,
    slice_batch,
)
from launch import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import UNEVEN, WIDTH, Block, assert_idle

from lightning_cephalo.common.errors import CephaloError, RemoteRankError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.sharding.discovery import UnitKind, find_units

TOKENS, LENGTH = 11, 3
EXACT = 1e-5


class Language(nn.Module):
    """Embeddings, four blocks, a norm and a head; subclasses say what else uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.places.weight + self.scale

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)  # the residual leads from the loss to the embeddings
        return x

    def end(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.end(self.through(self.embedded(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Plain(Language):
    """Both embeddings are used by calls only."""

    def embedded(self, tokens):
        return self.embed(tokens) + self.places(torch.arange(LENGTH)) + self.scale


class EarlyExit(Plain):
    """Some microbatches leave behind the first block."""

    def through(self, x):
        first, *others = self.blocks
        x = first(x)
        if x[0, 0, 0] > 0:
            return x
        for block in others:
            x = block(x)
        return x


class LeavesLate(Plain):
    """Some microbatches leave behind the last block but one, where the head is on its way."""

    def through(self, x):
        *others, last = self.blocks
        for block in others:
            x = block(x)
        return x if x[0, 0, 0] > 0 else last(x)


class NoUnits(Plain):
    """Visits no block."""

    def through(self, x):
        return x


class SkipsTheFirst(Plain):
    """Some microbatches skip the first block, so that their embedding enters another one."""

    def through(self, x):
        for index, block in enumerate(self.blocks):
            if index or x[0, 0, 0] > 0:
                x = x + block(x)
        return x


class EntersLater(Plain):
    """What the first layers give enters the last block first."""

    def embedded(self, tokens):
        self.kept = super().embedded(tokens)
        return self.scale.expand(len(tokens), LENGTH, WIDTH) * 1.0

    def through(self, x):
        for block in self.blocks[:-1]:
            x = x + block(x)
        return self.blocks[-1](x + self.kept)


class HeadInBetween(Plain):
    def through(self, x):
        middle = self.blocks[0](x)
        aside = self.head(middle).logsumexp(-1, keepdim=True)
        return self.blocks[3](self.blocks[2](self.blocks[1](middle + aside)))


class EmbeddingAgain(Plain):
    def end(self, x):
        return super().end(x + self.embed(torch.zeros(len(x), LENGTH, dtype=torch.long)))


class HeadIsSkipped(Plain):
    """Some microbatches end without the head."""

    def end(self, x):
        return x @ self.scale.expand(TOKENS, WIDTH).T if x[0, 0, 0] > 0 else super().end(x)


class HeadTwice(Plain):
    """The head is called for two halves of the tokens."""

    def end(self, x):
        return torch.cat([self.head(self.norm(x[:, :1])), self.head(self.norm(x[:, 1:]))], dim=1)


class BlockBehindTheHead(Plain):
    """Some microbatches end with another visit of a block."""

    def end(self, x):
        logits = super().end(x)
        return logits if x[0, 0, 0] > 0 else logits + self.blocks[0](x).mean(-1, keepdim=True)


# what follows uses an end without calling it, or in a place where no unit can be visited


class HeadByItsWeight(Plain):
    def end(self, x):
        return self.norm(x) @ self.head.weight.T + self.head.bias


class Checkpointed(Plain):
    """The head is recomputed by torch."""

    def end(self, x):
        return checkpoint(super().end, x, use_reentrant=False)


class EmbeddingIsDecayed(Plain):
    def embedded(self, tokens):
        return super().embedded(tokens) * (1 + self.embed.weight.square().mean())


class EmbeddingIsDecayedInTheLoss(Plain):
    def loss(self, tokens):
        decay = self.embed.weight.square().mean()
        return super().loss(tokens) + decay


class TiedByHand(Plain):
    def end(self, x):
        return self.norm(x) @ self.embed.weight.T + self.head(x).mean()


class HeadInsideOfAUnit(Plain):
    class Supervised(Block):
        def __init__(self, head: list[nn.Module]) -> None:
            super().__init__()
            self.head = head

        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) + self.head[0](value).logsumexp(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Supervised([self.head])


AS_IT_STANDS = (
    *(Plain, EarlyExit, LeavesLate, NoUnits, SkipsTheFirst, EntersLater, HeadInBetween),
    *(EmbeddingAgain, HeadIsSkipped, HeadTwice, BlockBehindTheHead),
)
REFUSED = (
    *(HeadByItsWeight, EmbeddingIsDecayed, EmbeddingIsDecayedInTheLoss, TiedByHand),
    *(HeadInsideOfAUnit, Checkpointed),
)


class Large(nn.Module):
    """As :class:`Plain`, with ends that are large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(13, WIDTH), nn.Embedding(14, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 13, bias=False)


EVEN = Allocation(((2, 2), (2, 2)), (0.5, 0.5))
# what a refusal says to do
REMEDY = re.compile(r"units=")


def made(model: nn.Module, recompute: bool, **options: Any) -> Executor:
    """An executor of a model with ends as units, however small; of as many ranks as there are."""
    fractions = UNEVEN.fractions if dist.get_world_size() == 3 else EVEN.fractions
    if "wanted" not in options:
        blocks = [f"blocks.{n}" for n in range(4)]
        ends = [name for name in ("embed", "places", "head") if hasattr(model, name)]
        options["wanted"] = [*blocks, *ends]
    return make_executor(model, fractions, recompute, **options)


def batch_of(samples: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {"tokens": torch.randint(0, TOKENS, (samples, LENGTH))}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.loss(batch["tokens"])


def calls_of(model: nn.Module, parts: list[dict[str, Tensor]]) -> list[MicrobatchCall]:
    return [
        MicrobatchCall(
            partial(loss_of, model, part), lambda loss, p=part: (loss, float(len(p["tokens"])))
        )
        for part in parts
    ]


def _one_device(model: Language, batch: dict[str, Tensor], allocation: Any) -> dict[str, Any]:
    """Gradients of the mean over samples, each microbatch as it runs: code may look at it."""
    twin = copy.deepcopy(model)
    start = 0
    for sizes in allocation.microbatches:
        for size in sizes:
            (loss_of(twin, slice_batch(batch, start, start + size)) * size).backward()
            start += size
    return {name: None if p.grad is None else p.grad / start for name, p in twin.named_parameters()}


def _equals(rank: int, kind: type[Language]) -> None:
    torch.manual_seed(2)
    model = kind()
    batch = batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    for recompute, reshard in ((True, True), (False, True), (True, False)):
        net = copy.deepcopy(model)
        executor = made(net, recompute, reshard=reshard)
        for step in range(4):  # the first one finds the order
            net.zero_grad()
            sharded_step(executor, net, loss_of, microbatches_of(batch, UNEVEN, rank))
            assert relative_error(full_gradients(net), wanted) < EXACT, step
            assert_idle(executor)


@pytest.mark.parametrize("kind", AS_IT_STANDS)
def test_gradients_are_those_of_one_device(kind):
    run_ranks(3, _equals, kind)


def _is_refused(rank: int, kind: type[Language]) -> None:
    torch.manual_seed(2)
    model = kind()
    executor = made(model, recompute=True)
    with pytest.raises(CephaloError, match=r"embed|head|Rank") as raised:
        sharded_step(executor, model, loss_of, microbatches_of(batch_of(4), UNEVEN, rank))
    assert_idle(executor)
    told = str(raised.value)
    assert isinstance(raised.value, RemoteRankError) or REMEDY.search(told), told


@pytest.mark.parametrize("kind", REFUSED)
def test_ends_that_are_used_without_a_call_are_refused_by_name(kind):
    run_ranks(3, _is_refused, kind)


def _named(rank: int, kind: type[Language]) -> None:
    """The remedy of the refusal: ends that are no units can be used everywhere."""
    torch.manual_seed(2)
    model = kind()
    batch = batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    executor = made(model, recompute=True, wanted=[f"blocks.{n}" for n in range(4)])
    for _ in range(2):
        model.zero_grad()
        sharded_step(executor, model, loss_of, microbatches_of(batch, UNEVEN, rank))
        assert relative_error(full_gradients(model), wanted) < EXACT


@pytest.mark.parametrize("kind", REFUSED)
def test_they_are_exact_where_only_blocks_are_named(kind):
    run_ranks(3, _named, kind)


class Looks(Observer):
    """Which ends are gathered, and which gradients are held, when an instruction begins."""

    def __init__(self, executor: Executor) -> None:
        kinds = (UnitKind.EMBEDDING, UnitKind.HEAD)
        self.units = [[u for u in executor.units if u.kind is kind] for kind in kinds]
        self.full: dict[Instruction, list[bool]] = {}
        self.armed: dict[Instruction, list[bool]] = {}

    def before(self, instruction: Instruction) -> None:
        flats_of = [[flat for unit in units for flat in unit.flats] for units in self.units]
        self.full[instruction] = [
            any(flat.gathered.full.untyped_storage().nbytes() for flat in flats)
            for flats in flats_of
        ]
        self.armed[instruction] = [
            any(flat.gradient.armed is not None for flat in flats) for flats in flats_of
        ]


def _held(rank: int) -> None:
    model = Plain()
    executor = made(model, recompute=True)
    parts = microbatches_of(batch_of(4), UNEVEN, rank)
    for is_known in (False, True):
        looks = Looks(executor)
        with executor.link.observed_by(looks):
            sharded_step(executor, model, loss_of, parts)
        of_blocks = {n for n, unit in enumerate(executor.units) if unit.kind is UnitKind.BLOCK}
        for instruction, (first, last) in looks.full.items():
            operation = instruction.operation
            if operation is Operation.BACKWARD:
                assert not first and not last, instruction
            if operation is Operation.LOSS:
                assert last and not first, instruction
            if operation is Operation.FORWARD and instruction.unit in of_blocks:
                assert not first or instruction.unit == min(of_blocks), instruction
                assert not last or instruction.unit >= max(of_blocks) - 1, instruction
        for instruction, (first, last) in looks.armed.items():
            if instruction.operation is Operation.FORWARD and is_known:
                assert not first and not last, instruction
            if instruction.operation is Operation.BACKWARD:
                assert not first or instruction.unit not in of_blocks, instruction
                assert not last or instruction.unit >= max(of_blocks) - 1, instruction
        # between steps no gradient is held, not even by a pool
        pools = {
            f.context.gradient_buffers for units in looks.units for u in units for f in u.flats
        }
        assert not any(pool.held_bytes for pool in pools)


def test_an_end_is_there_while_it_is_needed_and_its_memory_goes_back():
    run_ranks(3, _held)


class Watched(Plain):
    events: ClassVar[list[str]] = []

    def end(self, x):
        logits = super().end(x)
        self.events.append("logits")
        logits.register_hook(lambda gradient: self.events.append("gradient"))
        return logits


def _one_at_a_time(rank: int) -> None:
    model = Watched()
    executor = made(model, recompute=True)
    parts = microbatches_of(batch_of(8), EVEN, rank)
    for _ in range(3):  # also where the order is being found
        model.events.clear()
        sharded_step(executor, model, loss_of, parts)
        assert model.events == ["logits", "gradient"] * 2


def test_logits_of_one_microbatch_exist_at_a_time():
    run_ranks(2, _one_at_a_time)


def _evaluates_in_between(rank: int) -> None:
    torch.manual_seed(2)
    model = Plain()
    batch = batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    executor = made(model, recompute=True)
    parts = microbatches_of(batch, UNEVEN, rank)
    for _ in range(3):
        call = MicrobatchCall(partial(loss_of, model, batch), lambda loss: (loss, 1.0))
        with torch.no_grad():
            executor.evaluate(call, "evaluating")
        for parameter in (p for unit in executor.units for _, p in unit.named_sharded()):
            parameter.grad = None
        sharded_step(executor, model, loss_of, parts)
        assert relative_error(full_gradients(model), wanted) < EXACT
        assert_idle(executor)


def test_a_step_behind_an_evaluation():
    run_ranks(3, _evaluates_in_between)


def _begun(rank: int) -> tuple[Language, Executor, list[dict[str, Tensor]], dict[str, Any]]:
    """A model, its executor, this rank's microbatches, and the gradients of one device."""
    torch.manual_seed(2)
    model, batch = Plain(), batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    executor = made(model, recompute=True)
    return model, executor, microbatches_of(batch, UNEVEN, rank), wanted


def _forgets(rank: int) -> None:
    model, executor, parts, wanted = _begun(rank)
    sharded_step(executor, model, loss_of, parts)
    calls = calls_of(model, parts)
    executor.forward(calls)  # residuals bring gradients of the loss to the embeddings
    executor.reshard()
    model.zero_grad()
    sharded_step(executor, model, loss_of, parts)
    assert relative_error(full_gradients(model), wanted) < EXACT


def test_gradients_of_a_forward_whose_backward_does_not_come_are_forgotten():
    run_ranks(3, _forgets)


def _accumulates(rank: int) -> None:
    model, executor, parts, wanted = _begun(rank)
    for _ in range(3):
        sharded_step(executor, model, loss_of, parts)
    three = {name: None if g is None else 3 * g for name, g in wanted.items()}
    assert relative_error(full_gradients(model), three) < EXACT


def test_gradients_of_several_steps_add_up():
    run_ranks(3, _accumulates)


# -- where they are ---------------------------------------------------------------------------


def _kinds(model: nn.Module, **options: Any) -> dict[str, str]:
    found = find_units(model, **options)
    return {unit.name: unit.kind.value for unit in found if unit.kind is not UnitKind.BLOCK}


def test_ends_are_embeddings_and_what_is_behind_all_blocks():
    assert _kinds(Large()) == {
        "": "root",
        "embed": "embedding",
        "places": "embedding",
        "head": "head",
    }
    assert _kinds(Large(), wanted=[Block]) == {"": "root"}
    names = [*(f"blocks.{n}" for n in range(4)), "embed", "head"]
    assert _kinds(Large(), wanted=names) == {"": "root", "embed": "embedding", "head": "head"}
    assert _kinds(Large(), with_ends=False) == {"": "root"}


def test_what_is_tied_small_or_read_without_a_call_stays_in_the_root_unit():
    tied = Large()
    tied.head.weight = tied.embed.weight
    assert _kinds(tied) == {"": "root", "places": "embedding"}
    tied.places = nn.Embedding(1, WIDTH)
    assert _kinds(tied) == {"": "root"}

    class Reads(Large):
        def embedded(self, tokens):
            return self.embed.weight[tokens] + self.head.weight.sum()

    assert _kinds(Reads()) == {"": "root", "places": "embedding"}

    class Images(Large):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, WIDTH)
            self.places = nn.Embedding(14, WIDTH, max_norm=1.0)

    assert _kinds(Images()) == {"": "root", "head": "head"}
    assert _kinds(Large().to(torch.bfloat16)) == {"": "root"}
