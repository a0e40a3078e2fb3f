"""Who uses a device asks it by meaning: a device that nobody knows by name is served as well."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from late_device import LateCopies, LateDevice
from plans import plan_of

from lightning_cephalo.accelerator.backends import Backend
from lightning_cephalo.accelerator.throttle import Throttle
from lightning_cephalo.execution.offload import HostArena
from lightning_cephalo.observe.memory import COUNTED_STEP, TrainingMemory
from lightning_cephalo.observe.watch import Watch
from lightning_cephalo.preparation.limits import read_limits
from lightning_cephalo.preparation.options import Options, Planner
from lightning_cephalo.profiling.memory_model import StepMeter, resting_bytes


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.full((1000,), float(at)).requires_grad_() for at in range(count)]


def test_offloaded_values_are_waited_for_and_kept_until_they_are_copied():
    arena = HostArena(LateDevice(), math.inf)
    for _ in range(2):
        arena.start()
        held = [(leaf, arena.offload(leaf)) for leaf in leaves(6)]
        assert all(leaf.untyped_storage().nbytes() == 4 for leaf, _ in held)
        for _, away in reversed(held):
            away.fetch()  # long before it is needed
        for at in reversed(range(len(held))):
            leaf, away = held[at]
            away.restore()
            assert torch.equal(leaf.detach(), torch.full((1000,), float(at)))


def test_memory_that_values_are_on_their_way_to_is_not_given_back_before_they_have_come():
    arena = HostArena(LateDevice(), math.inf)
    arena.start()
    (leaf,) = leaves(1)
    away = arena.offload(leaf)
    returning, _ = away.fetch()
    away.discard()
    assert away.returning is None and torch.equal(returning, torch.zeros(1000))


def test_the_late_copies_themselves_notice_who_does_not_wait_and_who_lets_go():
    copies, target = LateCopies(), torch.zeros(4)
    source = torch.ones(4)
    arrival = copies.start(target, source)
    assert not target.any()
    copies.wait(arrival)
    assert target.all()
    arrival = copies.start(target, source)
    del source
    with pytest.raises(AssertionError, match="given up before"):
        copies.wait(arrival)


def test_the_host_is_never_two_steps_ahead():
    device = LateDevice()
    throttle = Throttle(device)
    ahead = []
    for _ in range(5):
        throttle.begin_step()
        ahead.append(device.issued - device.done)
        device.issued += 1
        throttle.end_step()
    assert ahead == [0, 1, 1, 1, 1]


class FakeModel(SimpleNamespace):
    """As much of a sharded model as those ask for who watch it; unlike its base, can be referred
    to weakly."""


def model_on(device: LateDevice) -> FakeModel:
    return FakeModel(
        accelerator=device,
        backend=Backend(),
        module=torch.nn.BatchNorm1d(1, affine=False),
        units=[],
        flats=[],
        parameter_pools=[],
        gradient_pools=[],
        buffer_pools=[],
        buffers=list,
        executor=SimpleNamespace(
            arena=None,
            link=SimpleNamespace(
                attach=lambda _: None,
                detach=lambda _: None,
                observed_by=lambda _: nullcontext(),
            ),
            overlay=SimpleNamespace(buffers=SimpleNamespace(resting_bytes=0)),
        ),
    )


def test_the_peak_is_read_off_an_allocator_that_knows_it():
    device = LateDevice()
    device.figures.current_bytes, device.figures.peak_bytes = 100, 1000
    meter = StepMeter(model_on(device))
    with meter.measuring():
        device.figures.current_bytes = 130
        meter.forward_done()
        device.figures.peak_bytes = 170
    held = meter.held(samples_bytes=1)
    assert (held.kept_bytes, held.peak_bytes) == (31, 71)
    assert resting_bytes(model_on(device), []) == 130


def test_the_meter_of_a_training_slows_no_step_of_a_device_that_knows_its_peak():
    device = LateDevice()
    meter = TrainingMemory(model_on(device), [])
    for step in range(1, 4):
        with meter.step():
            device.figures.peak_bytes = 50 * step
        assert not meter.slowed
    measured = meter.measured()
    assert measured.peak_bytes == 150 and measured.step is None and measured.host_bytes == 0
    assert COUNTED_STEP < 3


def test_a_watch_does_not_wait_for_a_device_that_runs_behind():
    device = LateDevice()
    watch = Watch()
    model = model_on(device)
    watch.begin(model, plan_of(((1,), 1.0)))
    watch.start_step()
    device.issued += 1
    watch.finish_step()
    assert device.done == 0 and watch.step_s is not None


def test_host_memory_apart_from_the_device_is_measured():
    options = Options(planner=Planner(host_memory_cap=2**20))
    host = read_limits(LateDevice(), 1, 0, options).host
    assert host.is_apart and not host.is_pinned
    assert host.capacity_bytes == 2**20 and 0 < host.copy_bytes_per_s < math.inf
