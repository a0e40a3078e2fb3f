"""Batch normalisation by the modes of its layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cephalo.adapters.batch_norm import batch_norms, smallest_microbatch, synchronised


class _Own(_BatchNorm):
    def _check_input_dim(self, input):
        """Take any."""


def test_layers_in_eval_are_not_named_but_need_two_samples_as_hooks_may_switch_them():
    for layer in (nn.BatchNorm2d(3), _Own(3)):
        module = nn.Sequential(nn.Linear(2, 2), layer)
        assert batch_norms(module) == ["1"] and smallest_microbatch(module) == 2
        layer.eval()
        assert not batch_norms(module) and smallest_microbatch(module) == 2
    assert smallest_microbatch(nn.Sequential(nn.GroupNorm(1, 2))) == 1


def test_synchronised_layers_are_named_only_where_they_compute_as_others():
    module = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, track_running_stats=False))
    assert synchronised(module) == ["0", "1"] and not batch_norms(module)
    assert batch_norms(module.eval()) == ["1"]  # evaluation has statistics of a rank's batch
