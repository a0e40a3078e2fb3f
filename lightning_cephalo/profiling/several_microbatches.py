"""Finds out whether a manually optimized step can run as several microbatches, and its price.

The code of such a step runs once per microbatch, and its effects have to be those of one run
(``execution/in_turns.py``). Whether they are, only a run says. So a few steps run as several small
microbatches of unequal sizes, unequally many on the ranks: code that depends on the number of
samples, or communicates, is refused then. They begin with what modules hold before training, and
with batches of other indices: steps often do something at every so many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from lightning_cephalo.common.texts import printable
from lightning_cephalo.profiling.isolation import same_flags
from lightning_cephalo.profiling.memory_model import RetainedBytes
from lightning_cephalo.profiling.probe import Prober
from lightning_cephalo.profiling.sweep import Measured, Sweep, measure_retained

# the first batch, which is that of every period; another one; one that ends most periods
_BATCHES = (0, 1, 251_999)
_COUNT = 3
_TIMES = 2
_LONGEST_REASON = 240


@dataclass(frozen=True)
class SeveralMicrobatches:
    """Whether ranks may run several microbatches of a step that optimizes manually.

    Attributes:
        refused: Why they may not; empty: they may.
        equal: Whether all ranks must run the same number.
        turn_s: Seconds that each microbatch takes in addition to one that is alone.
        turn_state_bytes: Bytes of copies of what the step writes, for the whole state.
        retained: What microbatches retain until their backward.
    """

    refused: str = ""
    equal: bool = False
    turn_s: float = 0.0
    turn_state_bytes: float = 0.0
    retained: RetainedBytes = field(default_factory=lambda: RetainedBytes(0.0, 0.0))


def try_several(
    prober: Prober,
    measured: Measured,
    sweep: Sweep,
    in_turns: Callable[[], AbstractContextManager[None]],
    put_back: Callable[[], None],
    share: float,
) -> SeveralMicrobatches:
    """Run steps of several microbatches; collective.

    Args:
        prober: Runs them.
        measured: This rank's measurements of one microbatch.
        sweep: How far was measured.
        in_turns: Lets several microbatches take turns in a ``with`` block; it may refuse that on
            every rank.
        put_back: Puts back what modules hold.
        share: This rank's share of the state.
    """
    control, manual = prober.control, prober.manual
    assert manual is not None
    if not control.all(bool(measured.times)):
        return SeveralMicrobatches("a rank has no memory for a microbatch")
    smallest = sweep.sizes[0]
    larger = smallest + control.all(measured.largest > smallest)
    refused = control.together("looking at optimizers and hooks", lambda: _refusal_of(in_turns))
    if refused:
        return SeveralMicrobatches(_shortened(refused))
    with in_turns(), same_flags(prober.model.module):
        is_equal, refused = control.world_size == 1, ""
        for is_equal in (True,) if control.world_size == 1 else (False, True):
            more = 1 if control.rank == 0 and not is_equal else 0
            sizes = [larger, *[smallest] * (1 + more)]
            refused = ""
            for batch_idx in _BATCHES:
                put_back()
                refused = refused or prober.refusal(sizes, batch_idx) or ""
            if not refused:
                break
        put_back()
        if refused:
            return SeveralMicrobatches(_shortened(refused))
        retained = measure_retained(prober, measured, sweep)
        turns_s = min(prober.timed_turns(smallest, _COUNT) for _ in range(_TIMES))
        turn_s = control.max(max(0.0, turns_s - measured.times[smallest].tail_s))
        copied = control.max(manual.turns.copied_bytes / share if share else 0.0)
    # a later phase of the step runs whole forwards again, when gradients have been reduced
    retained = replace(retained, reducing_sample_bytes=retained.sample_bytes)
    return SeveralMicrobatches("", is_equal, turn_s, copied, retained)


def _refusal_of(in_turns: Callable[[], AbstractContextManager[None]]) -> str:
    try:
        with in_turns():
            return ""
    except Exception as error:
        return printable(str(error))


def _shortened(reason: str) -> str:
    """Return the first sentences of a reason."""
    text = " ".join(reason.split())
    if len(text) <= _LONGEST_REASON:
        return text
    return f"{text[:_LONGEST_REASON].rsplit(' ', 1)[0]} ..."
