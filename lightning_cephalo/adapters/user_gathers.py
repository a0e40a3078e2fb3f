"""Rejects collectives of the user's own step if some rank would not join them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from zlib import crc32

from torch import Tensor

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup


class UserGathers:
    """Checks collectives inside steps, where ranks may run different numbers of microbatches."""

    def __init__(self, control: ControlGroup, has_one_microbatch: bool) -> None:
        self._control = control
        self._has_one_microbatch = has_one_microbatch
        self._stages: set[str] = set()
        self._own = (0, False)
        # what every rank runs in this step, where that is known
        self._counts: tuple[int, ...] = ()
        self._name = "all_gather"
        self._planned: tuple[int, ...] = ()  # empty while ranks are measured
        self._all_refused = False

    def expect(self, planned: Sequence[int]) -> None:
        """Set how many microbatches the plan gives every rank."""
        self._planned = tuple(planned)

    @contextmanager
    def refused(self) -> Generator[None, None, None]:
        """Refuse every collective in a ``with`` block, in which some ranks may run no step."""
        self._all_refused = True
        try:
            yield
        finally:
            self._all_refused = False

    def check(self, planned: Sequence[int]) -> None:
        """Reject other numbers of microbatches if steps would hang with them."""
        if "training" in self._stages:
            _refuse_unequal_collectives(planned, self._name)

    def before_step(self, stage: str, microbatches: int, *, failed: bool = False) -> None:
        """Check that all ranks would join, if the steps of this stage gather; collective.

        A rank without samples comes to no gather of an evaluation step, and cannot be asked there.
        """
        self._own = (microbatches, failed)
        if stage == "evaluation" or stage in self._stages:
            self._exchange()
        if stage in self._stages:
            _refuse_unequal_collectives(self._counts, self._name)

    def called(self, training: bool, name: str = "all_gather", *, takes_all: bool = True) -> None:
        """Reject a collective in a microbatch that some rank would not join; collective.

        Unless it ``takes_all`` ranks, others would not come here, and cannot be asked.
        """
        if self._all_refused:
            raise UnsupportedError(f"{name}() inside a step that some ranks do not run.")
        if not takes_all:
            return
        if not training:
            # an evaluation step is one call on each rank with samples, and none on others
            _refuse_unequal_collectives(self._counts, name)
            self._stages.add("evaluation")
        elif not self._planned:  # the step is measured
            if not self._has_one_microbatch:
                raise _refusal(name, "different numbers of")
        else:
            _refuse_unequal_collectives(self._planned, name)
            if "training" not in self._stages:
                # The first gather: all ranks are in their first microbatch, so they can still
                # communicate. From now on they compare before each step, since a smaller last
                # step may differ.
                self._stages.add("training")
                self._name = name
                self._exchange()
                _refuse_unequal_collectives(self._counts, self._name)

    def _exchange(self) -> None:
        microbatches, failed = self._own
        rows = self._control.gather([float(microbatches), float(failed)])
        # where a batch cannot be cut the step itself raises on all ranks
        is_known = not any(failed for _, failed in rows)
        self._counts = tuple(int(count) for count, _ in rows) if is_known else ()


def require_equal_shapes(tensor: Tensor, control: ControlGroup) -> None:
    """Reject a gather of tensors that differ in shape or dtype; collective.

    gloo and NCCL would end a process or return wrong values, without an explanation.
    """
    own = f"{list(tensor.shape)} of {tensor.dtype}"
    checksums = control.gather(float(crc32(own.encode())))
    if len(set(checksums)) > 1:
        everyones = "; ".join(
            f"rank {rank}: {each}" for rank, each in enumerate(control.gather(own))
        )
        raise UnsupportedError(
            f"all_gather() of tensors that differ between ranks ({everyones}). Ranks have different"
            " numbers of samples. Gather sums and counts, or, for one row per sample, call"
            " torch.distributed.all_gather_object(rows, tensor.cpu()) with rows = [None] *"
            " trainer.world_size in a hook, then torch.cat(rows)."
        )


def _refuse_unequal_collectives(counts: Sequence[int], name: str) -> None:
    """Raise if ranks run different numbers of microbatches."""
    if len(set(counts)) > 1:
        raise _refusal(name, str(list(counts)))


def _refusal(name: str, counts: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}() inside a step, of which ranks run {counts} microbatches: it would hang. For a"
        " loss over the samples of all ranks use lightning_cephalo.loss_over_batch(). Or let every"
        " rank run one microbatch: CephaloStrategy(planner=Planner(single_microbatch=True)), with"
        " DataLoader(drop_last=True) if it is a smaller last step. Or gather after the step, in a"
        " hook."
    )
