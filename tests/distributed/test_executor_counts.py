"""How often ranks talk in a step, what is held in memory meanwhile, and whose gradients count."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

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
)
from launch import run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import UNEVEN, WIDTH, Base, Block, assert_idle, make_batch, mean_loss

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.executor import Executor
from lightning_cephalo.execution.observer import Observer as StepObserver
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.sharding.transfers import Pending

# -- collectives and buffers --------------------------------------------------------------------


class Deep(Base):
    blocks_of = staticmethod(lambda: [Block() for _ in range(6)])


class Observer:
    """Counts an executor's collectives; looks at the storages whenever one begins or ends."""

    def __init__(self, executor: Executor) -> None:
        self.gathers: Counter[int] = Counter()
        self.reduces: Counter[int] = Counter()
        self.order: list[str] = []
        self.most_full = self.most_gradients = 0
        self.units = executor.units
        for index, unit in enumerate(executor.units):
            for flat in unit.flats:
                self._watch(flat, index)

    def _watch(self, flat, index) -> None:
        gather, reduce = flat.gathered.gather, flat.gradient.reduce

        def watched_gather(*slices) -> Pending:
            self.gathers[index] += 1
            self.order.append(f"gather {index}")
            pending = gather(*slices)
            self._look()
            return pending

        def watched_reduce(cut, scale: float, *, in_place: bool) -> Pending:
            self.reduces[index] += 1
            self.order.append(f"reduce {index}")
            pending = reduce(cut, scale, in_place=in_place)
            self._look()
            return pending

        def watched(function):
            def call() -> None:
                self._look()
                function()
                self._look()

            return call

        gradient, gathered = flat.gradient, flat.gathered
        gathered.gather, gradient.reduce = watched_gather, watched_reduce
        gradient.arm, gradient.disarm = watched(gradient.arm), watched(gradient.disarm)
        gathered.free = watched(gathered.free)

    def _look(self) -> None:
        flats = [flat for unit in self.units[1:] for flat in unit.flats]
        full = sum(flat.gathered.full.untyped_storage().nbytes() > 0 for flat in flats)
        self.most_full = max(self.most_full, full)
        armed = sum(flat.gradient.armed is not None for flat in flats)
        self.most_gradients = max(self.most_gradients, armed)


# the root unit is gathered and reduced once
OF_ROOT = {0: 1}


def _counts(rank: int, recompute: bool) -> list[tuple]:
    model = Deep()
    executor = make_executor(model, UNEVEN.fractions, recompute)
    orders = []
    for sizes in (((1,), (1,), ()), ((1, 1, 1, 1), (1,), (2,)), ((), (3,), ())):
        allocation = Allocation(sizes, UNEVEN.fractions)
        parts = microbatches_of(make_batch(8), allocation, rank)
        sharded_step(executor, model, mean_loss, parts)  # the first step discovers the order
        observer = Observer(executor)
        sharded_step(executor, model, mean_loss, parts)
        assert observer.gathers == {**OF_ROOT, **dict.fromkeys(range(1, 6), 2), 6: 1}
        assert observer.reduces == {**dict.fromkeys(range(7), 1), **OF_ROOT}
        assert observer.most_full == 2
        assert observer.most_gradients <= 2
        orders.append(tuple(observer.order))
        for unit in executor.units:
            for flat in unit.flats:
                del flat.gathered.gather, flat.gathered.free
                del flat.gradient.reduce, flat.gradient.arm, flat.gradient.disarm
    return orders


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "kept"])
def test_two_gathers_and_one_reduce_per_unit_whatever_the_microbatches(recompute):
    found = run_ranks(3, _counts, recompute)
    assert len({order for orders in found for order in orders}) == 1, "ranks or batches differ"


def _gathered_once(rank: int, recompute: bool) -> None:
    model = Deep()
    executor = make_executor(model, UNEVEN.fractions, recompute, reshard=False)
    parts = microbatches_of(make_batch(8), UNEVEN, rank)
    held = []
    for _ in range(3):  # the first step discovers the order
        observer = Observer(executor)
        sharded_step(executor, model, mean_loss, parts)
        assert observer.gathers == {**dict.fromkeys(range(7), 1), **OF_ROOT}
        assert observer.reduces == {**dict.fromkeys(range(7), 1), **OF_ROOT}
        assert observer.most_full == 6
        assert observer.most_gradients <= 2
        assert_idle(executor)
        flats = [flat for unit in executor.units[1:] for flat in unit.flats]
        held.append([flat.gathered.full.data_ptr() for flat in flats])
        assert not any(flat.gathered.is_lent for flat in flats) and all(held[-1])
    assert held[0] == held[1] == held[2], "memory was allocated anew"
    executor.reshard_after_forward = True
    assert all(flat.gathered.full.untyped_storage().nbytes() == 0 for flat in flats)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "kept"])
def test_units_that_stay_are_gathered_once_and_into_the_same_memory_in_every_step(recompute):
    run_ranks(3, _gathered_once, recompute)


def _discovers(rank: int) -> None:
    model = Deep()
    executor = make_executor(model, UNEVEN.fractions, True)
    parts = microbatches_of(make_batch(4), UNEVEN, rank)
    observer = Observer(executor)
    sharded_step(executor, model, mean_loss, parts)
    assert observer.gathers == {**OF_ROOT, **dict.fromkeys(range(1, 6), 2), 6: 1}
    assert observer.reduces == {**dict.fromkeys(range(7), 1), **OF_ROOT}
    assert observer.most_full <= 2


class Nesting(StepObserver):
    """Notes which gathers begin, and refuses any that is not announced as an instruction."""

    def __init__(self) -> None:
        self.running: Instruction | None = None
        self.gathers: list[Instruction] = []

    def before(self, instruction: Instruction) -> None:
        self.running = instruction

    def issued(self, instruction: Instruction, works: Sequence[Any]) -> None:
        assert instruction == self.running
        if instruction.operation is Operation.GATHER:
            self.gathers.append(instruction)

    def after(self, instruction: Instruction) -> None:
        self.running = None


def _freed_between(rank):
    model = Deep()
    executor = make_executor(model, (0.5, 0.5), recompute=True)
    batch = make_batch(4)
    call = MicrobatchCall(lambda: mean_loss(model, batch), lambda loss: (loss, 4.0))
    for _ in range(2):  # the second by the known order
        observer = Nesting()
        with executor.link.observed_by(observer):
            executor.forward([call])
            before = list(observer.gathers)
            executor.reshard()
            executor.backward()
    again = [instruction.unit for instruction in observer.gathers[len(before) :]]
    assert_idle(executor)
    return again


def test_units_that_hooks_free_in_between_are_gathered_by_instructions():
    # those that the forward leaves gathered come first, then all others
    assert run_ranks(2, _freed_between)[0] == [0, 6, 5, 4, 3, 2, 1]


def test_the_first_step_gathers_no_more_often_than_later_ones():
    run_ranks(3, _discovers)


# -- memory -------------------------------------------------------------------------------------


class WideTail(Base):
    """Remembers the storages of its logits; its loss keeps them for its backward."""

    def __init__(self):
        super().__init__()
        self.logits: list[StorageWeakRef] = []

    def forward(self, x):
        logits = self.through(self.embed(x)) * self.head.weight.exp()
        squared = logits * logits
        self.logits.append(StorageWeakRef(squared.untyped_storage()))
        return (squared * squared).sum(1, keepdim=True)


def _tail(rank: int) -> None:
    model = WideTail()
    kept = []
    for recompute in (True, False):
        executor = make_executor(copy.deepcopy(model), UNEVEN.fractions, recompute)
        twin = executor.units[0].module
        alive = []

        def loss_of(net, part, alive=alive):
            alive.append(sum(not ref.expired() for ref in net.logits))
            loss = mean_loss(net, part)
            kept.append(loss)  # users keep losses for their plots
            return loss

        for _ in range(3):
            sharded_step(executor, twin, loss_of, microbatches_of(make_batch(4), UNEVEN, rank))
        assert all(ref.expired() for ref in twin.logits)
        assert len(twin.logits) == 3 * len(UNEVEN.microbatches[rank])
        assert not any(alive)


def test_a_loss_that_the_user_keeps_does_not_keep_the_buffers_of_its_graph():
    run_ranks(3, _tail)


class Activations(Base):
    """Remembers the storages of what its blocks compute inside."""

    class Inside(Block):
        def __init__(self):
            super().__init__()
            self.inside: list[StorageWeakRef] = []

        def forward(self, x):
            y = self.linears[0](x)
            self.inside.append(StorageWeakRef(y.untyped_storage()))
            return torch.sin(y) * 2

    blocks_of = staticmethod(lambda: [Activations.Inside() for _ in range(3)])

    def alive(self) -> int:
        return sum(not ref.expired() for block in self.blocks for ref in block.inside)


def _activations(rank: int) -> None:
    for recompute in (True, False):
        model = Activations()
        executor = make_executor(model, UNEVEN.fractions, recompute)
        parts = microbatches_of(make_batch(4), UNEVEN, rank)
        calls = [
            MicrobatchCall(partial(mean_loss, model, part), lambda loss: (loss, 1.0))
            for part in parts
        ]
        for _ in range(2):
            executor.forward(calls)
            assert model.alive() == (0 if recompute else 3 * len(parts))
            executor.backward()
            assert model.alive() == 0


def test_recompute_keeps_nothing_from_inside_units_and_nothing_outlives_the_step():
    run_ranks(3, _activations)


# -- whose gradients count ------------------------------------------------------------------------


class Sometimes(Base):
    """Uses some parameters only for samples with a large first value."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(2))
        for block in self.blocks:
            block.rare = nn.Parameter(torch.ones(WIDTH, 1))

    class Rare(Block):
        def forward(self, x):
            y = super().forward(x)
            return y * self.rare.sum() if (x[:, 0] > 5).any() else y

    blocks_of = staticmethod(lambda: [Sometimes.Rare() for _ in range(3)])

    def through(self, x):
        x = super().through(x + torch.zeros_like(x))
        return x * self.rare if (x[:, 0] > 5).any() else x

    def forward(self, x):
        use = x[:, 0] > 5
        y = self.embed(x)
        y = torch.cat([torch.where(use, 6.0, 0.0)[:, None], y[:, 1:]], 1)
        z = self.through(y)
        return self.head(z * self.rare if use.any() else z)


def _used_on_one_rank(rank: int) -> None:
    torch.manual_seed(3)
    model = Sometimes()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    batch = make_batch(4)
    allocation = Allocation(((1, 1), (1,), (1,)), UNEVEN.fractions)
    for use in (False, True):
        if use:
            batch["x"][1, 0] = 10.0  # the second microbatch of rank 0 only
        model.zero_grad()
        single.zero_grad()
        sharded_step(executor, model, mean_loss, microbatches_of(batch, allocation, rank))
        for start in range(4):
            one = {key: value[start : start + 1] for key, value in batch.items()}
            (mean_loss(single, one) / 4).backward()
        wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
        assert (wanted["rare"] is not None) is use
        assert (wanted["blocks.0.rare"] is not None) is use
        assert wanted["never"] is None
        assert relative_error(full_gradients(model), wanted) <= 1e-5


def test_a_parameter_used_on_one_rank_has_a_gradient_on_all_and_an_unused_one_on_none():
    run_ranks(3, _used_on_one_rank)


def _tags(rank: int) -> None:
    model = Base()
    for name, parameter in model.named_parameters():
        parameter.no_decay = "bias" in name
    executor = make_executor(model, UNEVEN.fractions, True)
    seen = []

    def loss_of(model, part):
        seen.append([p.no_decay for _, p in model.blocks[0].named_parameters()])
        return mean_loss(model, part)

    sharded_step(executor, model, loss_of, microbatches_of(make_batch(4), UNEVEN, rank))
    assert seen == [[False, True]] * len(seen)
    for name, parameter in model.named_parameters():
        assert parameter.no_decay is ("bias" in name)


def test_attributes_that_users_hang_on_parameters_are_there_sharded_and_gathered():
    run_ranks(3, _tags)


def _freezes(rank: int) -> None:
    torch.manual_seed(3)
    model = Base()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    batch = make_batch(4)
    parts = microbatches_of(batch, UNEVEN, rank)
    for frozen in ((), ("embed", "blocks.0", "blocks.1"), ("blocks.2",), ("head", "embed"), ()):
        for twin in (model, single):
            twin.zero_grad()
            for name, parameter in twin.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen or "-"))
        sharded_step(executor, model, mean_loss, parts)
        mean_loss(single, batch).backward()
        wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
        assert relative_error(full_gradients(model), wanted) <= 1e-5
        assert_idle(executor)


def test_users_may_freeze_and_unfreeze_between_steps():
    run_ranks(3, _freezes)


# -- weights --------------------------------------------------------------------------------------


class Tokens(Base):
    """Predicts one of five classes at each of three places, some of which do not count."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.through(self.embed(x)))


def token_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)


def _tokens(rank: int) -> None:
    torch.manual_seed(3)
    model = Tokens()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    torch.manual_seed(11)
    batch = {"x": torch.randn(4, 3, 4), "y": torch.randint(0, 5, (4, 3))}
    batch["y"][0] = -100
    batch["y"][1, 1:] = -100
    batch["y"][2] = -100  # a microbatch without any token: its mean is 0/0
    parts = microbatches_of(batch, UNEVEN, rank)

    for scale in (1.0, 1024.0):
        model.zero_grad()
        single.zero_grad()
        calls = [
            MicrobatchCall(
                lambda part=part: token_loss(model, part),
                lambda loss, part=part: (loss, float((part["y"] != -100).sum())),
            )
            for part in parts
        ]
        outcome = executor.forward(calls, partial(torch.mul, other=scale))
        executor.backward(divisor=4.0)
        assert outcome.total_weight == 4.0
        expected = token_loss(single, batch)
        (expected * scale / 4.0).backward()
        wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
        assert relative_error(full_gradients(model), wanted) <= 1e-5


def test_weights_of_tokens_give_the_gradient_of_the_mean_over_all_tokens():
    run_ranks(3, _tokens)


# -- evaluation -----------------------------------------------------------------------------------


def _evaluates(rank: int) -> None:
    torch.manual_seed(3)
    model = Base()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    x = make_batch(4)["x"]

    def generate(net: nn.Module, rounds: int) -> torch.Tensor:
        y = x[rank : rank + 1]
        for _ in range(rounds):
            y = torch.cat([y[:, 1:], net(y)], 1)
        return y

    for rounds in ((3, 1, 0), (0, 0, 2), (1, 1, 1)):
        for mode in (torch.no_grad, torch.inference_mode):
            call = None
            if rounds[rank]:
                call = MicrobatchCall(lambda: generate(model, rounds[rank]), lambda _: (_, 0.0))  # noqa: B023
            with mode():
                outcome = executor.evaluate(call, "validating")
                assert torch.is_inference_mode_enabled() is (mode is torch.inference_mode)
            executor.reshard()
            assert_idle(executor)
            if call is None:
                assert outcome.results == ()
            else:
                (found,) = outcome.results
                with torch.no_grad():
                    torch.testing.assert_close(found.clone(), generate(single, rounds[rank]))
    # training goes on after evaluation in inference mode
    sharded_step(executor, model, mean_loss, microbatches_of(make_batch(4), UNEVEN, rank))
    mean_loss(single, make_batch(4)).backward()
    wanted = {key: parameter.grad for key, parameter in single.named_parameters()}
    assert relative_error(full_gradients(model), wanted) <= 1e-5


def test_ranks_may_evaluate_units_differently_often_or_not_at_all():
    run_ranks(3, _evaluates)


def _evaluation_fails(rank: int) -> None:
    model = Base()
    executor = make_executor(model, UNEVEN.fractions, True)

    def step() -> torch.Tensor:
        y = model(torch.ones(2, 4))
        if rank == 1:
            raise KeyError("no such label")
        return model(torch.ones(2, 4)) + y

    for _ in range(2):
        with pytest.raises(KeyError if rank == 1 else RemoteRankError, match="no such label"):
            executor.evaluate(
                None if rank == 2 else MicrobatchCall(step, lambda _: (_, 0.0)), "validating"
            )
        assert_idle(executor)
    sharded_step(executor, model, mean_loss, microbatches_of(make_batch(4), UNEVEN, rank))


def test_a_failing_evaluation_is_raised_on_all_ranks():
    run_ranks(3, _evaluation_fails)


def _outside(rank: int) -> None:
    torch.manual_seed(3)
    model = Base()
    single = copy.deepcopy(model)
    executor = make_executor(model, UNEVEN.fractions, True)
    x = torch.ones(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), single(x))
    sharded_step(executor, model, mean_loss, microbatches_of(make_batch(4), UNEVEN, rank))
    assert_idle(executor)
    executor.reshard()
    executor.hooks.uninstall()
    assert all("forward" not in block.__dict__ for block in model.blocks)
    dist.barrier()


def test_a_model_may_be_called_outside_of_a_step_by_all_ranks():
    run_ranks(3, _outside)


def _memory(rank: int, recompute: bool) -> list[set[int]]:
    model = Deep()
    executor = make_executor(model, UNEVEN.fractions, recompute)
    parts = microbatches_of(make_batch(8), Allocation(((1, 1), (3,), (3,)), UNEVEN.fractions), rank)
    context = executor.units[1].flats[0].context
    seen = []
    for _ in range(4):
        sharded_step(executor, model, mean_loss, parts)
        pools = (context.buffers, context.gradient_buffers)
        seen.append({b.storage.data_ptr() for pool in pools for b in pool.buffers})
    return seen


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "kept"])
def test_units_take_turns_in_the_same_memory(recompute):
    """Two buffers of each kind, the same ones in every step; kept graphs have memory apart."""
    for seen in run_ranks(3, _memory, recompute):
        assert all(step == seen[1] for step in seen[2:])
        pointers = {pointer for pointer in seen[1] if pointer}
        # the root unit has no pool apart here: one buffer more of each kind
        assert len(pointers) <= (6 if recompute else 4)
