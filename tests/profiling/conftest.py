"""Ranks are forked from the test process: whatever it has imported they need not import again."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_before_forking() -> None:
    """The solver imports it on first use, a fifth of a second in every forked rank that plans."""
    importlib.import_module("cvxpy")
