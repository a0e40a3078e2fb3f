"""Corrects or rejects functions of sharded gradients and weights that DTensor gets wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_cephalo.common.errors import UnsupportedError

# functions that DTensor gets wrong, or crashes on, when rows are divided unevenly
_MIXING = {
    *("mean", "nanmean", "matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "einsum", "linear"),
    *("addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "flatten", "svd", "qr"),
}
_LINALG_NORMS = {"linalg_norm", "linalg_vector_norm"}


class RowsArithmetic(TorchFunctionMode):
    """While active, functions of sharded tensors return correct numbers or raise.

    DTensor assumes evenly divided rows wherever a function derives new tensors. It averages the
    ranks' means as if all ranks held equally many rows, and it multiplies matrices by gathering
    rows that do not exist. In addition, Lightning's ``grad_norm`` makes one tensor of all norms,
    which torch cannot do with DTensors. Every rank must call the same functions, since some
    communicate.

    Raises:
        UnsupportedError: For functions that mix rows.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # not `types`: DTensor does not override torch functions, so it is not listed there
        if not any(isinstance(value, DTensor) for value in args):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "mean" and len(args) == 1 and not kwargs:
            return args[0].sum().full_tensor() / args[0].numel()
        if name in _MIXING or (name.startswith("linalg_") and name not in _LINALG_NORMS):
            raise UnsupportedError(
                f"{name}() of whole gradients or weights cannot be had, because each rank holds"
                " some of their rows. If the optimizer calls it, use an element-wise one such as"
                " AdamW or SGD; if a hook does, call it on parameter.grad.full_tensor(), on every"
                " rank."
            )
        result = func(*args, **kwargs)
        if func is Tensor.norm and isinstance(result, DTensor):
            return result.full_tensor()
        return result
