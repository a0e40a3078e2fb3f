"""Runs functions one after the other in a thread, beside the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Running(Future[None]):
    """A function that a line runs; waited for like a handle of torch.distributed."""

    wait = Future.result

    def when_done(self, note: Callable[[], None]) -> None:
        """Call ``note`` in another thread as soon as it has returned."""
        self.add_done_callback(lambda _: note())


class Line:
    """Runs functions in the order in which they come, in a thread that ends with the process.

    ::

        line = Line()
        running = line.run(forward_slices)    # returns at once
        running.wait()                        # raises what forward_slices raised
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Running, Callable[[], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], None]) -> Running:
        """Run a function after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._waiting,), daemon=True)
            self._thread.start()
        running = Running()
        self._waiting.put((running, function))
        return running


def _work(waiting: queue.SimpleQueue[tuple[Running, Callable[[], None]]]) -> None:
    while True:
        running, function = waiting.get()
        try:
            function()
        except BaseException as error:
            running.set_exception(error)
        else:
            running.set_result(None)
        # else the last function's tensors and group would live until the next one
        del running, function
