"""Copies and updates by the host as a listener is told of them, with their bytes and times."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from virtual_time import VirtualHost

from lightning_cephalo.accelerator import Accelerator, accelerator_of
from lightning_cephalo.accelerator.emulated.accelerator import Emulated
from lightning_cephalo.accelerator.transfers import Told, ToldWorker
from lightning_cephalo.emulation import EmulatedDevice
from lightning_cephalo.observe.recorder import Recorder
from lightning_cephalo.observe.recording import Event, Stream
from lightning_cephalo.plan.program import Instruction, Operation

ELEMENTS = 1000
COPY_S, UPDATE_S, COMPUTE_S = 4 * ELEMENTS / 1e4, ELEMENTS / 2e3, 0.25
STATE = Instruction(Operation.HOST_UPDATE, 3)


class Listener:
    """Notes what it is told."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.marks = accelerator.marks(None)
        self.copies: list[tuple[int, bool | None, float, float]] = []
        self.updates: list[tuple[float, float]] = []

    def device_s(self) -> float:
        return self.marks.now()

    def copied(self, nbytes: int, to_host: bool | None, start_s: float, end_s: float) -> None:
        self.copies.append((nbytes, to_host, start_s, end_s))

    def running(self) -> str:
        return "now"

    def updated(self, by: str, start_s: float, end_s: float) -> None:
        assert by == "now"
        self.updates.append((start_s, end_s))


def test_jobs_of_an_emulated_link_have_the_times_of_its_lanes():
    host = VirtualHost(tick_s=1e-9)
    given = {"link_bytes_per_s": 1e4, "host_updates_per_s": 2e3, "clock": host.clock}
    matrix, gradient, rows = torch.ones(10, 10), torch.ones(ELEMENTS), torch.zeros(ELEMENTS)
    with EmulatedDevice(flops_per_s=2000 / COMPUTE_S, **given) as device:
        accelerator = Emulated(torch.device("cpu"), device)
        out, back = Told(accelerator, to_host=True), Told(accelerator, to_host=False)
        worker = ToldWorker(accelerator)
        memory = accelerator.allocate_host(4 * ELEMENTS).view(torch.float32)
        out.start(memory, gradient)  # nobody listens: nothing happens but the copy
        out.finish(out.start(memory, gradient))
        began_s = host.now_s
        listener = accelerator.listener = Listener(accelerator)
        matrix @ matrix
        left = [out.start(memory, gradient), out.start(memory, gradient)]
        future = worker.submit(
            partial(memory.mul_, -0.5),
            ELEMENTS,
            left,
            lambda after: [back.start(rows, memory, after=after)],
        )
        future.result()
        accelerator.listener = None
        out.start(memory, gradient)
        device.synchronize()
    # behind the device's work; one after the other; then the update; then its result
    spans = [(start_s - began_s, end_s - began_s) for *_, start_s, end_s in listener.copies]
    first = COMPUTE_S + COPY_S
    assert spans == [
        pytest.approx((COMPUTE_S, first), rel=1e-3),
        pytest.approx((first, first + COPY_S), rel=1e-3),
        pytest.approx((first + COPY_S + UPDATE_S, first + 2 * COPY_S + UPDATE_S), rel=1e-3),
    ]
    assert [(nbytes, to_host) for nbytes, to_host, *_ in listener.copies] == [
        (4 * ELEMENTS, True),
        (4 * ELEMENTS, True),
        (4 * ELEMENTS, False),
    ]
    ((start_s, end_s),) = listener.updates
    assert end_s - start_s == pytest.approx(UPDATE_S, rel=1e-3)
    assert start_s - began_s == pytest.approx(first + COPY_S, rel=1e-3)
    assert rows.eq(-0.5).all()


def test_a_recorder_takes_copies_with_their_instruction_and_way():
    accelerator = accelerator_of(torch.device("cpu"))
    recorder = Recorder(accelerator.marks(None))
    for instruction, copies in (
        (Instruction(Operation.OFFLOAD, 1, 0, 2), [(10, None, 0.0, 1.0), (20, None, 1.0, 3.0)]),
        (Instruction(Operation.FETCH_STATE, 2), [(5, False, 3.0, 4.0)]),
        (STATE, [(6, True, 4.0, 5.0), (7, False, 6.0, 7.0), (8, False, 7.0, 7.0)]),
    ):
        recorder.before(instruction)
        for copy in copies:
            recorder.copied(*copy)
    recorder.updated(recorder.running(), 5.0, 6.0)
    recorder.finish()
    offload = Instruction(Operation.OFFLOAD, 1, 0, 2)
    assert recorder.events() == (
        Event(Stream.COPY, offload, 0.0, 1.0, 10.0),
        Event(Stream.COPY, offload, 1.0, 3.0, 20.0),
        Event(Stream.TO_DEVICE, Instruction(Operation.FETCH_STATE, 2), 3.0, 4.0, 5.0),
        Event(Stream.TO_HOST, STATE, 4.0, 5.0, 6.0),
        Event(Stream.HOST, STATE, 5.0, 6.0),
        Event(Stream.TO_DEVICE, STATE, 6.0, 7.0, 7.0),
    )


def test_the_thread_of_the_host_is_told_of_too():
    accelerator = accelerator_of(torch.device("cpu"))
    listener = accelerator.listener = Listener(accelerator)
    worker, back = ToldWorker(accelerator), Told(accelerator, to_host=False)
    rows, memory = torch.zeros(8), torch.ones(8)
    future = worker.submit(lambda: memory.mul_(3), 8, [], lambda after: [back.start(rows, memory)])
    assert future.result() == [None]
    worker.close()
    ((start_s, end_s),) = listener.updates
    ((nbytes, to_host, copied_s, _),) = listener.copies
    assert (nbytes, to_host) == (32, False) and start_s <= end_s <= copied_s
    assert rows.eq(3).all()
