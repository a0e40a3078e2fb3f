"""A constant batch size of self.log is named, a count of samples or tokens is not."""

from __future__ import annotations

import warnings

import pytest

from lightning_cephalo.adapters.constant_batch_sizes import ConstantBatchSizes


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([((8, 8), (3, 2))] * 3, 1),  # the global batch
        ([((4, 4), (3, 3))] * 3, 1),
        ([((4,), (6,))] * 3, 1),
        ([((4, 4), (2, 2))] * 3, 1),  # or other ranks have other sizes
        ([((1, 1), (3, 2))] * 3, 0),  # may be of one class
        ([((8,), (6,))] * 4, 1),  # said once
        ([((8,), (6,))] * 2, 0),
        ([((3, 2), (3, 2))] * 3, 0),
        ([((6,), (6,))] * 3, 0),
        ([((8, 8), (2, 2))] * 3, 0),  # may be tokens
        ([((4,), (4,))] * 3, 0),
        ([((96, 64), (3, 2))] * 3, 0),  # tokens
        ([((7,), (2,)), ((7,), (2,)), ((5,), (2,))], 0),
    ],
)
def test_a_constant_is_named_and_a_count_is_not(steps, told):
    batch_sizes = ConstantBatchSizes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given, samples in steps:
            batch_sizes.look("loss", given, samples, of_loader=4)
    assert ["batch_size=" in str(one.message) for one in caught] == [True] * told
