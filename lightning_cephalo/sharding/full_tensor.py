"""A full tensor that computes with sharded ones: the parameters of a copied module.

The parameters of a training module are DTensors between steps, and torch refuses to mix DTensors
with plain tensors. Users who have copied a module mix them on purpose, to average weights::

    for averaged, parameter in zip(copied.parameters(), module.parameters()):
        averaged.lerp_(parameter, 0.01)

Here the sharded operand is gathered first. If the sharded tensor is the one that is written, each
rank takes its rows of the full operand instead.

Considered: treating plain tensors as replicated ones (torch's ``implicit_replication``). It would
be wrong without an error for tensors that differ between ranks, such as activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import get_default_nowrap_functions
from torch.utils import _pytree as pytree

from lightning_cephalo.sharding.collectives import all_gather_rows
from lightning_cephalo.sharding.placement import Rows, as_dtensor, local_part, row_spec


class FullTensor(Tensor):
    """A plain tensor whose functions also accept DTensors.

    ::

        averaged.mul_(0.99).add_(parameter, alpha=0.01)     # gathers the parameter
        parameter.copy_(averaged)                           # writes this rank's rows

    A function with a sharded operand communicates: every rank calls it, or none. Results with plain
    tensors are plain. A pickled FullTensor is a plain tensor when it is loaded.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _without_subclasses():  # else what looks at the operands would come here again
            return _compute(func, tuple(args), dict(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _like(self, self.detach().clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _without_subclasses():
            plain = self.detach().as_subclass(Tensor)
            if not isinstance(self, nn.Parameter):
                return plain.__reduce_ex__(protocol)
            return nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        if _writes_sharded(func, args):
            return func(args[0], *(_rows_like(other, args[0]) for other in args[1:]), **kwargs)
        args, kwargs = pytree.tree_map_only(DTensor, _gathered, (args, kwargs))
    result = func(*args, **kwargs)
    # activations that a copied module computes are plain, so that they cost nothing extra
    mixed = any(tensor.ndim and not isinstance(tensor, (FullTensor, DTensor)) for tensor in tensors)
    if mixed or func in get_default_nowrap_functions():
        return result
    return pytree.tree_map_only(Tensor, _wrapped, result)


def full_parameter(sharded: nn.Parameter) -> nn.Parameter:
    """Return a full copy of a sharded parameter, on its device and in its dtype; collective."""
    with torch.no_grad():
        value = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded.detach()
        copied = value.clone().as_subclass(FullTensor)
    return _like(sharded, copied)


def _like(original: Tensor, copied: Tensor) -> Any:
    """Return a parameter with the tags of another, or the tensor itself."""
    if not isinstance(original, nn.Parameter):
        return copied.requires_grad_(original.requires_grad)
    parameter = nn.Parameter(copied, requires_grad=original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    return parameter


def _without_subclasses() -> Any:
    # private, as in the example of a subclass in torch's documentation
    return torch._C.DisableTorchFunctionSubclass()


def _wrapped(value: Tensor) -> Tensor:
    return value.as_subclass(FullTensor) if type(value) is Tensor else value


def _gathered(value: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, also of one that DTensor has derived; collective.

    A derived tensor (``0.25 * parameter``) holds the parameter's rows, but its placement claims
    even ones.
    """
    placement, mesh = value.placements[0], value.device_mesh
    if isinstance(placement, Rows) or not placement.is_shard(0):
        return value.full_tensor()
    local, group = local_part(value).detach(), mesh.get_group()
    counts = torch.tensor([len(local)], device=local.device)
    rows_of_ranks = all_gather_rows(counts, [1] * mesh.size(), group).tolist()
    return all_gather_rows(local.contiguous(), rows_of_ranks, group)


def _writes_sharded(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a function changes its first operand in place, and that one is sharded."""
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or name.rstrip("_") + "_" == name
    written = args[0] if args else None
    if isinstance(written, (list, tuple)):
        return in_place and any(isinstance(one, DTensor) for one in written)
    return in_place and isinstance(written, DTensor)


def _rows_like(value: Any, written: Any) -> Any:
    """Return full tensors as DTensors with the rows of the tensors that they are written to."""
    if isinstance(written, (list, tuple)):
        if not isinstance(value, (list, tuple)):
            return value
        return [_rows_like(one, other) for one, other in zip(value, written, strict=True)]
    if not isinstance(value, FullTensor) or not isinstance(written, DTensor):
        return value
    rows: Sequence[tuple[int, int]] | None = None
    plain, mesh = value.detach().as_subclass(Tensor), written.device_mesh
    if value.shape == written.shape and isinstance(written.placements[0], Rows):
        rows = written.placements[0].rows
    spec = row_spec(mesh, rows, plain.shape, plain.dtype)
    if rows is not None:
        first, end = rows[mesh.get_local_rank()]
        plain = plain[first:end]
    return as_dtensor(plain, spec)
