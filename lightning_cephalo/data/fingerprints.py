"""Checksums of samples and batches, by which ranks find out whether they read the same stream.

They cover the structure, shapes, short values, and both ends of long ones: microseconds each.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import os
import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_cephalo.data.containers import children_of

_EDGE = 64  # values that count at each end of an array
_VALUES = (
    *(bool, int, float, complex, np.generic, range, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta),
)
"""Types whose ``repr`` shows all of a value, and nothing else."""
_DEEPEST = 8  # objects may refer to themselves


def fingerprint(value: Any) -> int | None:
    """Returns a checksum of ``value`` with 32 bits; None if no content of it can be seen.

    Equal values give equal checksums in all processes, except for objects that hold addresses,
    times or process numbers.

    Example:
        >>> fingerprint([1, "a"]) == fingerprint([1, "a"]), fingerprint(object())
        (True, None)
    """
    parts: list[bytes] = []
    seen = _visit(value, parts, 0)
    return zlib.crc32(b"\0".join(parts)) if seen else None


def _visit(node: Any, parts: list[bytes], depth: int) -> bool:
    """Appends what is seen of ``node``; returns whether that was content, and not a type alone."""
    parts.append(type(node).__qualname__.encode())
    if isinstance(node, torch.Tensor):
        return _visit_tensor(node, parts)
    if isinstance(node, np.ndarray):
        return _visit_array(node, parts, depth)
    if isinstance(node, str | bytes | bytearray):
        raw = node.encode(errors="surrogatepass") if isinstance(node, str) else bytes(node)
        parts.extend((str(len(raw)).encode(), raw[:4096], raw[-_EDGE:]))
        return True
    if isinstance(node, os.PathLike):
        parts.append(repr(os.fspath(node)).encode(errors="surrogatepass"))
        return True
    if isinstance(node, _VALUES):
        parts.append(repr(node).encode())
        return True
    if depth == _DEEPEST:
        return False
    children = children_of(node)
    if isinstance(node, set | frozenset):
        return _visit_set(node, parts, depth)
    if children is None and hasattr(type(node), "__array_interface__"):  # images of PIL
        return _visit_image(node, parts, depth)
    if children is None:
        # by name: ranks may have set attributes in different orders
        children = sorted(getattr(node, "__dict__", {}).items())
    parts.append(str(len(children)).encode())
    seen = False
    for key, child in _edges(children):
        parts.append(repr(key).encode())
        seen = _visit(child, parts, depth + 1) or seen
    return seen


def _visit_set(items: Any, parts: list[bytes], depth: int) -> bool:
    """Appends checksums of the items, sorted: sets have other orders in other processes."""
    found, seen = [], False
    for item in items:
        inside: list[bytes] = []
        seen = _visit(item, inside, depth + 1) or seen
        found.append(zlib.crc32(b"\0".join(inside)))
    parts.append(repr(sorted(found)).encode())
    return seen


def _visit_image(image: Any, parts: list[bytes], depth: int) -> bool:
    crop, size = getattr(image, "crop", None), getattr(image, "size", None)
    if not callable(crop) or not isinstance(size, tuple):
        return _visit_array(np.asarray(image), parts, depth)
    # whole images of PIL are copied for each look at their array
    (width, height), rows = size, min(2, size[1])
    parts.append(f"{getattr(image, 'mode', None)}{size}".encode())
    for top in (0, height - rows):
        _visit_array(np.asarray(crop((0, top, width, top + rows))), parts, depth)
    return True


def _visit_tensor(tensor: torch.Tensor, parts: list[bytes]) -> bool:
    if tensor.is_nested or tensor.layout != torch.strided:
        parts.append(str(tensor.layout).encode())
        return False
    parts.append(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.is_meta:
        return False
    flat = tensor.detach().reshape(-1)
    ends = torch.cat((flat[:_EDGE], flat[-_EDGE:])).cpu()
    parts.append(ends.view(torch.uint8).numpy().tobytes())
    return True


def _visit_array(array: np.ndarray[Any, Any], parts: list[bytes], depth: int) -> bool:
    parts.append(f"{array.dtype}{array.shape}".encode())
    flat = array.reshape(-1)
    if array.dtype.hasobject:
        return depth < _DEEPEST and _visit(_edges(flat.tolist()), parts, depth + 1)
    parts.append(flat[:_EDGE].tobytes() + flat[-_EDGE:].tobytes())
    return True


def _edges(items: Sequence[Any]) -> list[Any]:
    return list(items) if len(items) <= 4 * _EDGE else [*items[: 2 * _EDGE], *items[-2 * _EDGE :]]
