"""Shows a status line while profiling and solving, and prints one line at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lightning_cephalo.common.texts import printable


class Progress:
    """A live status line where the terminal can show one, if this process prints at all."""

    def __init__(self, show: bool) -> None:
        self._console = Console(markup=False) if show else None
        self._status: Any = None

    def __enter__(self) -> Progress:
        if self._console is not None and self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        """Replace the status line."""
        if self._status is not None:
            self._status.update(printable(text))

    def warn(self, text: str) -> None:
        """Print a line that stays."""
        if self._console is not None:
            self._console.print(printable(text), highlight=False)

    def timing(self, sizes: Sequence[int]) -> None:
        """Show the microbatch sizes that are being timed."""
        by_rank = ", ".join(str(size) if size else "-" for size in sizes)
        self.say(f"profiling: microbatches of {by_rank} samples (by rank)")

    def done(self, largest: Sequence[int], seconds: float, steps: float) -> None:
        """Print the final line."""
        if self._console is not None:
            sizes = ", ".join(map(str, largest))
            self._console.print(
                f"Profiled microbatches of up to {sizes} samples (by rank) in {seconds:.1f} s"
                f" ({steps:.0f} steps).",
                highlight=False,
            )
