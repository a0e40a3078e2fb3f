"""Tells whether options of parameter groups are what they were before.

Values may be of any kind that users put into a parameter group. What cannot be compared counts as
changed, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_cephalo.sharding.placement import local_part


@dataclass(frozen=True)
class _Written:
    """A tensor, and how often it had been written to.

    The tensor itself is held: another one may get the ``id`` of one that is gone.
    """

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Inside:
    """A container, which code may change in place: its kind, its keys, and what was in it."""

    kind: type
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def kept(value: Any) -> Any:
    """Return what :func:`is_unchanged` compares a value with later."""
    if isinstance(value, Tensor):
        own = local_part(value)
        return _Written(own, _version_of(own))
    if isinstance(value, Mapping):
        return _Inside(type(value), tuple(value), tuple(map(kept, value.values())))
    if isinstance(value, (list, tuple)):
        return _Inside(type(value), (), tuple(map(kept, value)))
    return value


def is_unchanged(value: Any, before: Any) -> bool:
    """Return whether a value is the one of before, which nobody has written to."""
    if isinstance(before, _Written):
        if not isinstance(value, Tensor):
            return False
        own = local_part(value)
        return own is before.tensor and _version_of(own) == before.version
    if isinstance(before, _Inside):
        if type(value) is not before.kind:
            return False
        if isinstance(value, Mapping):
            if tuple(value) != before.keys:
                return False
            value = value.values()
        parts: tuple[Any, ...] = tuple(value)
        return len(parts) == len(before.values) and all(map(is_unchanged, parts, before.values))
    if value is before:
        return True
    if type(value) is not type(before):  # another type may choose another kernel
        return False
    try:
        return bool(value == before)
    except Exception:  # arrays have no single answer
        return False


def _version_of(tensor: Tensor) -> int:
    # outside of inference mode nobody writes to these, and they count nothing
    return 0 if tensor.is_inference() else tensor._version


def kept_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of a parameter group are now, for :func:`changed_options`."""
    return {name: kept(value) for name, value in group.items() if name != "params"}


def changed_options(group: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the options of a parameter group that have changed, and then those that are gone."""
    changed = [
        name
        for name, value in group.items()
        if name != "params" and (name not in before or not is_unchanged(value, before[name]))
    ]
    return changed + [name for name in before if name not in group]
