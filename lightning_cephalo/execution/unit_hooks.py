"""Intercepts calls of units' ``forward`` and of the modules that hold the root unit's parameters.

A unit's ``forward`` is replaced on the instance. Wrapping the module would change the names in the
state dict.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import refusing_freed, refusing_gradients
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.user_writes import UserWrites
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.placement import Meet
from lightning_cephalo.sharding.unit import Unit, UnitState

_REMEDY = (
    "Outside of a step, every rank must call the model, as its parameters are gathered from all."
    " For code that one rank runs alone, let every rank enter `with"
    " trainer.strategy.full_parameters():` around it."
)


class ReplacedForward(ABC):
    """Stands on a module in place of its ``forward``."""

    @abstractmethod
    def remove(self) -> None:
        """Give the module its own forward."""


class UnitHooks:
    def __init__(self, units: Sequence[Unit], meet: Meet, writes: UserWrites) -> None:
        self._units = list(units)
        self._meet = meet
        self.writes = writes
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext
        self.in_backward = False
        self._keeps_all = False
        self.running: Microbatch | None = None
        self._outside_depth = 0
        self._hooks: list[RemovableHandle] = []
        self._forwards: list[UnitForward] = []
        self._inside: list[ReplacedForward] = []

    def add(self, forward: ReplacedForward) -> None:
        """Take the forward of a module in or outside of units; before :meth:`install`."""
        self._inside.append(forward)

    def install(self) -> None:
        """Replace the units' forwards, and gather the root unit before its modules are called."""
        for index, unit in enumerate(self._units[1:], start=1):
            self._forwards.append(UnitForward(index, unit, self))
        root = self._units[ROOT]
        # the top module too, so that one call of it outside of a step gathers the root once
        modules = {id(module): module for module in [root.module, *root.owning_modules()]}
        for module in modules.values():
            self._hooks.append(module.register_forward_pre_hook(self._before_root))
            self._hooks.append(module.register_forward_hook(self._after_root, always_call=True))

    def uninstall(self) -> None:
        for forward in (*self._forwards, *self._inside):
            forward.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._forwards, self._inside = [], [], []

    @property
    def compiled_units(self) -> list[str]:
        pairs = zip(self._units[1:], self._forwards, strict=True)
        return [unit.name for unit, forward in pairs if forward.is_compiled]

    def advance(self, microbatch: Microbatch) -> None:
        self.running = microbatch
        try:
            with self.watch():
                microbatch.advance()
        finally:
            self.running = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Mark, in a ``with`` block, a backward that runs within the forward pass: the loss's."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    @contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Gather all units in a ``with`` block, so that ranks may call them alone; collective."""
        self._meet("entering full_parameters()", _REMEDY)
        for unit in self._units:
            unit.wait_gather()
        self._keeps_all = True
        try:
            yield
        finally:
            self._keeps_all = False
        self.writes.check("the block of full_parameters()")

    @property
    def _in_step(self) -> bool:
        return self.running is not None or self.in_backward

    def _is_kept(self, unit: Unit) -> bool:
        """Whether a unit needs no gather; code that needs the shards may have freed it."""
        return self._keeps_all and unit.state is UnitState.GATHERED

    def _before_root(self, module: nn.Module, args: Any) -> None:
        root = self._units[ROOT]
        if self._in_step:
            if root.state is UnitState.SHARDED and self.running is not None:
                self.running.need_root()
            root.wait_gather()
            return
        if not self._outside_depth and not self._is_kept(root):
            self._meet(f"calling {self._name_of(module)} outside of a step", _REMEDY)
        root.wait_gather()
        self._outside_depth += 1

    def _name_of(self, module: nn.Module) -> str:
        top = self._units[ROOT].module
        names = (name for name, other in top.named_modules() if other is module)
        return next(names, "") or type(module).__name__

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Restore the shards after a call outside of a step: callbacks read or change them."""
        if self._in_step or not self._outside_depth:
            return None
        self._outside_depth -= 1
        if self._outside_depth or self._keeps_all:
            return None
        self._units[ROOT].free()
        self.writes.check("a call of the module in a hook")
        return refusing_freed(output) if torch.is_grad_enabled() else None

    def call_outside(
        self, unit: Unit, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward outside of a step (a callback that samples); every rank must run it."""
        self._before_root(unit.module, args)
        unit.wait_gather()
        try:
            with torch.no_grad():
                outputs = body(*args, **kwargs)
            if torch.is_grad_enabled():
                return refusing_gradients(outputs, (args, kwargs), unit.trainable)
            return outputs
        finally:
            if not self._keeps_all:
                unit.free()
            self._after_root(unit.module, args, None)


class UnitForward(ReplacedForward):
    def __init__(self, index: int, unit: Unit, hooks: UnitHooks) -> None:
        self._index, self._unit, self._hooks = index, unit, hooks
        self.name, module = unit.name, unit.module
        self._module = module
        self.with_buffers = [each for each in module.modules() if each._buffers]
        self.renew_accumulators = unit.renew_accumulators
        # an embedding saves indices; a head would be computed again immediately
        self.recomputes = unit.kind is UnitKind.BLOCK
        self.is_head = unit.kind is UnitKind.HEAD
        # modules wrapped by torch.compile also have a forward on the instance
        self._replaced = module.__dict__.get("forward")
        # `module.compile()` would trace into the scheduler: the cut must be outside of it
        self._compiled = module._compiled_call_impl
        self.is_compiled = self._compiled is not None
        self.body = module.forward
        if self._compiled is not None:
            self.body = partial(self._compiled_body, self._compiled)
        if self._compiled is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise UnitUseError(
                f"{type(module).__name__} was compiled in place and has forward hooks, which would"
                " run twice. Compile it by `blocks[i] = torch.compile(block)` instead."
            )
        module._compiled_call_impl = None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks, unit = self._hooks, self._unit
        if hooks.in_backward:
            raise UnitUseError(
                f"Unit {unit.name!r} is called during the backward: it lies inside"
                " torch.utils.checkpoint. Cephalo recomputes units itself: switch gradient"
                " checkpointing off in the model."
            )
        running = hooks.running
        if running is None:
            return hooks.call_outside(unit, self.body, args, kwargs)
        return running.visit(self._index, unit.trainable, self, args, kwargs)

    def computing(self, body: Callable[..., Any]) -> UnitForward:
        """Return a forward that visits the unit for another function of its modules."""
        other = copy.copy(self)
        other.body = body
        return other

    def _compiled_body(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._restore_forward()
        try:
            return compiled(*args, **kwargs)
        finally:
            self._module.forward = self

    def _restore_forward(self) -> None:
        if self._replaced is None:
            del self._module.forward
        else:
            self._module.forward = self._replaced

    def remove(self) -> None:
        self._restore_forward()
        self._module._compiled_call_impl = self._compiled
