"""Counts the state that optimizers will hold for each parameter, before they have any.

Adam holds two moments, amsgrad three, SGD none. A trial on small tensors tells
(:func:`~lightning_cephalo.adapters.scope.state_bytes_per_element`).

Units may differ: an optimizer trains a part of the model, or one of its groups has another option.
Plans count one figure. Where units move whole, only that of the largest unit is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.early_update import late_by_optimizer
from lightning_cephalo.adapters.moved_state import needs_device
from lightning_cephalo.adapters.scope import MOMENTS, state_bytes_per_element
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.execution.sharded_model import ShardedModel


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
        own = (
            next(filter(None, map(late_by_optimizer, optimizers)), ""),
            needs_device(view, optimizers),
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
        return self.state_bytes / self.elements if self.elements else 0.0

    @property
    def each_parameter_bytes(self) -> float:
        """Bytes of each element."""
        return self.parameter_bytes / self.elements if self.elements else 0.0


def holds_rows(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state of sharded parameters, as a new Adagrad has."""
    return any(isinstance(key, DTensor) for key in optimizer.state)


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
        held = sum(
            p.numel() * each.get(id(p), float(untrained_moments * p.element_size()))
            for p in trained
        )
        own_bytes = sum(p.numel() * p.element_size() for p in trained)
        left = sum(p.numel() * p.element_size() for p in trained if id(p) not in each)
        found.append(UnitState(sum(p.numel() for p in trained), held, own_bytes, left))
    return tuple(found)


def bytes_per_parameter(units: Sequence[UnitState]) -> tuple[float, float]:
    """Return the bytes of state of a trained parameter: their mean, and those of the most."""
    # every rank holds rows of all units
    mean = sum(unit.state_bytes for unit in units) / max(1, sum(unit.elements for unit in units))
    return mean, max(unit.each_state_bytes for unit in units)
