"""Shards the averages of weights that Lightning's callbacks hold, while the model is sharded.

``WeightAveraging`` and ``StochasticWeightAveraging`` copy the module in their ``setup``, before it
is sharded. The copies' parameters get the rows of the module's. So each rank averages its own rows,
every step, without communication, and holds its share of the average.

Private API: the callbacks have no public name for their copies. ``tests/lightning/
test_averaged_weights.py`` fails if it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.sharding.collectives import broadcast
from lightning_cephalo.sharding.placement import (
    as_dtensor,
    own_part,
    row_spec,
    rows_of,
    whole_of,
)

_COPY = "_average_model"


def averaging_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that average weights in a copy of the module."""
    kinds = {"WeightAveraging", "StochasticWeightAveraging"}
    return [one for one in callbacks if kinds & {kind.__name__ for kind in type(one).__mro__}]


class AveragedWeights:
    """Shards the copies of a module that callbacks average, like the module.

    Creating it is collective; rank 0's values count, as for the module. The copies are those of the
    callbacks' ``setup``.

    Args:
        module: The sharded module.
        callbacks: The Trainer's callbacks.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[Any]) -> None:
        sharded = dict(module.named_parameters(remove_duplicate=False))
        copies = (getattr(callback, _COPY) for callback in averaging_callbacks(callbacks))
        # an AveragedModel holds the copy as its `module`
        self._copies = [getattr(copy, "module", copy) for copy in copies if copy is not None]
        for copy in self._copies:
            made: dict[int, nn.Parameter] = {}  # tied parameters stay one
            for name, owner, attribute, parameter in _places(copy):
                if id(parameter) not in made and isinstance(sharded.get(name), DTensor):
                    made[id(parameter)] = _sharded_like(sharded[name], parameter)
                owner._parameters[attribute] = made.get(id(parameter), parameter)

    def restore_full(self) -> None:
        """Give the copies plain full parameters; collective."""
        for copy in self._copies:
            made: dict[int, nn.Parameter] = {}
            for _, owner, attribute, parameter in _places(copy):
                if id(parameter) not in made and isinstance(parameter, DTensor):
                    full = whole_of(parameter).clone()
                    made[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
                owner._parameters[attribute] = made.get(id(parameter), parameter)
        self._copies = []


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield name, owner, attribute and parameter of every place, after all have been found."""
    return iter(
        [
            (f"{prefix}.{attribute}" if prefix else attribute, owner, attribute, parameter)
            for prefix, owner in module.named_modules(remove_duplicate=False)
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
    )


def _sharded_like(sharded: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the rows of another, on its own device; collective."""
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    values = parameter.detach().to(sharded.dtype).clone()
    if mesh.size() > 1:
        broadcast(values, None, source=0)
    spec = row_spec(mesh, rows_of(sharded), values.shape, values.dtype)
    own = own_part(values, sharded).clone()
    return nn.Parameter(as_dtensor(own, spec), requires_grad=parameter.requires_grad)
