"""What versions of torch differ in is the same from the oldest to the newest that is allowed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_cephalo.accelerator.torch_versions import (
    all_gather_single,
    computes_by_itself,
    leave_checkpoints,
    reduce_scatter_single,
)
from lightning_cephalo.sharding.placement import default_mesh, row_spec


def _doubled(name: str):
    @torch.library.custom_op(name, mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    return doubled


before = _doubled("cephalo_tests::before")


@computes_by_itself
class Noting(DTensor):
    """A DTensor that notes the operators that come to it, and computes them with local parts."""

    noted: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.noted.append(func.name())
        args, kwargs = pytree.tree_map_only(
            DTensor, lambda tensor: tensor._local_tensor, (args, kwargs or {})
        )
        return func(*args, **kwargs)


later = _doubled("cephalo_tests::later")

OPERATORS = {
    "detach": lambda x, plain: x.detach(),
    "add.Tensor": lambda x, plain: plain + x,
    "mul.Tensor": lambda x, plain: x * 2.0,
    "add_.Tensor": lambda x, plain: x.add_(1.0),
    "view": lambda x, plain: x.view(-1),
    "max": lambda x, plain: x.max(),
    "max.dim": lambda x, plain: x.max(0).values,
    "argmax": lambda x, plain: x.argmax(),
    "as_strided": lambda x, plain: x.as_strided((2,), (1,)),
    "equal": lambda x, plain: torch.tensor(torch.equal(x, plain)),
    "normal_": lambda x, plain: x.normal_().isfinite(),
    "_foreach_mul.Scalar": lambda x, plain: torch._foreach_mul([plain, x], 2.0)[1],
    "linalg_vector_norm": lambda x, plain: torch.linalg.vector_norm(x),
    "cephalo_tests::before": lambda x, plain: before(x),
}


def _operators(rank):
    mesh = default_mesh("cpu")
    for name, apply in OPERATORS.items():
        plain = torch.arange(6.0).view(3, 2)
        wanted = apply(plain.clone(), plain)
        for mode in (torch.no_grad, torch.inference_mode):
            Noting.noted.clear()
            with mode():
                local = plain.clone()
                noting = Noting(
                    local, row_spec(mesh, Replicate(), (3, 2), local.dtype), requires_grad=False
                )
                found = apply(noting, plain)
            full = name if "::" in name else f"aten::{name}"
            assert full in Noting.noted, (name, mode, Noting.noted)
            found = found if type(found) is torch.Tensor else noting._local_tensor
            assert torch.equal(found, wanted), (name, mode)


def test_operators_come_to_a_subclass_of_dtensor():
    run_ranks(1, _operators)


def _made_later(rank):
    local = torch.ones(3, 2)
    spec = row_spec(default_mesh("cpu"), Replicate(), (3, 2), local.dtype)
    noting = Noting(local, spec, requires_grad=False)
    if torch.__version__ >= "2.12":
        assert torch.equal(later(noting), local * 2)
    else:
        with pytest.raises(NotImplementedError, match=r"cephalo_tests\.later"):
            later(noting)


def test_an_operator_that_is_made_later_is_right_or_refused_by_name():
    run_ranks(1, _made_later)


def _collectives(rank):
    gathered = torch.empty(4)
    all_gather_single(gathered, torch.full((2,), float(rank)), group=dist.group.WORLD)
    assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
    summed = torch.empty(2)
    work = reduce_scatter_single(summed, torch.arange(4.0), group=dist.group.WORLD, async_op=True)
    work.wait()
    assert summed.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]


def test_collectives_of_one_tensor_gather_and_sum_without_a_warning():
    run_ranks(2, _collectives)


def _fails(x):
    raise ValueError("inside")


def _wraps(x):
    try:
        checkpoint(_fails, x, use_reentrant=False)
    except ValueError as error:
        raise RuntimeError("around") from error


@pytest.mark.parametrize("code", [_fails, _wraps])
def test_an_error_in_a_checkpoint_leaves_no_hook_while_it_is_kept(code):
    with pytest.raises((ValueError, RuntimeError)) as kept:
        checkpoint(code, torch.ones(2, requires_grad=True), use_reentrant=False)
    leave_checkpoints(kept.value)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
