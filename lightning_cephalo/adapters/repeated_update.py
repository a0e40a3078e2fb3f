"""Updates the same parameters' rows in every step, and prepares them once.

``update_rows`` puts rows in place of DTensors, in parameters, gradients and state, and back. In an
early update that comes once for each unit. What it finds is the same in every step, unless state is
loaded or rows move. So rows of state stay prepared here as long as the optimizer's entries are the
same objects, which is compared before each update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import (
    as_state,
    plain_step,
    update_rows,
    without_torch_functions,
)
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import is_spent


@dataclass(frozen=True)
class _Prepared:
    """A parameter's rows, and those of its state.

    Attributes:
        parameter: The parameter.
        rows: This rank's rows of it.
        entries: Its state, as the optimizer holds it.
        faces: What it had when this was prepared.
        plain: The same with rows in place of DTensors; the optimizer updates these.
        before: A copy of ``plain``.
    """

    parameter: Tensor
    rows: Tensor
    entries: dict[str, Any]
    faces: dict[str, Any]
    plain: dict[str, Any]
    before: dict[str, Any]

    @classmethod
    def of(cls, parameter: Tensor, entries: dict[str, Any]) -> _Prepared:
        plain = {name: _rows(value) for name, value in entries.items()}
        rows = local_part(parameter)
        return cls(parameter, rows, entries, dict(entries), plain, dict(plain))

    def is_current(self, entries: dict[str, Any]) -> bool:
        """Return whether nothing has been loaded, added or moved since."""
        if entries is not self.entries or local_part(self.parameter) is not self.rows:
            return False
        if len(entries) != len(self.faces):
            return False
        return all(
            entries.get(name) is face and _rows(face) is self.before[name]
            for name, face in self.faces.items()
        )

    def show_changes(self) -> bool:
        """Show what the optimizer has replaced, if anything; else return False."""
        same = len(self.plain) == len(self.before)
        if same and all(self.before.get(name) is value for name, value in self.plain.items()):
            return False
        self.entries.clear()
        for name, value in self.plain.items():
            if self.before.get(name) is value:
                self.entries[name] = self.faces[name]
            elif isinstance(value, Tensor):
                self.entries[name] = as_state(name, self.parameter, value)
            else:
                self.entries[name] = value
        return True


def _rows(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


class RepeatedUpdates:
    """Updates parameters as :func:`~.optimizer.update_rows` does, with less Python for each call.

    Args:
        optimizer: One of torch's element-wise optimizers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._prepared: dict[int, _Prepared] = {}

    def update(self, chosen: Sequence[Sequence[Tensor]], clip_value: float | None = None) -> None:
        """Update this rank's rows of some parameters.

        Args:
            chosen: By parameter group, parameters with gradients.
            clip_value: Clamps the gradients' elements before; None: they stay.
        """
        if not self._prepare(chosen):
            update_rows(self._optimizer, chosen, clip_value)
            return
        optimizer = self._optimizer
        state, groups = optimizer.state, optimizer.param_groups
        lists = [group["params"] for group in groups]
        prepared = self._prepared
        shown = [[prepared[id(parameter)] for parameter in members] for members in chosen]
        by_rows: Any = defaultdict(dict)
        with without_torch_functions():
            try:
                for group, members in zip(groups, shown, strict=True):
                    group["params"] = rows = [each.rows for each in members]
                    for each in members:
                        each.rows.grad = local_part(cast(Tensor, each.parameter.grad))
                        by_rows[each.rows] = each.plain
                    if clip_value is not None and rows:
                        torch.nn.utils.clip_grad_value_(rows, clip_value)
                optimizer.state = by_rows
                optimizer.param_groups = [group for group in groups if group["params"]]
                if optimizer.param_groups:
                    plain_step(optimizer)
            finally:
                optimizer.state, optimizer.param_groups = state, groups
                for group, parameters, members in zip(groups, lists, shown, strict=True):
                    group["params"] = parameters
                    for each in members:
                        each.rows.grad = None
                        if each.show_changes():
                            del prepared[id(each.parameter)]

    def _prepare(self, chosen: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether all parameters are of the usual kind: have rows, gradients and state."""
        state = self._optimizer.state
        for members in chosen:
            for parameter in members:
                entries = state.get(parameter)
                gradient = parameter.grad
                if not entries or not isinstance(parameter, DTensor):
                    return False
                if not isinstance(gradient, DTensor) or is_spent(gradient):
                    return False
                known = self._prepared.get(id(parameter))
                if known is None or not known.is_current(entries):
                    if any(isinstance(value, (list, tuple, dict)) for value in entries.values()):
                        return False
                    self._prepared[id(parameter)] = _Prepared.of(parameter, entries)
        return True
