"""Watches a training: times every step, records one, and shares the figures of all ranks."""

from __future__ import annotations

import math
import socket
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from statistics import median
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe import report, trace
from lightning_cephalo.observe.pace import (
    MeasuredRank,
    busy_table,
    counted,
    drift_of,
    predicted_busy_s,
    remarks,
)
from lightning_cephalo.observe.recorder import Recorder
from lightning_cephalo.observe.timing import Timing
from lightning_cephalo.plan import Plan
from lightning_cephalo.plan.timeline import Recording
from lightning_cephalo.ranks.control import ControlGroup

# The first steps differ from all others: orders are found, caches fill, allocators grow.
RECORDED_STEP = 5


def _nothing() -> None:
    pass


class Watch:
    """Times the steps of one rank and records one.

    Args:
        trace_path: Where to write a timeline of the fifth step, or of the last step if there are
            fewer; None: nothing is recorded.

    Raises:
        PlanError: If the file's name does not end in ``.json``.

    Attributes:
        ranks: The measurements of every rank, after a training that ended without a failure.
    """

    def __init__(self, trace_path: str | PathLike[str] | None = None) -> None:
        self._path = None if trace_path is None else trace.json_path(trace_path)
        self._recorder: Recorder | None = None
        self._timing = Timing()
        self._clock: Callable[[], float] = time.perf_counter
        self.ranks: tuple[MeasuredRank, ...] = ()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: the times, and nothing of the device or the model."""
        watching = {"_recorder": None, "_timing": Timing(), "_clock": time.perf_counter}
        return {**vars(self), **watching, "_reference": _nothing}

    def _forget(self) -> None:
        self._started_s = 0.0
        self._steps_before = 0
        self._latest_busy_s = math.nan
        self._steps_s, self._busy_s, self._waiting_s = array("d"), array("d"), array("d")

    def take_busy_s(self) -> float:
        """Return the seconds of this rank's work in the last step, once; NaN if it is not known."""
        busy_s, self._latest_busy_s = self._latest_busy_s, math.nan
        return busy_s

    def count_again(self) -> None:
        """Forget the times of steps so far: from now on another plan is followed."""
        before = self._steps_before + len(self._steps_s)
        self._read()
        self._forget()
        self._steps_before = before

    @property
    def step_s(self) -> float | None:
        """Median time of a step on this rank, without the first few; None before any step."""
        return median(counted(self._steps_s)) if self._steps_s else None

    def check(self, writes: bool) -> None:
        """Check that the trace can be written.

        Args:
            writes: Whether this is the rank that will write it.

        Raises:
            PlanError: If its folder does not exist.
        """
        if writes and self._path is not None and not self._path.absolute().parent.is_dir():
            raise PlanError(
                f"trace={str(self._path)!r}: there is no folder {str(self._path.parent)!r}."
                " Make it, or name another file."
            )

    def begin(self, model: ShardedModel) -> None:
        """Watch a training that is about to start."""
        self._forget()
        self.ranks = ()
        self._reference = weakref.ref(model)  # weak: its process groups must be freed in time
        # elsewhere, waiting for the device costs more than it tells
        on_host = model.accelerator.computes_on_host
        self._clock = model.accelerator.clock if on_host else model.accelerator.now_s
        marks = model.accelerator.marks(model.backend)
        self._timing = Timing(marks)
        if self._path is not None:
            now = self._clock if on_host else None
            self._recorder = Recorder(marks, now, records_copies=on_host)

    @property
    def _model(self) -> ShardedModel:
        model = self._reference()
        assert model is not None, "the model is gone before the end of the training"
        return model

    def start_step(self) -> None:
        """Begin a step, before its forward."""
        self._started_s = self._model.accelerator.now_s()
        executor = self._model.executor
        self._detach()
        self._timing.restart()
        executor.attach(self._timing)
        recorded = self._steps_before + len(self._steps_s)
        if self._recorder is not None and recorded < RECORDED_STEP:
            self._recorder.restart()
            executor.attach(self._recorder)

    def _detach(self) -> None:
        self._model.executor.detach(self._timing)
        if self._recorder is not None:
            self._model.executor.detach(self._recorder)

    def finish_step(self, counts: bool = True) -> None:
        """End a step, after the optimizer's update.

        Args:
            counts: Whether the step's time is comparable with other steps.
        """
        step_s = self._clock() - self._started_s
        if counts:
            self._steps_s.append(step_s)
        is_recorded = self._recorder is not None and self._model.executor.is_observed_by(
            self._recorder
        )
        self._detach()
        if self._timing.finish() and is_recorded:
            assert self._recorder is not None
            self._recorder.finish()
        if self._read() and counts and not is_recorded:
            self._latest_busy_s = self._busy_s[-1]

    def _read(self) -> bool:
        shares = self._timing.read()
        for share in shares:
            self._busy_s.append(share.busy_s)
            self._waiting_s.append(share.waiting_s)
        return bool(shares)

    def end(self, plan: Plan | None, verbose: bool, is_given: bool = False) -> None:
        """Share the measurements with all ranks, and write the trace; collective.

        Args:
            plan: The plan that training followed.
            verbose: Whether rank 0 prints the figures.
            is_given: Whether the user gave the plan.
        """
        model, control = self._model, self._model.control
        model.accelerator.synchronize()  # so that all steps can be read
        self._read()
        name = model.accelerator.name
        told = control.gather(self._measured(control.rank, name, plan))
        self.ranks = tuple(rank for rank in told if rank is not None)
        if verbose and control.rank == 0 and len(self.ranks) == control.world_size:
            report.show(busy_table(self.ranks))
            for remark in remarks(self.ranks, is_given=is_given):
                report.show(remark)
        if self._recorder is not None:
            self._write(self._recorder, control, name)

    def _measured(self, rank: int, name: str, plan: Plan | None) -> MeasuredRank | None:
        step_s = self.step_s
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
        )

    def _write(self, recorder: Recorder, control: ControlGroup, name: str) -> None:
        # the trace holds no more ranks: thousands of others need not send their recordings
        shown = control.rank < trace.RANKS_IN_FULL
        events = recorder.events(control.rank) if shown else ()
        own = Recording(control.rank, name, events)
        said = control.gather((socket.gethostname(), recorder.met_s, own))
        if control.rank or self._path is None:
            return
        recordings = aligned(said)
        try:
            trace.write_recording(recordings, self._path)
        except PlanError as error:
            # the training is done: its result must not be lost because of a file of times
            rank_zero_warn(f"The timeline was not written. {error}")


def aligned(said: list[tuple[str, float | None, Recording]]) -> list[Recording]:
    """Return recordings on one clock that starts with the first event.

    Ranks of one host share a clock. Recordings of other hosts are shifted such that all ranks left
    their last exchange of the step at the same time.

    Args:
        said: For every rank its host, when it last met all others by its clock, and its recording.
    """
    host, met_s, _ = said[0]
    moved = []
    for other_host, other_met_s, recording in said:
        shift_s = 0.0
        if other_host != host and met_s is not None and other_met_s is not None:
            shift_s = met_s - other_met_s
        moved.append((shift_s, recording))
    starts = [shift_s + r.events[0].start_s for shift_s, r in moved if r.events]
    first_s = min(starts, default=0.0)
    return [
        replace(
            recording,
            events=tuple(
                replace(
                    event,
                    start_s=event.start_s + shift_s - first_s,
                    end_s=event.end_s + shift_s - first_s,
                )
                for event in recording.events
            ),
        )
        for shift_s, recording in moved
    ]
