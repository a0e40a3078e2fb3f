"""Weighted means leave out what weighs nothing."""

import math

import pytest
import torch

from lightning_cephalo.common.weighted_mean import weighted_mean


@pytest.mark.parametrize(
    ("values", "weights", "wanted"),
    [
        ([1.0, 4.0], [3.0, 1.0], 1.75),
        ([math.nan, 4.0], [0.0, 2.0], 4.0),
        ([1.0, 4.0], [0.0, 0.0], 2.5),
    ],
)
def test_a_value_without_weight_has_no_part_in_the_mean(values, weights, wanted):
    assert weighted_mean(values, weights) == pytest.approx(wanted)
    tensors = [torch.full((2,), value, dtype=torch.bfloat16) for value in values]
    found = weighted_mean(tensors, weights)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [wanted, wanted]


def test_a_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        weighted_mean([], [])
