"""Lets users copy the module, or a part of it, while it is sharded: ``copy.deepcopy(pl_module)``.

The copy is an ordinary module with full parameters, which compute with the sharded ones of the
module (:mod:`~lightning_cephalo.sharding.row_operators`). ``__deepcopy__`` is set on the instances
of the module's modules, as their class may be anything.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.sharding.placement import full_parameter

_EVERY_RANK = (
    "A copy gathers the parameters, so every rank must make it at the same place, and not rank 0"
    " alone. To write weights, call save_checkpoint() on every rank."
)


class ModuleCopies:
    """Makes the modules of a sharded model copyable."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._modules = list(model.module.modules())
        for module in self._modules:
            vars(module)["__deepcopy__"] = partial(self._copy, module)

    def remove(self) -> None:
        """Restore the modules."""
        for module in self._modules:
            vars(module).pop("__deepcopy__", None)
        self._modules = []

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:  # else a module that contains this one is being copied
            memo[id(self)] = self
            self._prepare(module, memo)
        own = vars(module).pop("__deepcopy__")
        try:
            copied = copy.deepcopy(module, memo)  # as its class does it
        finally:
            vars(module)["__deepcopy__"] = own
        self._model.executor.hooks.remove_from_copy(copied)
        return copied

    def _prepare(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Note the full parameters of a module in the memory of ``copy.deepcopy``; collective."""
        if self._model.executor.inside_microbatch:
            raise UnsupportedError(
                "copy.deepcopy() of the module inside a step, which runs once per microbatch. Copy"
                " it in a hook, such as on_train_batch_start(), on every rank."
            )
        self._model.meet("copying the module with copy.deepcopy()", _EVERY_RANK)
        for hook in self._model.executor.hooks.objects:
            memo[id(hook)] = hook  # not copied; what refers to them is removed from the copy
        wanted = {id(parameter) for parameter in module.parameters()}
        for unit in self._model.units:
            for sharded, gathered in unit.parameter_pairs():
                if id(sharded) in wanted or id(gathered) in wanted:
                    memo[id(sharded)] = memo[id(gathered)] = full_parameter(sharded)
