"""Shards the averages of weights that Lightning's callbacks hold, while the model is sharded.

``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module in their ``setup``, before it
is sharded. The copies' parameters get the rows of the module's. So each rank averages its own rows,
every step, without communication, and holds its share of the average.

Private API: the callbacks have no public name for their copies. ``tests/lightning/
test_averaged_weights.py`` fails if it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.adapters.checkpoint import rows_like
from lightning_cephalo.sharding.collectives import broadcast
from lightning_cephalo.sharding.placement import full_parameter

_COPY = "_average_model"


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
        copies = (getattr(callback, _COPY) for callback in averaging_callbacks(callbacks))
        # an AveragedModel holds the copy as its `module`
        self._copies = [getattr(copy, "module", copy) for copy in copies if copy is not None]
        for copy in self._copies:
            _replace(copy, lambda name, own: _sharded_like(sharded.get(name), own))

    def pairs(self) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Return, for every copy, its sharded parameters with those of the module."""
        sharded = dict(self._module.named_parameters(remove_duplicate=False))
        return [
            [
                (parameter, sharded[name])
                for name, _, _, parameter in _places(copy)
                if isinstance(parameter, DTensor)
            ]
            for copy in self._copies
        ]

    def restore_full(self) -> None:
        """Give the copies plain full parameters; collective."""
        for copy in self._copies:
            _replace(copy, lambda _, p: full_parameter(p) if isinstance(p, DTensor) else p)
        self._copies = []


def _places(module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Return name, owner, attribute and parameter of every place."""
    return [
        (f"{prefix}.{attribute}" if prefix else attribute, owner, attribute, parameter)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _replace(copy: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for name, owner, attribute, parameter in _places(copy):
        if id(parameter) not in made:
            made[id(parameter)] = make(name, parameter)
        owner._parameters[attribute] = made[id(parameter)]


def _sharded_like(sharded: nn.Parameter | None, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the rows of another, on its own device, with its tags; collective."""
    if not isinstance(sharded, DTensor):
        return parameter
    mesh = sharded.device_mesh
    values = parameter.detach().to(mesh.device_type, sharded.dtype, copy=True)
    if dist.get_world_size() > 1:  # the mesh may be that of a group of ranks
        broadcast(values, None, source=0)
    rows = rows_like(sharded, values, parameter.device)
    made = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
