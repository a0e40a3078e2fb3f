"""Functions of sharded gradients and weights that DTensor gets wrong: mended, or refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_cephalo.common.errors import UnsupportedError

# functions that DTensor gets wrong, or dies of, when rows are divided unevenly
_MIXING = {
    *("mean", "nanmean", "matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "einsum", "linear"),
    *("addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "flatten", "svd", "qr"),
}
_LINALG_NORMS = {"linalg_norm", "linalg_vector_norm"}


class RowsArithmetic(TorchFunctionMode):
    """While active, functions of sharded tensors give right numbers or raise.

    DTensor takes rows for evenly divided, wherever a function derives new tensors: it averages the
    ranks' means as if all held equally many rows, and multiplies matrices by gathering rows that
    are not there. And Lightning's ``grad_norm`` makes one tensor of all norms, which torch cannot
    do with DTensors. Every rank must call the same functions, since some communicate.

    Raises:
        UnsupportedError: For functions that mix rows.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # not `types`: DTensor takes no part in torch functions, so that it is not named there
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
