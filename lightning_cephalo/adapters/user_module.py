"""Reads properties of the user's module, and switches its caches off during training."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def step_on(module: LightningModule, batch: Any) -> Any:
    """Call ``training_step`` as Lightning's loop does for its first batch."""
    parameters = inspect.signature(module.training_step).parameters
    if "batch_idx" in parameters or len(parameters) > 1:
        return module.training_step(batch, 0)
    return module.training_step(batch)


class SwitchedOffCaches:
    """Switches off the key-value caches of Hugging Face models during training.

    Every block would retain its keys and values until the end of the step, and append them a second
    time when it is recomputed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._configs: list[Any] = []
        seen: set[int] = set()
        for inner in module.modules():
            config: Any = getattr(inner, "config", None)
            if id(config) in seen or getattr(config, "use_cache", None) is not True:
                continue
            seen.add(id(config))
            config.use_cache = False
            self._configs.append(config)

    def restore(self) -> None:
        """Switch the caches on again."""
        for config in self._configs:
            config.use_cache = True
        self._configs = []
