"""The ways to train one model on the same ranks, each as its Lightning strategy trains inside.

They are torch's objects instead of Trainers, so that their steps can be interleaved in one set of
processes. If a strategy leaves a choice, the baseline gets the better one. Gradients are reduced
with the last microbatch only. Lightning's ``accumulate_grad_batches`` does so for DDP but not for
its FSDP and ModelParallel strategies (``ParallelStrategy.block_backward_sync``). DDP's buckets have
the size of a block, so that they overlap as 25 MB do in a large model.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from byte_gpt import Block, ByteGPT
from harness import sharded_step
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.features.install import install
from lightning_cephalo.ranks.groups import Groups

from .cases import CEPHALO, DDP, DDP_BY_SPEED, FSDP, MODEL_PARALLEL, TUNED

CPU = torch.device("cpu")
Part = dict[str, Tensor]


@dataclass(frozen=True)
class ModelSize:
    """The size of the model that all contenders train: a GPT over bytes, in fp32."""

    width: int = 192
    depth: int = 4
    heads: int = 6
    length: int = 128
    recompute: bool = False

    def make(self) -> ByteGPT:
        """Make the model, with the same weights every time."""
        torch.manual_seed(0)
        return ByteGPT(self.width, self.depth, self.heads, self.length)


@dataclass
class Contender:
    """One way to train.

    Attributes:
        name: As in the table.
        model: The model to train.
        backward: Forward and backward of this rank's microbatches, given the global batch size.
        sharded: Whether a rank holds only a part of the gradients.
        parts: This rank's microbatches.
        global_batch_size: Samples of all ranks.
        optimizer: The optimizer of its parameters.
    """

    name: str
    model: nn.Module
    backward: Callable[[Sequence[Part], int], None]
    sharded: bool
    parts: list[Part] = field(default_factory=list)
    global_batch_size: int = 0
    optimizer: torch.optim.Optimizer | None = None

    def prepare(self, parts: list[Part], global_batch_size: int) -> None:
        """Set the microbatches of a case and make a new optimizer."""
        self.parts, self.global_batch_size = parts, global_batch_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        """Run one training step."""
        self.accumulate()
        self.update()

    def accumulate(self) -> None:
        """Run forward and backward of all microbatches, and reduce the gradients."""
        self.backward(self.parts, self.global_batch_size)

    def update(self) -> None:
        """Run the optimizer's step and reset the gradients."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient; collective.

        Call it between ``accumulate`` and ``update``.
        """
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                total += local.detach().double().square().sum()
        if self.sharded:
            dist.all_reduce(total)
        return float(total.sqrt())


def loss_of(model: nn.Module, part: Part) -> Tensor:
    tokens = part["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def cephalo(size: ModelSize, ranks: int) -> tuple[Contender, ShardedModel]:
    """Make cephalo's contender. It is sharded evenly until a plan changes that."""
    model = size.make()
    groups = Groups.create(datetime.timedelta(seconds=300))
    even = [1 / ranks] * ranks
    sharded = ShardedModel(model, groups, accelerator_of(CPU), even)
    install(sharded.executor)
    sharded.executor.recompute = size.recompute

    def backward(parts: Sequence[Part], global_batch_size: int) -> None:
        sharded_step(sharded.executor, model, loss_of, parts)  # weighs microbatches by samples

    return Contender(CEPHALO, model, backward, sharded=True), sharded


def baselines(size: ModelSize, ranks: int) -> tuple[list[Contender], dict[str, str]]:
    """Make all other contenders; return them, and the reasons why the rest cannot run here."""
    made, reasons = [], {}
    for name, make in _MAKERS.items():
        try:
            contender = make(name, size, ranks)
            # a contender with lazy initialisation fails only when it first runs
            contender.prepare(
                [{"tokens": torch.zeros(1, size.length + 1, dtype=torch.long)}], ranks
            )
            contender.accumulate()
            contender.model.zero_grad()
            made.append(contender)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return made, reasons


def _fully_shard(name: str, size: ModelSize, ranks: int) -> Contender:
    model = size.make()
    _checkpoint(model, size)
    mesh = init_device_mesh("cpu", (ranks,))
    # memory is not limited here, and without resharding there is less communication
    reshard = name != TUNED
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if name == TUNED:
        _tune(model)

    def backward(parts: Sequence[Part], global_batch_size: int) -> None:
        for index, part in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)
            _backward_of(model, part, ranks / global_batch_size)

    return Contender(name, model, backward, sharded=True)


def _tune(model: Any) -> None:
    """Add two features that NCCL has and gloo lacks.

    Without them a gather stops the compute, and a reduce moves twice the bytes.
    """
    # Private; the default leaves overlap to CUDA streams, which the CPU does not have.
    model._set_unshard_async_op(True)
    for block, following in itertools.pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])
    for block, before in itertools.pairwise(reversed(model.blocks)):
        block.set_modules_to_backward_prefetch([before])
    for module in (model, *model.blocks):
        module.set_custom_reduce_scatter(AllToAllReduceScatter())


class AllToAllReduceScatter(ReduceScatter):
    """A reduce-scatter by an all-to-all and a sum. gloo's own is an all-reduce and a slice."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
            raise NotImplementedError(f"expected a blocking sum or mean, but got {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        reduce = torch.sum if op == dist.ReduceOp.SUM else torch.mean
        reduce(received.view(group.size(), -1), dim=0, out=output_tensor)


def _fsdp(name: str, size: ModelSize, ranks: int) -> Contender:
    model = FullyShardedDataParallel(
        size.make(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        use_orig_params=True,
    )
    _checkpoint(model, size)
    return _reducing_last(name, model, ranks, sharded=True)


def _ddp(name: str, size: ModelSize, ranks: int) -> Contender:
    model = size.make()
    _checkpoint(model, size)
    block_bytes = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    model = DistributedDataParallel(model, bucket_cap_mb=block_bytes / 2**20)
    return _reducing_last(name, model, ranks, sharded=False)


_MAKERS: dict[str, Callable[[str, ModelSize, int], Contender]] = {
    MODEL_PARALLEL: _fully_shard,
    TUNED: _fully_shard,
    FSDP: _fsdp,
    DDP: _ddp,
    DDP_BY_SPEED: _ddp,
}


def _reducing_last(name: str, model: Any, ranks: int, *, sharded: bool) -> Contender:
    def backward(parts: Sequence[Part], global_batch_size: int) -> None:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            context: AbstractContextManager[Any] = nullcontext() if last else model.no_sync()
            with context:
                _backward_of(model, part, ranks / global_batch_size)

    return Contender(name, model, backward, sharded)


def _backward_of(model: nn.Module, part: Part, factor: float) -> None:
    # torch divides by the number of ranks, but with batches by speed the mean over ranks is not the
    # mean over samples: so each microbatch is weighted by its samples
    (loss_of(model, part) * (len(part["tokens"]) * factor)).backward()


def _checkpoint(model: nn.Module, size: ModelSize) -> None:
    if size.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
