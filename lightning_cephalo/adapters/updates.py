"""Chooses for every optimizer where its updates run, before training, and equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_cephalo.adapters import scope
from lightning_cephalo.adapters.owned_update import OwnedUpdate
from lightning_cephalo.adapters.scope import Scope, Trial
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.owners import Owners


class OptimizerUpdates:
    """The updates of all optimizers of a training."""

    def __init__(self, model: ShardedModel, elementwise: Sequence[type[Optimizer] | str]) -> None:
        self._model, self._elementwise = model, elementwise
        self._chosen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, optimizer: Optimizer) -> OwnedUpdate | None:
        """Return the optimizer's updates on whole parameters; None: on rows; collective."""
        if optimizer not in self._chosen:
            self._chosen[optimizer] = self._choose(optimizer)
        return self._chosen[optimizer]

    def _choose(self, optimizer: Optimizer) -> OwnedUpdate | None:
        control = self._model.control
        if control.world_size == 1:
            return None  # the only rank's rows are whole
        found = control.together("trying out the optimizer", lambda: self._scope(optimizer))
        # devices may differ in what they compute: the widest scope is right for all
        widest = max(control.gather(float(list(Scope).index(found))))
        chosen = list(Scope)[int(widest)]
        if chosen is Scope.ELEMENT:
            return None
        if self._model.state_groups:
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates whole parameters, which hybrid sharding does"
                " not support so far. Use an element-wise optimizer, such as AdamW or SGD, or"
                " leave hybrid_sharding and state_groups out."
            )
        single = chosen is Scope.MODEL
        owners = Owners(self._model.fractions, control.rank, single)
        update = OwnedUpdate(optimizer, owners, control, single)
        update.adopt_state()
        return update

    def _scope(self, optimizer: Optimizer) -> Scope:
        known = scope.known_scope(optimizer)
        if known is not None:
            return known
        _check_held(optimizer)
        name = type(optimizer).__name__
        trial = scope.try_out(optimizer)
        if trial.moves_first:
            raise UnsupportedError(
                f"{name} changes parameters before it calls its closure, where each rank holds rows"
                " of them. Use a form of it that calls the closure first (for ScheduleFree: the"
                " class without 'Closure' in its name)."
            )
        is_named = scope.is_named(optimizer, self._elementwise)
        found = _judged(optimizer, trial, is_named=is_named)
        switches = [callable(getattr(optimizer, name, None)) for name in ("train", "eval")]
        if found is not Scope.ELEMENT and all(switches):
            raise UnsupportedError(
                f"{name} has train() and eval(), which change parameters outside of step(). That"
                " works for element-wise updates only. If its update is element-wise, say so:"
                f" Planner(elementwise=[{name!r}]). Else use another optimizer."
            )
        if found is Scope.MODEL:
            self._warn(optimizer, trial)
        return found

    def _warn(self, optimizer: Optimizer, trial: Trial) -> None:
        """Say that one rank holds and updates everything."""
        fractions = self._model.fractions
        rank = max(range(len(fractions)), key=lambda rank: fractions[rank])
        nbytes = sum(p.numel() * p.element_size() for p in scope.parameters_of(optimizer))
        draws = " It draws random numbers, which are not those of one device." * trial.draws
        rank_zero_warn(
            f"{type(optimizer).__name__}: {trial.why}. So rank {rank} gathers all its parameters"
            f" ({format_mib(nbytes)}), updates them, and holds all its state, which the plan has"
            f" not counted.{draws} If each element's update depends on that element alone, say so:"
            f" Planner(elementwise=[{type(optimizer).__name__!r}]) (docs/optimizers.md)."
        )

    def whole_loss(self, optimizer: Optimizer, loss: Any, weight: float) -> Any:
        """Return the loss of the global batch, for optimizers that may read it; collective."""
        known = scope.known_scope(optimizer)
        control = self._model.control
        if known in (Scope.ELEMENT, Scope.PARAMETER):
            return loss  # torch's own do not read it
        if control.world_size == 1:
            return loss
        # every rank comes, whatever its closure has returned: others may have a loss
        is_loss = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        own_weight = float(weight) if is_loss else 0.0
        rows = control.gather([float(loss) * own_weight if own_weight else 0.0, own_weight])
        total = sum(each for _, each in rows)
        if not is_loss or not total:
            return loss
        value = sum(part for part, _ in rows) / total
        if isinstance(loss, float):
            return value
        return torch.full_like(loss, value, requires_grad=False)


def _judged(optimizer: Optimizer, trial: Trial, *, is_named: bool) -> Scope:
    """Return the scope of an optimizer that is none of torch's."""
    if not is_named:
        is_listed = scope.is_listed(optimizer)
        return Scope.ELEMENT if is_listed and trial.is_element_wise else trial.scope
    option = f"Planner(elementwise=[...]) names {type(optimizer).__name__}"
    if not trial.ran:
        rank_zero_warn(f"{option}, which is followed. It could not be checked: {trial.why}.")
    elif not trial.is_element_wise and not trial.draws:
        raise UnsupportedError(
            f"{option}, but a trial of it updates rows in another way than whole parameters"
            f"{': ' + trial.why if trial.why else ''}. Do not name it."
        )
    return Scope.ELEMENT


def _check_held(optimizer: Optimizer) -> None:
    """Raise if the optimizer holds parameters where an exchange does not reach them."""
    found = scope.parameters_elsewhere(optimizer)
    if found:
        raise UnsupportedError(
            f"{type(optimizer).__name__} holds parameters, a module or another optimizer in its"
            f" attributes {found}, where they stay in shards during its update. Use an optimizer"
            " that finds its parameters in param_groups, and its state in `state`, only."
        )
