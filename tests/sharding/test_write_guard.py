"""Gathered parameters outside of their steps."""

import torch

from lightning_cephalo.sharding.write_guard import GatheredParameter


def test_a_parameter_whose_memory_is_gone_can_be_printed():
    """torch reads null memory there, which ends the process: pytest and debuggers print frames."""
    whole = torch.zeros(6)
    parameter = GatheredParameter(whole[:4].view(2, 2).data)
    parameter.full_name = "head.weight"
    assert "[0., 0.]" in repr(parameter)
    whole.untyped_storage().resize_(0)
    for text in (repr(parameter), f"{parameter}", str([parameter])):
        assert "'head.weight', shape=(2, 2), dtype=torch.float32, freed" in text
