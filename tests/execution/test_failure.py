"""What a rank does with an error of its own part of a step."""

from __future__ import annotations

import pytest
import torch

from lightning_cephalo.common.errors import RemoteRankError
from lightning_cephalo.execution.failure import Failure
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError, is_out_of_memory
from lightning_cephalo.plan.program import Instruction, Operation


class Stopped:
    """A microbatch of which only the stopping is looked at."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_stopped = False

    def abandon(self) -> None:
        self.is_stopped = True
        if self.error is not None:
            raise self.error


def failure_of(*microbatches: Stopped) -> Failure:
    failure = Failure(1, ["root", "block.0"])
    failure.begin(list(microbatches), "forward")
    return failure


def raising(error: BaseException):
    def function() -> None:
        raise error

    return function


def test_the_first_failure_stops_the_microbatches_and_later_work_is_not_begun():
    first, second = Stopped(), Stopped()
    failure = failure_of(first, second)
    error = ValueError("mine")
    failure.guarded(raising(error))
    assert first.is_stopped and second.is_stopped
    called = []
    failure.guarded(called.append, 1)
    assert not called
    assert failure.take() is error and failure.take() is None


def test_an_error_while_stopping_does_not_hide_the_first():
    failure = failure_of(Stopped(RuntimeError("second")), Stopped())
    error = ValueError("first")
    failure.note(error)
    assert failure.take() is error


def test_an_interrupt_is_no_failure_of_the_step():
    failure = failure_of(Stopped())
    with pytest.raises(KeyboardInterrupt):
        failure.guarded(raising(KeyboardInterrupt()))
    assert failure.error is None


OUT_OF_MEMORY = torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("optimizer's step", "in the optimizer's step:"),
        (Instruction(Operation.GATHER, 0), "in the gather of the root unit:"),
        (
            Instruction(Operation.FORWARD, 1, visit=0, microbatch=1),
            "in the forward of unit 'block.0', microbatch 2 of 2:",
        ),
        (Instruction(Operation.ARM, 1), "in the gradient of unit 'block.0':"),
    ],
)
def test_an_error_names_rank_and_place_and_what_was_planned(place, words):
    failure = failure_of(Stopped(), Stopped())
    failure.place, failure.planned_memory = place, "The plan counts on 7 GiB."
    failure.note(OUT_OF_MEMORY)
    message = str(failure.take())
    assert message.startswith("Rank 1 ran out of memory")
    assert words in message and "2.00 GiB. The plan counts on 7 GiB." in message
    assert "memory_cap" in message


def test_a_rank_without_memory_for_a_collective_takes_part_without_its_microbatches():
    microbatch, tries = Stopped(), []
    failure = failure_of(microbatch)

    def gather() -> None:
        tries.append(microbatch.is_stopped)
        if not microbatch.is_stopped:
            raise OUT_OF_MEMORY

    failure.with_memory(gather)
    assert tries == [False, True]
    assert isinstance(failure.take(), OutOfMemoryInStepError)


def test_a_rank_that_has_nothing_to_give_up_raises():
    with pytest.raises(OutOfMemoryInStepError):
        failure_of().with_memory(raising(OUT_OF_MEMORY))


def test_other_errors_of_a_collective_are_not_tried_again():
    failure = failure_of(Stopped())
    with pytest.raises(ValueError, match="mine"):
        failure.with_memory(raising(ValueError("mine")))


def test_only_what_is_not_yet_explained_is_explained():
    failure = failure_of()
    remote, plain = RemoteRankError("rank 0: out of memory"), ValueError("mine")
    assert failure.explain(remote) is remote and failure.explain(plain) is plain
    once = failure.explain(OUT_OF_MEMORY)
    assert isinstance(once, OutOfMemoryInStepError) and failure.explain(once) is once


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OUT_OF_MEMORY, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
        (torch.distributed.DistBackendError("NCCL error: out of memory"), False),
    ],
)
def test_what_is_taken_for_a_lack_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
