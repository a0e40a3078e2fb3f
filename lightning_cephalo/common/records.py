"""Checks shared by the planner's dataclasses: one message that names the field, what came, what is
expected.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_cephalo.common.errors import PlanError

_Built = TypeVar("_Built")


def real(
    field: str,
    value: Any,
    *,
    minimum: float = 0.0,
    above_minimum: bool = False,
    infinite: bool = False,
) -> float:
    """Return ``value`` as a float, or raise PlanError naming ``field``.

    Numbers of numpy and numbers written as text are taken too: YAML 1.1 reads ``1e-5`` as text.
    """
    bound = "greater than" if above_minimum else "at least"
    expected = f"a {'' if infinite else 'finite '}number {bound} {minimum:g}"
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise PlanError(f"{field}: expected {expected}, but got {value!r}.")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if (
        math.isnan(number)
        or number < minimum
        or (above_minimum and number == minimum)
        or (math.isinf(number) and not infinite)
    ):
        raise PlanError(f"{field}: expected {expected}, but got {value!r}.")
    return number


def optional_real(field: str, value: Any, **limits: Any) -> float | None:
    """As :func:`real`, but None stays None."""
    return None if value is None else real(field, value, **limits)


def whole(field: str, value: Any, *, minimum: int) -> int:
    """Return ``value`` as an int, or raise PlanError naming ``field``. A float is refused even when
    it is whole.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise PlanError(
            f"{field}: expected a whole number of at least {minimum}, but got {value!r}."
        )
    return int(value)


def text(field: str, value: Any) -> str:
    """Return ``value`` if it is a str, or raise PlanError naming ``field``."""
    if not isinstance(value, str):
        raise PlanError(f"{field}: expected text, but got {value!r}.")
    return value


def items(field: str, value: Any, *, of: str) -> tuple[Any, ...]:
    """Return the items of a list, tuple or array, or raise PlanError naming ``field``."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise PlanError(f"{field}: expected a list of {of}, but got {value!r}.")
    return tuple(value)


def mapping(what: str, value: Any, *, known: Sequence[str], required: Sequence[str]) -> dict:
    """Return a mapping with known keys only and all required ones, or raise PlanError."""
    if not isinstance(value, Mapping):
        raise PlanError(
            f"{what}: expected a mapping with the keys {', '.join(known)}, "
            f"but got {type(value).__name__}: {shortened(value)}."
        )
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PlanError(
                f"{what}: unknown key {key!r}; known keys are {', '.join(known)}.{hint}"
            )
    missing = [key for key in required if key not in value]
    if missing:
        raise PlanError(
            f"{what}: missing {', '.join(repr(key) for key in missing)}; "
            f"required keys are {', '.join(required)}. Add what is missing."
        )
    return dict(value)


def shortened(value: Any, length: int = 80) -> str:
    """The repr of what came, short enough for a message."""
    shown = repr(value)
    return shown if len(shown) <= length else shown[: length - 3] + "..."


def in_source(source: str | None) -> str:
    """The prefix that names the file a text came from, or nothing."""
    return f"{source}: " if source else ""


def built(cls: Callable[..., _Built], values: dict[str, Any], source: str | None) -> _Built:
    """``cls(**values)``; a PlanError of it names the file that the values came from."""
    try:
        return cls(**values)
    except PlanError as error:
        raise PlanError(f"{in_source(source)}{error}") from None
