"""Elements of HTML and SVG as text; whatever comes from a file is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from lightning_cephalo.common.texts import printable


class Markup(str):
    """Text that is markup already; all other text is escaped where an element takes it in."""


def element(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element.

    ::

        element("p", "a < b", class_="note")      # <p class="note">a &lt; b</p>

    Args:
        name: Its name.
        content: Markup, or text, which is escaped.
        attributes: Their underscores stand for hyphens; one at the end is dropped.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{given}>{joined(content)}</{name}>")


def joined(content: Iterable[str]) -> Markup:
    """Return markup of several parts, in which text is escaped."""
    return Markup("".join(map(_safe, content)))


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> Markup:
    """Return a table.

    Args:
        heading: Of each column.
        rows: Cells of each row.
        texts: How many columns at the left are texts; all others are numbers.
    """
    kinds = ["text"] * texts + ["number"] * (len(heading) - texts)
    head = element(
        "tr", *(element("th", cell, class_=kind) for cell, kind in zip(heading, kinds, strict=True))
    )
    body = [
        element(
            "tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))
        )
        for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="wide")


def _safe(content: str) -> str:
    return content if isinstance(content, Markup) else html.escape(printable(content))
