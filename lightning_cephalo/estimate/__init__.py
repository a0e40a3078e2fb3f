"""What a cluster that is not here would need for a step: from measured curves, tables, datasheets.

::

    cluster = Cluster.load("cluster.yaml")
    work = work_of("gpt2", sequence_length=512, dtype="fp16", n_layer=24)
    estimate = build_problem(cluster, work, global_batch_size=64)
    plan = solve(estimate.problem)

Names load on first use, as counting a model needs torch and reading a cluster does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import Estimate, RankSource, build_problem
    from .cluster import Cluster, ClusterRank, Link, NodeGroup
    from .devices import CATALOGUE, Device, find_device
    from .models import work_of
    from .table import Curves, CurveTable, cache_folder, cached_tables, save_measured
    from .work import ModelWork, count_work

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
    "CurveTable": "table",
    "Curves": "table",
    "Device": "devices",
    "Estimate": "build",
    "Link": "cluster",
    "ModelWork": "work",
    "NodeGroup": "cluster",
    "RankSource": "build",
    "build_problem": "build",
    "cache_folder": "table",
    "cached_tables": "table",
    "count_work": "work",
    "find_device": "devices",
    "save_measured": "table",
    "work_of": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
