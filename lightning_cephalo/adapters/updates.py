"""Chooses for every optimizer where its updates run, before training, and equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters import scope
from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.adapters.scope import Scope
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.owners import Owners


class OptimizerUpdates:
    """The updates of all optimizers of a training."""

    def __init__(self, model: ShardedModel, elementwise: Sequence[type[Optimizer] | str]) -> None:
        self._model, self._elementwise = model, elementwise
        self._scopes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._chosen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise on all ranks if an optimizer cannot train as on one device; collective."""
        for optimizer in optimizers:
            self._agreed_scope(optimizer)

    def of(self, optimizer: Optimizer) -> OwnedUpdate | None:
        """Return the optimizer's updates on whole parameters; None: on rows; collective."""
        if optimizer not in self._chosen:
            self._chosen[optimizer] = self._choose(optimizer)
        return self._chosen[optimizer]

    def _choose(self, optimizer: Optimizer) -> OwnedUpdate | None:
        model, control = self._model, self._model.control
        if self._agreed_scope(optimizer) is Scope.ELEMENT:
            return None
        if model.state_groups:
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates whole parameters, which hybrid sharding does"
                " not support so far. Use an element-wise optimizer, such as AdamW or SGD, or"
                " leave hybrid_sharding and state_groups out."
            )
        return OwnedUpdate(optimizer, Owners(model.fractions, control.rank), control)

    def _agreed_scope(self, optimizer: Optimizer) -> Scope:
        control = self._model.control
        if control.world_size == 1:
            return Scope.ELEMENT  # the only rank's rows are whole
        if optimizer not in self._scopes:
            found = control.together("trying out the optimizer", lambda: self._scope(optimizer))
            # devices may differ in what they compute
            is_wide = control.any(found is Scope.PARAMETER)
            self._scopes[optimizer] = Scope.PARAMETER if is_wide else Scope.ELEMENT
        found_scope: Scope = self._scopes[optimizer]
        return found_scope

    def _scope(self, optimizer: Optimizer) -> Scope:
        name, known = type(optimizer).__name__, scope.known_scope(optimizer)
        if known is Scope.PARAMETER and optimizer.state:
            raise UnsupportedError(
                f"{name} updates whole parameters, and has state of an earlier run. Make a new one"
                " in configure_optimizers(), and continue its state by fit(ckpt_path=...)."
            )
        if known is not None:
            return known
        _check_held(optimizer)
        claim = f"Planner(elementwise=[{name!r}])"
        is_named = scope.is_named(optimizer, self._elementwise)
        is_claimed = is_named or scope.listed_scope(optimizer) is Scope.ELEMENT
        trial = scope.try_out(optimizer, by_rows=is_claimed)
        if is_named and not trial.ran:
            rank_zero_warn(f"{claim} is followed. It could not be checked: {trial.why}.")
        elif is_named and trial.why:
            raise UnsupportedError(
                f"{claim} names an optimizer whose updates of rows, in a trial, are not those of"
                f" whole parameters: {trial.why}. Do not name it."
            )
        elif trial.why and not is_named:
            raise UnsupportedError(
                f"{name} does not update each parameter by itself: {trial.why}. So it trains on one"
                " device only. Use an optimizer whose update needs one parameter only, such as"
                f" AdamW or Muon. If each element's update depends on that element alone: {claim}."
            )
        if is_claimed:
            return Scope.ELEMENT
        if all(callable(getattr(optimizer, switch, None)) for switch in ("train", "eval")):
            raise UnsupportedError(
                f"{name} has train() and eval(), which change parameters outside of step(). That"
                " works for element-wise updates only. If its update is element-wise, say so:"
                f" {claim}. Else use another optimizer."
            )
        return Scope.PARAMETER


def _check_held(optimizer: Optimizer) -> None:
    """Raise if the optimizer holds parameters where an exchange does not reach them."""
    found = scope.parameters_elsewhere(optimizer)
    if found:
        raise UnsupportedError(
            f"{type(optimizer).__name__} holds parameters, a module or another optimizer in its"
            f" attributes {found}, where they stay in shards during its update. Use an optimizer"
            " that finds its parameters in param_groups, and its state in `state`, only."
        )
