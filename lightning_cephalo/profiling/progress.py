"""Shows a status line while profiling and solving."""

from __future__ import annotations

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
