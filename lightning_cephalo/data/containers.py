"""Reads and rebuilds the containers of nested batches: encodings, dataclasses, per-sample lists.

torch's pytree knows only registered types; dataclasses and Hugging Face's encodings are none.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and field names from the root of a batch to a node."""

IsLeaf: TypeAlias = Callable[[Path, Any], bool]
"""Whether a container counts as a leaf."""


def is_array(node: object) -> bool:
    """Returns whether ``node`` is a numpy array or a tensor that has rows."""
    if isinstance(node, torch.Tensor):
        return node.layout == torch.strided and not node.is_nested
    return isinstance(node, np.ndarray)


def is_sequence(node: object) -> bool:
    """Returns whether ``node`` is a list or tuple, but no namedtuple and no ``torch.Size``."""
    is_fixed = hasattr(node, "_fields") or isinstance(node, torch.Size)
    return isinstance(node, list | tuple) and not is_fixed


def is_sized_object(node: Any) -> bool:
    """Returns whether ``node`` is an object of the user's own with a length."""
    return children_of(node) is None and not is_array(node) and hasattr(node, "__len__")


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and children of a container in its own order; None for anything else."""
    if isinstance(node, Mapping):
        return list(node.items())
    if is_sequence(node):
        return list(enumerate(node))
    if isinstance(node, tuple) and not isinstance(node, PackedSequence | torch.Size):
        return list(zip(getattr(node, "_fields", ()), node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def walk(node: Any, is_leaf: IsLeaf | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields paths and leaves; containers for which ``is_leaf`` is true are leaves, too."""
    children = None if is_leaf and is_leaf(path, node) else children_of(node)
    if children is None:
        yield path, node
    for key, child in children or ():
        yield from walk(child, is_leaf, (*path, key))


def mapped(
    node: Any, function: Callable[[Path, Any], Any], is_leaf: IsLeaf | None = None, path: Path = ()
) -> Any:
    """Returns a batch with ``function(path, leaf)`` for each leaf that `walk` yields."""
    children = None if is_leaf and is_leaf(path, node) else children_of(node)
    if children is None:
        return function(path, node)
    return rebuild(node, [mapped(each, function, is_leaf, (*path, key)) for key, each in children])


def rebuild(node: Any, children: list[Any]) -> Any:
    """Returns a container like ``node`` with ``children`` instead, in the same order."""
    if isinstance(node, tuple):
        return type(node)(children) if is_sequence(node) else type(node)(*children)
    if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
        return type(node)(dict(zip(node, children, strict=True)))  # type: ignore[call-arg]
    # a copy shares every other attribute, which Hugging Face's encodings need
    clone: Any = copy.copy(node)
    if isinstance(node, list):
        clone[:] = children
    elif isinstance(node, MutableMapping):
        for key, child in zip(list(node), children, strict=True):
            clone[key] = child
    else:
        for field, child in zip(dataclasses.fields(node), children, strict=True):
            object.__setattr__(clone, field.name, child)  # as frozen ones reject assignment
    return clone


def own_copy(node: Any, *, with_arrays: bool) -> Any:
    """Returns a copy in containers of its own; ``with_arrays``: with arrays of its own, too."""

    def copied(_: Path, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad) if with_arrays else leaf
        if isinstance(leaf, np.ndarray) or hides_arrays(leaf):
            with suppress(Exception):  # of an object of the user's that cannot be copied
                return copy.deepcopy(leaf) if with_arrays else copy.copy(leaf)
        return leaf

    return mapped(node, copied)


def contains_arrays(node: object) -> bool:
    """Returns whether ``node``, or a known container inside it, holds a tensor or numpy array."""
    return any(isinstance(leaf, torch.Tensor | np.ndarray) for _, leaf in walk(node))


def hides_arrays(node: object) -> bool:
    """Returns whether ``node`` is an object, without known rows, that seems to hold tensors."""
    if is_array(node) or isinstance(node, type) or callable(node):
        return False
    return callable(getattr(node, "to", None)) or any(
        contains_arrays(value) for value in getattr(node, "__dict__", {}).values()
    )


def describe(node: object, depth: int = 2) -> str:
    """Returns a short description of a batch for error messages: types, shapes, a few keys."""
    name = type(node).__name__
    if isinstance(node, torch.Tensor | np.ndarray):
        return f"{name}{list(node.shape)}" if is_array(node) else f"{name} without rows"
    children = children_of(node)
    if not children or depth == 0:
        return name
    shown = ", ".join(f"{key}: {describe(child, depth - 1)}" for key, child in children[:6])
    return f"{name}({shown}{', ...' if len(children) > 6 else ''})"


def spell(path: Path) -> str:
    """Returns ``path`` as a user would write it: ``batch['images'][0]``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def known_length(sized: Any) -> int | None:
    """Returns the length of a loader or sampler; None if it has none, which is no error."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
