"""The session of a run: plans that are applied while it lasts, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import Cases
from common import Net, assert_same_tensors, loader, trainer, values_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from plans import PLANS, plan_of

from lightning_cephalo import CephaloStrategy, Plan

# as "3:1" deals samples and shares, in other microbatches
OTHER_MICROBATCHES = plan_of(((2, 2, 2), 0.75), ((1, 1), 0.25))
OTHER_FRACTIONS = plan_of(((3, 3), 0.4), ((2,), 0.6))


class Applies(Callback):
    """Applies a plan after the first step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        session = trainer.strategy.session
        if batch_idx == 0:
            session.adopt(session.accept(self.plan))
        self.counts.append(len(session.batches.cutter.cut(batch)))


class AppliesEarly(Net):
    """Applies a plan before there are optimizers."""

    def configure_optimizers(self):
        session = self.trainer.strategy.session
        session.adopt(session.accept(OTHER_FRACTIONS))
        return super().configure_optimizers()


def trained(make: Callable[[], Net] = Net, *callbacks: Callback):
    model = make()
    run = trainer("3:1", callbacks=list(callbacks), max_steps=3)
    run.fit(model, loader(), loader(8))
    return model.losses, values_of(model), run


def fit_unchanged(plan: str):
    return trained()[0]


def fit_with_other_microbatches(plan: str):
    callback = Applies(OTHER_MICROBATCHES)
    losses, _, run = trained(Net, callback)
    return losses, callback.counts, run.global_rank


def test_a_plan_that_moves_no_shards_can_be_applied_while_training():
    for wanted, own in zip(FITS["unchanged"], FITS["other microbatches"], strict=True):
        losses, counts, rank = own
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert counts == [len(OTHER_MICROBATCHES.ranks[rank].microbatch_sizes)] * 3


def fit_with_an_early_plan(plan: str):
    return trained(AppliesEarly)[0]


def test_shards_move_before_there_are_optimizers():
    for wanted, losses in zip(FITS["unchanged"], FITS["early plan"], strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)


def _fit_with(optimizer, *callbacks):
    class Chosen(Net):
        def configure_optimizers(self):
            return optimizer([p for p in self.parameters() if p.requires_grad])

    average = EMAWeightAveraging(decay=0.6)
    losses, values, _ = trained(Chosen, average, *callbacks)
    held = {name: value.clone() for name, value in average._average_model.state_dict().items()}
    return losses, values, held


MOVED = {
    "rows": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "owners": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def fit_kept_and_moved(plan: str, optimizer):
    same_data = plan_of(((3, 3), 0.1), ((2,), 0.9))
    return _fit_with(optimizer), _fit_with(optimizer, Applies(same_data))


@pytest.mark.parametrize("optimizer", MOVED)
def test_shards_move_with_optimizers_and_averages_wherever_updates_run(optimizer):
    """With other shares alone, all values are those of a run without the move, bit for bit."""
    for wanted, found in FITS[optimizer]:
        assert found[0] == wanted[0]
        assert_same_tensors(found[1], wanted[1], 0.0)
        assert_same_tensors(found[2], wanted[2], 0.0)


class Looks(Callback):
    """What a session says before, while and after a run."""

    def on_fit_start(self, trainer, module) -> None:
        self.plan = trainer.strategy.session.plan
        self.sizes = trainer.strategy.session.batches.cutter.microbatch_sizes


def fit_looking(plan: str):
    looks = Looks()
    run = trainer(plan, callbacks=[looks], max_steps=1)
    with pytest.raises(RuntimeError, match="works only while training runs"):
        run.strategy.session  # noqa: B018
    run.fit(Net(), loader(), loader(8))
    with pytest.raises(RuntimeError, match="works only while training runs"):
        run.strategy.session  # noqa: B018
    own = run.strategy.plan.ranks[run.global_rank].microbatch_sizes
    return looks.plan == run.strategy.plan == PLANS[plan], looks.sizes == own


def test_a_session_lasts_from_setup_to_teardown():
    assert FITS["looks"] == [(True, True)] * 2


class Overrules(Callback):
    """Applies a plan with an option of its own, and then one without."""

    def __init__(self, plan: Plan) -> None:
        self.plans = [replace(plan, reshard_after_forward=False), plan]
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        session = trainer.strategy.session
        session.adopt(session.accept(self.plans[batch_idx]))
        self.seen.append(session.model.executor.reshard_after_forward)


def fit_overruling(plan: str):
    overrules = Overrules(PLANS[plan])
    run = trainer(plan, callbacks=[overrules], max_steps=2)
    run.fit(Net(), loader(), loader(8))
    return overrules.seen


def test_a_plan_with_options_of_its_own_overrules_the_strategys_and_the_next_does_not():
    assert FITS["overruled options"] == [[False, True]] * 2


FITS = Cases(
    {
        "unchanged": ("3:1", fit_unchanged),
        "other microbatches": ("3:1", fit_with_other_microbatches),
        "early plan": ("3:1", fit_with_an_early_plan),
        **{name: ("3:1", fit_kept_and_moved, optimizer) for name, optimizer in MOVED.items()},
        "looks": ("3:1", fit_looking),
        "overruled options": ("3:1", fit_overruling),
    }
)


def test_the_world_size_is_known_before_setup():
    """Scripts divide a global batch by it; Lightning's connector calls ``set_world_ranks``."""
    made = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=CephaloStrategy(),
        logger=False,
        enable_checkpointing=False,
    )
    assert made.world_size == made.strategy.world_size == 3
