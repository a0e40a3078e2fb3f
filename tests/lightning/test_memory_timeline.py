"""One recorded step of a real training: memory by kind, traffic, and the run's record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import Net, RankFailure, in_ranks, loader, trainer
from lightning.pytorch import Callback, Trainer
from plans import PLANS, QUIET

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.observe.recording import Kind, Recording, Stream
from lightning_cephalo.observe.run_record import RECORD_NAME, RunRecord
from lightning_cephalo.plan.program import NONE, Operation

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


COPIES = (Stream.COPY, Stream.TO_HOST, Stream.TO_DEVICE)


TO_HOST = (Stream.TO_HOST, Operation.OFFLOAD)
TO_DEVICE = (Stream.TO_DEVICE, Operation.FETCH)


def moved(timeline: Recording, way: tuple[Stream | Operation, ...]) -> float:
    """Bytes that move one way in the step."""
    own = (event for event in timeline.events if {event.stream, event.operation} & {*way})
    return sum(event.moved_bytes for event in own)


def gathered(timeline: Recording) -> float:
    """Bytes that the first gather of every unit brings."""
    gathers = [event for event in timeline.events if event.operation is Operation.GATHER]
    return sum({event.unit: event.moved_bytes for event in reversed(gathers)}.values())


class Early(Callback):
    """Reads the record before the first step."""

    def __init__(self, folder: str) -> None:
        self.folder, self.found = Path(folder), None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        path = self.folder / RECORD_NAME
        if self.found is None and trainer.is_global_zero and path.is_file():
            self.found = RunRecord.load(path)


def fit(folder: str, steps: int) -> tuple[Any, Any, RunRecord | None]:
    options = {"record": folder} if folder else {}
    early = Early(folder)
    made = trainer("3:1", options, max_epochs=-1, max_steps=steps, callbacks=[early])
    made.fit(Net(), loader(32))
    return made.strategy.report.timeline, made.strategy.report.memory, early.found


def test_a_recorded_step_has_the_measured_peak_and_traffic(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "today"
    (timelines, measured, early), (others, *_) = in_ranks(2, fit, str(folder), 7)
    assert timelines == others  # every rank knows every rank's
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline, memory in zip(timelines, measured, strict=True):
        assert timeline.peak_bytes == memory.peak_bytes
        assert timeline.end_s > timeline.start_s
        at = {kind: index for index, kind in enumerate(Kind)}
        first = timeline.held[0].sizes
        assert first[at[Kind.PARAMETER_ROWS]] == 4 * memory.parameters
        assert first[at[Kind.GRADIENT_ROWS]] == 0  # early updates have given them back
        resting = first[at[Kind.PARAMETER_ROWS]] + first[at[Kind.OPTIMIZER_STATE]]
        assert memory.resting_state_bytes == resting
        assert memory.bytes_per_parameter == (
            resting / memory.parameters,
            memory.state_bytes / memory.parameters,
        )
        most = max(held.sizes[at[Kind.GRADIENT_ROWS]] for held in timeline.held)
        assert 0 < most <= memory.state_bytes - resting
        assert moved(timeline, TO_HOST) == moved(timeline, TO_DEVICE) == 0
    # what one rank lacks the other has; the 0-d parameter is on both
    parameters = [p for p in Net().parameters() if p.ndim]
    full = 4 * sum(parameter.numel() for parameter in parameters)
    assert sum(map(gathered, timelines)) == full
    trained = 4 * sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    reduced = sum(moved(timeline, (Operation.REDUCE,)) for timeline in timelines)
    assert reduced == trained

    entries = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for timeline in timelines:
        counters = [e for e in entries if e["ph"] == "C" and e["pid"] == timeline.rank]
        sizes = [sum(e["args"].values()) for e in counters if e["name"] == "memory by kind"]
        assert max(sizes) == timeline.peak_bytes
        own = [e for e in entries if e["ph"] == "X" and e["pid"] == timeline.rank]
        assert {e["cat"] for e in own if "bytes" in e["args"]} == {"gather", "reduce"}

    assert early is not None and not early.is_finished and not early.timelines()
    record = RunRecord.load(folder / RECORD_NAME)
    assert record.is_finished and record.is_given and len(record.steps_s) == 6  # one is counted
    assert [rank.measured_memory for rank in record.ranks] == list(measured)
    assert all(rank.busy_s and rank.step_s and rank.between_s for rank in record.ranks)
    for read, timeline in zip(record.timelines(), timelines, strict=True):
        assert (read.peak_bytes, len(read.events)) == (timeline.peak_bytes, len(timeline.events))
        assert read.end_s == pytest.approx(timeline.end_s, abs=1e-9)


def fit_with_state_on_the_host(folder: str) -> Any:
    plan = PLANS["3:1"]
    moved = {"resident_fraction": 0.4, "host_update_fraction": 0.3}
    plan = replace(plan, ranks=tuple(replace(rank, **moved) for rank in plan.ranks))
    chosen = CephaloStrategy(
        plan=plan, global_batch_size=8, planner=Planner(verbose=False), record=folder
    )
    options = {**QUIET, "max_epochs": -1, "max_steps": 4}
    made = Trainer(accelerator="cpu", devices=2, strategy=chosen, **options)
    made.fit(Net(), loader(32))
    return made.strategy.report.timeline


def test_state_that_moves_is_traffic_and_updates_by_the_host_keep_it_busy(tmp_path: Path) -> None:
    timelines, _ = in_ranks(2, fit_with_state_on_the_host, str(tmp_path))
    for timeline in timelines:
        copies = [e for e in timeline.events if e.stream in COPIES]
        host = [e for e in timeline.events if e.stream is Stream.HOST]
        # of three blocks one streams its state, and one is updated by the host
        (updated,) = {event.unit for event in host}
        (streamed,) = {e.unit for e in copies} - {updated, NONE}
        there, back, gradients = (
            sum(e.moved_bytes for e in copies if (e.operation, e.unit) == (operation, unit))
            for operation, unit in (
                (Operation.FETCH_STATE, streamed),
                (Operation.STORE_STATE, streamed),
                (Operation.HOST_UPDATE, updated),
            )
        )
        # two moments each way; of the other unit gradients leave and rows come back
        assert there == back > 0 and gradients > 0
        assert moved(timeline, TO_HOST) == back + gradients
        assert moved(timeline, TO_DEVICE) == there + gradients
        assert all(held.host_bytes > there + 2 * gradients for held in timeline.held)
    read = RunRecord.load(tmp_path / RECORD_NAME).timelines()
    assert [len(one.events) for one in read] == [len(one.events) for one in timelines]


def test_without_a_folder_nothing_is_recorded_and_one_that_cannot_be_made_is_refused(
    tmp_path: Path,
) -> None:
    assert in_ranks(2, fit, "", 3)[0][0] == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailure, match="the folder cannot be made"):
        in_ranks(2, fit, str(tmp_path / "file"), 3)
