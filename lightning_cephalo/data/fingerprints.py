"""Checksums of samples and batches, by which ranks find out whether they read the same stream.

They cover the structure, shapes, short values, and both ends of long ones: microseconds each.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from lightning_cephalo.data.containers import children_of, is_array

_EDGE = 64  # values that count at each end of an array or a container
_DEEPEST = 8  # objects may refer to themselves


def fingerprint(value: Any) -> int:
    """Returns a checksum of ``value`` with 32 bits; 0 if no content of it can be seen.

    Equal values give equal checksums in all processes, except for objects that hold addresses,
    times or process numbers.

    Example:
        >>> fingerprint([1, "a"]) == fingerprint([1, "a"]), fingerprint(object())
        (True, 0)
    """
    parts: list[str] = []
    seen = _visit(value, parts, 0)
    content = "\0".join(parts).encode(errors="surrogatepass")
    return (zlib.crc32(content) or 1) if seen else 0


def _visit(node: Any, parts: list[str], depth: int) -> bool:
    """Appends what is seen of ``node``; returns whether that was content, and not a type alone."""
    parts.append(type(node).__qualname__)
    if isinstance(node, torch.Tensor) and is_array(node):
        flat = node.detach().reshape(-1)
        raw = torch.cat((flat[:_EDGE], flat[-_EDGE:])).cpu().view(torch.uint8).numpy()
        parts += [str(node.dtype), str(node.shape), raw.tobytes().hex()]
        return True
    if hasattr(type(node), "__array_interface__"):  # arrays, and images of PIL
        array = np.asarray(node)
        ends = np.concatenate((array.reshape(-1)[:_EDGE], array.reshape(-1)[-_EDGE:]))
        parts += [str(array.dtype), str(array.shape)]
        if not array.dtype.hasobject:
            parts.append(ends.tobytes().hex())
            return True
        node = ends.tolist()
    if isinstance(node, set | frozenset):  # their order differs between processes
        node = sorted(map(fingerprint, node))
    children = children_of(node)
    if children is None:  # by name: ranks may have set attributes in different orders
        children = [] if callable(node) else sorted(getattr(node, "__dict__", {}).items())
        text = "" if children or type(node).__repr__ is object.__repr__ else repr(node)
        if isinstance(node, str | bytes) or (text and " at 0x" not in text):
            parts += [str(len(text)), text[:4096], text[-_EDGE:]]
            return node is not None
    parts.append(str(len(children)))
    seen = False
    for key, child in [*children[:_EDGE], *children[_EDGE:][-_EDGE:]] if depth < _DEEPEST else ():
        parts.append(repr(key))
        seen = _visit(child, parts, depth + 1) or seen
    return seen
