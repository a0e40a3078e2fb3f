"""The ends of the root unit are there while they are needed, wherever code uses them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
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

from lightning_cephalo.common.errors import CephaloError, ShardedUseError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.plan.program import FIRST_LAYERS, LAST_LAYERS, Instruction, Operation
from lightning_cephalo.sharding.discovery import find_units
from lightning_cephalo.sharding.flat_group import UnitState
from lightning_cephalo.sharding.root_ends import NO_ENDS, RootEnds, ends_of

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


class HeadByItsWeight(Plain):
    """The norm is called, and the head's weight is used behind it."""

    def end(self, x):
        return self.norm(x) @ self.head.weight.T + self.head.bias


class Checkpointed(Plain):
    """The head is recomputed by torch."""

    def end(self, x):
        return checkpoint(super().end, x, use_reentrant=False)


# what follows uses an end in another place: the root unit is gathered as one


class NothingIsCalled(Plain):
    def end(self, x):
        return x @ self.head.weight.T + self.head.bias


class HeadInBetween(Plain):
    def through(self, x):
        middle = self.blocks[0](x)
        aside = self.head(middle).logsumexp(-1, keepdim=True)
        return self.blocks[3](self.blocks[2](self.blocks[1](middle + aside)))


class EmbeddingAgain(Plain):
    def end(self, x):
        return super().end(x + self.embed(torch.zeros(len(x), LENGTH, dtype=torch.long)))


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
    *(Plain, EarlyExit, LeavesLate, NoUnits, SkipsTheFirst, EntersLater, HeadByItsWeight),
)
ELSEWHERE = (
    *(NothingIsCalled, HeadInBetween, EmbeddingAgain, EmbeddingIsDecayed),
    *(EmbeddingIsDecayedInTheLoss, TiedByHand, HeadInsideOfAUnit, Checkpointed),
)


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


def _equals(rank: int, kind: type[Language], is_apart: bool) -> None:
    torch.manual_seed(2)
    model = kind()
    batch = batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    for recompute, reshard in ((True, True), (False, True), (True, False)):
        net = copy.deepcopy(model)
        executor = make_executor(net, UNEVEN.fractions, recompute, reshard=reshard)
        assert executor.ends_policy.is_on
        for step in range(4):  # the first one finds the order
            net.zero_grad()
            sharded_step(executor, net, loss_of, microbatches_of(batch, UNEVEN, rank))
            assert relative_error(full_gradients(net), wanted) < EXACT, step
            assert_idle(executor)
            assert executor.ends_policy.is_on is is_apart


@pytest.mark.parametrize("kind", AS_IT_STANDS)
def test_gradients_are_those_of_one_device(kind):
    run_ranks(3, _equals, kind, True)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_ends_that_are_used_elsewhere_are_gathered_with_the_root_unit(kind):
    run_ranks(3, _equals, kind, False)


class Looks(Observer):
    """Which ends are gathered, and which gradients are held, when an instruction begins."""

    def __init__(self, executor: Executor) -> None:
        self._ends = executor.units[0].ends
        self.full: dict[Instruction, list[bool]] = {}
        self.armed: dict[Instruction, list[bool]] = {}

    def before(self, instruction: Instruction) -> None:
        groups = [self._ends[end].flats for end in (FIRST_LAYERS, LAST_LAYERS)]
        self.full[instruction] = [
            any(flat.full.untyped_storage().nbytes() for flat in flats) for flats in groups
        ]
        self.armed[instruction] = [
            any(flat.grad_full is not None for flat in flats) for flats in groups
        ]


def _held(rank: int) -> None:
    model = Plain()
    executor = make_executor(model, UNEVEN.fractions, recompute=True)
    parts = microbatches_of(batch_of(4), UNEVEN, rank)
    for is_known in (False, True):
        looks = Looks(executor)
        with executor.observed_by(looks):
            sharded_step(executor, model, loss_of, parts)
        for instruction, (first, last) in looks.full.items():
            operation, visit = instruction.operation, instruction.visit
            in_units = operation in (Operation.FORWARD, Operation.BACKWARD) and visit >= 0
            if in_units:
                assert not first, instruction
            if operation is Operation.LOSS and (is_known or last):
                assert last and not first, instruction
            if in_units and (operation is Operation.BACKWARD or visit < 2):
                assert not last, instruction
        for instruction, (first, last) in looks.armed.items():
            if instruction.operation is Operation.FORWARD:
                assert not first, instruction
                assert not last or instruction.visit == 3, instruction
            if instruction.operation is Operation.BACKWARD:
                assert first == (instruction.visit == 0), instruction
                assert not last or instruction.visit >= 2, instruction
        # between steps nothing is held, not even by a pool
        pools = {
            flat.context.gradient_buffers
            for g in executor.units[0].ends.values()
            for flat in g.flats
        }
        assert not any(pool.held_bytes for pool in pools)


def test_an_end_is_there_while_it_is_needed_and_its_memory_goes_back():
    run_ranks(3, _held)


class Changes(Plain):
    """Uses an end elsewhere from the third step on."""

    where = ""
    steps = 0

    def embedded(self, tokens):
        x = super().embedded(tokens)
        if self.steps > 2 and self.where == "values":
            return x * self.embed.weight.square().sum()
        if self.steps > 2 and self.where == "weight":
            return x * self.head.weight.square().sum()
        return x

    def through(self, x):
        *others, last = self.blocks
        for block in others:
            x = x + block(x)
        if self.steps > 2 and self.where == "head, late":
            x = x + self.head(x).mean(-1, keepdim=True)
        if self.steps > 2 and self.where == "head without its input":
            x = x + self.head(x.detach()).mean(-1, keepdim=True)
        if self.steps > 2 and self.where == "weight, late":
            x = x + self.head.weight.mean(0)
        if self.steps > 2 and self.where == "bias of the norm, late":
            x = self.places(torch.zeros_like(x[..., 0], dtype=torch.long)) * 0 + x + self.norm.bias
        x = x + last(x)
        if self.steps > 2 and self.where == "a unit behind the head":
            x = self.blocks[0](x + self.head(x).mean(-1, keepdim=True))
        return x

    def end(self, x):
        if self.steps > 2 and self.where == "embedding":
            x = x + self.embed(torch.zeros(len(x), LENGTH, dtype=torch.long))
        return super().end(x)


def _changes(rank: int, where: str) -> None:
    torch.manual_seed(2)
    model = Changes()
    model.where = where
    batch = batch_of(4)
    executor = make_executor(model, UNEVEN.fractions, recompute=True)
    parts = microbatches_of(batch, UNEVEN, rank)
    calls = calls_of(model, parts)
    for model.steps in (1, 2):
        executor.forward(calls)
        executor.backward()
    model.steps = 3
    with pytest.raises(CephaloError) as raised:
        executor.forward(calls)
        executor.backward()
    # a rank whose own code does so names the parameters; the other ranks name that rank
    assert isinstance(raised.value, ShardedUseError) or "rank" in str(raised.value).lower()
    assert executor.ends_policy.is_to_repeat() and not executor.ends_policy.is_to_repeat()
    assert_idle(executor)
    model.zero_grad()
    executor.forward(calls)
    executor.backward()
    torch.manual_seed(2)
    single = Changes()
    single.where, single.steps = where, 3
    wanted = _one_device(single, batch, UNEVEN)
    assert relative_error(full_gradients(model), wanted) < EXACT


@pytest.mark.parametrize(
    "where",
    [
        *("weight", "embedding", "values", "head, late", "head without its input"),
        *("weight, late", "bias of the norm, late", "a unit behind the head"),
    ],
)
def test_a_step_that_begins_to_use_an_end_elsewhere_fails_on_all_ranks_and_can_run_again(where):
    run_ranks(3, _changes, where)


def _evaluates_in_between(rank: int) -> None:
    torch.manual_seed(2)
    model = Plain()
    batch = batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    executor = make_executor(model, UNEVEN.fractions, recompute=True)
    parts = microbatches_of(batch, UNEVEN, rank)
    for _ in range(3):
        call = MicrobatchCall(partial(loss_of, model, batch), lambda loss: (loss, 1.0))
        with torch.no_grad():
            executor.evaluate(call, "evaluating")
        root = executor.units[0]
        assert all(group.state is UnitState.GATHERED for group in root.ends.values())
        for parameter in (p for unit in executor.units for _, p in unit.named_sharded()):
            parameter.grad = None
        sharded_step(executor, model, loss_of, parts)
        assert relative_error(full_gradients(model), wanted) < EXACT
        assert_idle(executor)


def test_a_step_behind_an_evaluation_which_gathers_all_of_the_root_unit():
    run_ranks(3, _evaluates_in_between)


def _begun(rank: int) -> tuple[Language, Executor, list[dict[str, Tensor]], dict[str, Any]]:
    """A model, its executor, this rank's microbatches, and the gradients of one device."""
    torch.manual_seed(2)
    model, batch = Plain(), batch_of(4)
    wanted = _one_device(model, batch, UNEVEN)
    executor = make_executor(model, UNEVEN.fractions, recompute=True)
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


def _names(model: nn.Module, **options: Any) -> tuple[list[str], list[str]]:
    members = find_units(model)
    ends = ends_of(model, members, **options)
    owners = [owners for _, owners in members[0].parameters]
    return [owners[i][0].name for i in ends.first], [owners[i][0].name for i in ends.last]


def test_ends_are_embeddings_before_the_first_unit_and_all_behind_the_last():
    first, last = _names(Plain())
    assert first == ["embed.weight", "places.weight"]
    assert last == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_tied_small_and_other_first_layers_stay_in_the_root_unit():
    tied = Plain()
    tied.head.weight = tied.embed.weight
    assert _names(tied, smallest_share=0.0) == (
        ["places.weight"],
        ["norm.weight", "norm.bias", "head.bias"],
    )
    assert _names(tied, smallest_share=1.0) == ([], [])

    class Images(Plain):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, WIDTH)
            self.places = nn.Embedding(LENGTH, WIDTH, max_norm=1.0)

    assert _names(Images(), smallest_share=0.0)[0] == []
    assert ends_of(nn.Linear(2, 2), find_units(nn.Linear(2, 2), unit_names=[])) == NO_ENDS
    assert RootEnds() == NO_ENDS
