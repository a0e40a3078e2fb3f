"""Watches a training: times every step, records one, and shares the figures of all ranks."""

from __future__ import annotations

import math
import socket
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe import trace
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.pace import MeasuredRank, counted, drift_of, predicted_busy_s
from lightning_cephalo.observe.recorder import Look, Recorder
from lightning_cephalo.observe.recording import Recording
from lightning_cephalo.observe.run_record import RECORD_NAME, STEPS_IN_FULL, RunRecord
from lightning_cephalo.observe.timing import Timing
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.plan.replan import Replan
from lightning_cephalo.ranks.control import ControlGroup

# The first steps differ from all others: orders are found, caches fill, allocators grow.
RECORDED_STEP = 5


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RunReport:
    """What is known of the running training, or of the last one that has run.

    ::

        Trainer(strategy=strategy, devices=4).fit(module, loader)
        print(strategy.report.step_s)

    Attributes:
        plan: The plan in use; None before ``setup``.
        step_s: Median seconds of a step on this rank, without the first few; None before any.
        ranks: Work and waiting times of every rank, at the end of ``fit``.
        memory: Memory of every rank, by kind; None before the end of two steps or more.
        timeline: What every rank held and moved over one step, at the end of ``fit`` with
            ``record=``.
        replans: The changes of plan, without those of the user.
    """

    plan: Plan | None = None
    step_s: float | None = None
    ranks: tuple[MeasuredRank, ...] = ()
    memory: tuple[RankMemory, ...] | None = None
    timeline: tuple[Recording, ...] = ()
    replans: tuple[Replan, ...] = ()


class Watch:
    """Times the steps of one rank and records one.

    The report has all of it after a training that ended without a failure.

    Args:
        folder: Where to write the record of the run and its timeline, with the fifth step, or the
            last step if there are fewer; None: nowhere.
    """

    def __init__(self, folder: str | PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._report = RunReport()
        self._recorder: Recorder | None = None
        self._timing = Timing()
        self._clock: Callable[[], float] = time.perf_counter
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: the times, and nothing of the device or the model."""
        watching = {"_recorder": None, "_timing": Timing(), "_clock": time.perf_counter}
        return {**vars(self), **watching, "_reference": _nothing}

    def _forget(self) -> None:
        self._started_s = self._ended_s = math.nan
        self._steps_before = 0
        self._latest_busy_s = math.nan
        self._steps_s, self._busy_s, self._waiting_s = array("d"), array("d"), array("d")
        self._between_s = array("d")

    def take_busy_s(self) -> float:
        """Return the seconds of this rank's work in the last step, once; NaN if it is not known."""
        busy_s, self._latest_busy_s = self._latest_busy_s, math.nan
        return busy_s

    @property
    def report(self) -> RunReport:
        """What is known now."""
        return replace(self._report, step_s=self.step_s)

    def note(self, change: Replan) -> None:
        """Note a change of plan that is not the user's."""
        self._report = replace(self._report, replans=(*self._report.replans, change))

    def follow(self, plan: Plan) -> None:
        """Forget the times of steps so far: from now on another plan is followed."""
        self._report = replace(self._report, plan=plan)
        before = self._steps_before + len(self._steps_s)
        self._read()
        self._forget()
        self._steps_before = before

    @property
    def step_s(self) -> float | None:
        """Median time of a step on this rank, without the first few; None before any step."""
        return median(counted(self._steps_s)) if self._steps_s else None

    def start(self, writes: bool) -> None:
        """Forget an earlier run; raise PlanError if this rank will write the record, and cannot."""
        self._report = RunReport()
        if writes and self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PlanError(
                    f"record={str(self._folder)!r}: the folder cannot be made:"
                    f" {error.strerror or error}. Name another one."
                ) from error

    def begin(self, model: ShardedModel, plan: Plan) -> None:
        """Watch a training that is about to start."""
        self._forget()
        self._report = RunReport(plan)
        self._reference = weakref.ref(model)  # weak: its process groups must be freed in time
        # elsewhere, waiting for the device costs more than it tells
        on_host = model.accelerator.computes_on_host
        self._clock = model.accelerator.clock if on_host else model.accelerator.now_s
        marks = model.accelerator.marks(model.backend)
        self._timing = Timing(marks)
        if self._folder is not None:
            self._recorder = Recorder(marks, self._clock if on_host else None)

    @property
    def _model(self) -> ShardedModel:
        model = self._reference()
        assert model is not None, "the model is gone before the end of the training"
        return model

    def start_step(self) -> None:
        """Begin a step, before its forward."""
        self._started_s = self._model.accelerator.now_s()
        if not math.isnan(self._ended_s):
            self._between_s.append(max(self._started_s - self._ended_s, 0.0))
        executor = self._model.executor
        self._detach()
        self._timing.restart()
        executor.link.attach(self._timing)
        recorded = self._steps_before + len(self._steps_s)
        if self._recorder is not None and recorded < RECORDED_STEP:
            self._recorder.restart()
            executor.link.attach(self._recorder)
            if self._model.accelerator.computes_on_host:
                self._model.accelerator.listener = self._recorder

    def _detach(self) -> None:
        self._model.executor.link.detach(self._timing)
        if self._recorder is not None:
            self._model.executor.link.detach(self._recorder)
            self._model.accelerator.listener = None

    def finish_step(self, counts: bool = True) -> None:
        """End a step, after the optimizer's update; ``counts``: its time is comparable."""
        self._ended_s = self._clock()
        step_s = self._ended_s - self._started_s
        if counts:
            self._steps_s.append(step_s)
        recorder, link = self._recorder, self._model.executor.link
        is_recorded = recorder is not None and link.is_observed_by(recorder)
        self._detach()
        if self._timing.finish() and recorder is not None and is_recorded:
            recorder.finish()
        if self._read() and counts and not is_recorded:
            self._latest_busy_s = self._busy_s[-1]

    def _read(self) -> bool:
        shares = self._timing.read()
        for share in shares:
            self._busy_s.append(share.busy_s)
            self._waiting_s.append(share.waiting_s)
        return bool(shares)

    def end(self, memory: tuple[RankMemory, ...] | None, looks: Sequence[Look]) -> None:
        """Share the measurements with all ranks, and write the timeline; collective."""
        model, control = self._model, self._model.control
        model.accelerator.synchronize()  # so that all steps can be read
        self._read()
        name = model.accelerator.name
        measured = control.gather(self._measured(control.rank, name))
        ranks = tuple(rank for rank in measured if rank is not None)
        self._report = replace(self._report, ranks=ranks, memory=memory)
        if self._recorder is not None and self._folder is not None:
            timeline = self._timelines(self._recorder, control, name, looks)
            self._report = replace(self._report, timeline=timeline)
            if control.rank == 0:
                path = self._folder / trace.TRACE_NAME
                _write(partial(trace.write_trace, timeline, path), "timeline")

    @property
    def writes_record(self) -> bool:
        """Whether a record of the run is written."""
        return self._folder is not None

    def write_record(self, known: Callable[[], RunRecord]) -> None:
        """Write what is known of the run so far, or warn; on rank 0."""
        if self._folder is not None:
            path = self._folder / RECORD_NAME
            _write(lambda: known().save(path), "record of the run")

    @property
    def shown_steps_s(self) -> tuple[float, ...]:
        """Seconds of the steps on this rank; of many, medians of equally long runs."""
        values = self._steps_s
        length = -(-len(values) // STEPS_IN_FULL) or 1
        return tuple(median(values[i : i + length]) for i in range(0, len(values), length))

    def _measured(self, rank: int, name: str) -> MeasuredRank | None:
        step_s, plan = self.step_s, self._report.plan
        if step_s is None or not self._busy_s:
            return None
        visits = self._model.executor.visits
        units = sum(visit.differentiable and not visit.is_meeting for visit in visits)
        return MeasuredRank(
            rank=rank,
            name=name,
            steps=len(counted(self._busy_s)),
            step_s=step_s,
            busy_s=median(counted(self._busy_s)),
            waiting_s=median(counted(self._waiting_s)),
            predicted_busy_s=None if plan is None else predicted_busy_s(plan.ranks[rank], units),
            drift=drift_of(self._busy_s, step_s, self._steps_before),
            between_s=median(counted(self._between_s)) if self._between_s else None,
        )

    def _timelines(
        self, recorder: Recorder, control: ControlGroup, name: str, looks: Sequence[Look]
    ) -> tuple[Recording, ...]:
        # the trace holds no more ranks: thousands of others need not send their recordings
        own = Recording(control.rank, name, ())
        if control.rank < trace.RANKS_IN_FULL:
            moved = partial(_moved_bytes, self._model)
            own = recorder.recording(control.rank, name, looks, moved)
        sent = control.gather((socket.gethostname(), recorder.met_s, own))
        plans = () if self._report.plan is None else self._report.plan.ranks
        return tuple(
            replace(one, planned_bytes=part.memory_bytes, capacity_bytes=part.capacity_bytes)
            for one, part in zip(aligned(sent[: trace.RANKS_IN_FULL]), plans, strict=False)
        )


def _write(write: Callable[[], None], what: str) -> None:
    try:
        write()
    except Exception as error:
        # only rank 0 writes: others would wait for it, and training be lost for a file of times
        rank_zero_warn(f"The {what} was not written. {type(error).__name__}: {error}")


def _moved_bytes(model: ShardedModel, instruction: Instruction) -> float:
    """Return the bytes of others' rows that a gather brings, or that leave in a reduce."""
    if instruction.operation not in (Operation.GATHER, Operation.REDUCE):
        return 0.0
    is_gather = instruction.operation is Operation.GATHER
    return float(
        sum(
            (flat.contents.numel - flat.shard.numel())
            * (flat.contents.dtype if is_gather else flat.contents.sent_dtype).itemsize
            for flat in model.units[instruction.unit].flats
            if is_gather or flat.trainable
        )
    )


def aligned(sent: list[tuple[str, float | None, Recording]]) -> list[Recording]:
    """Return recordings on one clock that starts with the first event.

    Ranks of one host share a clock. Recordings of other hosts are shifted such that all ranks left
    their last exchange of the step at the same time.
    """
    host, met_s, _ = sent[0]
    moved = []
    for other_host, other_met_s, recording in sent:
        shift_s = 0.0
        if other_host != host and met_s is not None and other_met_s is not None:
            shift_s = met_s - other_met_s
        moved.append(recording.later(shift_s))
    first_s = min((each.events[0].start_s for each in moved if each.events), default=0.0)
    return [each.later(-first_s) for each in moved]
