"""A rank that runs out of memory in a step: every rank says which, where, and what would help."""

from __future__ import annotations

import time

import pytest
import torch
from profiled import GPT, SOON_S, fit, in_ranks, loader

from lightning_cephalo import Plan, RankPlan

PLAN = Plan(
    tuple(RankPlan((4,), 0.5, memory_bytes=4e6, capacity_bytes=4.6e6) for _ in range(2)),
)
HELP = "What would help: a lower CephaloStrategy(memory_cap=...)"
PLANNED = "The plan counts on 3.8 MiB. One for 3.1 MiB on this rank would leave room."


class Hungry(GPT):
    """Wants much in one of its units from the second step on."""

    def __init__(self, rank: int, backward: bool) -> None:
        super().__init__(width=64, depth=3, context=16)
        self.hungry_rank, self.in_backward = rank, backward
        inside = next(self.network.blocks[1].children())
        inside.register_forward_pre_hook(self._eat)

    def _eat(self, *_: object) -> None:
        hooks = self.trainer.strategy.session.model.executor.hooks
        is_now = hooks.in_backward == self.in_backward
        if is_now and self.global_rank == self.hungry_rank and self.global_step:
            torch.zeros(10_000_000)


def failure(model, capacity_bytes, **strategy):
    started_s = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        options = {"strategy": {"plan": PLAN, **strategy}, "max_steps": 4}
        fit(model, loader(), capacity_bytes=capacity_bytes, **options)
    return str(error.value), time.monotonic() - started_s


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_in_a_unit(backward):
    doing = "backward" if backward else "forward"
    found = in_ranks(2, lambda: failure(Hungry(1, backward), (4_600_000, 4_600_000)))
    for message, seconds in found:
        place = f"in the {doing} of unit 'network.blocks.1', microbatch 1 of 1"
        assert f"Rank 1 ran out of memory {place}: " in message
        assert "Tried to allocate 40000000 bytes" in message
        assert PLANNED in message and HELP in message
        assert seconds < SOON_S


def test_in_the_optimizer():
    model = GPT(width=64, depth=12, context=16)
    for message, seconds in in_ranks(
        2, lambda: failure(model, (10**9, 4_600_000), early_update=False)
    ):
        assert "Rank 1 ran out of memory in the optimizer's step: " in message
        assert "Rank 0 ran" not in message
        assert PLANNED in message and HELP in message
        assert seconds < SOON_S
