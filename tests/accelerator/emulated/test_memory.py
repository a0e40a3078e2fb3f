import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_cephalo.emulation import EmulatedDevice, MemoryTracker

KIBI = 256  # float32 elements


def allocator_peak_bytes(work):
    """What torch's CPU allocator itself reports, an instrument independent of ours."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        work()
    current = peak = 0
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


class Block(nn.Module):
    def __init__(self, width, recompute):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.recompute = recompute

    def forward(self, hidden):
        if self.recompute:
            return checkpoint(self.run, hidden, use_reentrant=False)
        return self.run(hidden)

    def run(self, hidden):
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + self.perceptron(hidden)


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_agrees_with_the_allocator_over_training_steps(recompute):
    def work():
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(64, recompute) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    work()
    gc.collect()
    expected = allocator_peak_bytes(work)
    with MemoryTracker() as tracker:
        work()
    assert tracker.peak_bytes == pytest.approx(expected, rel=0.05)


def test_live_and_peak_follow_birth_and_death():
    with MemoryTracker() as tracker:
        first = torch.zeros(KIBI)
        second = first + 1
        assert tracker.current_bytes == 2048
        del second
        assert tracker.current_bytes == 1024
        assert tracker.peak_bytes == 2048
        tracker.reset_peak()
        assert tracker.peak_bytes == 1024
    del first
    assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 1024


def test_views_and_in_place_operators_add_nothing():
    with MemoryTracker() as tracker:
        values = torch.zeros(KIBI)
        views = [values.view(16, 16), values[:8], values.detach(), *values.chunk(4)]
        values.add_(1)
        views[0].mul_(2)
        torch.add(values, 1, out=values)
        assert tracker.current_bytes == 1024


def test_what_autograd_keeps_is_alive():
    with MemoryTracker() as tracker:
        weights = torch.ones(KIBI, requires_grad=True)
        result = weights.exp().sum()  # exp keeps its result, which nothing else holds
        gc.collect()
        assert tracker.current_bytes == 2048 + 4
        result.backward()
        del result
        assert tracker.current_bytes == 2048


def test_tensors_from_before_count_only_when_tracked():
    before, module = torch.zeros(KIBI), nn.Linear(16, 16, bias=False)
    module.weight.grad = torch.zeros(16, 16)
    with MemoryTracker() as tracker:
        before.view(-1).detach().add_(1)
        assert tracker.current_bytes == 0
        tracker.track(before, {"again": [before, before[:3]]}, "no tensor")
        assert tracker.current_bytes == 1024
        tracker.track(module)
        assert tracker.current_bytes == 1024 + 2 * 1024
        tracker.untrack(before, torch.ones(3))
        assert tracker.current_bytes == 2 * 1024
        before.add_(1)
        del module
        gc.collect()
        assert tracker.current_bytes == 0


def test_tensors_from_python_data_count():
    with MemoryTracker() as tracker:
        values = torch.tensor([1.0] * KIBI)
        assert tracker.current_bytes == values.nbytes


def test_storage_freed_by_resize_leaves_the_live_bytes_and_returns_to_them():
    with MemoryTracker() as tracker:
        full = torch.zeros(KIBI)
        full.untyped_storage().resize_(0)
        assert tracker.current_bytes == 0
        full.untyped_storage().resize_(1024)
        assert tracker.current_bytes == 1024
        full.zero_()
        full.untyped_storage().resize_(0)
        other = torch.zeros(KIBI)
        assert tracker.current_bytes == other.nbytes
        assert tracker.peak_bytes == 1024


def test_buffers_gathered_and_freed_in_turn_do_not_add_up():
    # As the strategy does with its units: never more than two full buffers at a time.
    with MemoryTracker() as tracker:
        flats = [torch.empty(KIBI) for _ in range(8)]
        for flat in flats:
            flat.untyped_storage().resize_(0)
        tracker.reset_peak()
        for previous, flat in zip([None, *flats], flats, strict=False):
            flat.untyped_storage().resize_(1024)
            flat.fill_(1)
            if previous is not None:
                previous.untyped_storage().resize_(0)
        assert tracker.peak_bytes == 2048


def test_storage_regrown_from_before_is_found_at_the_next_operator():
    with MemoryTracker() as tracker:
        full = torch.zeros(0)
        full.untyped_storage().resize_(4096)
        full.view(-1)
        assert tracker._current_bytes == 4096


def test_tensor_resize_is_seen():
    with MemoryTracker() as tracker:
        values = torch.zeros(KIBI)
        values.resize_(2 * KIBI)
        assert tracker.peak_bytes == 2048


def test_meta_tensors_and_sparse_tensors_do_not_disturb():
    with MemoryTracker() as tracker:
        torch.empty(10**6, device="meta") + 1
        dense = torch.eye(4)
        dense.to_sparse().coalesce().to_dense()
        assert tracker.current_bytes == dense.nbytes


def test_inference_mode_counts_what_composite_operators_make():
    with torch.inference_mode(), MemoryTracker() as tracker:
        result = nn.functional.linear(torch.zeros(4, 16), torch.zeros(8, 16))
        assert tracker.current_bytes == result.nbytes
        assert tracker.peak_bytes >= 4 * (64 + 128 + 32)


def test_trackers_nest_in_each_other_and_in_a_device():
    with EmulatedDevice(capacity_bytes=10**6) as device, MemoryTracker() as outer:
        first = torch.zeros(KIBI)
        with MemoryTracker() as inner:
            second = first + 1
            torch.mm(torch.zeros(2, 2), torch.zeros(2, 2))
        assert (inner.current_bytes, outer.current_bytes) == (1024, 2048)
        assert device.current_bytes == 2048
        assert device.flops == 16
        del first, second
    assert device.current_bytes == outer.current_bytes == inner.current_bytes == 0


def test_a_tracker_can_be_entered_again():
    tracker = MemoryTracker()
    with tracker:
        kept = torch.zeros(KIBI)
    ignored = torch.zeros(KIBI)
    with tracker:
        more = torch.zeros(KIBI)
    assert tracker.current_bytes == kept.nbytes + more.nbytes
    del ignored


def test_too_much_raises_as_a_gpu_would_and_leaves_the_device_usable():
    with EmulatedDevice(capacity_bytes=4096, name="tiny") as device:
        kept = torch.zeros(2 * KIBI)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            kept.repeat(2)
        message = str(raised.value)
        assert "'tiny'" in message
        assert "allocate 4096 bytes" in message
        assert "2048 bytes (0.00 MiB) are live" in message
        assert "capacity is 4096 bytes" in message
        assert device.current_bytes == 2048
        assert device.peak_bytes == 2048
        fitting = kept + 1
        assert device.peak_bytes == 4096
        del kept, fitting


def test_exactly_the_capacity_fits():
    with EmulatedDevice(capacity_bytes=1024):
        torch.zeros(KIBI)


def test_out_of_memory_in_backward_keeps_its_type():
    with EmulatedDevice(capacity_bytes=2 * 1024 + 100):
        weights = torch.ones(KIBI, requires_grad=True)
        result = weights.exp().sum()
        with pytest.raises(torch.OutOfMemoryError):
            result.backward()


def test_freed_buffers_make_room():
    with EmulatedDevice(capacity_bytes=1500):
        full = torch.zeros(KIBI)
        full.untyped_storage().resize_(0)
        other = torch.zeros(KIBI)
        full.untyped_storage().resize_(1024)
        with pytest.raises(torch.OutOfMemoryError):
            full.fill_(1)
        del other


def test_tracking_too_much_raises():
    with EmulatedDevice(capacity_bytes=1000) as device, pytest.raises(torch.OutOfMemoryError):
        device.track(torch.zeros(KIBI))


def test_a_tracker_survives_copying_of_what_it_counts():
    with MemoryTracker() as tracker:
        module = nn.Linear(16, 16, bias=False)
        twin = copy.deepcopy(module)
        again = pickle.loads(pickle.dumps(module))
        assert tracker.current_bytes >= 2 * 1024
        del module, twin, again
        gc.collect()
        assert tracker.current_bytes == 0


def test_what_is_made_while_paused_is_host_memory():
    with EmulatedDevice(capacity_bytes=8 * 1024) as device:
        kept = torch.zeros(4 * KIBI)
        with device.paused():
            host = torch.zeros(100 * KIBI)
            with device.paused():
                pass
            host += 1
        assert device.peak_bytes == 4 * 1024
        host.mul_(2)
        torch.zeros(4 * KIBI)
        assert device.peak_bytes == 8 * 1024
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(5 * KIBI)
    assert kept.numel() == 4 * KIBI and host[0] == 2


def test_a_capacity_that_changes_counts_from_then_on():
    with EmulatedDevice() as device:
        torch.zeros(8 * KIBI)
        kept = torch.zeros(2 * KIBI)
        device.change_capacity(4 * 1024)
        assert device.capacity_bytes == 4 * 1024
        assert device.peak_bytes == 2 * 1024
        torch.zeros(2 * KIBI)
        with pytest.raises(torch.OutOfMemoryError, match="capacity is 4096 bytes"):
            torch.zeros(3 * KIBI)
        device.change_capacity(1024)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        device.change_capacity(None)
        torch.zeros(3 * KIBI)
        with pytest.raises(ValueError, match="capacity_bytes"):
            device.change_capacity(0)
    assert kept.numel()


# torch.compile's own imports
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_functions_are_compiled_again_after_the_block():
    compilations, runs = [], []

    def backend(graph, example_inputs):
        compilations.append(graph)

        def run(*inputs):
            runs.append(len(inputs))
            return graph(*inputs)

        return run

    compiled = torch.compile(lambda values: values * 2 + 1, backend=backend, dynamic=False)
    compiled(torch.zeros(3))
    with MemoryTracker() as tracker:
        compiled(torch.zeros(3))
        compiled(torch.zeros(KIBI))
    assert tracker.peak_bytes >= 2 * 1024
    assert (len(compilations), len(runs)) == (1, 1)
    compiled(torch.zeros(3))
    compiled(torch.zeros(4))
    assert (len(compilations), len(runs)) == (2, 3)


def test_overlapping_trackers_leave_compiling_as_it_was():
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph

    first, second = MemoryTracker(), MemoryTracker()
    begun, done = threading.Event(), threading.Event()

    def other():
        with second:
            begun.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert begun.wait(10)
    done.set()
    thread.join()
    torch.compile(lambda values: values * 3 + 1, backend=backend)(torch.zeros(3))
    assert len(compilations) == 1
