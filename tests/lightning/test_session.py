"""The session of a run: plans that are applied while it lasts, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from common import Net, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback, Trainer
from plans import PLANS, plan_of

from lightning_cephalo import CephaloStrategy, Plan
from lightning_cephalo.common.errors import UnsupportedError

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
            session.apply(self.plan)
        self.counts.append(len(session.cutter.cut(batch)))


class AppliesEarly(Net):
    """Applies a plan before there are optimizers."""

    def configure_optimizers(self):
        self.trainer.strategy.session.apply(OTHER_FRACTIONS)
        return super().configure_optimizers()


def trained(make: Callable[[], Net] = Net, *callbacks: Callback):
    model = make()
    run = trainer("3:1", callbacks=list(callbacks), max_steps=3)
    run.fit(model, loader(), loader(8))
    return model.losses, values_of(model), run


def test_a_plan_that_moves_no_shards_can_be_applied_while_training():
    def fit():
        wanted, _, _ = trained()
        callback = Applies(OTHER_MICROBATCHES)
        losses, _, run = trained(Net, callback)
        return wanted, losses, callback.counts, run.global_rank

    for wanted, losses, counts, rank in in_ranks(2, fit):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert counts == [len(OTHER_MICROBATCHES.ranks[rank].microbatch_sizes)] * 3


def test_shards_move_before_there_are_optimizers():
    def fit():
        wanted, _, _ = trained()
        losses, _, _ = trained(AppliesEarly)
        return wanted, losses

    for wanted, losses in in_ranks(2, fit):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_shards_of_an_optimizer_do_not_move_yet():
    def fit():
        with pytest.raises(UnsupportedError, match="their state cannot be moved yet") as refused:
            trained(Net, Applies(OTHER_FRACTIONS))
        return str(refused.value)

    for message in in_ranks(2, fit):
        assert "40.0%, 60.0%; they hold 75.0%, 25.0%" in message
        assert "resume a checkpoint with CephaloStrategy(plan=...)" in message


class Looks(Callback):
    """What a session says before, while and after a run."""

    def on_fit_start(self, trainer, module) -> None:
        self.plan = trainer.strategy.session.plan
        self.sizes = trainer.strategy.session.cutter.microbatch_sizes


def test_a_session_lasts_from_setup_to_teardown():
    def fit():
        looks = Looks()
        run = trainer("3:1", callbacks=[looks], max_steps=1)
        with pytest.raises(RuntimeError, match="works only while training runs"):
            run.strategy.session  # noqa: B018
        run.fit(Net(), loader(), loader(8))
        with pytest.raises(RuntimeError, match="works only while training runs"):
            run.strategy.session  # noqa: B018
        own = run.strategy.plan.ranks[run.global_rank].microbatch_sizes
        return looks.plan == run.strategy.plan == PLANS["3:1"], looks.sizes == own

    assert in_ranks(2, fit) == [(True, True)] * 2


def test_a_plan_with_options_of_its_own_overrules_the_strategys_and_the_next_does_not():
    says = replace(PLANS["3:1"], reshard_after_forward=False)

    def fit():
        seen = []

        class Overrules(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
                session = trainer.strategy.session
                session.apply([says, PLANS["3:1"]][batch_idx])
                seen.append(session.model.executor.reshard_after_forward)

        run = trainer("3:1", callbacks=[Overrules()], max_steps=2)
        run.fit(Net(), loader(), loader(8))
        return seen

    assert in_ranks(2, fit) == [[False, True]] * 2


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
