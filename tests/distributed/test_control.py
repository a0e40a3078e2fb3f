"""Messages between ranks: what they carry, and that all ranks raise together."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from launch import run_ranks

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.ranks.control import ControlGroup

SECONDS = 5.0


def _answers(rank: int) -> None:
    control = ControlGroup(dist.new_group())
    world_size = control.world_size
    ranks = list(range(world_size))
    assert control.gather(rank / 3) == [other / 3 for other in ranks]
    assert control.gather([float(rank), -1.0]) == [[float(other), -1.0] for other in ranks]
    assert control.gather((rank, None)) == [(other, None) for other in ranks]
    assert control.gather("a" * rank) == ["a" * other for other in ranks]
    assert control.gather(["a"] * rank + ["b"]) == [["a"] * other + ["b"] for other in ranks]
    last = rank == world_size - 1
    assert control.all(True) and not control.all(not last)
    assert control.any(last) and not control.any(False)
    assert control.any([False, last, True]) == [False, True, True]
    assert control.any([]) == []
    assert control.max(-rank) == 0
    assert control.broadcast({"rank": rank}, source=world_size - 1) == {"rank": world_size - 1}
    assert control.together("counting", lambda: rank) == rank


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_the_same_answers(world_size):
    run_ranks(world_size, _answers)


def test_a_barrier_waits_for_the_last_rank():
    def arrives(rank: int) -> float:
        control = ControlGroup(dist.new_group())
        time.sleep(0.2 * rank)
        start = time.monotonic()
        control.barrier()
        return start, time.monotonic()

    (_, first_left), (last_came, _) = run_ranks(2, arrives)
    assert first_left >= last_came


def _fails(rank: int, failing: tuple[int, ...]) -> None:
    control = ControlGroup(dist.new_group())
    failure = KeyError(f"of rank {rank}")

    def read() -> None:
        if rank in failing:
            raise failure

    start = time.monotonic()
    with pytest.raises((KeyError, RemoteRankError)) as caught:
        control.together("reading" if rank else "looking", read)
    assert time.monotonic() - start < SECONDS
    if rank in failing:
        assert caught.value is failure and control.raised is failure
    else:
        assert control.raised is None
        others = f" (and ranks {list(failing[1:])})" if failing[1:] else ""
        doing = "reading" if failing[0] else "looking"
        assert str(caught.value) == (
            f"Rank {failing[0]}{others} failed while {doing}: KeyError: 'of rank {failing[0]}'"
        )
    assert control.all(True)


@pytest.mark.parametrize("failing", [(0,), (1,), (1, 2)])
def test_a_failure_is_raised_on_every_rank_with_what_the_failing_one_was_doing(failing):
    run_ranks(4, _fails, failing)
