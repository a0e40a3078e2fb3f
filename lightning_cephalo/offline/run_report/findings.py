"""Says in a few sentences where a run's time went, the largest loss first, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from lightning_cephalo.common.quantities import format_bytes, format_seconds
from lightning_cephalo.observe.run_record import RunRecord
from lightning_cephalo.offline.run_report.lost_time import LostTime

# Less than this share of a step is not worth a sentence.
_SHARE = 0.05
_UNLIKE = 0.1
_NEARLY_FULL = 0.97
_CLEARLY_LESS = 0.5
# by field of LostTime, the share from which on it is said, and what is said
_LOSSES = {
    "others_s": (
        _SHARE,
        "In the recorded step ranks wait {share} of the time for ranks that come later. {who}",
    ),
    "network_s": (
        _SHARE,
        "In the recorded step ranks wait {share} of the time for transfers that no compute hides. A"
        " larger global batch hides more of them. Units that stay gathered need a third less, where"
        " memory allows it.",
    ),
    "update_s": (
        _UNLIKE,
        "The optimizer takes {share} of the recorded step. A larger batch has fewer updates;"
        " fused=True is faster where the optimizer has it.",
    ),
    "rest_s": (
        _UNLIKE,
        "{share} of the recorded step is neither work of a device nor waiting for ranks: hooks,"
        " clipping and Python between instructions, copies, or another program. Larger units and"
        " microbatches make it less.",
    ),
}


class Finding(NamedTuple):
    """A sentence, and how much of the time it is about."""

    share: float
    text: str


def findings(record: RunRecord, lost: Sequence[LostTime]) -> list[Finding]:
    """Return what stands out, the largest share of time first."""
    found = [*_of_steps(record), *_of_memory(record), *(_of_recorded(record, lost) if lost else ())]
    return sorted(found, key=lambda finding: -finding.share)


def missing_in(record: RunRecord) -> Iterator[str]:
    """Yield what the record does not have, with what puts it there."""
    if not record.is_finished:
        yield (
            "Measurements: the run has not ended, or has ended with an error. They are written when"
            " fit() ends without one."
        )
        return
    ranks = record.ranks
    has = {
        "times": all(rank.busy_s is not None for rank in ranks),
        "memory": all(rank.measured_memory is not None for rank in ranks),
        "a recorded step": any(rank.end_s is not None for rank in ranks),
        "memory over it": any(rank.held for rank in ranks),
    }
    if not all(has.values()):
        lacks = ", ".join(name for name in has if not has[name])
        yield f"Not measured: {lacks}. Train for more steps, and without a change of the plan."
    if record.plan.step_s is None:
        yield (
            "Predictions: the given plan has none. A plan that is made (plan=None), or one of"
            " `cephalo plan`, has them."
        )


def _of_steps(record: RunRecord) -> Iterator[Finding]:
    between = [rank.between_s for rank in record.ranks if rank.between_s is not None]
    steps = [rank.step_s for rank in record.ranks if rank.step_s is not None]
    if not steps:
        return
    between_s, step_s, predicted_s = median(between or [0.0]), max(steps), record.plan.step_s
    share = between_s / (between_s + median(steps)) if between_s else 0.0
    if share >= _SHARE:
        yield Finding(
            share,
            f"{format_seconds(between_s)} pass between two steps ({share:.0%} of all time): data"
            " loading, hooks and logging, which no plan shortens. More workers of the data loader,"
            " or less work in hooks, would.",
        )
    if predicted_s and step_s >= (1 + _UNLIKE) * predicted_s:
        yield Finding(
            1 - predicted_s / step_s,
            f"A step takes {format_seconds(step_s)}, {step_s / predicted_s - 1:.0%} longer than the"
            f" {format_seconds(predicted_s)} that the plan predicts.",
        )


def _of_memory(record: RunRecord) -> Iterator[Finding]:
    for rank, part in zip(record.ranks, record.plan.ranks, strict=True):
        peak = rank.measured_memory and rank.measured_memory.peak_bytes
        if not peak:
            continue
        holds = f"{_named(rank.rank, rank.name)} holds {format_bytes(peak)}"
        if part.capacity_bytes and peak > _NEARLY_FULL * part.capacity_bytes:
            may = f"the {format_bytes(part.capacity_bytes)} that it may use"
            yield Finding(0.0, f"{holds} of {may}: a little more ends the run.")
        elif part.memory_bytes and peak > (1 + _UNLIKE) * part.memory_bytes:
            planned = f"the {format_bytes(part.memory_bytes)} that the plan predicts"
            yield Finding(0.0, f"{holds}, more than {planned}.")


def _of_recorded(record: RunRecord, lost: Sequence[LostTime]) -> Iterator[Finding]:
    for field, (least, text) in _LOSSES.items():
        share = fmean(one.share(field) for one in lost)
        if share >= least:
            who = _who_is_late(record, lost, share) if field == "others_s" else ""
            yield Finding(share, text.format(share=f"{share:.0%}", who=who))


def _who_is_late(record: RunRecord, lost: Sequence[LostTime], share: float) -> str:
    awaited = min(lost, key=lambda one: one.share("others_s"))
    rank = record.ranks[awaited.rank]
    if awaited.share("others_s") >= _CLEARLY_LESS * share:
        return "They wait for each other in turn: no single rank is the slowest all the time."
    text = f"{_named(awaited.rank, awaited.name)} waits least of all: it is waited for. Its"
    if rank.busy_s is None or not rank.predicted_busy_s:
        return f"{text} share of the work is too large for its speed."
    factor = rank.busy_s / rank.predicted_busy_s
    if factor < 1 + _UNLIKE:
        return (
            f"{text} work takes as long as predicted: the batch divides no better, or steps differ."
        )
    way_out = (
        "Leave plan= out, to measure and plan anew."
        if record.is_given
        else "Start again, to measure and plan anew; replan=True changes the plan while training."
    )
    return f"{text} work takes {factor:.2f} times what the plan predicts. {way_out}"


def _named(rank: int, name: str) -> str:
    return f"Rank {rank} ({name})" if name else f"Rank {rank}"
