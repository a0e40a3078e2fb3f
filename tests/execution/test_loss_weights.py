"""What each microbatch's loss weighs."""

from __future__ import annotations

import pytest
import torch

from lightning_cephalo.accelerator.cpu import HostReadback
from lightning_cephalo.execution.loss_weights import LossWeights, loss_scale


def test_losses_are_divided_by_the_sum_of_a_whole_batch_or_by_a_power_of_two_near_it():
    assert [loss_scale(1.0, whole) for whole in (1.0, 12.0, 20.0)] == [1.0, 1 / 12, 1 / 20]
    # weights that are tokens: the factor differs by a power of two
    assert [loss_scale(each, 12.0) for each in (0.8, 0.4, 100.0)] == [1 / 12, 1 / 6, 1 / 1536]
    assert loss_scale(0.0, 1.0) > 1e29  # no sum is known yet


def test_a_loss_is_multiplied_by_its_weight_the_scale_and_a_gradient_scalers_factor():
    weights = LossWeights(3, 0.25, HostReadback())
    loss = torch.tensor(3.0, requires_grad=True)
    scaled, without_weight = weights.weigh(0, loss, 2.0)
    assert (scaled.item(), without_weight) == (1.5, None)
    weights.scale_loss = lambda loss: loss * 8
    scaled, without_weight = weights.weigh(1, loss, torch.tensor([4.0]))
    assert (scaled.item(), bool(without_weight)) == (24.0, False)
    assert weights.weigh(2, loss * float("nan"), 0.0) is None  # a mean over no tokens
    assert weights.values == [2.0, 0.0, 0.0]  # the second one is on its way
    for _ in range(2):  # a step that asks all ranks comes here again
        weights.read()
        assert weights.values == [2.0, 4.0, 0.0]


def test_a_tensor_without_weight_says_so_on_the_device():
    loss = torch.tensor(3.0, requires_grad=True)
    _, without_weight = LossWeights(1, 1.0, HostReadback()).weigh(0, loss, torch.tensor(0.0))
    assert bool(without_weight)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_no_weight_is_refused(weight, on_device):
    weights = LossWeights(1, 1.0, HostReadback())
    loss = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(TypeError, match=r"returned the weight .*, expected 0 or more"):
        weights.weigh(0, loss, torch.tensor(weight) if on_device else weight)
        weights.read()
