"""Where calls of a unit's forward come in: from a microbatch of a step, or from outside of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.replay import ChangingBuffers
from lightning_cephalo.execution.unit_hooks import Cut
from lightning_cephalo.observe.recorder import Recorder
from lightning_cephalo.sharding.unit import Unit

ROOT = 0


class Entrance:
    """The cuts of a model at its units, and what happens when one is called.

    Args:
        units: All units; the root unit first.

    Attributes:
        watch: Called before every action of a training step, if any.
        recorder: Notes when everything in a step begins and ends; None: nobody does.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.watch: Callable[[], None] | None = None
        self.recorder: Recorder | None = None
        self._running: Microbatch | None = None
        self._in_backward = False
        self._outside_depth = 0
        self._hooks: list[RemovableHandle] = []
        self._cuts: list[Cut] = []

    def install(self) -> None:
        """Cut the model at its units; parameters of the root unit come when they are asked for."""
        for index, unit in enumerate(self.units[1:], start=1):
            self._cuts.append(Cut(unit.module, partial(self.enter_unit, index)))
        root = self.units[ROOT]
        # the top module too, so that one call of it outside of a step gathers the root once
        modules = {id(module): module for module in [root.module, *root.owning_modules()]}
        for module in modules.values():
            self._hooks.append(module.register_forward_pre_hook(self._root_wanted))
            self._hooks.append(module.register_forward_hook(self._root_left, always_call=True))

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        for cut in self._cuts:
            cut.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._cuts = [], []

    @property
    def compiled_units(self) -> list[str]:
        """Names of the units that were compiled in place."""
        cut_units = zip(self.units[1:], self._cuts, strict=True)
        return [unit.name for unit, cut in cut_units if cut.is_compiled]

    def _root_wanted(self, module: nn.Module, args: Any) -> None:
        self.units[ROOT].wait_gather()
        if not self._in_step:
            self._outside_depth += 1

    def _root_left(self, module: nn.Module, args: Any, output: Any) -> None:
        """Show the shards again after a call outside of a step: callbacks read or change them."""
        if self._in_step or not self._outside_depth:
            return
        self._outside_depth -= 1
        if not self._outside_depth:
            self.units[ROOT].free()

    @property
    def _in_step(self) -> bool:
        return self._running is not None or self._in_backward

    def reshard(self) -> None:
        """Free whatever is gathered: before anything reads or changes the shards."""
        for unit in self.units:
            unit.free()

    def enter_unit(
        self,
        index: int,
        body: Callable[..., Any],
        buffers: ChangingBuffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Called in place of a unit's forward."""
        if self._in_backward:
            raise UnitUseError(
                f"Unit {self.units[index].name!r} is called during the backward: it lies inside"
                " torch.utils.checkpoint. Cephalo recomputes units itself: switch gradient"
                " checkpointing off in the model."
            )
        running = self._running
        if running is not None:
            if self.recorder is not None:
                body = self.recorder.watched(body)
            unit = self.units[index]
            return running.visit(index, unit.trainable, body, buffers, args, kwargs)
        return self._outside(index, body, args, kwargs)

    def _outside(
        self, index: int, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A forward outside of a step (a callback that samples): every rank must do it."""
        unit = self.units[index]
        self._root_wanted(unit.module, args)
        unit.wait_gather()
        try:
            with torch.no_grad():
                return body(*args, **kwargs)
        finally:
            unit.free()
            self._root_left(unit.module, args, None)

    def _advance(self, microbatch: Microbatch) -> None:
        self._running = microbatch
        try:
            microbatch.advance()
        finally:
            self._running = None
