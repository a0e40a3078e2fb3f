"""Notes when everything in one real step begins and ends, as events of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from lightning_cephalo.stopwatch import Mark, Stopwatch
from lightning_cephalo.timeline import NONE, Activity, Event, Stream

# What was done already is "waited for" in a microsecond or two: that is no event.
_NO_WAITING_S = 1e-5


@dataclass(frozen=True)
class _Span:
    """What has begun; done at the last of its ends, of which there must be ``parts``."""

    stream: Stream
    name: Activity
    unit: int
    microbatch: int
    start: Mark
    parts: int = 1
    ends: list[Mark] = field(default_factory=list)


class Recorder:
    """Records steps of one rank; of several, the last.

    Compute is what the host spends on it; on CUDA, what the device does. A collective is under way
    from when it is issued until the backend says that it is done; it is left out where a backend
    does not say.

    Args:
        stopwatch: The runner's, which knows when the rank waited.
        now: Marks the present, when the device has done what it was given; None: the stopwatch's
            way, which is enough for a real device.
    """

    def __init__(self, stopwatch: Stopwatch, now: Callable[[], Mark] | None = None) -> None:
        self._stopwatch = stopwatch
        self.now = now or stopwatch.marks.now
        self._spans: list[_Span] = []
        self._finished: list[_Span] = []
        self._left_unit: Mark | None = None
        self._returned = False
        self._met: Mark | None = None

    def restart(self) -> None:
        """Begin a step."""
        self._spans = []

    @contextmanager
    def computing(self, name: Activity, unit: int, microbatch: int) -> Iterator[None]:
        """A pass of a microbatch through a unit; what follows the last unit is the tail.

        Args:
            name: What it is.
            unit: Index in the runner: 0 is the root unit.
            microbatch: Index on this rank.
        """
        self._left_unit, self._returned = None, False
        start = self.now()
        yield
        end = self.now()
        between = self._left_unit if name is Activity.FORWARD and self._returned else None
        if between is not None:
            self._add(Stream.COMPUTE, name, unit, microbatch, start, between)
            name, unit, start = Activity.TAIL, 0, between
        self._add(Stream.COMPUTE, name, unit, microbatch, start, end)

    def watched(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A unit's body that says when it has been left."""

        @wraps(body)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = body(*args, **kwargs)
            self._left_unit = self.now()
            return result

        return watched

    def returned(self) -> None:
        """The user's step has returned: its loss and its backward are the tail."""
        self._returned = True

    def issued(self, name: Activity, unit: int, start: Mark, works: Sequence[Any]) -> None:
        """A collective is under way.

        Args:
            name: Gather or reduce.
            unit: Index in the runner.
            start: From when on.
            works: Its handles; none where a rank is alone.
        """
        stream = Stream.REDUCTION if name is Activity.REDUCE else Stream.COMMUNICATION
        span = _Span(stream, name, unit - 1, NONE, start, len(works))
        for work in works:
            try:
                self._stopwatch.marks.when_done(work, span.ends.append)
            except (RuntimeError, NotImplementedError):
                return  # this backend does not say
        if works:
            self._spans.append(span)

    def finish(self) -> None:
        """End the step, after its optimizer; the stopwatch has finished it already."""
        for start, end in self._stopwatch.last_waits:
            self._add(Stream.COMPUTE, Activity.WAITING, 0, NONE, start, end)
            self._met = end
        started = self._stopwatch.last_work_ended
        self._add(Stream.COMPUTE, Activity.OPTIMIZER, 0, NONE, started, self.now())
        self._stopwatch.marks.tie()
        self._finished, self._spans = self._spans, []

    def events(self, rank: int) -> tuple[Event, ...]:
        """The last finished step, by start, in seconds of this host's clock."""
        host_s, found = self._stopwatch.marks.host_s, []
        for span in self._finished:
            if len(span.ends) < span.parts:
                continue
            start_s, end_s = host_s(span.start), max(host_s(end) for end in span.ends)
            if end_s - start_s > (_NO_WAITING_S if span.name is Activity.WAITING else 0.0):
                found.append(
                    Event(rank, span.stream, span.name, start_s, end_s, span.unit, span.microbatch)
                )
        return tuple(sorted(found, key=lambda event: event.start_s))

    @property
    def met_s(self) -> float | None:
        """When all ranks last met in that step: at the same time, whatever their clocks say."""
        return None if self._met is None else self._stopwatch.marks.host_s(self._met)

    def _add(
        self, stream: Stream, name: Activity, unit: int, microbatch: int, start: Mark, end: Mark
    ) -> None:
        self._spans.append(_Span(stream, name, unit - 1, microbatch, start, ends=[end]))
