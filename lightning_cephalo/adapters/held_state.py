"""Counts the state that optimizers will hold, and finds what has the rows of parameters.

Optimizers are made before the plan, and most hold no state yet: a trial on small tensors tells what
they will hold. Of units that differ, plans count the one with the most, as units may move whole.
State of optimizers that update whole parameters stays on owners (``owned_update.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

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
        each_bytes: Bytes of state of a trained parameter in the unit with the most; None: as of
            Adam.
    """

    late: str = ""
    stays: str = ""
    each_bytes: float | None = None

    @classmethod
    def of(
        cls, optimizers: Sequence[Optimizer], model: ShardedModel, view: TrainerView
    ) -> OptimizerFacts:
        """Look at the optimizers of all ranks; collective."""
        stay = next(filter(None, map(not_by_units, optimizers)), "")
        own = (
            next(filter(None, map(late_by_optimizer, optimizers)), ""),
            stay if view.module.automatic_optimization else "manual optimization",
            max(unit.state_bytes for unit in held_by_unit(optimizers, model)),
        )
        late, stays, each = zip(*model.control.gather(own), strict=True)
        return cls(next(filter(None, late), ""), next(filter(None, stays), ""), max(each))


class HeldByUnit(NamedTuple):
    """What the optimizers will hold for the trained parameters of a unit, on all ranks together."""

    elements: int
    state_bytes: float  # for each element
    parameter_bytes: float  # of each element


def held_by_unit(optimizers: Sequence[Optimizer], model: ShardedModel) -> list[HeldByUnit]:
    """Return what element-wise optimizers will hold for each unit.

    What no optimizer trains counts as with Adam: ``add_param_group`` may follow.
    """
    each = Counter[int]()
    for optimizer in optimizers:
        each.update(state_bytes_per_element(optimizer))
    found = []
    for unit in model.units:
        trained = [p for _, p in unit.named_sharded() if p.requires_grad]
        state = [p.numel() * each.get(id(p), MOMENTS * p.element_size()) for p in trained]
        count, nbytes = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
        found.append(HeldByUnit(count, sum(state) / max(1, count), nbytes / max(1, count)))
    return found


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
        for name, parameter, value in _followers(optimizers, averages, with_gradients):
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
                    " parameter's rows. Use plans with the same shares of the model, or start again"
                    " from a checkpoint."
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
                    f"Rank {rank} holds other optimizer state than rank 0, so that rows stay."
                    " Take a step with the present plan first, or use plans with the same shares."
                )

    def of(self, flat: Flat) -> list[Column]:
        """Return what has the rows of a flat's parameters, in columns of one kind."""
        columns: dict[tuple[str, torch.dtype, torch.device], list[DTensor | None]] = {}
        for slot, parameter in enumerate(flat.sharded):
            for name, value in self._found.get(id(parameter), ()):
                key = name, value.dtype, value.device
                columns.setdefault(key, [None] * len(flat.sharded))[slot] = value
        return [Column(name, tuple(tensors)) for (name, _, _), tensors in columns.items()]


def _followers(
    optimizers: Sequence[Optimizer],
    averages: Sequence[Sequence[tuple[Tensor, Tensor]]],
    with_gradients: Sequence[Flat],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the parameter and the value of what may have a parameter's rows."""
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            entries = dict(optimizer.state.get(parameter, {}))
            for path, leaf in pytree.tree_flatten_with_path(entries)[0]:
                if isinstance(leaf, Tensor):
                    yield f"{number}{pytree.keystr(path)}", parameter, leaf
    for number, pairs in enumerate(averages):
        for average, parameter in pairs:
            yield f"average {number}", parameter, average
    for flat in with_gradients:
        cut_gradients(flat.sharded)
        for parameter in flat.sharded:
            if parameter.grad is not None and not is_spent(parameter.grad):
                yield "gradient", parameter, parameter.grad
