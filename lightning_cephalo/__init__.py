"""A PyTorch Lightning strategy that trains on mixed GPUs with uneven batches and uneven shards.

Importing this package registers the strategy names ``"cephalo"``, ``"cephalo_spawn"``,
``"cephalo_fork"`` and ``"cephalo_notebook"`` with Lightning. The public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# torch imports this package at the end of its own import (see _autoload.py), when torch is not yet
# complete: nothing here may import torch or Lightning, or take long.
from lightning_cephalo import _autoload

if TYPE_CHECKING:
    from lightning_cephalo.features.chunked_cross_entropy import chunked_cross_entropy
    from lightning_cephalo.features.over_batch import loss_over_batch
    from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, solve
    from lightning_cephalo.preparation.options import Planner
    from lightning_cephalo.ranks.slurm import UnevenSLURMEnvironment
    from lightning_cephalo.recovery.options import Recovery
    from lightning_cephalo.sharding.writable_parameters import writable_parameters
    from lightning_cephalo.strategy import CephaloStrategy

__version__ = "0.1.0"

__all__ = [
    "CephaloStrategy",
    "Plan",
    "Planner",
    "Problem",
    "RankPlan",
    "RankProfile",
    "Recovery",
    "UnevenSLURMEnvironment",
    "__version__",
    "chunked_cross_entropy",
    "loss_over_batch",
    "solve",
    "writable_parameters",
]

_HOME_OF = {
    "CephaloStrategy": "lightning_cephalo.strategy",
    "Plan": "lightning_cephalo.plan",
    "Planner": "lightning_cephalo.preparation.options",
    "Problem": "lightning_cephalo.plan",
    "RankPlan": "lightning_cephalo.plan",
    "RankProfile": "lightning_cephalo.plan",
    "Recovery": "lightning_cephalo.recovery.options",
    "UnevenSLURMEnvironment": "lightning_cephalo.ranks.slurm",
    "chunked_cross_entropy": "lightning_cephalo.features.chunked_cross_entropy",
    "loss_over_batch": "lightning_cephalo.features.over_batch",
    "writable_parameters": "lightning_cephalo.sharding.writable_parameters",
    "solve": "lightning_cephalo.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_autoload.register()
