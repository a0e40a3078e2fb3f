"""Shows a status line while profiling and solving."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from lightning_cephalo.common.texts import printable


class Progress:
    """A live status line where the terminal can show one, if this process prints at all."""

    def __init__(self, show: bool) -> None:
        self._console = Console(markup=False, quiet=not show)
        self._status = self._console.status("starting")
        self._is_live = show and self._console.is_terminal

    def __enter__(self) -> Progress:
        if self._is_live:
            self._status.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """Replace the status line."""
        self._status.update(printable(text))

    def warn(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(printable(text), highlight=False)
