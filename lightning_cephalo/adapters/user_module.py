"""Calls the user's step, and changes the module while it is sharded: no caches, no deep copies."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_cephalo.common.errors import UnsupportedError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def step_on(module: LightningModule, batch: Any) -> Any:
    """Call ``training_step`` as Lightning's loop does for its first batch."""
    is_counted = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return module.training_step(batch, 0) if is_counted else module.training_step(batch)


def switch_off_caches(module: nn.Module, at_end: ExitStack) -> None:
    """Switch off the key-value caches of Hugging Face models, until the end.

    Every block would retain its keys and values until the end of the step, and append them a second
    time when it is recomputed.
    """
    configs: list[Any] = [getattr(inner, "config", None) for inner in module.modules()]
    for config in configs:
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            at_end.callback(setattr, config, "use_cache", True)


def refuse_copies(module: nn.Module, at_end: ExitStack) -> None:
    """Refuse ``copy.deepcopy`` of what is sharded, which would copy shards, until the end."""
    for inner in module.modules():
        if next(inner.parameters(), None) is not None:  # other metrics copy themselves
            vars(inner)["__deepcopy__"] = _refuse_copy
            at_end.callback(vars(inner).pop, "__deepcopy__", None)


def _refuse_copy(memo: dict[int, Any]) -> Any:
    raise UnsupportedError(
        "copy.deepcopy() of a module whose parameters are sharded. Copy it before, in __init__() or"
        " in setup(), and update the copy in hooks; its values are those of one device. Or use"
        " Lightning's WeightAveraging. To keep weights, copy module.state_dict()."
    )
