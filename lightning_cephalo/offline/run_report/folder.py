"""Reads a run's folder: what is there, and which option gives what is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.observe.run_record import RECORD_NAME, RunRecord, read_record


@dataclass(frozen=True)
class RunFolder:
    name: str
    record: RunRecord

    @classmethod
    def read(cls, folder: Path) -> RunFolder:
        """Read the record of a run."""
        record = read_record(folder)
        if record is None:
            raise PlanError(
                f"{folder}: expected the folder of a run, with {RECORD_NAME}, but that is not"
                f" there. Train with CephaloStrategy(record={str(folder)!r})."
            )
        return cls(str(folder), record)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not in the record, and how it gets there."""
        return tuple(_missing_in(self.record))


def _missing_in(record: RunRecord) -> Iterator[str]:
    if not record.is_finished:
        yield (
            "Measurements: the run has not ended, or has ended with an error. They are written when"
            " fit() ends without one."
        )
        return
    if any(rank.busy_s is None for rank in record.ranks):
        yield "Times: no step was measured. Train for more steps."
    if any(rank.measured_memory is None for rank in record.ranks):
        yield "Memory: it is measured in the second step. Train for two steps or more."
    elif not any(rank.held for rank in record.ranks):
        yield (
            "Memory over the step: the step whose memory was read ran other instructions than the"
            " one that was timed, as the plan has changed between them. Train for longer."
        )
    if not any(rank.phases for rank in record.ranks):
        yield "A recorded step: none has come to its end. Train for more steps."
    if record.plan.step_s is None:
        yield (
            "Predictions: the given plan has none. A plan that is made (plan=None), or one of"
            " `cephalo plan`, has them."
        )
