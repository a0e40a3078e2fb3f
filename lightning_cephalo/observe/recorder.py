"""Records when every instruction of one real step begins and ends, as events of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cephalo.accelerator.marks import Mark, Marks
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.plan.program import COMPUTE, Instruction, Operation
from lightning_cephalo.plan.timeline import Event, Stream

# Waiting for work that is already done takes a microsecond or two: that is no event.
_NO_WAITING_S = 1e-5
_COPIES = frozenset({Operation.OFFLOAD, Operation.FETCH})


@dataclass(frozen=True)
class _Span:
    """Work that has begun. It is done at the last of its ends, of which there must be ``parts``."""

    stream: Stream
    instruction: Instruction
    start: Mark
    parts: int = 1
    ends: list[Mark] = field(default_factory=list)


class Recorder(Observer):
    """Records steps of one rank; retains only the last one.

    Compute is timed on the host, or on the device where the host queues kernels for one. A
    collective lasts from its issue until the backend reports that it is done. It is left out if
    the backend does not report this.

    Args:
        marks: The device's marks.
        now: Marks the present once the device has done all issued work; None: the marks' own
            ``now``, which is enough for a real device.
        records_copies: Whether copies to and from the host are done when their instruction ends.
    """

    def __init__(
        self,
        marks: Marks,
        now: Callable[[], Mark] | None = None,
        records_copies: bool = True,
    ) -> None:
        self._marks = marks
        self._now = now or marks.now
        self._takes_time = COMPUTE | {Operation.UPDATE} | (_COPIES if records_copies else set())
        self._spans: list[_Span] = []
        self._finished: list[_Span] = []
        self._began: Mark | None = None
        self._waits_since: Mark | None = None
        self._met: Mark | None = None

    def restart(self) -> None:
        """Begin a step."""
        self._spans = []

    def before(self, instruction: Instruction) -> None:
        self._began = self._now()

    def after(self, instruction: Instruction) -> None:
        if instruction.operation in self._takes_time:
            stream = Stream.COPY if instruction.operation in _COPIES else Stream.COMPUTE
            self._spans.append(_Span(stream, instruction, self._began, ends=[self._now()]))

    def issued(self, instruction: Instruction, works: Sequence[Any]) -> None:
        is_reduce = instruction.operation is Operation.REDUCE
        stream = Stream.REDUCTION if is_reduce else Stream.COMMUNICATION
        span = _Span(stream, instruction, self._began, len(works))
        for work in works:
            try:
                self._marks.when_done(work, span.ends.append)
            except (RuntimeError, NotImplementedError):
                return  # this backend does not report when it is done
        if works:
            self._spans.append(span)

    def before_wait(self, instruction: Instruction) -> None:
        self._waits_since = self._marks.now()

    def after_wait(self, instruction: Instruction) -> None:
        self._met = self._marks.now()
        # the next collective of the same instruction begins no earlier than now
        self._began = self._now()
        waited = replace(instruction, operation=Operation.WAIT)
        self._spans.append(_Span(Stream.COMPUTE, waited, self._waits_since, ends=[self._met]))

    def finish(self) -> None:
        """End the step, after its update."""
        self._marks.tie()
        self._finished, self._spans = self._spans, []

    def events(self, rank: int) -> tuple[Event, ...]:
        """Return the last finished step, by start, in seconds of this host's ``perf_counter``."""
        host_s, found = self._marks.host_s, []
        for span in self._finished:
            if len(span.ends) < span.parts:
                continue
            start_s, end_s = host_s(span.start), max(host_s(end) for end in span.ends)
            is_wait = span.instruction.operation is Operation.WAIT
            if end_s - start_s > (_NO_WAITING_S if is_wait else 0.0):
                found.append(Event(rank, span.stream, span.instruction, start_s, end_s))
        return tuple(sorted(found, key=lambda event: event.start_s))

    @property
    def met_s(self) -> float | None:
        """When all ranks last met in that step: the same moment for all, whatever their clocks."""
        return None if self._met is None else self._marks.host_s(self._met)
