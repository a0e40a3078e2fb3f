"""Counts the state that optimizers will hold, and finds what has the rows of parameters.

Optimizers are made before the plan, and most hold no state yet: a trial on small tensors tells what
they will hold. Units may differ: an optimizer trains a part of the model, or one of its groups has
another option. Plans count one figure. Where units move whole, only that of the largest is safe.

State of optimizers that update whole parameters lies on owners, whatever rows ranks hold: it moves
with the owners (``owned_update.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.early_update import late_by_optimizer
from lightning_cephalo.adapters.scope import MOMENTS, not_by_units, state_bytes_per_element
from lightning_cephalo.adapters.stepping import parameters_of
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.flat import Flat
from lightning_cephalo.sharding.moving import Column
from lightning_cephalo.sharding.placement import rows_of
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import is_spent


@dataclass(frozen=True)
class OptimizerFacts:
    """What plans count of the user's optimizers; equal on every rank.

    Attributes:
        late: Why they update nothing inside the backward, in a few words; empty: they may.
        stays: Why their state stays on the devices, in a few words; empty: it may leave.
        each_bytes: Bytes of state of a trained parameter; None: as of Adam.
        most_bytes: The same of the unit with the most.
        untrained_bytes: Bytes of parameters that no optimizer trains, whose gradients stay.
    """

    late: str = ""
    stays: str = ""
    each_bytes: float | None = None
    most_bytes: float | None = None
    untrained_bytes: int = 0

    @classmethod
    def of(
        cls, optimizers: Sequence[Optimizer], model: ShardedModel, view: TrainerView
    ) -> OptimizerFacts:
        """Look at the optimizers of all ranks; collective."""
        # what no optimizer trains counts as with Adam: ``add_param_group`` may follow
        units = held_by_unit(optimizers, model, untrained_moments=MOMENTS)
        stay = next(filter(None, map(not_by_units, optimizers)), "")
        own = (
            next(filter(None, map(late_by_optimizer, optimizers)), ""),
            stay if view.module.automatic_optimization else "manual optimization",
            *bytes_per_parameter(units),
            sum(unit.untrained_bytes for unit in units),
        )
        late, stays, means, mosts, untrained = zip(*model.control.gather(own), strict=True)
        either = next(filter(None, late), ""), next(filter(None, stays), "")
        return cls(*either, max(means), max(mosts), max(untrained))


@dataclass(frozen=True)
class UnitState:
    """What the optimizers will hold for the trained parameters of a unit, on all ranks together."""

    elements: int
    state_bytes: float
    parameter_bytes: int
    untrained_bytes: int  # of parameters that no optimizer trains, whose gradients stay

    @property
    def each_state_bytes(self) -> float:
        """Bytes of state for each element."""
        return self.state_bytes / max(1, self.elements)

    @property
    def each_parameter_bytes(self) -> float:
        """Bytes of each element."""
        return self.parameter_bytes / max(1, self.elements)


def held_by_unit(
    optimizers: Sequence[Optimizer], model: ShardedModel, *, untrained_moments: int = 0
) -> tuple[UnitState, ...]:
    """Return what element-wise optimizers will hold for each unit.

    ``untrained_moments``: state of parameters that none of them trains, in sizes of the parameter.
    """
    each: dict[int, float] = {}
    for optimizer in optimizers:
        pairs = zip(optimizer.param_groups, state_bytes_per_element(optimizer), strict=True)
        for group, nbytes in pairs:
            for parameter in group["params"]:
                sharded = model.sharded_in_place_of(parameter)
                own = parameter if sharded is None else sharded
                # a trial has the dtype of the group's first parameter
                part = own.element_size() / group["params"][0].element_size()
                each[id(own)] = each.get(id(own), 0.0) + nbytes * part
    found = []
    for unit in model.units:
        trained = [p for _, p in unit.named_sharded() if p.requires_grad]
        state = [
            p.numel() * each.get(id(p), float(untrained_moments * p.element_size()))
            for p in trained
        ]
        left = sum(p.nbytes for p in trained if id(p) not in each)
        elements, nbytes = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
        found.append(UnitState(elements, sum(state), nbytes, left))
    return tuple(found)


def bytes_per_parameter(units: Sequence[UnitState]) -> tuple[float, float]:
    """Return the bytes of state of a trained parameter: their mean, and those of the most."""
    # every rank holds rows of all units
    mean = sum(unit.state_bytes for unit in units) / max(1, sum(unit.elements for unit in units))
    return mean, max(unit.each_state_bytes for unit in units)


class RowsOfState:
    """The tensors that have the rows of parameters, flat by flat, so that they move with them.

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
        columns = [[(c.name, str(c.dtype), c.slots) for c in self.of(flat)] for flat in flats]
        refusals, ranks = zip(*control.gather((self._refused, columns)), strict=True)
        if any(refusals):
            raise UnsupportedError(max(refusals))
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
            entries = dict(optimizer.state.get(parameter, {}))
            for path, leaf in pytree.tree_flatten_with_path(entries)[0]:
                if isinstance(leaf, Tensor):
                    yield f"{number}{pytree.keystr(path)}", parameter, leaf


def _gradients(flats: Sequence[Flat]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for flat in flats:
        cut_gradients(flat.sharded)
        for parameter in flat.sharded:
            if parameter.grad is not None and not is_spent(parameter.grad):
                yield "gradient", parameter, parameter.grad
