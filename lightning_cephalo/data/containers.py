"""Reads and rebuilds the containers of nested batches: encodings, dataclasses, per-sample lists.

torch's pytree knows only registered types, and treats lists of strings like lists of tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import torch

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names from the root of a batch to a node."""


def is_array(node: object) -> bool:
    """Returns whether ``node`` is a tensor or a numpy array."""
    return isinstance(node, torch.Tensor | np.ndarray)


def is_named_tuple(node: object) -> bool:
    """Returns whether ``node`` is an instance of a namedtuple class."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_plain_sequence(node: object) -> bool:
    """Returns whether ``node`` is a list or tuple, but no namedtuple and no ``torch.Size``."""
    return (
        isinstance(node, list | tuple)
        and not is_named_tuple(node)
        and not isinstance(node, torch.Size)
    )


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and children of a container in its own order; None for anything else."""
    if isinstance(node, Mapping):
        return list(node.items())
    if is_named_tuple(node):
        return list(zip(node._fields, node, strict=True))
    if is_plain_sequence(node):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def rebuild(node: Any, children: list[Any]) -> Any:
    """Returns a container like ``node`` with ``children`` instead, in the same order."""
    if isinstance(node, MutableMapping):
        # a copy shares every other attribute, which Hugging Face's encodings need
        mapping: Any = copy.copy(node)
        for key, child in zip(list(node), children, strict=True):
            mapping[key] = child
        return mapping
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node.keys(), children, strict=True)))  # type: ignore[call-arg]
    if is_named_tuple(node):
        return type(node)._make(children)
    if isinstance(node, tuple):
        return type(node)(children)
    if isinstance(node, list):
        return _like_list(node, children)
    clone = copy.copy(node)
    for field, child in zip(dataclasses.fields(node), children, strict=True):
        # frozen dataclasses reject plain assignment
        object.__setattr__(clone, field.name, child)
    return clone


def own_copy(node: Any, *, with_arrays: bool) -> Any:
    """Returns a copy in containers of its own; ``with_arrays``: with arrays of its own, too."""
    if isinstance(node, torch.Tensor):
        if not with_arrays:
            return node
        return node.detach().clone().requires_grad_(node.requires_grad)
    if isinstance(node, np.ndarray):
        return node.copy() if with_arrays else node
    children = children_of(node)
    if children is not None:
        return rebuild(node, [own_copy(child, with_arrays=with_arrays) for _, child in children])
    if not hides_arrays(node):
        return node
    try:
        return copy.deepcopy(node) if with_arrays else copy.copy(node)
    except Exception:  # an object of the user's that cannot be copied
        return node


def cut(node: Any, start: int, stop: int) -> Any:
    """Returns rows ``start`` to ``stop`` of a leaf: a view of an array, else the leaf's type."""
    rows = node[start:stop]
    if type(rows) is torch.Tensor and not rows.requires_grad:
        # a view of its own version: autograd would take a write to one part for one to all
        return rows.data
    if isinstance(node, list):
        return _like_list(node, rows)
    if is_plain_sequence(node) and type(rows) is not type(node):
        return type(node)(rows)
    return rows


def _like_list(node: list[Any], items: Iterable[Any]) -> list[Any]:
    if type(node) is list:
        return list(items)
    clone = copy.copy(node)
    clone[:] = items
    return clone


def contains_arrays(node: object) -> bool:
    """Returns whether ``node``, or a known container inside it, holds a tensor or numpy array."""
    if is_array(node):
        return True
    children = children_of(node)
    return children is not None and any(contains_arrays(child) for _, child in children)


def hides_arrays(node: object) -> bool:
    """Returns whether ``node`` is an object of unknown type that seems to hold tensors."""
    if isinstance(node, type) or callable(node):
        return False
    if callable(getattr(node, "to", None)):
        return True
    attributes = getattr(node, "__dict__", {})
    return any(contains_arrays(value) for value in attributes.values())


def describe(node: object, depth: int = 2) -> str:
    """Returns a short description of a batch for error messages: types, shapes, a few keys."""
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            return "nested tensor"
        return f"{type(node).__name__}{list(node.shape)}"
    if isinstance(node, np.ndarray):
        return f"ndarray{list(node.shape)}"
    children = children_of(node)
    if children is None:
        return type(node).__name__
    if depth == 0:
        return f"{type(node).__name__}(...)"
    shown = ", ".join(f"{key}: {describe(child, depth - 1)}" for key, child in children[:6])
    return f"{type(node).__name__}({shown}{', ...' if len(children) > 6 else ''})"


def spell(path: Path) -> str:
    """Returns ``path`` as a user would write it: ``batch['images'][0]``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def known_length(sized: Any) -> int | None:
    """Returns the length of a loader or sampler; None if it has none, which is no error."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
