"""Amounts in the units that people read."""

from __future__ import annotations

import math

import pytest

from lightning_cephalo.common.quantities import (
    BYTES,
    BYTES_PER_S,
    FLOPS_PER_S,
    GIB,
    MIB,
    SECONDS,
    byte_unit,
    format_bytes,
    format_bytes_exactly,
    format_count,
    format_gib,
    format_mib,
    format_rate,
    format_seconds,
)


@pytest.mark.parametrize(
    ("dimension", "text", "number"),
    [
        (BYTES_PER_S, "100 Gb/s", 12.5e9),
        (BYTES_PER_S, "100 GB/s", 100e9),
        (BYTES_PER_S, "1.5e3 MB/s", 1.5e9),
        (BYTES, "24GiB", 24 * GIB),
        (BYTES, "24 GB", 24e9),
        (FLOPS_PER_S, "30 TFLOP/s", 30e12),
        (SECONDS, "5 us", 5e-6),
        (SECONDS, ".5 ms", 5e-4),
    ],
)
def test_quantities(dimension, text, number):
    assert dimension.parse("field", text) == pytest.approx(number, rel=1e-12)
    assert dimension.parse("field", dimension.text(number)) == number


@pytest.mark.parametrize("number", [1 / 3, 123456789.123, 0.9 * 24 * GIB, 7e-7])
def test_odd_quantities_are_written_exactly(number):
    assert BYTES.parse("field", BYTES.text(number)) == number


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "–"), (0.0, "0 s"), (1.25, "1.25 s"), (0.0125, "12.5 ms"), (8e-5, "80 µs")],
)
def test_seconds_have_a_fitting_unit(seconds: float | None, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("per_s", "expected"),
    [(0.71234, "0.712"), (77.23, "77.2"), (999.4, "999"), (999.6, "1,000"), (12500.4, "12,500")],
)
def test_rates_have_three_digits_and_no_exponent(per_s: float, expected: str) -> None:
    assert format_rate(per_s) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1k"),
        (7_110_000, "7.11M"),
        (38_600_000, "38.6M"),
        (1.2e9, "1.2B"),
    ],
)
def test_counts_have_three_digits(count: float, expected: str) -> None:
    assert format_count(count) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**40, "1.0 TiB"),
        (math.inf, "unlimited"),
    ],
)
def test_bytes_are_in_powers_of_1024(size: float | None, expected: str) -> None:
    assert format_bytes(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0.0, ("B", 1)), (1023, ("B", 1)), (1024, ("KiB", 1024)), (3 * GIB, ("GiB", GIB))],
)
def test_the_unit_that_fits_is_no_larger_than_the_amount(size, expected):
    assert byte_unit(size) == expected


def test_amounts_that_are_compared_share_a_unit():
    assert [format_mib(size) for size in (MIB, 1.25 * GIB, 0)] == [
        "1.0 MiB",
        "1,280.0 MiB",
        "0.0 MiB",
    ]
    assert [format_gib(size) for size in (GIB / 2, 1200 * GIB)] == ["0.50 GiB", "1,200.00 GiB"]
    assert format_gib(3 * GIB, digits=3) == "3.000 GiB"
    assert format_mib(math.inf) == format_gib(math.inf) == "unlimited"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (999.2, "1000 bytes"),
        (MIB - 1, "1048575 bytes"),
        (3 * GIB, "3.000 GiB (3221225472 bytes)"),
        (math.inf, "unlimited bytes"),
    ],
)
def test_an_exact_amount_is_rounded_up_to_bytes(size, expected):
    assert format_bytes_exactly(size) == expected
