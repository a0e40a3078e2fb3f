"""Ranks that stay end with the tests."""

from __future__ import annotations

import pytest
import warm_ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks_that_stay():
    yield
    warm_ranks.close()
