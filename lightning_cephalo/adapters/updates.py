"""Chooses for every optimizer where its updates run, before training, and equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.adapters.scope import Scope, known_scope, try_out
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.owners import Owners


class OptimizerUpdates:
    """The updates of all optimizers of a training."""

    def __init__(self, model: ShardedModel, elementwise: Sequence[type[Optimizer] | str]) -> None:
        self._model, self._elementwise = model, elementwise
        self._scopes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._owned: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, optimizer: Optimizer) -> OwnedUpdate | None:
        """Return the optimizer's updates on whole parameters; None: on rows; collective."""
        if self.scope(optimizer) is Scope.ELEMENT:
            return None
        if optimizer not in self._owned:
            owners = Owners(self._model.fractions, self._model.control.rank)
            self._owned[optimizer] = OwnedUpdate(optimizer, owners, self._model.control)
        return cast(OwnedUpdate, self._owned[optimizer])

    def scope(self, optimizer: Optimizer) -> Scope:
        """Return the scope, or raise on all ranks if training would not be as on one device."""
        control = self._model.control
        if control.world_size == 1:
            return Scope.ELEMENT  # the only rank's rows are whole
        if optimizer not in self._scopes:
            own = control.together("trying out the optimizer", lambda: self._scope(optimizer))
            # processors may differ in what they compute
            is_whole = control.any(own is Scope.PARAMETER)
            self._scopes[optimizer] = Scope.PARAMETER if is_whole else own
        return cast(Scope, self._scopes[optimizer])

    def _scope(self, optimizer: Optimizer) -> Scope:
        name, found = type(optimizer).__name__, known_scope(optimizer) or self._tried(optimizer)
        if found is Scope.PARAMETER and self._model.state_groups:
            raise UnsupportedError(
                f"{name} updates whole parameters, which hybrid sharding does not support so far."
                " Use an element-wise optimizer, such as AdamW or SGD, or leave hybrid_sharding"
                " and state_groups out."
            )
        return found

    def _tried(self, optimizer: Optimizer) -> Scope:
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
        return Scope.ELEMENT if is_named else Scope.PARAMETER
