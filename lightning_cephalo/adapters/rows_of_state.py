"""Finds what has the rows of the model's parameters, so that it moves with them.

These are the state of optimizers that update rows, and the averages of Lightning's callbacks. State
of optimizers that update whole parameters lies on owners, whatever rows ranks hold: it moves with
the owners (``owned_update.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.scope import parameters_of
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.moving import Column
from lightning_cephalo.sharding.placement import rows_of
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import is_spent


class RowsOfState:
    """The tensors that have the rows of parameters, flat by flat.

    ``averages`` are, per copy of the module, its parameters and those that they average. Gradients
    of ``with_gradients`` move too, but for those that are spent.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        averages: Sequence[Sequence[tuple[Tensor, Tensor]]] = (),
        with_gradients: Sequence[Flat] = (),
    ) -> None:
        self._found: dict[int, list[tuple[str, DTensor]]] = {}
        self._refused = ""
        seen: set[int] = set()
        of_averages = (
            (f"average {number}", parameter, average)
            for number, pairs in enumerate(averages)
            for average, parameter in pairs
        )
        for name, parameter, value in chain(
            _states(optimizers), of_averages, _gradients(with_gradients)
        ):
            rows = rows_of(parameter)
            if rows is None or id(value) in seen:
                continue
            if rows_of(value) == rows and value.shape == parameter.shape:
                seen.add(id(value))
                self._found.setdefault(id(parameter), []).append((name, cast(DTensor, value)))
            elif value.numel() > 1:
                self._refused = (
                    f"The optimizer's state {name} has the shape {tuple(value.shape)} for a"
                    f" parameter of shape {tuple(parameter.shape)}, so that it cannot move with the"
                    " parameter's rows. Plans with the same shares of the model still work; for"
                    " others, start again from a checkpoint."
                )

    def check(self, flats: Sequence[Flat], control: ControlGroup) -> None:
        """Raise on every rank if not all of them can move the same tensors; collective."""

        def refuse() -> None:
            if self._refused:
                raise UnsupportedError(self._refused)

        control.together("looking for the state that moves", refuse)
        columns = [[(c.name, str(c.dtype), c.slots) for c in self.of(flat)] for flat in flats]
        ranks = control.gather((columns,))
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                raise UnsupportedError(
                    f"Rank {rank} holds other optimizer state than rank 0, so that rows cannot"
                    " move between them. Take a step with the present plan first; if that does not"
                    " help, use plans with the same shares of the model."
                )

    def of(self, flat: Flat) -> list[Column]:
        """Return what has the rows of a flat's parameters, in columns of one kind."""
        columns: dict[tuple[str, torch.dtype, torch.device], list[DTensor | None]] = {}
        for slot, parameter in enumerate(flat.sharded):
            for name, value in self._found.get(id(parameter), ()):
                key = name, value.dtype, value.device
                columns.setdefault(key, [None] * len(flat.sharded))[slot] = value
        return [Column(name, tuple(tensors)) for (name, _, _), tensors in columns.items()]


def _states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the parameter and the value of every tensor of state."""
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            entries = optimizer.state.get(parameter, {})
            for path, leaf in pytree.tree_flatten_with_path(dict(entries))[0]:
                if isinstance(leaf, Tensor):
                    yield f"{number}{pytree.keystr(path)}", parameter, leaf


def _gradients(flats: Sequence[Flat]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for flat in flats:
        cut_gradients(flat.sharded)
        for parameter in flat.sharded:
            if parameter.grad is not None and not is_spent(parameter.grad):
                yield "gradient", parameter, parameter.grad
