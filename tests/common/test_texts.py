"""Text of files and other processes cannot give orders to the terminal."""

from __future__ import annotations

import pytest

from lightning_cephalo.common.texts import printable

SAID = "a é\t\u4e2d\n"


@pytest.mark.parametrize(
    ("character", "shown"), [("\x1b", r"\x1b"), ("\r", r"\r"), ("\x07", r"\x07"), ("\x9b", r"\x9b")]
)
def test_control_characters_are_spelled_out_and_all_else_stays(character, shown):
    assert printable(f"{SAID}{character}[2J{SAID}") == f"{SAID}{shown}[2J{SAID}"
    assert printable(SAID) == SAID
