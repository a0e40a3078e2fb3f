"""A mean that only some microbatches log is warned of, once."""

from __future__ import annotations

import warnings

import pytest

from lightning_cephalo.adapters.partly_logged import PartlyLogged


def test_a_mean_that_only_some_microbatches_log_is_warned_of_once_by_name():
    partly = PartlyLogged()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partly.look("loss", [0, 1, 1, 2], 3)
    with pytest.warns(UserWarning, match="1 of 3 microbatches log 'positive'.*batch_size="):
        partly.look("positive", [1, 1], 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partly.look("positive", [2], 3)
