"""Makes text of files and other processes fit for a terminal."""

from __future__ import annotations

import unicodedata

_LAYOUT = {"\n", "\t"}


def is_control(character: str) -> bool:
    """Whether a terminal would obey a character instead of showing it; not for line ends and tabs.

    ::

        is_control("\\x1b"), is_control("é"), is_control("\\n")  # True, False, False
    """
    return unicodedata.category(character) == "Cc" and character not in _LAYOUT


def printable(text: str) -> str:
    """Return a text with its control characters spelled out, so that a terminal only shows them.

    ::

        printable("red: \\x1b[31m")   # r"red: \\x1b[31m", in which nothing is red
    """
    if not any(map(is_control, set(text))):
        return text
    return "".join(repr(c)[1:-1] if is_control(c) else c for c in text)
