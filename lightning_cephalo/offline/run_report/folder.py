"""Reads a run's folder: what is there, and which option gives what is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.observe.run_record import RECORD_NAME, RankRecord, RunRecord, read_record
from lightning_cephalo.plan import Plan

_PLANS = ("plan.yaml", "plan.yml", "plan.json")


@dataclass(frozen=True)
class Comparison:
    """The main job's comparison with even sharding, in samples per second."""

    samples_per_s: float
    even_samples_per_s: float


@dataclass(frozen=True)
class RunFolder:
    name: str
    record: RunRecord
    comparison: Comparison | None = None
    missing: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> RunFolder:
        """Read a folder."""
        if not folder.is_dir():
            raise PlanError(f"{folder}: expected the folder of a run, but there is none.")
        missing: list[str] = []
        record = read_record(folder)
        if record is None:
            plan = next((folder / name for name in _PLANS if (folder / name).is_file()), None)
            if plan is None:
                raise PlanError(
                    f"{folder}: expected {RECORD_NAME}, or a plan such as {_PLANS[0]}, but neither"
                    f" is there. Train with CephaloStrategy(record={str(folder)!r})."
                )
            loaded = Plan.load(plan)
            ranks = tuple(RankRecord(rank, part.name) for rank, part in enumerate(loaded.ranks))
            record = RunRecord(loaded, ranks)
            missing.append(
                f"{RECORD_NAME}: only the plan of the run is known. CephaloStrategy(record=FOLDER)"
                " writes measurements and a recorded step."
            )
        else:
            missing += _missing_in(record)
        comparison, damaged = _comparison(folder)
        return cls(str(folder), record, comparison, (*missing, *damaged))


def _missing_in(record: RunRecord) -> list[str]:
    found = []
    if not record.is_finished:
        found.append(
            "Measurements: the run has not ended, or has ended with an error. They are written when"
            " fit() ends without one."
        )
        return found
    if any(rank.busy_s is None for rank in record.ranks):
        found.append("Times: no step was measured. Train for more steps.")
    if any(rank.measured_memory is None for rank in record.ranks):
        found.append("Memory: it is measured in the second step. Train for two steps or more.")
    elif not any(rank.held for rank in record.ranks):
        found.append(
            "Memory over the step: the step whose memory was read ran other instructions than the"
            " one that was timed, as the plan has changed between them. Train for longer."
        )
    if not any(rank.phases for rank in record.ranks):
        found.append("A recorded step: none has come to its end. Train for more steps.")
    if record.plan.step_s is None:
        found.append(
            "Predictions: the given plan has none. A plan that is made (plan=None), or one of"
            " `cephalo plan`, has them."
        )
    return found


def _comparison(folder: Path) -> tuple[Comparison | None, list[str]]:
    path = folder / "comparison.json"
    if not path.is_file():
        return None, []
    what = "a comparison"
    try:
        data = files.parse_json(files.read_text(path, what=what), what=what, source=str(path))
        ours, even = _number(data, "samples_per_s"), _number(data, "even_samples_per_s")
    except PlanError as error:
        return None, [f"Comparison: {error}"]
    if ours is None or even is None:
        return None, [f"Comparison: {path} has other content than that of examples/train.py."]
    return Comparison(ours, even), []


def _number(data: Any, name: str) -> float | None:
    value = data.get(name) if isinstance(data, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None
