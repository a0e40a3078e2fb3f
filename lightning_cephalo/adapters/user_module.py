"""What cephalo reads from the user's module, and switches off in it while it trains."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def has_running_statistics(module: nn.Module) -> bool:
    """Whether training changes buffers that differ between ranks (batch normalisation)."""
    return any(getattr(inner, "running_mean", None) is not None for inner in module.modules())


def smallest_microbatch(module: nn.Module) -> int:
    """Two where batch normalisation needs more than one value per channel, else one."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return 2 if any(isinstance(inner, kinds) for inner in module.modules()) else 1


def step_arguments(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Arguments for ``training_step`` as Lightning's loop gives them for its first batch."""
    parameters = inspect.signature(module.training_step).parameters
    return (batch, 0) if "batch_idx" in parameters or len(parameters) > 1 else (batch,)


class SwitchedOffCaches:
    """Key-value caches of Hugging Face models, off while training.

    They are for generation; in training every block would keep its keys and values until the end
    of the step, and append them a second time when it is computed again. Hugging Face switches
    them off for its own gradient checkpointing too.
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
        """Switch them on again."""
        for config in self._configs:
            config.use_cache = True
        self._configs = []
