"""Caches the measured problem of a job for its next start on the same devices.

:func:`describe` lists what identifies a job. Hosts are no part of it, and free memory is read anew.
Problems of emulated devices are never cached, as their speed differs from start to start, nor those
of classes without a source file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Device
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common import files
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.data.randomness import preserved_randomness
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.ranks.control import ControlGroup

# Free memory that differs by a larger factor may hold other microbatches.
_SAME_CAPACITY = 1.25
# Of what problems hold: a start ignores the ones that other versions of it have written.
_VERSION = 4


@dataclass(frozen=True)
class CachedProblem:
    """A lookup, equal on every rank; without ``path`` never cache, without ``problem`` measure."""

    path: Path | None
    problem: Problem | None = None
    said: str | None = None


def look_up(
    control: ControlGroup, device: Device, describe_job: Callable[[], Any], *, remeasure: bool
) -> CachedProblem:
    """Look up the problem that an earlier start of this job has measured; collective."""
    key = None
    # an error of the user's model or data is reported by measuring
    with contextlib.suppress(Exception):
        key = _digest(describe_job()) if device.speed_lasts else None
    rows = control.gather((key, device.name, device.capacity_bytes))
    if any(key is None for key, *_ in rows):
        return CachedProblem(None)
    found = None
    if control.rank == 0:
        key = _digest([(key, name) for key, name, _ in rows])
        path = files.cache_folder() / "jobs" / f"{key[:32]}.json"
        found = CachedProblem(path) if remeasure else _read(path, [row[2] for row in rows])
    return control.broadcast(found)


def save(path: Path, problem: Problem) -> str | None:
    """Write a measured problem for the next start; return None, or why that was not possible."""
    data = {"measured": time.strftime("%Y-%m-%d %H:%M:%S"), "problem": problem.to_dict()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(data))
    except (OSError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _read(path: Path, capacities: Sequence[float]) -> CachedProblem:
    try:
        if not path.exists():
            return CachedProblem(path)
        data = json.loads(files.read_text(path, what="measured times"))
        problem, day = Problem.from_dict(data["problem"]), str(data["measured"])
        pairs = [*zip(problem.ranks, capacities, strict=True)]
    except Exception as error:  # the file may hold anything, and the job can measure again
        return CachedProblem(path, said=f"Measuring again, as {path} cannot be read: {error}")
    for rank, (profile, now) in enumerate(pairs):
        before = profile.capacity_bytes
        if max(before, now) > _SAME_CAPACITY * min(before, now):
            said = f"{format_bytes(now)} now and {format_bytes(before)} on {day}"
            return CachedProblem(path, said=f"Measuring again, as rank {rank} may fill {said}.")
    ranks = [replace(profile, capacity_bytes=capacity) for profile, capacity in pairs]
    said = f"Using times measured on {day} ({path}); Planner(remeasure=True) measures again."
    return CachedProblem(path, replace(problem, ranks=tuple(merge_equal_ranks(ranks))), said)


def describe(
    model: ShardedModel, view: TrainerView, read: Callable[[], Any], options: Mapping[str, Any]
) -> Any:
    """Return all that measured times depend on, except for the devices, by what shows them."""
    module: Any = model.module
    inner = dict(module.named_modules())
    with preserved_randomness():
        leaves = pytree.tree_leaves(read())
    return [
        (_VERSION, torch.__version__, importlib.metadata.version("lightning-cephalo")),
        [
            (unit.name, unit.kind, name, p.shape, p.dtype, p.requires_grad)
            for unit in model.units
            for name, p in unit.named_sharded()
        ],
        model.executor.hooks.compiled_units,
        [name for name, each in inner.items() if each._compiled_call_impl],
        # the module itself holds learning rates and counters
        [(name, _described(each)) for name, each in inner.items() if name],
        _sources(module),
        [(e.shape[1:], e.dtype) if isinstance(e, Tensor) else type(e) for e in leaves],
        (type(view.precision), getattr(view.precision, "precision", ""), model.compute_dtype),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        (model.executor.recompute, module.automatic_optimization, model.state_groups),
        [
            # the options that decide how an optimizer computes
            (type(own), [(k, v) for k, v in group.items() if v is None or isinstance(v, bool)])
            for own in view.optimizers
            for group in own.param_groups
        ],
        (view.clip_value is None, view.clips_by_value),
        torch.get_num_threads() if model.accelerator.computes_on_host else None,
        [(k, getattr(v, "__qualname__", "") if callable(v) else v) for k, v in options.items()],
    ]


def _described(inner: nn.Module) -> list[Any]:
    """Return a module's numbers, such as strides and heads, and how it computes attention."""
    numbers = [
        (name, value)
        for name, value in vars(inner).items()
        for parts in [value if isinstance(value, tuple) else (value,)]
        if name != "training" and all(isinstance(part, (int, float)) for part in parts)
    ]
    config = getattr(inner, "config", None)
    return [type(inner), numbers, getattr(config, "_attn_implementation", None)]


def _sources(module: nn.Module) -> list[str]:
    """Return digests of the files that define the model's classes."""
    kinds = {base for inner in module.modules() for base in type(inner).__mro__}
    # others compute nothing of their own, or are written in C
    own = [kind for kind in kinds if any(map(inspect.isfunction, vars(kind).values()))]
    step = inspect.unwrap(type(module).training_step)  # type: ignore[attr-defined]
    paths = {inspect.getsourcefile(each) or "" for each in [*own, step]}  # none has no digest
    return sorted(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
