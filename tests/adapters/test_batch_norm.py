"""Batch normalisation by the modes of its layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cephalo.adapters.batch_norm import (
    SynchronisedLayers,
    batch_norms,
    refuse_synchronised,
    smallest_microbatch,
    synchronised,
)
from lightning_cephalo.common.errors import UnsupportedError


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


class _Other(nn.SyncBatchNorm):
    def forward(self, input):
        return super().forward(2 * input)


def _grouped():
    layer = nn.SyncBatchNorm(3)
    layer.process_group = "some of the ranks"
    return layer


def _compiled():
    block = nn.Sequential(nn.SyncBatchNorm(3))
    block._compiled_call_impl = block.forward  # as `block.compile()` does
    return block


@pytest.mark.parametrize(
    ("make", "is_manual", "message"),
    [
        (lambda: nn.SyncBatchNorm(3), True, r"\['1'\] \(1 in all\) .* optimizes manually"),
        (lambda: _Other(3), False, "'1' is a _Other, which changes the forward"),
        (_grouped, False, "'1' has a process_group.*leave process_group out"),
        (_compiled, False, "'1.0' is .* that torch.compile compiles"),
    ],
)
def test_layers_that_ranks_cannot_compute_together_are_refused(make, is_manual, message):
    with pytest.raises(UnsupportedError, match=message):
        refuse_synchronised(nn.Sequential(nn.Linear(2, 2), make()), is_manual=is_manual)


def test_layers_are_put_back_with_what_they_have_learned():
    shared = nn.BatchNorm1d(3)
    module = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.BatchNorm2d(3).eval()})
    before = dict(module.named_modules())
    replaced = SynchronisedLayers(module)
    assert all(isinstance(module[name], nn.SyncBatchNorm) for name in "ac")
    assert module["a"] is module["b"][0] and not module["c"].training
    refuse_synchronised(module, is_manual=False)
    module["a"].weight = nn.Parameter(module["a"].weight.detach() + 1.0)
    module["a"].running_mean += 2.0
    module["a"].eval()
    replaced.restore()
    assert dict(module.named_modules()) == before
    assert shared.weight[0] == 2.0 and shared.running_mean[0] == 2.0 and not shared.training


class _Activated(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input).relu()


def test_a_layer_with_a_forward_of_its_own_is_not_replaced_by_one_without():
    module = nn.Sequential(nn.BatchNorm1d(3), _Activated(3))
    with pytest.raises(UnsupportedError, match="'1', a _Activated with a forward of its own"):
        SynchronisedLayers(module)
    assert type(module[0]) is nn.BatchNorm1d


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
