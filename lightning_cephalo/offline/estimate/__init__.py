"""Estimates the times and memory of a step on a cluster without access to it.

The sources are measured curves, tables and datasheets::

    cluster = Cluster.load("cluster.yaml")
    work = work_of("gpt2", sequence_length=512, dtype="fp16", n_layer=24)
    estimate = build_problem(cluster, work, global_batch_size=64)
    plan = solve(estimate.problem)

Names load on first use, because counting a model needs torch and reading a cluster does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_cephalo.common.files import cache_folder
    from lightning_cephalo.offline.estimate.build import Estimate, RankSource, build_problem
    from lightning_cephalo.offline.estimate.cluster import Cluster, ClusterRank, NodeGroup
    from lightning_cephalo.offline.estimate.devices import CATALOGUE, Device, find_device
    from lightning_cephalo.offline.estimate.models import work_of
    from lightning_cephalo.offline.estimate.network import Link, Network
    from lightning_cephalo.offline.estimate.work import ModelWork, count_work
    from lightning_cephalo.plan.curves import (
        Curves,
        CurveTable,
        cached_tables,
        save_measured,
    )

__all__ = [
    "CATALOGUE",
    "Cluster",
    "ClusterRank",
    "CurveTable",
    "Curves",
    "Device",
    "Estimate",
    "Link",
    "ModelWork",
    "Network",
    "NodeGroup",
    "RankSource",
    "build_problem",
    "cache_folder",
    "cached_tables",
    "count_work",
    "find_device",
    "save_measured",
    "work_of",
]

_HOME_OF = {
    "CATALOGUE": "devices",
    "Cluster": "cluster",
    "ClusterRank": "cluster",
    "CurveTable": "lightning_cephalo.plan.curves",
    "Curves": "lightning_cephalo.plan.curves",
    "Device": "devices",
    "Estimate": "build",
    "Link": "network",
    "ModelWork": "work",
    "Network": "network",
    "NodeGroup": "cluster",
    "RankSource": "build",
    "build_problem": "build",
    "cache_folder": "lightning_cephalo.common.files",
    "cached_tables": "lightning_cephalo.plan.curves",
    "count_work": "work",
    "find_device": "devices",
    "save_measured": "lightning_cephalo.plan.curves",
    "work_of": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF[name]
    value = getattr(import_module(home if "." in home else f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
