"""The interface of a device, on those that can be had here: the CPU, and emulated ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_cephalo.accelerator import Accelerator, accelerator_of
from lightning_cephalo.accelerator.attention import ATTENTION_KERNELS
from lightning_cephalo.accelerator.backends import BACKENDS, Backend, backend_named
from lightning_cephalo.accelerator.cpu import Cpu
from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.accelerator.host import USABLE_SHARE, host_share
from lightning_cephalo.accelerator.marks import HostMarks, StreamMarks
from lightning_cephalo.accelerator.torch_device import TorchDevice, distinct_bytes
from lightning_cephalo.emulation import EmulatedDevice

CPU = torch.device("cpu")
GLOO = backend_named("gloo")
CAPACITY_BYTES = 10**6


@pytest.fixture(params=["cpu", "emulated"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    emulated = EmulatedDevice(capacity_bytes=CAPACITY_BYTES, name="small")
    with emulated if request.param == "emulated" else nullcontext():
        yield accelerator_of(CPU)


# -- of all that run on the host -------------------------------------------------------------------


def test_which_one_it_is_depends_on_where_it_is_asked_for():
    assert type(accelerator_of(CPU)) is Cpu
    with EmulatedDevice() as outer, EmulatedDevice() as inner:
        found = accelerator_of(CPU)
        assert isinstance(found, Emulated) and found.emulated is inner is not outer
    assert type(accelerator_of(CPU)) is Cpu
    assert isinstance(accelerator_of(torch.device("cuda", 0)), TorchDevice)


def test_collectives_and_kernels_run_on_the_host(accelerator):
    assert accelerator.computes_on_host and not accelerator.pins_host_memory
    assert accelerator.default_backend == "gloo"
    assert accelerator.autocast_types == ("cpu",)
    assert accelerator.end_of_work() is None
    assert accelerator.allocator is None
    accelerator.empty_cache()


def test_it_holds_what_lies_in_its_memory(accelerator):
    assert accelerator.holds(torch.zeros(2))
    assert not accelerator.holds(torch.zeros(2, device="meta"))


def test_the_clock_is_the_hosts(accelerator):
    before_s = time.perf_counter()
    found = [accelerator.now_s(), accelerator.clock(), accelerator.now_s()]
    assert before_s <= found[0] <= found[1] <= found[2] <= time.perf_counter()


def test_tests_of_users_may_replace_the_clock_that_callbacks_read(monkeypatch):
    with monkeypatch.context() as replaced:
        replaced.setattr(time, "perf_counter", iter([]).__next__)
        assert accelerator_of(CPU).now_s() > 0.0


def test_random_numbers_are_drawn_again(accelerator):
    states = accelerator.random_states()
    drawn = torch.rand(3)
    assert not torch.equal(torch.rand(3), drawn)
    accelerator.restore_random_states(states)
    assert torch.equal(torch.rand(3), drawn)


def test_copies_are_done_when_they_have_started(accelerator):
    copies, source = accelerator.copies(), torch.arange(6.0).reshape(2, 3)
    host = torch.zeros(2, 3)
    arrival = copies.start(host, source)
    assert arrival is None and torch.equal(host, source)
    copies.wait(arrival)


def test_host_memory_is_bytes(accelerator):
    host = accelerator.allocate_host(100)
    assert host.dtype == torch.uint8 and host.shape == (100,) and host.device == CPU
    assert not host.is_pinned()


def test_its_text_names_it(accelerator):
    assert accelerator.name in repr(accelerator)


# -- of the CPU ------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_its_memory():
    one, four = (accelerator_of(CPU).describe(ranks) for ranks in (1, 4))
    assert (one.name, one.speed_lasts, one.cap_bytes) == ("cpu", True, math.inf)
    assert four.total_bytes == one.total_bytes / 4
    assert 0 < four.capacity_bytes < four.total_bytes


def test_memory_of_the_cpu_is_the_hosts():
    accelerator = accelerator_of(CPU)
    assert not accelerator.host_is_apart and accelerator.memory is None
    lift = accelerator.limit_memory(1.0)  # nobody can refuse anything
    torch.zeros(100)
    lift()


# -- of emulated devices ---------------------------------------------------------------------------


def test_an_emulated_device_tells_its_own_name_and_memory():
    with EmulatedDevice(capacity_bytes=CAPACITY_BYTES, name="small"):
        device = accelerator_of(CPU).describe(processes_on_host=3)
    assert device.name == "small" and not device.speed_lasts
    assert device.capacity_bytes == device.total_bytes == CAPACITY_BYTES


def test_an_emulated_device_without_a_capacity_has_its_share_of_the_host():
    with EmulatedDevice():
        device = accelerator_of(CPU).describe(processes_on_host=3)
    assert device.total_bytes == host_share(3).total_bytes


def test_what_is_made_on_the_host_takes_no_room_on_an_emulated_device():
    with EmulatedDevice(capacity_bytes=CAPACITY_BYTES) as emulated:
        accelerator = accelerator_of(CPU)
        assert accelerator.host_is_apart and accelerator.memory is emulated
        host = accelerator.allocate_host(10 * CAPACITY_BYTES)
        with accelerator.on_host():
            also = torch.zeros(10 * CAPACITY_BYTES)
        assert emulated.current_bytes == 0
        on_device = torch.zeros(100)
        assert emulated.current_bytes == 400
    assert host.numel() == also.numel() and on_device.numel() == 100


def test_a_limit_holds_until_it_is_lifted_once():
    with EmulatedDevice(capacity_bytes=CAPACITY_BYTES) as emulated:
        accelerator = accelerator_of(CPU)
        lift = accelerator.limit_memory(1000.9)
        assert emulated.capacity_bytes == 1000
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1001, dtype=torch.uint8)
        lift()
        torch.zeros(1001, dtype=torch.uint8)
        emulated.change_capacity(2 * CAPACITY_BYTES)
        lift()  # the second time it does nothing
        assert emulated.capacity_bytes == 2 * CAPACITY_BYTES
        accelerator.limit_memory(math.inf)()
        assert emulated.capacity_bytes == 2 * CAPACITY_BYTES


def test_marks_and_the_clock_go_by_the_emulated_devices_work():
    class Busy(EmulatedDevice):
        done_s, waits = math.inf, 0

        def synchronize(self, *, keep_credit: bool = False) -> None:
            self.waits += 1

    with Busy() as emulated:
        accelerator = accelerator_of(CPU)
        assert accelerator.marks(GLOO).now() == math.inf
        emulated.done_s = -math.inf
        assert accelerator.marks(GLOO).now() <= time.perf_counter()
        accelerator.clock()
        assert emulated.waits == 1


# -- marks -----------------------------------------------------------------------------------------


class HostWork:
    """A collective that host threads have done: its future calls back."""

    def get_future(self) -> HostWork:
        return self

    def add_done_callback(self, note) -> None:
        note(self)


class HandleOfTransfer:
    def when_done(self, note) -> None:
        note()


def test_marks_of_the_host_are_times_of_its_clock():
    times = iter([1.0, 3.0, 5.0, 7.0])
    marks = HostMarks(lambda: next(times), lambda: 4.0)
    assert [marks.now(), marks.now(), marks.now()] == [4.0, 4.0, 5.0]
    assert marks.passed(5.0) and marks.between_s(4.0, 5.0) == 1.0 and marks.host_s(5.0) == 5.0
    ends: list[float] = []
    marks.when_done(HostWork(), ends.append)
    assert ends == [7.0]  # of when it was done: the device's work has nothing to do with it


@pytest.mark.parametrize("work", [HostWork(), HandleOfTransfer()])
def test_the_end_of_a_collective_on_the_host_is_noted(work):
    ends: list[float] = []
    HostMarks(lambda: 2.0).when_done(work, ends.append)
    assert ends == [2.0]


def test_collectives_of_the_host_are_noted_by_its_clock_on_any_device():
    marks = StreamMarks(torch.device("cuda", 0), collectives_on_device=False, now_s=lambda: 2.0)
    ends: list[float] = []
    marks.when_done(HostWork(), ends.append)
    assert ends == [2.0] == [marks.host_s(end) for end in ends]


# -- devices of torch, by a module that stands for theirs ------------------------------------------


class ModuleEvent:
    def __init__(self, **options: bool) -> None:
        self.options, self.recorded = options, False

    def record(self) -> None:
        self.recorded = True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(
        get_device_name=lambda device: f"NVIDIA H{100 + device.index}",
        mem_get_info=lambda device: (600, 1000),
        memory_reserved=lambda device: 100,
        memory_allocated=lambda device: 80,
        max_memory_allocated=lambda device: 90,
        Event=ModuleEvent,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


def test_a_device_of_torch_runs_behind_its_host(module):
    accelerator = accelerator_of(torch.device("cuda", 1))
    assert not accelerator.computes_on_host
    assert accelerator.host_is_apart and accelerator.pins_host_memory
    assert accelerator.default_backend == "nccl"
    assert set(accelerator.autocast_types) == {"cpu", "cuda"}
    assert not accelerator.holds(torch.zeros(2))


def test_a_device_of_torch_is_described_by_what_is_free_and_what_is_ours(module):
    device = accelerator_of(torch.device("cuda", 1)).describe(processes_on_host=8)
    assert device.name == "H101" and device.speed_lasts
    assert device.capacity_bytes == 700 * USABLE_SHARE and device.total_bytes == 1000


def test_its_allocator_leaves_out_what_it_is_told_to(module, monkeypatch):
    accelerator = accelerator_of(torch.device("cuda", 1))
    monkeypatch.setattr(type(accelerator), "holds", lambda self, tensor: tensor.numel() > 1)
    figures = accelerator.memory
    assert figures is accelerator.allocator
    assert (figures.current_bytes, figures.peak_bytes) == (80, 90)
    batch = torch.zeros(4)
    figures.untrack(batch, batch.view(2, 2), torch.zeros(1))
    assert figures.current_bytes == 80 - 16
    figures.track(batch)
    assert figures.current_bytes == 80


def test_what_its_module_lacks_is_asked_of_torch(module):
    accelerator = accelerator_of(torch.device("cuda", 1))
    assert accelerator.ask("memory_allocated") is module.memory_allocated
    assert accelerator.ask("reset_peak_memory_stats") is torch.accelerator.reset_peak_memory_stats


def test_the_host_sleeps_for_its_work_where_events_can(module):
    event = accelerator_of(torch.device("cuda", 1)).end_of_work()
    assert event.options == {"blocking": True} and event.recorded


def test_its_generator_is_put_back_with_the_cpus(module):
    states = {"device": torch.tensor([7])}
    module.get_rng_state = lambda device: states["device"].clone()
    module.set_rng_state = lambda state, device: states.update(device=state)
    accelerator = accelerator_of(torch.device("cuda", 1))
    saved, drawn = accelerator.random_states(), torch.rand(2)
    states["device"] = torch.tensor([8])
    accelerator.restore_random_states(saved)
    assert states["device"].item() == 7 and torch.equal(torch.rand(2), drawn)


def test_storages_count_once():
    base = torch.zeros(10)
    assert distinct_bytes([base, base[2:], torch.zeros(1)]) == 44


# -- tables ----------------------------------------------------------------------------------------


def test_backends_are_known_by_what_they_do():
    assert not backend_named("gloo").runs_on_device
    for name in ("nccl", "xccl", "hccl"):
        assert backend_named(name).runs_on_device
    assert backend_named("nccl").must_be_aborted and backend_named("nccl").barrier_names_device
    assert list(backend_named("nccl").environment) == ["NCCL_LAUNCH_ORDER_IMPLICIT"]
    assert backend_named("ucc") == backend_named(None) == Backend()
    assert set(BACKENDS) == {"gloo", "nccl", "xccl", "hccl"}


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_the_backend_that_torch_prefers_is_in_the_table(kind):
    assert dist.get_default_backend_for_device(kind) in BACKENDS


def test_attention_kernels_are_read_as_torch_reads_them():
    public = torch.backends.cuda
    readers = (
        public.flash_sdp_enabled,
        public.mem_efficient_sdp_enabled,
        public.math_sdp_enabled,
        public.cudnn_sdp_enabled,
    )
    for (allowed, allow), reader in zip(ATTENTION_KERNELS, readers, strict=True):
        before = reader()
        try:
            for value in (False, True):
                allow(value)
                assert allowed() is reader() is value
        finally:
            allow(before)


def test_a_generic_event_still_cannot_sleep():
    """Else the table of traits need not ask the device's own module for one."""
    assert "not supported right now" in torch.Event.__doc__
