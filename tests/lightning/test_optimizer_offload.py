"""The plan chooses where optimizer state lives: what fits nowhere else trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from profiled import GPT, fit, in_ranks, loader
from torch import Tensor

from lightning_cephalo import CephaloStrategy

MODEL = {"width": 64, "depth": 8}
STEPS = 3
# Ranks hold gathered units and 12 bytes of each of 417,536 parameters, 3.3 MB of them moments.
CAPACITIES = (3_700_000, 2_500_000)


class Model(GPT):
    """Its update divides by no number near zero, which would show rounding a hundredfold."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Amsgrad(Model):
    """Its optimizer holds three moments."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, amsgrad=True)


class Adagrad(Model):
    """Its optimizer holds one moment, from before the ranks are measured."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=1e-3, eps=1e-4)


KINDS = (Model, Amsgrad, Adagrad)


class Watch(Callback):
    """What training leaves, and what it held."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        session = trainer.strategy.session
        self.predicted, self.notes = session.predicted_memory, trainer.strategy._training.notes


def one_device(kind: type[Model] = Model) -> dict[str, Tensor]:
    module = kind(**MODEL)
    optimizer = module.configure_optimizers()
    module.log = lambda *_, **__: None
    for index, batch in zip(range(STEPS), loader(samples=8 * STEPS, batch_size=8), strict=True):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _trained(
    offload: Any,
    capacities: Any = CAPACITIES,
    emulation: Any = None,
    kind: type[Model] = Model,
    **strategy: Any,
) -> Any:
    watch, module = Watch(), kind(**MODEL)
    runs = fit(
        module,
        loader(samples=8 * STEPS, batch_size=4),
        capacity_bytes=capacities,
        emulation=emulation,
        callbacks=[watch],
        max_steps=STEPS,
        strategy={
            "optimizer_offload": offload,
            "replan": False,
            "budget_s": 1.0,
            **strategy,
        },
    )
    values = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return runs.strategy.plan, runs.strategy.report.memory, watch, values


def _refused(offload: Any, **strategy: Any) -> str:
    try:
        _trained(offload, **strategy)
    except Exception as failure:
        return str(failure)
    return ""


def _offloaded() -> Any:
    refused = [
        _refused(False),
        _refused("auto", host_memory_cap=200_000),
        _refused(True, host_memory_cap=0),
    ]
    found = []
    for kind in KINDS:
        plan, measured, watch, values = _trained("auto", kind=kind)
        found.append((plan, measured, watch.predicted, watch.notes, values))
    return refused, found


@pytest.mark.slow
def test_a_model_that_fits_nowhere_trains_as_on_one_device():
    wanted = [one_device(kind) for kind in KINDS]
    for rank, (refused, found) in enumerate(in_ranks(2, _offloaded)):
        without, capped, none = refused
        assert "Memory binds" in without and "optimizer_offload='auto'" in without
        assert "more host memory" in capped
        assert "optimizer_offload=True, but optimizer state has to stay" in none
        for own, values in zip(found, wanted, strict=True):
            _check(own, values, has_notes=rank == 0)


def _check(found: Any, wanted: dict[str, Tensor], has_notes: bool) -> None:
    plan, measured, predicted, notes, values = found
    assert plan.moves_state
    is_told = any("optimizer state in host memory" in note for note in notes)
    assert is_told == has_notes
    for name, value in wanted.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    for rank, held, expected, capacity in zip(
        plan.ranks, measured, predicted, CAPACITIES, strict=True
    ):
        assert held.peak_bytes <= rank.memory_bytes * 1.001 <= capacity * 1.001
        assert held.peak_bytes >= 0.8 * rank.memory_bytes
        assert held.host_bytes == pytest.approx(expected.host_bytes, rel=0.05)
        planned = (rank.host_bytes or 0) + (rank.state_host_bytes or 0)
        assert expected.host_bytes == pytest.approx(planned, rel=0.1, abs=2000)


def _with_a_slow_host() -> Any:
    """Of ranks that are alike but for the second one's host, which takes five times as long."""
    rates = {"link_bytes_per_s": (1e8, 2e7), "host_updates_per_s": (1e7, 2e6)}
    plan, _, _, values = _trained("auto", (3_100_000, 3_100_000), rates)
    return [rank.state_host_bytes or 0.0 for rank in plan.ranks], values


def _beside_full_units() -> Any:
    return _trained("auto", (4_500_000, 1_600_000))


def test_a_rank_that_full_units_leave_little_memory_is_measured_with_less_and_training_is_exact():
    """A share by its memory, a quarter, does not fit beside 0.9 MB of full units."""
    wanted = one_device()
    for plan, _, _, values in in_ranks(2, _beside_full_units):
        assert plan.ranks[1].state_fraction < 0.2
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)


def test_equal_devices_of_unlike_hosts_both_move_state_and_training_is_exact():
    """Both are planned with the slower host's rates: tests/profiling/test_state_rates.py."""
    wanted = one_device()
    for held_bytes, values in in_ranks(2, _with_a_slow_host):
        assert min(held_bytes) > 0
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)


def test_the_option_is_one_of_three():
    for value in (True, False, "auto"):
        assert CephaloStrategy(optimizer_offload=value)._options.optimizer_offload == value
    with pytest.raises(ValueError, match="optimizer_offload: expected True, False or 'auto'"):
        CephaloStrategy(optimizer_offload="yes")
