"""Records when every instruction of one real step begins and ends, as events of a timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cephalo.accelerator.marks import Mark, Marks
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.observe.recording import Event, Held, Recording, Stream
from lightning_cephalo.plan.program import COMPUTE, Instruction, Operation

# Waiting for work that is already done takes a microsecond or two: that is no event.
_NO_WAITING_S = 1e-5
_COPIES = frozenset({Operation.OFFLOAD, Operation.FETCH})
_TAKES_TIME = COMPUTE | {Operation.UPDATE}


@dataclass(frozen=True)
class _Span:
    """Work that has begun. It is done at the last of its ends, of which there must be ``parts``."""

    stream: Stream
    instruction: Instruction
    start: Mark
    parts: int = 1
    ends: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Look:
    """What a rank held before an instruction, and the most until the next one."""

    instruction: Instruction
    sizes: tuple[float, ...]
    host_bytes: float


@dataclass
class _Step:
    """What was seen of a step so far."""

    spans: list[_Span] = field(default_factory=list)
    copied: list[Event] = field(default_factory=list)
    order: list[tuple[Mark, Instruction]] = field(default_factory=list)  # the moment before each
    ended: Mark | None = None


class Recorder(Observer):
    """Records steps of one rank; retains only the last one.

    A collective lasts from its issue until the backend reports that it is done. It is left out if
    the backend does not report this. Copies are recorded where the device tells of them.
    """

    def __init__(
        self,
        marks: Marks,
        now: Callable[[], Mark] | None = None,
    ) -> None:
        self._marks = marks
        self._now = now or marks.now
        self._step, self._finished = _Step(), _Step()
        self._instruction = Instruction(Operation.AGREE)
        self._thread = threading.get_ident()
        self._began: Mark | None = None
        self._waits_since: Mark | None = None
        self._met: Mark | None = None

    def restart(self) -> None:
        """Begin a step."""
        self._step, self._thread = _Step(), threading.get_ident()

    def before(self, instruction: Instruction) -> None:
        self._began = self._now()
        self._step.order.append((self._began, instruction))
        self._instruction = instruction

    def after(self, instruction: Instruction) -> None:
        if instruction.operation in _TAKES_TIME:
            span = _Span(Stream.COMPUTE, instruction, self._began, ends=[self._now()])
            self._step.spans.append(span)

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
            self._step.spans.append(span)

    # -- of accelerator.base.TransferListener ---------------------------------------------------

    def device_s(self) -> float:
        """Return when work begins that is submitted now; only where marks are seconds."""
        mark = self._marks.now()
        return mark if isinstance(mark, float) else time.perf_counter()

    def copied(self, nbytes: int, to_host: bool | None, start_s: float, end_s: float) -> None:
        """Record a copy between device and host, of boundaries or of optimizer state."""
        instruction, stream = self._here(), Stream.COPY
        if instruction.operation not in _COPIES:
            stream = Stream.TO_HOST if to_host else Stream.TO_DEVICE
        self._step.copied.append(Event(stream, instruction, start_s, end_s, float(nbytes)))

    def running(self) -> Instruction:
        """Return the running instruction."""
        return self._instruction

    def updated(self, by: Any, start_s: float, end_s: float) -> None:
        """Record an update by the host."""
        instruction = Instruction(Operation.HOST_UPDATE, by.unit)
        self._step.copied.append(Event(Stream.HOST, instruction, start_s, end_s))

    def _here(self) -> Instruction:
        """Return the running instruction; another thread serves an earlier one."""
        if threading.get_ident() != self._thread:
            return Instruction(Operation.HOST_UPDATE)
        return self._instruction

    # -- of Observer ----------------------------------------------------------------------------

    def before_wait(self, instruction: Instruction) -> None:
        self._waits_since = self._marks.now()

    def after_wait(self, instruction: Instruction) -> None:
        self._met = self._marks.now()
        # the next collective of the same instruction begins no earlier than now
        self._began = self._now()
        waited = replace(instruction, operation=Operation.WAIT)
        span = _Span(Stream.COMPUTE, waited, self._waits_since, ends=[self._met])
        self._step.spans.append(span)

    def finish(self) -> None:
        """End the step, after its update."""
        self._step.ended = self._now()
        self._marks.tie()
        self._finished, self._step = self._step, _Step()

    def events(
        self, bytes_of: Callable[[Instruction], float] = lambda instruction: 0.0
    ) -> tuple[Event, ...]:
        """Return the last finished step, by start, in seconds of this host's ``perf_counter``."""
        host_s = self._marks.host_s
        found = [*self._finished.copied]
        for span in self._finished.spans:
            if len(span.ends) < span.parts:
                continue
            start_s, end_s = host_s(span.start), max(host_s(end) for end in span.ends)
            is_wait = span.instruction.operation is Operation.WAIT
            if not is_wait or end_s - start_s > _NO_WAITING_S:
                moved_bytes = bytes_of(span.instruction)
                found.append(Event(span.stream, span.instruction, start_s, end_s, moved_bytes))
        timed = (event for event in found if event.end_s > event.start_s)
        return tuple(sorted(timed, key=lambda event: event.start_s))

    def recording(
        self,
        rank: int,
        name: str,
        looks: Sequence[Look],
        bytes_of: Callable[[Instruction], float],
    ) -> Recording:
        """Return the last finished step, with what the rank held."""
        step, host_s = self._finished, self._marks.host_s
        order = [(host_s(mark), instruction) for mark, instruction in step.order]
        held: tuple[Held, ...] = ()
        if [instruction for _, instruction in order] == [look.instruction for look in looks]:
            held = tuple(
                Held(time_s, look.sizes, look.host_bytes)
                for (time_s, _), look in zip(order, looks, strict=True)
            )
        found = Recording(rank, name, self.events(bytes_of), held)
        if step.ended is None or not order:
            return found
        return replace(found, start_s=order[0][0], end_s=host_s(step.ended))

    @property
    def met_s(self) -> float | None:
        """When all ranks last met in that step: the same moment for all, whatever their clocks."""
        return None if self._met is None else self._marks.host_s(self._met)
