"""Shards the averages of weights that Lightning's callbacks hold, while the model is sharded.

``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module in their ``setup``, before it
is sharded. The copies' parameters get the rows of the module's. So each rank averages its own rows,
every step, without communication, and holds its share of the average.

Private API: the callbacks have no public name for their copies. ``tests/lightning/
test_averaged_weights.py`` fails if it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.adapters.checkpoint import replace_tensors, rows_like
from lightning_cephalo.sharding.collectives import broadcast
from lightning_cephalo.sharding.placement import full_parameter, like_parameter


def lightnings_classes(callback: Any) -> set[str]:
    """Return the names of the classes of Lightning, in either package, that a callback is of."""
    packages = ("lightning", "pytorch_lightning")
    kinds = type(callback).__mro__
    return {kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] in packages}


def averaging_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return Lightning's callbacks that average weights in a copy of the module."""
    kinds = {"WeightAveraging", "StochasticWeightAveraging"}
    return [one for one in callbacks if kinds & lightnings_classes(one)]


class AveragedWeights:
    """Shards the copies of a module that callbacks average, like the module; collective."""

    def __init__(self, module: nn.Module, callbacks: Sequence[Any]) -> None:
        self._module = module
        sharded = dict(module.named_parameters(remove_duplicate=False))
        copies = (callback._average_model for callback in averaging_callbacks(callbacks))
        # an AveragedModel holds the copy as its `module`
        self._copies = [getattr(copy, "module", copy) for copy in copies if copy is not None]
        for copy in self._copies:
            replace_tensors(copy, lambda name, own: _sharded_like(sharded.get(name), own))

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return, for every copy, its sharded parameters with those of the module."""
        sharded = dict(self._module.named_parameters(remove_duplicate=False))
        named = (copy.named_parameters(remove_duplicate=False) for copy in self._copies)
        return [[(p, sharded[n]) for n, p in each if isinstance(p, DTensor)] for each in named]

    def restore_full(self) -> None:
        """Give the copies plain full parameters; collective."""
        for copy in self._copies:
            replace_tensors(copy, lambda _, p: full_parameter(p) if isinstance(p, DTensor) else p)
        self._copies = []


def _sharded_like(sharded: nn.Parameter | None, parameter: Tensor) -> Tensor:
    """Return a parameter with the rows of another, on its own device, with its tags; collective."""
    if not isinstance(sharded, DTensor):
        return parameter
    mesh = sharded.device_mesh
    values = parameter.detach().to(mesh.device_type, sharded.dtype, copy=True)
    if dist.get_world_size() > 1:  # the mesh may be that of a group of ranks
        broadcast(values, None, source=0)
    rows = rows_like(sharded, values, parameter.device)
    return like_parameter(rows, parameter)
