"""What the simulated device answers, and what its checker finds: right numbers are not enough."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

pytestmark = pytest.mark.simulated


def found(simulated, function, *args):
    """What one rank's function returns, and the kinds of what the checker found."""
    (outcome,) = simulated.run(1, function, *args)
    return outcome.value, [line.split(":")[0] for line in outcome.findings]


# -- order between streams ------------------------------------------------------------------------


def computes_aside(_, ordered):
    x = torch.full((8,), 3.0, device="cuda")
    side = torch.cuda.Stream()
    if ordered != "not":
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        done = side.record_event()
    if ordered == "by event":
        torch.cuda.current_stream().wait_event(done)
    elif ordered == "by host":
        done.synchronize()
    elif ordered == "by query":
        assert done.query()
    y.add_(1)
    return y.tolist()


@pytest.mark.parametrize("ordered", ["by event", "by host", "by query", "one way", "not"])
def test_streams_that_do_not_wait_are_found_although_the_numbers_are_right(simulated, ordered):
    value, kinds = found(simulated, computes_aside, ordered)
    assert value == [7.0] * 8
    # the memory that the other stream reads is freed when the function ends
    assert set(kinds) == ({"race", "freed early"} if ordered in ("one way", "not") else set())


def reads_together(_):
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        a = x * 2
    b = x * 3
    torch.cuda.synchronize()
    return (a + b).tolist()


def test_two_streams_may_read_the_same_memory(simulated):
    assert found(simulated, reads_together) == ([5.0] * 8, [])


def parts(_, second):
    x = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:4].fill_(1)
    x[second : second + 4].fill_(2)
    torch.cuda.synchronize()
    return x.tolist()


def test_only_the_bytes_that_both_touch_count(simulated):
    assert found(simulated, parts, 4) == ([1.0] * 4 + [2.0] * 4, [])
    assert found(simulated, parts, 3)[1] == ["race"]


def test_a_finding_names_both_operators_and_their_lines(simulated):
    (outcome,) = simulated.run(1, computes_aside, "one way")
    line = outcome.findings[0]
    assert "aten::add" in line and "aten::mul" in line
    assert line.count("test_checker.py:") >= 3, "both sides, and where the memory is from"


def uses_autograd(_):
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x @ x).relu()
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    return x.grad.sum().item()


def test_the_backward_runs_on_the_streams_of_the_forward(simulated):
    assert found(simulated, uses_autograd) == (128.0, [])


# -- memory ---------------------------------------------------------------------------------------


def frees(_, safe):
    side = torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if safe == "recorded":
        x.record_stream(side)
    elif safe == "waited":
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.cuda.synchronize()
    return y.tolist()


def test_memory_that_another_stream_may_still_use_must_not_be_freed(simulated):
    assert found(simulated, frees, "recorded") == ([2.0] * 8, [])
    assert found(simulated, frees, "waited") == ([2.0] * 8, [])
    assert found(simulated, frees, None) == ([2.0] * 8, ["freed early"])


def uses_recycled(_, waits):
    torch.zeros(4, device="cuda")
    x = torch.empty(8, device="cuda")
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(1)
    torch.cuda.synchronize()


def test_new_memory_is_that_of_earlier_kernels_of_its_stream(simulated):
    assert found(simulated, uses_recycled, True)[1] == []
    assert found(simulated, uses_recycled, False)[1] == ["recycled"]


def allocates(_):
    import simulated_cuda

    simulated_cuda.set_capacity(0, 2**24)
    base = torch.cuda.memory_allocated()
    x = torch.empty(1000, dtype=torch.uint8, device="cuda")
    y = torch.empty(2**23, dtype=torch.uint8, device="cuda")
    figures = [torch.cuda.memory_allocated() - base, torch.accelerator.memory_allocated() - base]
    del y
    figures += [torch.cuda.memory_allocated() - base, torch.cuda.max_memory_allocated() - base]
    torch.cuda.reset_peak_memory_stats()
    figures.append(torch.cuda.max_memory_allocated() - base)
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    figures += [reserved - torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]]
    try:
        torch.empty(2**24, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        figures.append("CUDA out of memory" in str(error))
    return figures, x.shape, torch.empty(4, device="cuda").isnan().all().item()


def test_memory_is_counted_limited_and_poisoned(simulated):
    (figures, _, poisoned), _ = found(simulated, allocates)
    big = 2**23
    assert figures == [1024 + big, 1024 + big, 1024, 1024 + big, 1024, big, 2**24, True]
    assert poisoned


def resizes_a_storage(_):
    x = torch.arange(4.0, device="cuda")
    before = torch.cuda.memory_allocated()
    x.untyped_storage().resize_(0)
    freed = before - torch.cuda.memory_allocated()
    x.untyped_storage().resize_(16)
    x.fill_(5)
    return freed, x.tolist()


def test_storages_give_memory_back(simulated):
    assert found(simulated, resizes_a_storage) == ((512, [5.0] * 4), [])


def copies_deeply(_):
    x = torch.arange(6.0, device="cuda").view(2, 3)[1:]
    y = copy.deepcopy(x)
    x.zero_()
    return y.tolist(), y.device == x.device


def test_tensors_are_copied_deeply(simulated):
    assert found(simulated, copies_deeply) == (([[3.0, 4.0, 5.0]], True), [])


# -- pinned memory --------------------------------------------------------------------------------


def copies_to_the_host(_, way):
    x = torch.arange(4.0, device="cuda")
    host = torch.empty(4, pin_memory=way != "pageable")
    assert host.is_pinned() == (way != "pageable")
    host.copy_(x, non_blocking=True)
    if way == "waits":
        torch.cuda.current_stream().synchronize()
    if way == "views":
        host = host[:2].view(2, 1)
        torch.cuda.synchronize()
    return (host * 2).sum().item()


@pytest.mark.parametrize("way", ["waits", "views", "pageable", "reads"])
def test_the_host_must_wait_before_it_reads_pinned_memory(simulated, way):
    value, kinds = found(simulated, copies_to_the_host, way)
    assert value == (2.0 if way == "views" else 12.0)
    assert kinds == (["host race"] if way == "reads" else [])


def copies_to_the_device(_, waits):
    host = torch.ones(4).pin_memory()
    x = host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.zero_()
    return x.tolist()


def test_the_host_must_not_overwrite_what_is_being_copied(simulated):
    assert found(simulated, copies_to_the_device, True) == ([1.0] * 4, [])
    assert found(simulated, copies_to_the_device, False) == ([1.0] * 4, ["host race"])


# -- the host's waits -----------------------------------------------------------------------------


def waits_everywhere(_):
    x = torch.arange(4.0, device="cuda")
    x.sum().item()
    x.tolist()
    x.cpu()
    torch.cuda.synchronize()
    x.nonzero()
    torch.empty(4).copy_(x, non_blocking=True)  # pageable memory
    torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)


def test_waits_of_the_host_are_counted_by_line(simulated):
    (outcome,) = simulated.run(1, waits_everywhere)
    lines = [key.split(" | ")[0] for key in outcome.waits]
    assert sorted(lines) == [
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "copy to the host",
        "copy to the host",
        "copy to the host",
        "device",
    ]
    assert all("test_checker.py:" in key for key in outcome.waits)


def waits_in_debug_mode(_):
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.sum().item()
    except RuntimeError as error:
        said = str(error)
    torch.ones(2).pin_memory().to("cuda", non_blocking=True)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        values = [x.sum().item() for _ in range(2)]
    torch.cuda.set_sync_debug_mode("default")
    return said, [str(warning.message) for warning in warned], [*values, x.sum().item()]


def test_the_sync_debug_mode_of_torch_raises_and_warns(simulated):
    (said, warned, values), _ = found(simulated, waits_in_debug_mode)
    assert "synchronizing CUDA operation" in said
    assert len(warned) == 2 and all("synchronizing CUDA operation" in each for each in warned)
    assert values == [4.0] * 3


# -- the rest of a device -------------------------------------------------------------------------


def mixes(_):
    x = torch.ones(4, device="cuda:1")
    said = []
    for other in (torch.ones(4), torch.ones(4, device="cuda:0")):
        try:
            x + other
        except RuntimeError as error:
            said.append("same device" in str(error))
    return said, (x + torch.tensor(2.0)).tolist(), x.to("cuda:0").device.index


def test_devices_are_not_mixed(simulated):
    assert found(simulated, mixes) == (([True, True], [3.0] * 4, 0), [])


def draws(_):
    torch.manual_seed(3)
    a, host = torch.rand(3, device="cuda"), torch.rand(3)
    state = torch.cuda.get_rng_state()
    b = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.rand(3, device="cuda")
    torch.manual_seed(3)
    same = torch.equal(a, torch.rand(3, device="cuda")) and torch.equal(host, torch.rand(3))
    other = torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return torch.equal(b, again), same, torch.equal(other, a)


def test_each_device_draws_its_own_numbers(simulated):
    assert found(simulated, draws)[0] == (True, True, False)


def times(_):
    import simulated_cuda

    simulated_cuda.set_denials(1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(4, device="cuda")
    end.record()
    said = []
    try:
        start.elapsed_time(end)
    except RuntimeError as error:
        said.append(str(error))
    end.synchronize()
    return said, start.elapsed_time(end) > 0


def test_events_tell_the_time_once_the_host_knows_that_they_are_done(simulated):
    (said, is_later), _ = found(simulated, times)
    assert len(said) == 1 and "must be completed" in said[0] and is_later


def lags(_):
    import simulated_cuda

    simulated_cuda.set_denials(2)
    event = torch.cuda.current_stream().record_event()
    return [event.query() for _ in range(4)]


def test_a_device_may_lag(simulated):
    assert found(simulated, lags)[0] == [False, False, True, True]


def half(_):
    layer = torch.nn.Linear(4, 4).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    with torch.autocast("cuda"):
        out = layer(torch.full((2, 4), 60000.0, device="cuda"))
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return str(out.dtype), scaler.get_scale() < 2.0**30, torch.equal(before, layer.weight)


def test_half_precision_overflows_and_skips_the_step(simulated):
    assert found(simulated, half)[0] == ("torch.float16", True, True)
