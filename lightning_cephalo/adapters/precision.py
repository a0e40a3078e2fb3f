"""Adapts precision plugins to gradients in shards.

Clipping by norm and by value would be correct unchanged: the optimizer's parameters are DTensors,
whose norm is that of all ranks. It is faster over this rank's rows, with one message for all
gradients. A gradient scaler needs one change: ranks must agree whether a step overflowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import precision as lightning
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import clip_by_norm, clip_by_value
from lightning_cephalo.adapters.scope import parameters_of
from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import local_part


class RanksGradScaler(torch.amp.GradScaler):
    """A gradient scaler that detects an overflow on any rank.

    Overrides ``_unscale_grads_``, which torch's own sharded scaler does as well
    (``torch/distributed/fsdp/sharded_grad_scaler.py``): there is no public hook.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            local_part(parameter.grad)
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        ]
        found = found_inf.clone()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for chosen in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(
                chosen, found, inv_scale.to(found.device)
            )
        all_reduce(found, op=dist.ReduceOp.MAX).wait()
        return {found.device: found}


class _OverRows(lightning.Precision):
    """Clips gradients without DTensors.

    Attributes:
        before_norm: Called before ranks communicate for a norm; returns whether to clip at all.
        shown: Returns what hooks see of a batch.
    """

    before_norm: Callable[[], bool] = staticmethod(lambda: True)
    shown: Callable[[Any], Any] = staticmethod(lambda batch: batch)

    def convert_input(self, data: Any) -> Any:
        # the first that Lightning does with a batch
        return super().convert_input(self.shown(data))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.before_norm():
            clip_by_norm(self.main_params(optimizer), clip_val)


# named like Lightning's classes: checkpoints hold a plugin's state under the name of its class
class Precision(_OverRows, lightning.Precision):
    """Lightning's plugin, with clipping over rows."""


class MixedPrecision(_OverRows, lightning.MixedPrecision):
    """Lightning's plugin, with clipping over rows."""


class HalfPrecision(_OverRows, lightning.HalfPrecision):
    """Lightning's plugin, with clipping over rows."""


class DoublePrecision(_OverRows, lightning.DoublePrecision):
    """Lightning's plugin, with clipping over rows."""


_PLUGINS: dict[type[lightning.Precision], type[lightning.Precision]] = {
    getattr(lightning, own.__name__): own
    for own in (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
}


def adapt(
    plugin: lightning.Precision | None,
    before_norm: Callable[[], bool],
    shown: Callable[[Any], Any],
) -> lightning.Precision | None:
    """Return a plugin that clips over rows, if the given one is of Lightning's; else that one."""
    own = None if plugin is None else _PLUGINS.get(type(plugin))
    if own is not None:
        attributes = vars(plugin)
        plugin = own.__new__(own)
        plugin.__dict__ = attributes
    if isinstance(plugin, _OverRows):
        plugin.before_norm, plugin.shown = before_norm, shown
    elif plugin is not None:
        kind: Any = plugin
        kind.convert_input = _Shown(type(plugin).convert_input, plugin, shown)
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(plugin, lightning.MixedPrecision) or scaler is None:
        return plugin
    if not isinstance(scaler, RanksGradScaler):
        plugin.scaler = RanksGradScaler(
            plugin.device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
    return plugin


class _Shown:
    """The ``convert_input`` of a plugin of the user's own class, for what hooks see of a batch."""

    def __init__(
        self, convert: Callable[..., Any], plugin: lightning.Precision, shown: Callable[[Any], Any]
    ) -> None:
        self._convert, self._plugin, self._shown = convert, plugin, shown

    def __call__(self, data: Any) -> Any:
        return self._convert(self._plugin, self._shown(data))


def is_adapted(plugin: lightning.Precision) -> bool:
    """Return whether the plugin is Lightning's own, so that its steps are known."""
    return type(plugin) in (*_PLUGINS, *_PLUGINS.values())


def compute_dtype(plugin: lightning.Precision) -> torch.dtype | None:
    """Return the dtype in which parameters are gathered; None for their own.

    The master copy that the optimizer updates stays in full precision.
    """
    return plugin._desired_input_dtype if isinstance(plugin, lightning.HalfPrecision) else None


def loss_scaler(plugin: lightning.Precision) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the gradient scaler's function that multiplies a loss; None without a scaler.

    The factor stays on the device: reading it would make the host wait in every step.
    """
    scaler: Any = getattr(plugin, "scaler", None)
    return None if scaler is None else scaler.scale
