"""Batch normalisation by the modes of its layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cephalo.adapters.batch_norm import (
    SynchronisedLayers,
    batch_norms,
    smallest_microbatch,
    synchronised,
)


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


def test_layers_are_put_back_with_what_they_have_learned():
    shared = nn.BatchNorm1d(3)
    module = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.BatchNorm2d(3).eval()})
    before = dict(module.named_modules())
    replaced = SynchronisedLayers(module)
    assert all(isinstance(module[name], nn.SyncBatchNorm) for name in "ac")
    assert module["a"] is module["b"][0] and not module["c"].training
    module["a"].weight = nn.Parameter(module["a"].weight.detach() + 1.0)
    module["a"].running_mean += 2.0
    module["a"].eval()
    replaced.restore()
    assert dict(module.named_modules()) == before
    assert shared.weight[0] == 2.0 and shared.running_mean[0] == 2.0 and not shared.training


def test_hooks_of_a_replaced_layer_fire_and_can_be_removed():
    module = nn.Sequential(nn.BatchNorm1d(3))
    fired = []
    handle = module[0].register_forward_hook(lambda *_: fired.append(1))
    SynchronisedLayers(module)
    module[0].eval()(torch.ones(2, 3))
    assert fired == [1]
    handle.remove()
    module[0](torch.ones(2, 3))
    assert fired == [1]
