"""What ranks hold while they train, by kind, against arithmetic and against another instrument."""

import functools

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from profiled import GPT, fit, in_ranks, loader

from lightning_cephalo import Plan, RankPlan
from lightning_cephalo.emulation import active_device
from lightning_cephalo.observe import memory
from lightning_cephalo.observe.memory import COUNTED_STEP

WIDTH, DEPTH, CONTEXT = 64, 3, 32
MODEL = {"width": WIDTH, "depth": DEPTH, "context": CONTEXT}
UNEVEN = Plan(
    ranks=(
        RankPlan(microbatch_sizes=(4, 3, 2, 1), state_fraction=0.75),
        RankPlan(microbatch_sizes=(1, 1, 2, 2), state_fraction=0.25),
    )
)
IDLE = Plan(
    ranks=(
        RankPlan(microbatch_sizes=(8, 8), state_fraction=1.0),
        RankPlan(microbatch_sizes=(), state_fraction=0.0),
    )
)
NUMBER = 4  # bytes


class Peak(Callback):
    """Most bytes alive at once, and bytes between steps, by the emulated device's own count."""

    peak_bytes = resting_bytes = 0

    def on_train_batch_end(self, *_):
        if active_device() is not None:
            self.peak_bytes = max(self.peak_bytes, active_device().peak_bytes)
            self.resting_bytes = active_device().current_bytes


def held(plan, speeds, max_steps, early="auto"):
    peak = Peak()
    trainer = fit(
        GPT(**MODEL),
        loader(context=CONTEXT, batch_size=8),
        speeds=speeds,
        callbacks=[peak],
        max_steps=max_steps,
        strategy={"plan": plan, "early_update": early},
        is_time_shared=False,
    )
    timed = len(trainer.strategy._watch._steps_s)
    loss = trainer.callback_metrics["loss"].item()
    return trainer.strategy.report.memory, peak.peak_bytes, timed, loss, peak.resting_bytes


HELD = [
    (UNEVEN, (1.0, 1.0), 3, "auto"),
    (IDLE, (1.0, 1.0), 3, "auto"),
    (UNEVEN, None, 3, "auto"),
    (IDLE, None, 3, "auto"),
    (UNEVEN, (1.0, 1.0), 3, False),
    (UNEVEN, None, 1, "auto"),
]
UNCOUNTED = len(HELD)


@functools.cache
def all_held():
    """What each rank finds in every case, and where no step is counted."""

    def uncounted():
        before, memory.COUNTED_STEP = memory.COUNTED_STEP, 1_000
        try:
            return held(UNEVEN, None, 3)
        finally:
            memory.COUNTED_STEP = before

    return in_ranks(2, lambda: [*(held(*case) for case in HELD), uncounted()])


def held_by_ranks(plan, speeds, max_steps=3, early="auto"):
    index = HELD.index((plan, speeds, max_steps, early))
    return [found[index] for found in all_held()]


def parameters_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("plan", [UNEVEN, IDLE])
def test_kinds_are_what_arithmetic_says(plan, emulated):
    speeds = (1.0, 1.0) if emulated else None
    (measured, *_), (others, *_) = held_by_ranks(plan, speeds)
    assert measured == others  # every rank knows every rank's
    model = GPT(**MODEL).network
    block = parameters_of(model.blocks[0])
    root = parameters_of(model) - DEPTH * block
    # parameters, Adam's two moments, and the root unit's gradient: those of units are in full ones
    state = [rank.state_bytes for rank in measured]
    assert sum(state) == NUMBER * (3 * parameters_of(model) + root)
    for rank, part in zip(measured, plan.ranks, strict=True):
        # cuts lie between rows
        expected = part.state_fraction * sum(state)
        assert rank.state_bytes == pytest.approx(expected, abs=0.01 * sum(state))
        assert rank.gathered_bytes == NUMBER * (root + 2 * block)
        received = 2 * part.state_fraction * NUMBER * block
        assert rank.gradients_bytes == pytest.approx(
            NUMBER * (root + 2 * block) + received, rel=0.02
        )
        # an input of every block and the gradient of the last one's output; and the tokens
        per_sample = CONTEXT * (WIDTH * NUMBER * (DEPTH + 1) + 8)
        boundaries = part.batch_size * per_sample
        assert rank.boundaries_bytes == pytest.approx(boundaries, rel=0.1, abs=2_000)
        assert 0 <= rank.other_bytes < 10_000
        kinds = (rank.state_bytes, rank.gathered_bytes, rank.gradients_bytes,
                 rank.boundaries_bytes, rank.inside_bytes, rank.other_bytes)  # fmt: skip
        assert rank.peak_bytes == sum(kinds)
        assert (rank.inside_bytes > 100_000) == bool(part.batch_size)
        assert rank.step == (None if emulated else COUNTED_STEP)


def test_between_steps_early_updates_hold_12_bytes_per_parameter_and_late_ones_16():
    early, late = (held_by_ranks(UNEVEN, (1.0, 1.0), early=when) for when in ("auto", False))
    state = [rank.state_bytes for rank in late[0][0]]
    assert sum(state) == 4 * NUMBER * parameters_of(GPT(**MODEL).network)
    for own_bytes, (*_, early_bytes), (*_, late_bytes) in zip(state, early, late, strict=True):
        assert late_bytes - early_bytes == pytest.approx(own_bytes / 4, rel=0.001)
    assert [rank[3] for rank in early] == [rank[3] for rank in late]  # losses


def test_the_peak_is_that_of_the_emulated_device_and_of_a_step_counted_on_the_cpu():
    emulated = held_by_ranks(UNEVEN, (1.0, 1.0))
    on_cpu = held_by_ranks(UNEVEN, None)
    for rank, ((measured, peak_bytes, *_), (counted, *_)) in enumerate(
        zip(emulated, on_cpu, strict=True)
    ):
        assert measured[rank].peak_bytes == peak_bytes
        assert counted[rank].peak_bytes == pytest.approx(peak_bytes, rel=0.01)


def test_the_step_that_is_counted_on_the_cpu_is_not_timed():
    assert held_by_ranks(UNEVEN, None)[0][2] == 2
    assert held_by_ranks(UNEVEN, (1.0, 1.0))[0][2] == 3


def test_a_single_step_is_not_accounted():
    measured, _, timed, *_ = held_by_ranks(UNEVEN, None, 1)[0]
    assert measured is None
    assert timed == 1


def test_rank_zero_prints_predicted_beside_measured(capfd):
    def planned():
        predicted = []
        at_the_end = LambdaCallback(
            on_train_end=lambda trainer, _: predicted.extend(
                trainer.strategy.session.predicted_memory
            )
        )
        options = {"strategy": {"verbose": True}, "max_steps": 2, "callbacks": [at_the_end]}
        options["speeds"] = (1.0, 1.0)  # the plan depends on no machine
        trainer = fit(GPT(**MODEL), loader(context=CONTEXT, batch_size=8), **options)
        return trainer.strategy.report.memory, predicted

    measured, predicted = in_ranks(2, planned)[0]
    output = capfd.readouterr().out
    assert output.count("predicted / measured") == 1
    for rank in (0, 1):
        assert measured[rank].host_bytes == predicted[rank].host_bytes == 0
        assert measured[rank].peak_bytes == pytest.approx(predicted[rank].peak_bytes, rel=0.1)
        assert predicted[rank].state_bytes is None


def test_counting_a_step_changes_no_result():
    for (measured, *_, loss, _), found in zip(held_by_ranks(UNEVEN, None), all_held(), strict=True):
        nothing, *_, other, _ = found[UNCOUNTED]
        assert measured is not None and nothing is None
        assert loss == other
