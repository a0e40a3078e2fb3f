"""Makes writes to parameters inside of a step visible, so that none is lost in silence.

Inside of a step a parameter is a copy that is freed after its use, or the rows of one rank. The
user's code runs once per microbatch, and not at all on a rank without samples. A write there would
be lost, or repeated. So a gathered parameter counts every write, and a sharded one refuses to be
used while the forward runs. Both cost nothing per operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.sharding.placement import local_part, set_local_part

REMEDY = (
    "Write to parameters once a step, in a hook, where every rank runs the code:"
    " `with lightning_cephalo.writable_parameters(self.teacher, self.student): ...` in"
    " on_train_batch_start() for a write before the forward, in on_after_backward() for one behind"
    " it. The same lines work on one device."
)


class GatheredParameter(nn.Parameter):
    """A full parameter that counts every write in its version.

    torch gives ``p.data`` a version counter of its own, so that ``p.data.mul_(2)`` would leave no
    trace. Here ``p.data`` shares the counter of ``p``. Assigning ``p.data = x`` raises. Operators
    do not see the class: its ``__torch_function__`` is switched off, as that of every parameter.
    """

    full_name = ""
    guard: RowGuard

    @property
    def data(self) -> Tensor:
        """The values, without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise UnitUseError(
            f"`.data` of the parameter {self.full_name!r} is assigned inside of a step, where it"
            f" is a copy that is freed after its use: the write would be lost. {REMEDY}"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        # torch would read memory that is gone, and end the process: debuggers print frames
        if self.numel() and not self.untyped_storage().nbytes():
            told = f"shape={tuple(self.shape)}, dtype={self.dtype}, freed"
            return f"GatheredParameter({self.full_name!r}, {told})"
        return super().__repr__()


def point_to(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter the memory of ``values``; its version does not change."""
    torch.Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]


class Locked(Tensor):
    """Stands in for a tensor, and refuses every operator.

    Shape, dtype and device of the tensor stay readable.

    Attributes:
        refusal: The message, with places for the names and the operator.
    """

    full_name: str
    refusal: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, full_name: str) -> Any:
        locked = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=like.device,
            storage_size=0,  # else those who count memory would count it
        )
        locked.full_name = full_name
        return locked

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        names = [leaf.full_name for leaf in leaves if isinstance(leaf, cls)]
        message = cls.refusal.format(names=spelled(names), operator=func)
        raise UnitUseError(message)


class LockedRows(Locked):
    """Stands in for this rank's rows of a sharded parameter."""

    refusal = (
        "training_step reads or writes {names} ({operator}) while sharded: each rank holds some"
        " rows, and runs the code once per microbatch. Inside of a step a unit's parameters can be"
        " used in its forward only. To read them elsewhere, name the units without them, such as"
        " CephaloStrategy(units=[Block]), as what is no unit is there all step long; or name"
        " one that holds the code that reads them, with units=[...]. An empty list makes the"
        f" whole model one unit. {REMEDY}"
    )


class RowGuard:
    """Locks the sharded parameters of a flat while a forward runs, and finds writes to them."""

    is_closed = False

    def __init__(self, names: Sequence[str], sharded: Sequence[nn.Parameter]) -> None:
        self._names, self._sharded = names, sharded
        self.renew()
        # a DTensor has no memory of its own, except after `parameter.data = plain_tensor`
        self._addresses = [face.data_ptr() for face in sharded]
        self._versions = [face._version for face in sharded]

    def renew(self) -> None:
        """Take the parameters' rows of now for those that they hold."""
        self._rows = [local_part(face) for face in self._sharded]
        self._locked: list[LockedRows] = []

    def close(self) -> None:
        """Refuse all use of the parameters until :meth:`open`."""
        self.is_closed = True
        if not self._locked:
            pairs = zip(self._rows, self._names, strict=True)
            self._locked = [LockedRows(rows, name) for rows, name in pairs]
        for face, locked in zip(self._sharded, self._locked, strict=True):
            set_local_part(face, locked)

    def open(self) -> None:
        """Allow use of the parameters again."""
        self.is_closed = False
        for face, rows in zip(self._sharded, self._rows, strict=True):
            set_local_part(face, rows)

    def assigned(self) -> list[str]:
        """Return the names of parameters to whose ``data`` plain values were assigned."""
        return changed(self._names, [p.data_ptr() for p in self._sharded], self._addresses)

    def written(self) -> list[str]:
        """Return the names of parameters that code wrote to since the last call."""
        before, self._versions = self._versions, [face._version for face in self._sharded]
        return changed(self._names, self._versions, before)


def changed(names: Sequence[str], now: Sequence[int], before: Sequence[int]) -> list[str]:
    """Return the names of numbers that differ."""
    pairs = zip(names, now, before, strict=True)
    return [name for name, one, other in pairs if one != other]


def spelled(names: list[str]) -> str:
    """Return a few names of parameters for a message."""
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the parameter {shown}" if len(names) == 1 else f"the parameters {shown}{more}"
