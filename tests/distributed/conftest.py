"""Ranks are forked from the test process: whatever it has imported they need not import again."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_before_forking() -> None:
    """DTensor and the optimizers import these on first use, seconds in every forked rank."""
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.profiler"):
        importlib.import_module(name)
