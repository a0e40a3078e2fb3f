"""Takes a checkpoint apart into this rank's tensors, and puts one together from all ranks' parts.

Sharded tensors are kept as the rows of each rank; nothing is gathered. The parts of all ranks give
whole tensors again, under any plan and any number of ranks.
"""

from __future__ import annotations

import itertools
import pickle
from collections import UserDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery.store import places
from lightning_cephalo.recovery.trees import with_tensors
from lightning_cephalo.sharding.placement import Rows, local_part, rows_of


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in the tree that is kept."""

    number: int


@dataclass(frozen=True)
class _Part:
    """A tensor of a rank."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: tuple[int, ...] | None = None
    rows: tuple[int, int] = (0, 0)


def taken_apart(
    tree: Any, rank: int, updated: Container[int] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Return what describes a tree of values, and the tensors in it."""
    found: dict[int, int] = {}
    tensors: list[Tensor] = []
    wholes: list[tuple[tuple[int, ...] | None, tuple[int, int]]] = []
    ranks: dict[int, int] = {}  # of few meshes, for many tensors

    def rows_here(leaf: Tensor, rows: Rows) -> tuple[int, int]:
        mesh = cast(DTensor, leaf).device_mesh
        if id(mesh) not in ranks:
            ranks[id(mesh)] = _rank_in(mesh, rank)
        return rows.rows[ranks[id(mesh)]]

    def place(leaf: Tensor) -> Any:
        if leaf.layout != torch.strided or (leaf.is_meta or leaf.is_quantized):
            return leaf  # pickled as it is
        if id(leaf) not in found:  # tied weights are kept once
            found[id(leaf)] = len(tensors)
            rows = rows_of(leaf)
            own = (None, (0, 0)) if rows is None else (tuple(leaf.shape), rows_here(leaf, rows))
            wholes.append(own)
            local = local_part(leaf)
            lasts = updated is None or rows is not None or id(leaf) in updated
            lasts = lasts and not (updated is not None and local.is_inference())
            # the part itself, not a view of it: its version tells whether it has been written to
            tensors.append(local if lasts else local.detach().clone())
        return _Place(found[id(leaf)])

    kept = with_tensors(tree, place)
    starts, _ = places(tensors)
    parts = tuple(
        _Part(start, tuple(tensor.shape), tensor.dtype, *whole)
        for start, tensor, whole in zip(starts, tensors, wholes, strict=True)
    )
    return pickle.dumps((kept, parts), protocol=pickle.HIGHEST_PROTOCOL), tensors


def _rank_in(mesh: DeviceMesh, rank: int) -> int:
    """Return a rank's number in a mesh, which may be one of several that hold all rows each."""
    is_grouped = dist.is_initialized() and mesh.size() < dist.get_world_size()
    return mesh.get_local_rank() if is_grouped else rank


@dataclass(frozen=True)
class RankState:
    """What one rank has kept, without its payload."""

    tree: Any
    parts: tuple[_Part, ...]

    @classmethod
    def parse(cls, meta: bytes) -> RankState:
        """Return what :func:`taken_apart` has described."""
        return cls(*pickle.loads(meta))


class Assembly:
    """Puts whole tensors together."""

    def __init__(self, states: Sequence[RankState], fetch: Callable[[int, slice], Tensor]) -> None:
        self.states, self._fetch = states, fetch
        shapes = [[part.whole for part in state.parts] for state in states]
        if any([s for s in own if s] != [s for s in shapes[0] if s] for own in shapes):
            raise RecoveryError(
                "The ranks have kept different sharded tensors. on_save_checkpoint() and"
                " state_dict() of callbacks must put in the same ones on every rank."
            )
        # ranks may have different plain tensors, so that numbers differ
        self._sharded = [[p for p in state.parts if p.whole is not None] for state in states]
        self._index_of = [
            list(itertools.accumulate((p.whole is not None for p in state.parts), initial=0))
            for state in states
        ]

    def resolved(self, tree: Any, rank: int = 0) -> Any:
        """Return a tree with tensors in their places."""
        return pytree.tree_map_only(_Place, partial(self._tensor, rank), tree)

    def lazily(self, tree: Mapping[Any, Any]) -> UserDict[Any, Any]:
        """Return a dict that puts the tensors of an item together whenever it is read."""
        return _Lazily(tree, self.resolved)

    def _tensor(self, rank: int, place: _Place) -> Tensor:
        part = self.states[rank].parts[place.number]
        if part.whole is None:
            return self._read(rank, part)
        index = self._index_of[rank][place.number]
        whole = torch.empty(part.whole, dtype=part.dtype)
        missing = torch.ones(len(whole), dtype=torch.bool)
        for holder, parts in enumerate(self._sharded):
            own = parts[index]
            first, end = own.rows
            # groups of ranks may hold the whole tensor each
            if end > first and missing[first:end].any():
                whole[first:end].copy_(self._read(holder, own))
                missing[first:end] = False
        return whole

    def _read(self, rank: int, part: _Part) -> Tensor:
        empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
        found = self._fetch(rank, slice(part.start, part.start + empty.nbytes))
        return found.clone().view(part.dtype).view(part.shape)


class _Lazily(UserDict[Any, Any]):
    """A dict whose values are made when they are read; what is set is kept as it is."""

    def __init__(self, kept: Mapping[Any, Any], made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.data = dict(kept)
        self._made = made

    def __getitem__(self, key: Any) -> Any:
        return self._made(super().__getitem__(key))
