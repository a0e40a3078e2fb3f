"""Numbers with units, as people write them: ``25 GB/s``, ``256 GiB``, ``5 us``.

Strict on purpose: a wrong unit is an error, as 100 Gb/s (bits) and 100 GB/s (bytes) differ by 8.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from lightning_cephalo.common.errors import PlanError

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s.].*?)\s*")


@dataclass(frozen=True)
class Dimension:
    """What a quantity measures.

    Attributes:
        name: for messages.
        example: a right spelling.
        units: unit and its size in the base unit; the first that fits is the one written.
    """

    name: str
    example: str
    units: tuple[tuple[str, float], ...]

    def parse(self, field: str, value: Any, *, zero: bool = False) -> float:
        """The number in the base unit, or PlanError naming ``field``.

        Args:
            field: for the message.
            value: what came.
            zero: whether 0 is a legal value.
        """
        match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
        size = dict(self.units).get(match[2]) if match else None
        if match is None or size is None:
            raise PlanError(
                f"{field}: expected {self.name} such as {self.example!r} "
                f"(units: {', '.join(unit for unit, _ in self.units)}), but got {value!r}."
            )
        # dividing keeps 5 us at exactly 5e-6, which multiplying does not
        number = float(match[1]) * size if size >= 1 else float(match[1]) / round(1 / size)
        if number < 0 or (number == 0 and not zero) or math.isinf(number):
            least = "at least 0" if zero else "greater than 0"
            raise PlanError(f"{field}: expected {self.name} {least}, but got {value!r}.")
        return number

    def text(self, number: float) -> str:
        """A spelling that :meth:`parse` reads back exactly, short where there is one."""
        for unit, size in self.units:
            spelling = f"{number / size:.12g} {unit}"
            if 1 <= number / size < 10_000 and self.parse("", spelling) == number:
                return spelling
        base = next(unit for unit, size in self.units if size == 1)
        return f"{number!r} {base}"


def _scaled(unit: str, *prefixes: str) -> tuple[tuple[str, float], ...]:
    powers = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3}
    powers |= {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    powers |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
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
SECONDS = Dimension("a time", "10 us", _scaled("s", "u", "m", "", "n", "µ"))
