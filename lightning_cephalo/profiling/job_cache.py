"""Caches the measured problem of a job for its next start on the same devices.

:func:`describe` lists what identifies a job. Hosts are no part of it, and free memory is read anew.
Problems of emulated devices are never cached, as their speed differs from start to start, nor those
of classes without a source file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator import Device
from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.data.randomness import preserved_randomness
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.plan import Problem
from lightning_cephalo.profiling.rank_curves import merge_equal_ranks
from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Free memory that differs by a larger factor needs a new measurement: more memory may hold larger
# microbatches.
_SAME_CAPACITY = 1.25
# Of what problems hold: a start ignores the ones that other versions of it have written.
_VERSION = 3
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class CachedProblem:
    """A lookup, equal on every rank; without ``path`` never cache, without ``problem`` measure."""

    path: Path | None
    problem: Problem | None = None
    said: str | None = None


def look_up(
    control: ControlGroup,
    device: Device,
    describe_job: Callable[[], Any],
    *,
    remeasure: bool,
) -> CachedProblem:
    """Look up the problem that an earlier start of this job has measured; collective."""
    rows = control.gather(
        (
            _digest(describe_job) if device.speed_lasts else None,
            device.name,
            device.capacity_bytes,
        )
    )
    if any(digest is None for digest, *_ in rows):
        return CachedProblem(None)
    key = _hashed([(digest, name) for digest, name, *_ in rows])
    found = None
    if control.rank == 0:
        path = files.cache_folder() / "jobs" / f"{key[:32]}.json"
        found = CachedProblem(path) if remeasure else _read(path, [row[2] for row in rows])
        for folder in (files.cache_folder(), path.parent):
            with suppress(OSError):  # a home that may not be entered is told of by what reads it
                files.remove_leftovers(folder)
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
        problem = Problem.from_dict(data["problem"])
        if len(problem.ranks) != len(capacities):
            raise PlanError(f"expected {len(capacities)} ranks, got {len(problem.ranks)}")
        day = str(data["measured"])
    except Exception as error:  # the file may hold anything, and the job can measure again
        return CachedProblem(path, said=f"Measuring again, as {path} cannot be read: {error}")
    for rank, (profile, capacity) in enumerate(zip(problem.ranks, capacities, strict=True)):
        less, more = sorted((profile.capacity_bytes, capacity))
        if more > _SAME_CAPACITY * less:
            return CachedProblem(
                path,
                said=f"Measuring again, as rank {rank} may fill {format_bytes(capacity)} now and"
                f" {format_bytes(profile.capacity_bytes)} on {day}.",
            )
    ranks = merge_equal_ranks(
        [
            dataclasses.replace(profile, capacity_bytes=capacity)
            for profile, capacity in zip(problem.ranks, capacities, strict=True)
        ]
    )
    said = (
        f"Using times measured on {day} ({path});"
        " CephaloStrategy(planner=Planner(remeasure=True)) measures again."
    )
    return CachedProblem(path, dataclasses.replace(problem, ranks=tuple(ranks)), said)


# -- what a job is --------------------------------------------------------------------------------


def describe(
    model: ShardedModel,
    trainer: Trainer,
    read_sample: Callable[[], Any],
    global_batch_size: int,
    options: Mapping[str, Any],
) -> Any:
    """Return all that measured times depend on, except for the devices, as plain values."""
    module = model.module
    with preserved_randomness():
        batch = read_sample()
    plugin = trainer.precision_plugin
    return {
        "versions": [
            _VERSION, torch.__version__, importlib.metadata.version("lightning-cephalo")
        ],
        "parameters": [
            [name, list(p.shape), str(p.dtype), p.requires_grad]
            for unit in model.units
            for name, p in unit.named_sharded()
        ],
        "units": [[unit.name, unit.kind.value] for unit in model.units],
        "compiled": [
            *model.executor.hooks.compiled_units,
            *[name for name, inner in module.named_modules() if inner._compiled_call_impl],
        ],
        "modules": [[name, *_described(inner, inner is module)]
                    for name, inner in module.named_modules()],
        "sources": _sources(module),
        "batch": [_leaf(leaf) for leaf in pytree.tree_leaves(batch)],
        "global_batch_size": global_batch_size,
        "precision": [type(plugin).__name__, str(getattr(plugin, "precision", "")),
                      str(model.compute_dtype), torch.get_float32_matmul_precision(),
                      torch.are_deterministic_algorithms_enabled()],
        "recompute": model.executor.recompute,
        "manual": not getattr(module, "automatic_optimization", True),
        "optimizers": [_optimizer(each) for each in trainer.optimizers],
        "clipping": [bool(trainer.gradient_clip_val), str(trainer.gradient_clip_algorithm)],
        "state_groups": model.state_groups,
        "threads": torch.get_num_threads() if model.accelerator.computes_on_host else None,
        "options": {name: _plain(value) for name, value in options.items()},
    }  # fmt: skip


def _described(inner: nn.Module, is_root: bool) -> list[Any]:
    """Return a module's class and numbers, but not the root's: learning rates and counters."""
    config = getattr(inner, "config", None)
    numbers = {} if is_root else {
        name: value for name, value in vars(inner).items()
        if _is_number(value) and name != "training"
    }  # fmt: skip
    attention = getattr(config, "_attn_implementation", None)
    return [f"{type(inner).__module__}.{type(inner).__qualname__}", numbers, str(attention)]


def _optimizer(optimizer: Optimizer) -> list[Any]:
    """Return an optimizer's class and the options that decide how it computes."""
    kind = type(optimizer)
    options = [
        {name: value for name, value in group.items() if isinstance(value, (bool, type(None)))}
        for group in optimizer.param_groups
    ]
    return [f"{kind.__module__}.{kind.__qualname__}", options]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(part) for part in value)
    return isinstance(value, (bool, int, float))


def _sources(module: nn.Module) -> list[str]:
    """Return digests of the files that define the model's classes, except for torch's own."""
    kinds = {base for inner in module.modules() for base in type(inner).__mro__}
    # others compute nothing of their own, or are written in C
    own = [kind for kind in kinds if any(map(inspect.isfunction, vars(kind).values()))]
    step = inspect.unwrap(type(module).training_step)  # type: ignore[attr-defined]
    paths = {_source_file(each) for each in own} | {_source_file(step)}
    return sorted(
        hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in paths
        if not path.startswith(_TORCH)
    )


def _source_file(defined: Any) -> str:
    path = inspect.getsourcefile(defined)
    if path is None:
        raise OSError(f"{defined} has no source file")
    return path


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return [list(leaf.shape[1:]), str(leaf.dtype)]
    return type(leaf).__name__


def _plain(value: Any) -> Any:
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else ""
    return repr(value) if dataclasses.is_dataclass(value) else value


def _digest(describe_job: Callable[[], Any]) -> str | None:
    """Return the digest of a job; None if the job cannot be described."""
    try:
        return _hashed(describe_job())
    except Exception:  # an error of the user's model or data: measuring reports it
        return None


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
