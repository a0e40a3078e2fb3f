"""Checksums of samples and batches, by which ranks find out whether they read the same stream.

They cover the structure, shapes, short values, and both ends of long ones: microseconds each.
"""

from __future__ import annotations

import datetime
import decimal
import os
import zlib
from typing import Any

import numpy as np
import torch

from lightning_cephalo.data.containers import children_of

_EDGE = 64  # values that count at each end of an array or a container
_VALUES = (
    *(bool, int, float, complex, np.generic, decimal.Decimal, os.PathLike),
    *(datetime.date, datetime.time, datetime.timedelta),
)
"""Types whose ``repr`` shows all of a value, and nothing else."""
_DEEPEST = 8  # objects may refer to themselves


def fingerprint(value: Any) -> int:
    """Returns a checksum of ``value`` with 32 bits; 0 if no content of it can be seen.

    Equal values give equal checksums in all processes, except for objects that hold addresses,
    times or process numbers.

    Example:
        >>> fingerprint([1, "a"]) == fingerprint([1, "a"]), fingerprint(object())
        (True, 0)
    """
    parts: list[bytes] = []
    seen = _visit(value, parts, 0)
    return (zlib.crc32(b"\0".join(parts)) or 1) if seen else 0


def _visit(node: Any, parts: list[bytes], depth: int) -> bool:
    """Appends what is seen of ``node``; returns whether that was content, and not a type alone."""
    parts.append(type(node).__qualname__.encode())
    if isinstance(node, torch.Tensor):
        return _visit_tensor(node, parts)
    if hasattr(type(node), "__array_interface__"):  # arrays, and images of PIL
        node = np.asarray(node)
        parts.append(f"{node.dtype}{node.shape}".encode())
        flat = node.reshape(-1)
        ends = np.concatenate((flat[:_EDGE], flat[-_EDGE:]))
        if not node.dtype.hasobject:
            parts.append(ends.tobytes())
            return True
        node = ends.tolist()
    if isinstance(node, str | bytes | bytearray):
        raw = node.encode(errors="surrogatepass") if isinstance(node, str) else bytes(node)
        parts.extend((str(len(raw)).encode(), raw[:4096], raw[-_EDGE:]))
        return True
    if isinstance(node, _VALUES):
        parts.append(repr(node).encode(errors="surrogatepass"))
        return True
    if depth == _DEEPEST:
        return False
    if isinstance(node, set | frozenset):  # their order differs between processes
        node = sorted(map(fingerprint, node))
    children = children_of(node)
    if children is None:
        # by name: ranks may have set attributes in different orders
        children = sorted(getattr(node, "__dict__", {}).items())
    parts.append(str(len(children)).encode())
    seen = False
    for key, child in [*children[:_EDGE], *children[_EDGE:][-_EDGE:]]:
        parts.append(repr(key).encode())
        seen = _visit(child, parts, depth + 1) or seen
    return seen


def _visit_tensor(tensor: torch.Tensor, parts: list[bytes]) -> bool:
    if tensor.is_nested or tensor.layout != torch.strided:
        parts.append(str(tensor.layout).encode())
        return False
    parts.append(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().reshape(-1)
    ends = torch.cat((flat[:_EDGE], flat[-_EDGE:])).cpu()
    parts.append(ends.view(torch.uint8).numpy().tobytes())
    return True
