"""Says in a few sentences where a run's time went, the largest loss first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_cephalo.common.quantities import format_bytes, format_seconds
from lightning_cephalo.observe.run_record import RankRecord, RunRecord
from lightning_cephalo.offline.run_report.lost_time import LostTime

# Less than this share of a step is not worth a sentence.
_SHARE = 0.05
_UNLIKE = 0.1
_NEARLY_FULL = 0.97
_SLOWER = 1.1
_CLEARLY_LESS = 0.5


@dataclass(frozen=True)
class Finding:
    """A sentence, and how much of the time it is about."""

    share: float
    text: str


def findings(record: RunRecord, lost: Sequence[LostTime]) -> list[Finding]:
    """Return what stands out, the largest share of time first."""
    found = [*_between_steps(record), *_unlike_the_plan(record), *_memory(record)]
    if lost:
        found += [*_waiting_for_others(record, lost), *_network(record, lost)]
        found += [*_update(lost), *_rest(lost)]
    return sorted(found, key=lambda finding: -finding.share)


def _between_steps(record: RunRecord) -> list[Finding]:
    steps = [
        (rank.between_s, rank.step_s)
        for rank in record.ranks
        if rank.between_s is not None and rank.step_s is not None
    ]
    if not steps:
        return []
    between_s, step_s = (median(values) for values in zip(*steps, strict=True))
    share = between_s / (between_s + step_s) if between_s + step_s else 0.0
    if share < _SHARE:
        return []
    text = (
        f"{format_seconds(between_s)} pass between two steps ({share:.0%} of all time): data"
        " loading, hooks and logging, which no plan shortens. More workers of the data loader, or"
        " less work in hooks, would."
    )
    return [Finding(share, text)]


def _waiting_for_others(record: RunRecord, lost: Sequence[LostTime]) -> list[Finding]:
    share = _mean_share(lost, [one.others_s for one in lost])
    if share < _SHARE:
        return []
    awaited = min(lost, key=lambda one: one.others_s / one.step_s if one.step_s else math.inf)
    text = f"In the recorded step ranks wait {share:.0%} of the time for ranks that come later."
    if awaited.others_s < _CLEARLY_LESS * share * awaited.step_s:
        text += f" {_named(awaited.rank, awaited.name)} waits least of all: it is waited for."
        text += _pace(record.ranks[awaited.rank], record)
    else:
        text += " They wait for each other in turn: no single rank is the slowest all the time."
    return [Finding(share, text)]


def _mean_share(lost: Sequence[LostTime], parts_s: Sequence[float]) -> float:
    """Return which part of a step these seconds of every rank are, on average."""
    pairs = zip(lost, parts_s, strict=True)
    return fmean(part_s / one.step_s if one.step_s else 0.0 for one, part_s in pairs)


def _rest(lost: Sequence[LostTime]) -> list[Finding]:
    share = _mean_share(lost, [one.rest_s for one in lost])
    if share < _UNLIKE:
        return []
    text = (
        f"{share:.0%} of the recorded step is neither work of a device nor waiting for ranks: code"
        " of the host between instructions (hooks, clipping, Python), copies, or a machine that"
        " does something else. Smaller units and microbatches make it more, larger ones less."
    )
    return [Finding(share, text)]


def _pace(rank: RankRecord, record: RunRecord) -> str:
    if rank.busy_s is None or not rank.predicted_busy_s:
        return " Its share of the work is too large for its speed."
    factor = rank.busy_s / rank.predicted_busy_s
    if factor < _SLOWER:
        return " Its work takes as long as predicted: the batch divides no better, or steps differ."
    way_out = (
        "Leave plan= out, to measure and plan anew."
        if record.is_given
        else "Start again, to measure and plan anew; replan=True changes the plan while training."
    )
    return f" Its work takes {factor:.2f} times what the plan predicts. {way_out}"


def _network(record: RunRecord, lost: Sequence[LostTime]) -> list[Finding]:
    share = _mean_share(lost, [one.network_s for one in lost])
    if share < _SHARE:
        return []
    text = (
        f"In the recorded step ranks wait {share:.0%} of the time for transfers that no compute"
        " hides. A larger global batch hides more of them"
    )
    if record.plan.reshard_after_forward is not False:
        text += ", and units that stay gathered need a third less, where memory allows it"
    return [Finding(share, text + ".")]


def _update(lost: Sequence[LostTime]) -> list[Finding]:
    share = _mean_share(lost, [one.update_s for one in lost])
    if share < _UNLIKE:
        return []
    text = (
        f"The optimizer takes {share:.0%} of the recorded step. A larger batch has fewer updates;"
        " fused=True is faster where the optimizer has it."
    )
    return [Finding(share, text)]


def _unlike_the_plan(record: RunRecord) -> list[Finding]:
    steps = [rank.step_s for rank in record.ranks if rank.step_s is not None]
    predicted_s = record.plan.step_s
    if not steps or not predicted_s:
        return []
    excess = max(steps) / predicted_s - 1
    if excess < _UNLIKE:
        return []
    text = (
        f"A step takes {format_seconds(max(steps))}, {excess:.0%} longer than the"
        f" {format_seconds(predicted_s)} that the plan predicts."
    )
    return [Finding(excess / (1 + excess), text)]


def _memory(record: RunRecord) -> list[Finding]:
    found = []
    for rank, part in zip(record.ranks, record.plan.ranks, strict=True):
        measured = rank.measured_memory
        peak = None if measured is None else measured.peak_bytes
        if peak is None:
            continue
        named, capacity = _named(rank.rank, rank.name), part.capacity_bytes or math.inf
        if peak > _NEARLY_FULL * capacity:
            found.append(
                Finding(
                    0.0,
                    f"{named} holds {format_bytes(peak)} of the"
                    f" {format_bytes(capacity)} that it may use: a little more ends the run.",
                )
            )
        elif part.memory_bytes and peak > (1 + _UNLIKE) * part.memory_bytes:
            found.append(
                Finding(
                    0.0,
                    f"{named} holds {format_bytes(peak)}, more than the"
                    f" {format_bytes(part.memory_bytes)} that the plan predicts.",
                )
            )
    return found


def _named(rank: int, name: str) -> str:
    return f"Rank {rank} ({name})" if name else f"Rank {rank}"
