"""Tensors that hooks take out of units have gradients, such as the router logits of mixtures."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    Allocation,
    batch_size_of,
    full_gradients,
    make_executor,
    microbatches_of,
    relative_error,
)
from launch import run_ranks
from torch import Tensor, nn
from toys import assert_idle
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_cephalo import loss_over_batch
from lightning_cephalo.common.errors import RemoteRankError, UnitUseError
from lightning_cephalo.execution.step import MicrobatchCall

UNEVEN = Allocation(((3, 1), (2,), ()), (0.75, 0.25, 0.0))
STEPS = 2
EXPERTS, CHOSEN, LENGTH = 4, 2, 6

TAKEN: ContextVar[list[Tensor] | None] = ContextVar("taken", default=None)
"""As transformers has one: each microbatch has its own."""

Gradients = dict[str, Tensor | None]


SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": CHOSEN,
}


class Mixture(nn.Module):
    """A mixture of experts of Hugging Face, with its balance over the whole global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.made()

    def made(self) -> Any:
        return MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, **SIZES))

    @staticmethod
    def batch(samples: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(30, (samples, LENGTH))}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        found = self.model(ids, output_router_logits=True)
        rows = [logits.unflatten(0, (len(ids), LENGTH)) for logits in found.router_logits]
        balance = loss_over_batch(self.balance, *rows)
        return F.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + balance

    @staticmethod
    def balance(*rows: Tensor) -> Tensor:
        logits = tuple(each.flatten(0, 1) for each in rows)
        return load_balancing_loss_func(logits, EXPERTS, CHOSEN)


class Qwen2(Mixture):
    """It has an expert that all tokens visit, and a layer without experts."""

    def made(self) -> Any:
        config = Qwen2MoeConfig(
            num_experts=EXPERTS,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
            mlp_only_layers=[1],
            **SIZES,
        )
        return Qwen2MoeForCausalLM(config)


class Qwen3(Mixture):
    def made(self) -> Any:
        config = Qwen3MoeConfig(
            num_experts=EXPERTS, moe_intermediate_size=12, head_dim=8, norm_topk_prob=True, **SIZES
        )
        return Qwen3MoeForCausalLM(config)


class Deep(nn.Module):
    """Hooks take tensors that depend on one another, before, between and behind meetings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.last = nn.SyncBatchNorm(4), nn.SyncBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(torch.tanh(self.first(x)) + x))
        return x + self.last(self.third(torch.tanh(y)) + y)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Deep(), Plain(), Deep(), Plain()])
        self.double()
        inner = [
            self.blocks[0].first,
            self.blocks[0].second,
            self.blocks[0].norm,
            self.blocks[0].third,
            self.blocks[1].up,
            self.blocks[1].down,
            self.blocks[2].last,
            self.blocks[2].third,
        ]
        for place, module in enumerate(inner):
            module.register_forward_hook(partial(self._take, place % 3 == 0))

    def _take(self, in_half: bool, module: nn.Module, args: Any, output: Tensor) -> Any:
        if TAKEN.get() is not None:
            TAKEN.get().append(output)
        return output * 0.5 if in_half else None  # what it returns goes on

    @staticmethod
    def batch(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 4, dtype=torch.float64)}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, taken = batch["x"], []
        token = TAKEN.set(taken)
        for block in self.blocks:
            x = block(x)
        TAKEN.reset(token)
        loss = x.sin().mean()
        for place, value in enumerate(taken):
            if place != 1:  # one that nobody uses
                loss = loss + (place + 1) * value.square().mean()
        return loss


def _made(kind: type[Any], samples: int) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(4)
    return kind().train(), kind.batch(samples)


def _one_device(kind: type[Any]) -> Gradients:
    model, batch = _made(kind, batch_size_of(UNEVEN))
    model.loss(batch).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _equal(rank: int, expected: dict[type[Any], Gradients]) -> None:
    for kind, gradients in expected.items():
        exact = 1e-6 if issubclass(kind, Mixture) else 1e-12
        for recompute in (True, False):
            model, batch = _made(kind, batch_size_of(UNEVEN))
            executor = make_executor(model, UNEVEN.fractions, recompute)
            parts = microbatches_of(batch, UNEVEN, rank)
            for _ in range(STEPS):
                model.zero_grad()
                calls = [_call(model, part) for part in parts]
                executor.forward(calls)
                executor.backward()
                assert relative_error(full_gradients(model), gradients) < exact, kind
                assert_idle(executor)
            executor.hooks.uninstall()


def _call(model: Any, part: dict[str, Tensor]) -> MicrobatchCall:
    samples = len(next(iter(part.values())))
    return MicrobatchCall(
        lambda: model.loss(part), lambda loss: (loss, float(samples)), samples=samples
    )


class OwnList(Hooked):
    """Its hooks append to a list that the step makes."""

    def _take(self, in_half: bool, module: nn.Module, args: Any, output: Tensor) -> None:
        self.taken.append(output)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self._begin()
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.sin().mean() + sum(value.square().mean() for value in self.taken)

    def _begin(self) -> None:
        self.taken: list[Tensor] = []


class Shared(OwnList):
    """They append to one list, which microbatches share."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = []

    def _begin(self) -> None:
        self.taken.clear()


def _refused(rank: int) -> None:
    for recompute in (True, False):
        model, batch = _made(Shared, batch_size_of(UNEVEN))
        executor = make_executor(model, UNEVEN.fractions, recompute)
        calls = [_call(model, part) for part in microbatches_of(batch, UNEVEN, rank)]
        with pytest.raises(RemoteRankError if rank else UnitUseError, match="another microbatch"):
            executor.forward(calls)
        executor.hooks.uninstall()


def test_a_list_that_hooks_of_several_microbatches_fill_is_refused_by_name():
    run_ranks(UNEVEN.world_size, _refused)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_hooks_take_out_of_units_has_the_gradients_of_one_device():
    expected = {kind: _one_device(kind) for kind in (Hooked, OwnList, Mixture, Qwen2, Qwen3)}
    run_ranks(UNEVEN.world_size, _equal, expected)
