"""Results of microbatches become the result of the step."""

import pytest
import torch

from lightning_cephalo.data.cutting import joined_result, loss_and_weight


def _join(results, weights, counts):
    return joined_result(results, weights, counts)


def test_losses_are_weighted():
    joined = _join([torch.tensor(1.0), torch.tensor(4.0)], [3.0, 1.0], [3, 1])
    assert float(joined) == pytest.approx(1.75)


def test_a_microbatch_without_weight_does_not_spoil_the_loss():
    joined = _join([torch.tensor(float("nan")), torch.tensor(4.0)], [0.0, 2.0], [1, 2])
    assert float(joined) == 4.0


def test_rows_are_joined_and_weights_are_summed():
    results = [
        {"loss": torch.tensor(1.0), "weight": torch.tensor(6.0), "logits": torch.ones(2, 3)},
        {"loss": torch.tensor(2.0), "weight": torch.tensor(2.0), "logits": torch.zeros(1, 3)},
    ]
    joined = _join(results, [6.0, 2.0], [2, 1])
    assert float(joined["loss"]) == pytest.approx(1.25)
    assert float(joined["weight"]) == 8.0
    assert joined["logits"].shape == (3, 3)


def test_a_rank_without_microbatches_has_no_result():
    assert _join([], [], []) is None


@pytest.mark.parametrize("result", [None, 1.0, {"accuracy": torch.ones(())}, torch.ones(2)])
def test_what_is_no_loss_is_refused_with_the_way_out(result):
    with pytest.raises(
        TypeError,
        match=r"expected|must return a Tensor, or a dict|Return a tensor, or a dict with",
    ):
        loss_and_weight(result, 2)
