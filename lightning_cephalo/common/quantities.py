"""Parses and prints numbers with units: ``25 GB/s``, ``256 GiB``, ``5 us``.

Parsing is strict on purpose. A wrong unit is an error, because 100 Gb/s (bits) and 100 GB/s (bytes)
differ by a factor of 8. Messages and tables print amounts with the ``format_`` functions::

    format_bytes(3 * GIB)          "3.0 GiB"       in the unit that fits
    format_gib(0.5 * GIB)          "0.50 GiB"      in one unit, to compare amounts
    format_mib(1.25 * GIB)         "1,280.0 MiB"
    format_bytes_exactly(3 * GIB)  "3.000 GiB (3221225472 bytes)"
    format_seconds(0.0125)         "12.5 ms"
    format_rate(12_500.4)          "12,500"
    format_count(38_600_000)       "38.6M"
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.common.errors import PlanError

KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40
# The units that amounts of memory are printed in, the largest first.
BYTE_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1.0))
ABSENT = "–"
# Fraction of a memory that a plan may fill. The rest is for uses that no profile measures
# (fragmentation, libraries' workspaces, other processes).
USABLE_SHARE = 0.9
_UNLIMITED = "unlimited"

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s.].*?)\s*")


@dataclass(frozen=True)
class Dimension:
    """A physical dimension with its units.

    Attributes:
        units: each unit and its size in the base unit; :meth:`text` uses the first that fits.
        zero: whether a number may be 0.
    """

    name: str
    example: str
    units: tuple[tuple[str, float], ...]
    zero: bool = False

    def parse(self, field: str, value: Any) -> float:
        """Return the number in the base unit, or raise PlanError naming ``field``."""
        match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
        size = dict(self.units).get(match[2]) if match else None
        if match is None or size is None:
            raise PlanError(
                f"{field}: expected {self.name} such as {self.example!r} "
                f"(units: {', '.join(unit for unit, _ in self.units)}), but got {value!r}."
                f"{self._meant(match[2]) if match else ''}"
            )
        # division gives exactly 5e-6 for 5 us; multiplication does not
        number = float(match[1]) * size if size >= 1 else float(match[1]) / round(1 / size)
        if number < 0 or (number == 0 and not self.zero) or math.isinf(number):
            least = "at least 0" if self.zero else "greater than 0"
            least = "that is finite" if math.isinf(number) else least
            raise PlanError(f"{field}: expected {self.name} {least}, but got {value!r}.")
        return number

    def _meant(self, unit: str) -> str:
        """Return a sentence with the units that an unknown one resembles; it may be empty."""
        known: dict[str, list[str]] = {}
        for name, _ in self.units:
            known.setdefault(name.casefold(), []).append(name)
        close = difflib.get_close_matches(unit.casefold(), known, n=1)
        return f" Did you mean {' or '.join(known[close[0]])}?" if close else ""

    def text(self, number: float) -> str:
        """Return a spelling that :meth:`parse` reads back exactly, short if possible."""
        for unit, size in self.units:
            spelling = f"{number / size:.12g} {unit}"
            if 1 <= number / size < 10_000 and self.parse("", spelling) == number:
                return spelling
        base = next(unit for unit, size in self.units if size == 1)
        return f"{number!r} {base}"


def _scaled(unit: str, *prefixes: str) -> tuple[tuple[str, float], ...]:
    powers = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3}
    powers |= {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    powers |= {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}
    return tuple((prefix + unit, powers[prefix]) for prefix in prefixes)


_BITS = tuple((unit, size / 8) for unit, size in _scaled("b/s", "k", "M", "G", "T"))

BYTES = Dimension(
    "an amount of memory",
    "24 GiB",
    _scaled("B", "Ti", "Gi", "T", "G", "Mi", "M", "Ki", "k", "K", ""),
)
BYTES_PER_S = Dimension(
    "a bandwidth",
    "25 GB/s",
    _scaled("B/s", "G", "T", "M", "k", "K", "", "Gi", "Mi") + _BITS,
)
FLOPS_PER_S = Dimension(
    "a rate of operations",
    "30 TFLOP/s",
    _scaled("FLOP/s", "T", "G", "P", "M", "") + _scaled("FLOPS", "T", "G", "P"),
)
SECONDS = Dimension("a time", "10 us", _scaled("s", "u", "m", "", "n", "µ"), zero=True)


def parse_each(
    where: str, values: Mapping[str, Any], keys: Mapping[str, tuple[str, Dimension]]
) -> dict[str, float]:
    """Parse the values of some keys; return them by the name that goes with each key.

    ::

        parse_each("link", {"latency": "5 us"}, {"latency": ("latency_s", SECONDS)})
        # {"latency_s": 5e-06}
    """
    return {
        name: dimension.parse(f"{where}: {key}", values[key])
        for key, (name, dimension) in keys.items()
        if key in values
    }


def format_bytes(size: float | None) -> str:
    """Return an amount of memory in the unit that fits: ``1.5 GiB``; a dash for None."""
    if size is None:
        return ABSENT
    if math.isinf(size):
        return _UNLIMITED
    unit, least = byte_unit(abs(size))
    return f"{size:.0f} B" if least == 1 else f"{size / least:.1f} {unit}"


def byte_unit(size: float) -> tuple[str, float]:
    """Return the largest unit that is no larger than this amount, and its bytes."""
    fitting = (pair for pair in BYTE_UNITS if size >= pair[1])
    return next(fitting, BYTE_UNITS[-1])


def format_mib(size: float, *, digits: int = 1) -> str:
    """Return an amount of memory in MiB, to compare amounts: ``1,280.0 MiB``."""
    return _UNLIMITED if math.isinf(size) else f"{size / MIB:,.{digits}f} MiB"


def format_gib(size: float, *, digits: int = 2) -> str:
    """Return an amount of memory in GiB, to compare amounts: ``12.50 GiB``."""
    return _UNLIMITED if math.isinf(size) else f"{size / GIB:,.{digits}f} GiB"


def format_bytes_exactly(size: float) -> str:
    """Return an amount of memory to the byte, rounded up: ``3.000 GiB (3221225472 bytes)``."""
    if math.isinf(size):
        return f"{_UNLIMITED} bytes"
    exact = f"{math.ceil(size):d} bytes"
    return exact if size < MIB else f"{format_gib(size, digits=3)} ({exact})"


def format_seconds(seconds: float | None) -> str:
    """Return a time in the unit that fits: ``1.25 s``, ``12.5 ms``, ``80 µs``; a dash for None."""
    if seconds is None:
        return ABSENT
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size or seconds == 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def format_count(count: float) -> str:
    """Return a count with three digits: ``950``, ``38.6M``, ``1.24B``."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def format_rate(per_s: float) -> str:
    """Return a rate with three digits below 1000, else as a whole number: ``77.2``, ``12,500``."""
    return f"{per_s:,.0f}" if per_s >= 999.5 else f"{per_s:.3g}"
