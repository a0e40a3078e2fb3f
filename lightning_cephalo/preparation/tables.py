"""What a session shows of its plan and its run: tables on the terminal, and the record of a run."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.common.texts import printable
from lightning_cephalo.observe import report
from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.pace import busy_table, remarks
from lightning_cephalo.observe.run_record import RankRecord, RunRecord
from lightning_cephalo.observe.watch import RunReport
from lightning_cephalo.preparation.limits import limit_note
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.preparation.training import Training
from lightning_cephalo.sharding.blocks import type_of


def show_plan(training: Training) -> None:
    """Print the plan as a table that also says when updates run."""
    session = training.session
    table = report.plan_table(
        session.plan,
        model=_unit_sizes(session),
        updates=_updates(session),
        notes=_notes(training),
        details=session.job.options.planner.verbose > 1,
    )
    report.show(table)


def show_predictions(session: Session, found: RunReport) -> None:
    """Print predicted and measured work, step time and memory."""
    if len(found.ranks) == session.plan.world_size:
        report.show(busy_table(found.ranks))
        for remark in _remarks(session, found):
            report.show(remark)
    if found.step_s is not None:
        report.show(report.step_line(session.plan.step_s, found.step_s))
    if found.memory is not None:
        report.show(report.memory_table(session.predicted_memory, found.memory))


def record_of(training: Training, *, is_finished: bool) -> RunRecord:
    """Return the run's record."""
    session, found, plan = training.session, training.watch.report, training.session.plan
    after: Sequence[RankMemory | None] = found.memory or (None,) * plan.world_size
    memories = zip(session.predicted_memory, after, strict=True)
    times = {one.rank: one for one in found.ranks}
    steps = {one.rank: one for one in found.timeline}
    return RunRecord(
        plan=plan,
        ranks=tuple(
            RankRecord.of(rank, plan.ranks[rank].name, *own, times.get(rank), steps.get(rank))
            for rank, own in enumerate(memories)
        ),
        model=printable(report.units_text(_unit_sizes(session))),
        updates=_updates(session),
        notes=_notes(training),
        remarks=_remarks(session, found),
        changes=tuple(
            f"behind step {change.step}: {change.cause}, rank {change.rank}"
            for change in found.replans
        ),
        steps_s=training.watch.shown_steps_s,
        is_finished=is_finished,
        is_given=session.job.options.plan is not None,
    )


def _remarks(session: Session, found: RunReport) -> tuple[str, ...]:
    is_given = session.job.options.plan is not None
    return tuple(remarks(found.ranks, is_given=is_given))


def _unit_sizes(session: Session) -> list[report.UnitSize]:
    """Return the units as tables name them, the root unit first."""
    return [
        report.UnitSize(
            unit.name,
            type_of(unit.module).__name__,
            sum(flat.contents.numel for flat in unit.flats),
        )
        for unit in session.model.units
    ]


def _updates(session: Session) -> str:
    late = session.job.late
    return f"after the backward: {late}" if late else "inside the backward"


def _notes(training: Training) -> tuple[str, ...]:
    session = training.session
    uses_host = session.plan.moves_state or any(rank.offload for rank in session.plan.ranks)
    return tuple(filter(None, (*training.notes, limit_note(session.job.limits, uses_host))))
