"""Updates on the host before the norm that clips gradients is known: no bit changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from common import in_ranks, loader
from lightning.pytorch import Callback
from test_moved_state import Breaks, Changes, Notes, Partly, fitted, moved, trainer
from test_repeated_steps import MOVING, PLAN, Sends, _result

from lightning_cephalo import Plan
from lightning_cephalo.adapters import host_update, speculation
from lightning_cephalo.common.errors import UnsupportedError

# what `_Gated` computes depends on the number of samples
pytestmark = pytest.mark.filterwarnings("ignore:The loss of .* samples is")
SAMPLES = 46
"""Of six steps: the first traces the visits, and the second one speculates nothing yet."""
CLIPPED, NOT = 1e-3, 1e3


def ahead(plan: Plan, part: float = 1.0) -> Plan:
    """A plan whose hosts update a part of their units before the norm is known."""
    ranks = [replace(r, speculated_fraction=part * r.host_update_fraction) for r in plan.ranks]
    return replace(plan, ranks=tuple(ranks))


class Clips(Callback):
    """Clips each step by its own norm, and may do more before it."""

    def __init__(self, *norms: float, before: Any = None) -> None:
        self.norms, self.before = norms, before

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        trainer.gradient_clip_val = self.norms[index % len(self.norms)]
        if self.before is not None:
            self.before(trainer, pl_module, batch, index)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count updates that begin before the norm, and those that hold."""
    found = {"begun": 0, "held": 0}
    guess, confirm = host_update.HostUpdates.guess, host_update.HostUpdates.confirm

    def count_guess(self: Any, unit: int, *rest: Any) -> None:
        before = len(self._guesses)
        guess(self, unit, *rest)
        found["begun"] += len(self._guesses) - before

    def count_confirm(self: Any, *rest: Any) -> Any:
        held = confirm(self, *rest)
        found["held"] += bool(held)
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_update.HostUpdates, "guess", count_guess)
        patch.setattr(host_update.HostUpdates, "confirm", count_confirm)
        yield found


def run(plan: Plan, clips: Clips, module: Any = None, **options: Any) -> tuple[Notes, Any]:
    notes = Notes()
    callbacks = [notes, clips]
    runs = trainer(plan, "auto", callbacks=callbacks, gradient_clip_val=1.0, **options)
    with counted() as found:
        runs.fit(module or Partly(), loader(SAMPLES), loader(8))
    return notes, found


def assert_equal(found: Notes, wanted: Notes) -> None:
    _equal(found.values, wanted.values)
    if not wanted.state:
        return
    assert list(found.state["state"]) == list(wanted.state["state"])
    for index, entries in wanted.state["state"].items():
        _equal(found.state["state"][index], entries)
    assert found.state["param_groups"] == wanted.state["param_groups"]


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


# two steps behind one that was wrong assume nothing
IN_TURNS = (NOT, NOT, CLIPPED, NOT, NOT, CLIPPED)
NORMS = {IN_TURNS: {"begun": 3, "held": 1}, (CLIPPED,): {"begun": 0, "held": 0}}
CASES: dict[int, list[tuple[str, float, float, str, float, int]]] = {
    # plan, fractions, optimizer, the part ahead, units that rank 0 updates ahead
    2: [("3:1", 0.0, 1.0, "adamw", 1.0, 3), ("no data", 0.0, 1.0, "sgd", 0.5, 1)],
    3: [("three", 0.3, 0.4, "adamw", 1.0, 1)],
}


def _same(cases: Any) -> None:
    for plan, resident, on_host, optimizer, part, units in cases:
        late = moved(plan, resident, on_host)
        for norms, counts in NORMS.items():
            wanted, none = run(late, Clips(*norms), Partly(optimizer))
            found, own = run(ahead(late, part), Clips(*norms), Partly(optimizer))
            assert none == {"begun": 0, "held": 0}
            assert_equal(found, wanted)
            assert found.done == wanted.done
            if torch.distributed.get_rank() == 0:
                assert own == {name: units * count for name, count in counts.items()}
                assert found.host_bytes > wanted.host_bytes


@pytest.mark.parametrize("world_size", CASES)
def test_clipped_or_not_it_is_the_update_behind_the_norm(world_size):
    in_ranks(world_size, _same, CASES[world_size])


# -- what the update may not assume ---------------------------------------------------------------


class Late(Partly):
    """Changes something in two backwards, when the last block's gradient is on the host."""

    def __init__(self, change: Any, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.change = change

    def forward(self, x: Any) -> Any:
        x = self.inputs(x)
        if x.requires_grad and self.trainer.global_step in (2, 4):
            x.register_hook(lambda gradient: self.change(self))
        for block in self.blocks:
            x = block(x)
        return self.outputs(torch.tanh(self.head(x))).sum(1, keepdim=True) * self.gain


def _rate(module: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] = 0.003 * module.trainer.global_step


def _betas(module: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["betas"][0] = 0.1 * module.trainer.global_step


class Listed(Late):
    """Has options that code may change in place, and one that has no single comparison."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        for group in made[0][0].param_groups:
            group.update(betas=[0.9, 0.99], layers=numpy.arange(3))
        return made


def _state(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    for parameter, entries in optimizer.state.items():
        if parameter.ndim == 2:
            entries["exp_avg"].mul_(0.5)


def _lost_gradient(trainer: Any, module: Any, batch: Any, index: int) -> None:
    if index == 2:
        batch[0][:] = torch.nan


@contextmanager
def failing() -> Iterator[None]:
    """Let updates before the norm fail, half done, and no others."""
    work = speculation.Guess.work

    def fail(self: Any, step: Any) -> None:
        work(self, step)
        raise MemoryError("no memory in the thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation.Guess, "work", fail)
        yield


def _assumed() -> None:
    late = moved("3:1", 0.0, 1.0)
    # two steps behind one that was wrong assume nothing
    everything, some = {"begun": 15, "held": 15}, {"begun": 9, "held": 8}
    for kind, change in ((Late, _rate), (Late, _state), (Listed, _betas)):
        wanted, _ = run(late, Clips(NOT), kind(change))
        found, own = run(ahead(late), Clips(NOT), kind(change))
        _equal(found.values, wanted.values)
        if kind is Late:  # others have options that cannot be compared
            assert_equal(found, wanted)
        assert own == some or torch.distributed.get_rank()
    wanted, _ = run(late, Clips(NOT, before=_lost_gradient))
    found, own = run(ahead(late), Clips(NOT, before=_lost_gradient))
    assert wanted.values["blocks.0.up.weight"].isnan().all()
    assert_equal(found, wanted)
    wanted, own = run(late, Clips(NOT))
    with failing():
        found, own = run(ahead(late), Clips(NOT))
    assert_equal(found, wanted)
    assert own["begun"] == 6 and own["held"] <= 6
    found, own = run(ahead(late), Clips(NOT))
    assert_equal(found, wanted)
    assert own == everything


def test_what_changes_before_the_norm_is_known_is_in_the_update():
    in_ranks(2, _assumed)


# -- other plans, checkpoints, and steps that are repeated ----------------------------------------


def _resumed(plans: list[Plan], path: str) -> Notes:
    """Train by two plans in turn, save, and resume by a third."""
    callbacks = [Clips(NOT, NOT, CLIPPED), Changes(plans[1], plans[1])]
    runs = trainer(plans[0], "auto", callbacks=callbacks, gradient_clip_val=1.0, max_epochs=2)
    runs.fit(Partly(), loader(), loader(8))
    runs.save_checkpoint(path)
    again = [Clips(NOT)]
    options = {"gradient_clip_val": 1.0, "max_epochs": 4}
    return fitted(plans[2], "auto", Partly(), again, ckpt_path=path, **options)


def _followed(folder: str) -> None:
    late = [moved("3:1", 0.0, 1.0), moved("no data", 0.0, 1.0), moved("even", 0.0, 1.0)]
    wanted = _resumed(late, f"{folder}/late.ckpt")
    with counted() as found:
        own = _resumed([*map(ahead, late)], f"{folder}/ahead.ckpt")
    assert_equal(own, wanted)
    assert found["held"] > 9 or torch.distributed.get_rank()


def test_it_follows_other_plans_and_is_resumed_from_a_checkpoint(tmp_path):
    in_ranks(2, _followed, str(tmp_path))


def _repeated() -> None:
    problem = replace(MOVING, sends_gradients=True, may_speculate=True)
    options = {"gradient_clip_val": NOT, "early": "auto", "problem": problem}
    ranks = [replace(r, resident_fraction=0.0, host_update_fraction=1.0) for r in PLAN.ranks]
    late = replace(PLAN, ranks=tuple(ranks))
    results = []
    for plan in (late, ahead(late)):
        with counted() as found:
            results.append(_result(lambda: Sends((3, "backward")), plan, **options))
    (wanted, _, _), (own, plans, _) = results
    assert len(plans) == 1  # the rank went on with another one
    assert own["losses"] == wanted["losses"]
    _equal(own["values"], wanted["values"])
    # those of the attempt that ran out of memory are forgotten
    assert found["begun"] > found["held"] > 3 or torch.distributed.get_rank()


def test_a_step_that_is_repeated_forgets_what_the_host_has_begun():
    in_ranks(2, _repeated)


class BreaksLater(Breaks):
    """Lets all of the host's updates fail on rank 1, behind two steps."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        trainer.gradient_clip_val = NOT
        super().on_train_batch_start(trainer, pl_module, batch, index - 1)


def _broken() -> str:
    plan = ahead(moved("3:1", 0.0, 1.0))
    runs = trainer(plan, "auto", callbacks=[BreaksLater()], gradient_clip_val=1.0)
    try:
        runs.fit(Partly(), loader(SAMPLES), loader(8))
    except Exception as failure:
        said = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
        return f"{type(failure).__name__}: {said}"
    return ""


def test_an_update_that_fails_with_the_norm_too_ends_all_ranks():
    other, own = in_ranks(2, _broken)
    assert own.startswith("TypeError: cannot unpack") and "Weights are half-updated" in own
    assert "Rank 1" in other and "failed: TypeError: cannot unpack" in other


class ByValue(Partly):
    """Clips the third step by value, which is said behind its forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.gradient_clip_algorithm = "value" if batch_idx == 2 else "norm"
        return loss


def _by_value() -> str:
    try:
        run(moved("3:1", 0.0, 1.0), Clips(NOT), ByValue())
    except UnsupportedError as failure:
        return str(failure)
    return ""


def test_gradients_that_have_left_are_not_clipped_by_value_in_silence():
    for said in in_ranks(2, _by_value):
        assert "clipped by value, but those of the parameters 'blocks.0.up.weight'" in said
        assert "are on the host already: the step began with clipping by norm" in said


# -- what is said -----------------------------------------------------------------------------


class Nesterov(Partly):
    """Has an optimizer without a fused kernel for hosts."""

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def _unfused() -> None:
    late = moved("3:1", 0.0, 1.0)
    wanted, _ = run(late, Clips(NOT), Nesterov())
    is_first = torch.distributed.get_rank() == 0
    with (
        pytest.warns(UserWarning, match="NAdam has no fused kernel") if is_first else nullcontext()
    ):
        found, own = run(ahead(late), Clips(NOT), Nesterov())
    assert_equal(found, wanted)
    assert own == {"begun": 0, "held": 0}


def test_an_optimizer_whose_kernel_may_write_gradients_waits_for_the_norm_and_says_so():
    in_ranks(2, _unfused)
