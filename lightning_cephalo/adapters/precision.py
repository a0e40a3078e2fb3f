"""Adapts precision plugins to gradients in shards.

Clipping by norm would be correct unchanged, as the optimizer's parameters are DTensors. Over rows
it is faster, with one message for all gradients. With a scaler, ranks agree on overflows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import clip_by_norm
from lightning_cephalo.adapters.stepping import parameters_of
from lightning_cephalo.sharding.collectives import all_reduce
from lightning_cephalo.sharding.placement import local_part


class RanksGradScaler(torch.amp.GradScaler):
    """A gradient scaler that detects an overflow on any rank.

    Overrides ``_unscale_grads_``, which torch's own sharded scaler does as well
    (``torch/distributed/fsdp/sharded_grad_scaler.py``): there is no public hook.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found, by_dtype = found_inf.clone(), defaultdict[torch.dtype, list[Tensor]](list)
        for gradient in (p.grad for p in parameters_of(optimizer) if p.grad is not None):
            by_dtype[gradient.dtype].append(local_part(gradient))
        for chosen in by_dtype.values():
            scale = inv_scale.to(found.device)
            torch._amp_foreach_non_finite_check_and_unscale_(chosen, found, scale)
        all_reduce(found, op=dist.ReduceOp.MAX).wait()
        return {found.device: found}


def is_known(plugin: Precision) -> bool:
    """Return whether the plugin is Lightning's own, so that its steps are known."""
    return type(plugin) in (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def adapt(
    plugin: Precision, before_norm: Callable[[], bool], shown: Callable[[Any], Any]
) -> Precision:
    """Let a plugin of Lightning's clip over rows, and hooks see what ``shown`` makes of a batch.

    ``before_norm`` comes before ranks communicate for a norm, and returns whether to clip at all.
    """
    kind, own = type(plugin), vars(plugin)  # methods of this instance, which can be pickled
    own["convert_input"] = partial(_convert, kind.convert_input, plugin, shown)
    if is_known(plugin):
        own["clip_grad_by_norm"] = partial(_clip_by_norm, plugin, before_norm)
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is not None and not isinstance(scaler, RanksGradScaler):
        own["scaler"] = RanksGradScaler(own["device"], enabled=scaler.is_enabled())
        own["scaler"].load_state_dict(scaler.state_dict())
    return plugin


def _convert(
    convert: Callable[..., Any], plugin: Precision, shown: Callable[[Any], Any], data: Any
) -> Any:
    return convert(plugin, shown(data))  # the first that Lightning does with a batch


def _clip_by_norm(
    plugin: Precision, before_norm: Callable[[], bool], optimizer: Optimizer, clip_val: float
) -> None:
    if before_norm():
        clip_by_norm(plugin.main_params(optimizer), clip_val)


def compute_dtype(plugin: Precision) -> torch.dtype | None:
    """Return the dtype in which parameters are gathered; None for that of the master copy."""
    return plugin._desired_input_dtype if isinstance(plugin, HalfPrecision) else None


def loss_scaler(plugin: Precision) -> Callable[[Tensor], Tensor] | None:
    """Return the gradient scaler's function that multiplies a loss; None without a scaler.

    The factor stays on the device: reading it would make the host wait in every step.
    """
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return None if scaler is None else scaler.scale
