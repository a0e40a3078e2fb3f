"""Optimizer state in host memory: it changes no bit, and the host's updates are fused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from common import Net, assert_same_optimizer_state, assert_same_tensors, in_ranks, loader
from lightning.pytorch import Callback, Trainer
from plans import GLOBAL_BATCH, PLANS, QUIET, plan_of, quiet_strategy
from profiled import GPT, fit
from profiled import in_ranks as in_emulated_ranks
from profiled import loader as profiled_loader
from torch import Tensor, nn

from lightning_cephalo import Plan
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan.program import Instruction, Operation

# what `_Gated` computes depends on the number of samples
pytestmark = pytest.mark.filterwarnings("ignore:The loss of .* samples is")
STATE = (
    Operation.FETCH_STATE,
    Operation.HOST_UPDATE,
    Operation.STORE_STATE,
    Operation.UPDATE,
)


SAMPLES = 22
"""Of three steps: the first traces the visits, and the last has fewer samples."""


def moved(plan: str, resident: float, on_host: float = 0.0) -> Plan:
    """A plan whose ranks keep a part of their optimizer state in host memory."""
    given = PLANS[plan]
    return replace(
        given,
        ranks=tuple(
            replace(rank, resident_fraction=resident, host_update_fraction=on_host)
            for rank in given.ranks
        ),
    )


class _Gated(nn.Module):
    """Has a parameter that no sample uses, one that not all microbatches use, and a frozen one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.never, self.some = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(width))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        used = x * self.some if len(x) == 2 else x
        return x + self.gain * self.down(torch.tanh(self.up(used)))


class Partly(Net):
    def __init__(self, optimizer: str = "adamw", fused: bool = False) -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(_Gated(6) for _ in range(3))
        self.blocks[1].up.weight.requires_grad_(False)
        self.fused = fused

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        for group in made[0][0].param_groups:
            group["fused"] = self.fused
        return made


class Notes(Callback, Observer):
    """Notes what is done with state, and what training gives."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.session.model.executor.link.attach(self)

    def before(self, instruction: Instruction) -> None:
        if instruction.operation in STATE:
            self.done.append(str(instruction))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        named = pl_module.named_parameters()
        self.values = {name: p.full_tensor().detach().clone() for name, p in named}
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.host_bytes = trainer.strategy.session.moved.host_bytes


def trainer(plan: Plan, early: Any, strategy: Any = None, **options: Any) -> Trainer:
    by_plan = quiet_strategy(
        plan=plan,
        global_batch_size=GLOBAL_BATCH,
        early_update=early,
        timeout=timedelta(seconds=400),
        **strategy or {},
    )
    options = {"accelerator": "cpu", "limit_val_batches": 0, **QUIET, **options}
    return Trainer(strategy=by_plan, devices=plan.world_size, **options)


def fitted(
    plan: Plan,
    early: Any,
    module: Any,
    callbacks: Any = (),
    ckpt_path: str | None = None,
    **options: Any,
) -> Notes:
    notes = Notes()
    runs = trainer(plan, early, callbacks=[notes, *callbacks], **options)
    runs.fit(module, loader(SAMPLES), loader(8), ckpt_path=ckpt_path)
    return notes


def assert_same(found: Notes, wanted: Notes) -> None:
    assert_same_tensors(found.values, wanted.values, 0.0)
    if wanted.state:  # rank 0 has it
        assert_same_optimizer_state(found.state, wanted.state, 0.0)


BY_VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
CLIPS, DOES_NOT = {"gradient_clip_val": 1e-3}, {"gradient_clip_val": 1e3}
# plan, optimizer, early updates, options of the Trainer, resident fraction
STREAMED = {
    2: [
        ("no data", "sgd", "auto", BY_VALUE, 0.5),
        ("3:1", "adamw", "auto", CLIPS, 0.3),
        ("no state", "sgd", False, DOES_NOT, 0.0),
        ("no data", "adamw", "auto", {"accumulate_grad_batches": 2}, 0.0),
    ],
    3: [("three", "adamw", "auto", {}, 0.5)],
}
MORE_STREAMED = [("3:1", "adamw", "auto", {}, 0.0)]


def _streamed(cases: Any) -> None:
    for plan, optimizer, early, options, resident in cases:
        wanted = fitted(PLANS[plan], early, Partly(optimizer), **options)
        found = fitted(moved(plan, resident), early, Partly(optimizer), **options)
        assert_same(found, wanted)
        has_rows = PLANS[plan].ranks[torch.distributed.get_rank()].state_fraction > 0
        assert wanted.host_bytes == 0 and (found.host_bytes > 0) is has_rows
        assert any(each.startswith("I") for each in found.done) is has_rows


@pytest.mark.parametrize("world_size", STREAMED)
def test_state_that_is_streamed_is_bit_by_bit_that_on_the_device(world_size):
    in_ranks(world_size, _streamed, STREAMED[world_size])


@pytest.mark.slow
def test_streamed_state_of_more_plans_is_bit_by_bit_that_on_the_device():
    in_ranks(2, _streamed, MORE_STREAMED)


class Writes(Callback):
    """Writes to weights between two steps, in every way that code has."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        block = pl_module.blocks[0]
        with torch.no_grad():
            block.up.weight.mul_(0.9)
            block.down.bias.copy_(torch.linspace(0, 1, 6))
        pl_module.head.weight.data.add_(0.01)
        block.down.weight.detach().sub_(0.02)


ON_HOST = [
    ("3:1", "sgd", "auto", BY_VALUE),
    ("no data", "adamw", "auto", {}),
    ("no data", "adamw", "auto", DOES_NOT),
    ("3:1", "adamw", "auto", {**CLIPS, "accumulate_grad_batches": 2}),
    ("no data", "adamw", False, {"accumulate_grad_batches": 2}),
]
MORE_ON_HOST = [("3:1", "adamw", "auto", CLIPS)]


def _on_host(cases: Any) -> None:
    for plan, optimizer, early, options in cases:
        # where all is updated on the host, that is what the fused optimizer gives
        fused = Partly(optimizer, optimizer == "adamw")
        wanted = fitted(PLANS[plan], early, fused, [Writes()], **options)
        found = fitted(moved(plan, 0.0, 1.0), early, Partly(optimizer), [Writes()], **options)
        assert found.done.count("C2") == found.done.count("S2") > 0 and "I2" not in found.done
        assert_same_tensors(found.values, wanted.values, 0.0)
        if wanted.state:
            assert list(found.state["state"]) == list(wanted.state["state"])
            for index, entries in wanted.state["state"].items():
                assert_same_tensors(found.state["state"][index], entries, 0.0)


def _on_both_sides() -> None:
    # the norm is of gradients on both sides
    wanted = fitted(PLANS["3:1"], "auto", Partly(fused=True), **CLIPS)
    both = fitted(moved("3:1", 0.5, 0.35), "auto", Partly(fused=True), **CLIPS)
    assert {"C3", "I2", "U2"} <= set(both.done)
    assert_same(both, wanted)
    # some of each: the units that the host does not update are not fused
    mixed = fitted(moved("3:1", 0.5, 0.35), "auto", Partly(fused=True))
    assert {"C3", "S3", "I2", "U2", "S2", "U1"} <= set(mixed.done)
    assert_same_tensors(mixed.values, fitted(PLANS["3:1"], False, Partly(fused=True)).values, 0.0)


def test_what_the_host_updates_is_what_the_fused_optimizer_gives():
    in_ranks(2, lambda: [_on_host(ON_HOST), _on_both_sides()])


@pytest.mark.slow
def test_what_the_host_updates_by_more_plans_is_what_the_fused_optimizer_gives():
    in_ranks(2, _on_host, MORE_ON_HOST)


# -- other plans ----------------------------------------------------------------------------------


class Changes(Callback):
    """Changes the plan twice, between steps."""

    def __init__(self, first: Plan, second: Plan) -> None:
        self.plans = {0: first, 2: second}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any, **__: Any) -> None:
        if trainer.current_epoch == 0 and rest[-1] in self.plans:
            trainer.strategy.change_plan(self.plans[rest[-1]])


def _trained(plans: list[Plan], path: str) -> Notes:
    """Train by three plans in turn, save, and resume by a fourth."""
    runs = trainer(plans[0], "auto", callbacks=[Changes(plans[1], plans[2])], max_epochs=2)
    runs.fit(Partly(), loader(), loader(8))
    runs.save_checkpoint(path)
    return fitted(plans[3], "auto", Partly(), ckpt_path=path, max_epochs=4)


def _followed(folder: str) -> None:
    names = ("3:1", "even", "idle first", "no state")
    wanted = _trained([PLANS[name] for name in names], f"{folder}/resident.ckpt")
    # the second one begins with all state on the device
    for parts in ((0.0, 0.5, 1.0, 0.0), (1.0, 0.0, 0.5, 1.0)):
        plans = [moved(name, part) for name, part in zip(names, parts, strict=True)]
        found = _trained(plans, f"{folder}/streamed.ckpt")
        assert_same(found, wanted)


@pytest.mark.slow
def test_it_follows_other_plans_and_is_resumed_by_them(tmp_path):
    in_ranks(2, _followed, str(tmp_path))


# -- bad input ------------------------------------------------------------------------------------


class Breaks(Callback):
    """Lets the host's update fail on rank 1, in the second step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and index == 1:
            trainer.optimizers[0].param_groups[0]["betas"] = None


class LacksPinned(Partly):
    """Its ranks pin host memory, of which that of rank 1 has none to give."""

    def configure_optimizers(self) -> Any:
        accelerator = self.trainer.strategy.session.model.accelerator
        accelerator.pins_host_memory = True
        if self.trainer.global_rank == 1:
            accelerator.allocate_host = self.refuse
        return super().configure_optimizers()

    def refuse(self, nbytes: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")  # as torch raises it


class Whole(Partly):
    """Has an optimizer whose updates are not element-wise."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def _raised(plan: Plan, module: Any, callbacks: Any = (), **strategy: Any) -> str:
    runs = trainer(plan, "auto", strategy=strategy, callbacks=list(callbacks))
    try:
        runs.fit(module, loader(), loader(8))
    except Exception as failure:
        said = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
        return f"{type(failure).__name__}: {said}"
    return ""


def _bad() -> list[str]:
    streamed, on_host = moved("3:1", 0.0), moved("3:1", 0.0, 1.0)
    return [
        _raised(streamed, Whole()),
        _raised(streamed, Partly(), host_memory_cap=1000),
        _raised(on_host, Partly(), [Breaks()]),
        *(_raised(plan, LacksPinned()) for plan in (streamed, on_host)),
    ]


def test_what_cannot_be_is_named_on_all_ranks():
    other, own = in_ranks(2, _bad)
    for whole, small, *_ in (other, own):
        assert "(resident_fraction), but it has to stay on the devices: Adafactor is none" in whole
        assert "HostMemoryError: The plan keeps" in small and "host_memory_cap=" in small
    assert own[2].startswith("TypeError: cannot unpack") and "Weights are half-updated" in own[2]
    assert "Rank 1" in other[2] and "failed: TypeError: cannot unpack" in other[2]
    for lacks, told in zip(own[3:], other[3:], strict=True):
        assert lacks.startswith("HostMemoryError: This rank's host did not give")
        assert told.startswith("RemoteRankError: Rank 1") and "allocating host memory" in told
        for said in (lacks, told):
            assert "CUDA error: out of memory" in said and "Lower Planner(host_memory_cap=" in said


class Poisoned(Partly):
    """Has weights of the head that make every gradient behind it NaN."""

    def __init__(self) -> None:
        super().__init__(fused=True)  # as the host updates
        self.head.weight.data[0] = torch.nan


def _poisoned() -> None:
    for options in ({}, {"gradient_clip_val": 0.5}):
        wanted = fitted(PLANS["3:1"], "auto", Poisoned(), **options)
        assert wanted.values["blocks.0.up.weight"].isnan().all()
        for on_host in (0.0, 0.5, 1.0):
            found = fitted(moved("3:1", 0.0, on_host), "auto", Poisoned(), **options)
            pairs = [(found.values, wanted.values)]
            if wanted.state:  # rank 0 has it
                kept = [list(notes.state["state"].values()) for notes in (found, wanted)]
                pairs += zip(*kept, strict=True)
            for one, other in pairs:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_gradients_that_are_nan_give_what_they_give_on_the_device():
    in_ranks(2, _poisoned)


# -- time ----------------------------------------------------------------------------------------


def _idle() -> list[float]:
    """Seconds of a step in which a rank without samples has state on its device, or streams it."""
    found = []
    for resident in (1.0, 0.4):
        plan = plan_of(((1,) * 4, 0.6), ((), 0.4), resident_fraction=resident)
        runs = fit(
            GPT(width=32, depth=6),
            profiled_loader(samples=16, batch_size=2),
            speeds=(1.0, 1.0),
            capacity_bytes=(2**30, 2**30),
            total_flops_per_s=1e9,
            emulation={"link_bytes_per_s": 1e8},
            max_steps=4,
            strategy={"plan": plan, "global_batch_size": 4},
        )
        found.append(runs.strategy.report.step_s)
    return found


@pytest.mark.slow
def test_the_ways_of_state_hide_on_a_rank_without_samples_too():
    for resident_s, streamed_s in in_emulated_ranks(2, _idle):
        assert streamed_s == pytest.approx(resident_s, rel=0.01)


# -- memory ---------------------------------------------------------------------------------------


class Predicted(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.memory = trainer.strategy.session.predicted_memory


def _memory() -> list[Any]:
    found = []
    for resident, on_host in ((1.0, 0.0), (0.3, 0.0), (0.3, 0.7)):
        each = {"resident_fraction": resident, "host_update_fraction": on_host}
        plan = plan_of(((2,), 0.75), ((2,), 0.25), **each)
        predicted = Predicted()
        runs = fit(
            GPT(width=32, depth=8),
            profiled_loader(samples=16),
            capacity_bytes=(2**30, 2**30),
            is_time_shared=False,
            callbacks=[predicted],
            max_steps=2,
            strategy={"plan": plan, "early_update": "auto", "global_batch_size": 4},
        )
        found.append((runs.strategy.report.memory, predicted.memory))
    return found


def test_the_device_holds_less_and_the_host_what_is_predicted():
    (all_there, _), *others = in_emulated_ranks(2, _memory)[0]
    for measured, predicted in others:
        for rank, (before, after, expected) in enumerate(
            zip(all_there, measured, predicted, strict=True)
        ):
            assert before.host_bytes == 0
            assert after.host_bytes == pytest.approx(expected.host_bytes, rel=0.05), rank
            # of 12 bytes per element 8 are state, of which 0.3 stay beside two of ten units
            assert after.state_bytes < 0.8 * before.state_bytes
            assert after.peak_bytes < before.peak_bytes
    streamed, on_host = (measured for measured, _ in others)
    for one, other in zip(streamed, on_host, strict=True):
        assert one.host_bytes < 0.55 * other.host_bytes  # 8 bytes against 16
        assert other.state_bytes < one.state_bytes  # no staging
