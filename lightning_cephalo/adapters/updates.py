"""Chooses for every optimizer where its updates run, before training, and equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.adapters.scope import is_elementwise, try_out
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.owners import Owners


class OptimizerUpdates:
    """The updates of all optimizers of a training."""

    def __init__(self, model: ShardedModel, elementwise: Sequence[type[Optimizer] | str]) -> None:
        self._model, self._elementwise = model, elementwise
        self._by_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._owned: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, optimizer: Optimizer) -> OwnedUpdate | None:
        """Return the optimizer's updates on whole parameters; None: on rows; collective."""
        if self.are_by_rows(optimizer):
            return None
        if optimizer not in self._owned:
            owners = Owners(self._model.fractions, self._model.control.rank)
            self._owned[optimizer] = OwnedUpdate(optimizer, owners, self._model.control)
        return cast(OwnedUpdate, self._owned[optimizer])

    def are_by_rows(self, optimizer: Optimizer) -> bool:
        """Whether updates run on rows; raises on all ranks if neither way is exact."""
        control = self._model.control
        if control.world_size == 1:
            return True  # the only rank's rows are whole
        if optimizer not in self._by_rows:
            own = control.together("trying out the optimizer", lambda: self._may_run(optimizer))
            # processors may differ in what they compute
            self._by_rows[optimizer] = not control.any(not own)
        return bool(self._by_rows[optimizer])

    def _may_run(self, optimizer: Optimizer) -> bool:
        """Return whether updates run on rows, as one device would; or raise."""
        name, by_rows = type(optimizer).__name__, is_elementwise(optimizer)
        if by_rows is None:
            by_rows = self._tried(optimizer)
        if not by_rows and self._model.state_groups:
            raise UnsupportedError(
                f"{name} updates whole parameters, which hybrid sharding does not support so far."
                " Use an element-wise optimizer, such as AdamW or SGD, or leave hybrid_sharding"
                " and the plan's groups out."
            )
        return by_rows

    def _tried(self, optimizer: Optimizer) -> bool:
        name, named = type(optimizer).__name__, self._elementwise
        # the user names the class, or one that it is made from
        is_named = any(kind in named or kind.__name__ in named for kind in type(optimizer).__mro__)
        claim, why = f"Planner(elementwise=[{name!r}])", try_out(optimizer, by_rows=is_named)
        if why and is_named:
            raise UnsupportedError(
                f"{claim} names an optimizer whose updates of rows, in a trial, are not those of"
                f" whole parameters: {why}. Do not name it."
            )
        if why:
            raise UnsupportedError(
                f"{name} does not update each parameter by itself: {why}. So it trains on one"
                " device only. Use an optimizer whose update needs one parameter only, such as"
                f" AdamW or Muon. If each element's update depends on that element alone: {claim}."
            )
        return is_named
