"""Changes how the loaders of a running training deal samples, at a step that no rank has dealt.

Workers prefetch, so ranks have dealt different numbers of steps. The first step of which no rank
has dealt anything is the first that can have other sizes: nothing that is loaded is lost, and every
step keeps the samples of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_cephalo.adapters.resuming import dealt_in, steps_ahead
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.collate import RankCollate
from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.lockstep import LockStepLoader
from lightning_cephalo.data.samplers import RankBatchSampler
from lightning_cephalo.data.streams import DealtStream
from lightning_cephalo.plan import Plan
from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class Mark:
    """Where the loaders stand: their samplers, and the passes that each has begun."""

    samplers: tuple[RankBatchSampler, ...]
    passes: tuple[int, ...]

    @property
    def have_begun(self) -> bool:
        """Whether any pass has begun."""
        return any(self.passes)


class DealtLoaders:
    """The training dataloaders of a running training.

    Args:
        trainer: The trainer that is fitting.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._combined: Any = trainer.fit_loop._combined_loader
        self._loaders = [] if self._combined is None else list(self._combined.flattened)
        found = [dealt_in(loader) for loader in self._loaders]
        self._samplers = tuple(each for each in found if isinstance(each, RankBatchSampler))

    def refuse_other_sizes(self, old: Plan, new: Plan) -> None:
        """Raise if the loaders cannot deal the new plan's sizes.

        Args:
            old: The plan whose sizes they deal now.
            new: The new plan.

        Raises:
            UnsupportedError: The message names the loader, and what may change.
        """
        batches = [rank.batch_size for rank in old.ranks] != [r.batch_size for r in new.ranks]
        parts = [r.microbatch_sizes for r in old.ranks] != [r.microbatch_sizes for r in new.ranks]
        for loader in self._loaders:
            apart = _microbatches_of(loader) is not None
            if not batches and not (parts and apart):
                continue
            why = self._fixed(loader, apart)
            if why is not None:
                sizes = "microbatch_sizes" if apart else "batches"
                raise UnsupportedError(
                    f"The new plan has other {sizes}, but {why}. A plan for this run may change"
                    f" shares, recomputation, offloading and resharding; keep its {sizes}."
                )

    def refuse_other_microbatches(self, old: Plan, new: Plan) -> None:
        """Raise if batches that are loaded cannot be cut in the new plan's microbatches.

        Args:
            old: The plan by which they were loaded.
            new: A plan with the same batches.

        Raises:
            UnsupportedError: If microbatches were collated apart.
        """
        same = [r.microbatch_sizes for r in old.ranks] == [r.microbatch_sizes for r in new.ranks]
        if not same and any(_microbatches_of(loader) is not None for loader in self._loaders):
            raise UnsupportedError(
                "With collate_per_microbatch=True the microbatches of batches that are loaded stay"
                " as they are."
            )

    def _fixed(self, loader: Any, apart: bool) -> str | None:
        """Return why a loader cannot deal other sizes; None if it can."""
        if isinstance(loader, DealtStream):
            return "the training dataloader is a stream, whose workers hold the sizes of batches"
        if isinstance(loader, LockStepLoader):
            return "each rank reads a stream of its own, in batches of fixed sizes"
        if apart:
            return "collate_per_microbatch=True fixes sizes in the dataloader's workers"
        if len(self._samplers) > 1 and self._combined._mode == "max_size_cycle":
            lengths = {known_length(sampler) for sampler in self._samplers}
            if len(lengths) > 1 or None in lengths:
                return (
                    "of several training dataloaders the shorter ones begin anew inside of an epoch"
                    " (CombinedLoader mode 'max_size_cycle'; 'min_size' and 'max_size' can change)"
                )
        return None

    def mark(self) -> Mark:
        """Return where the loaders stand."""
        return Mark(self._samplers, tuple(sampler.passes for sampler in self._samplers))

    def is_behind(self, mark: Mark) -> bool:
        """Whether another pass may have begun since a mark; loaders of others have none."""
        now = self.mark()
        if not now.samplers:
            return True
        same = len(now.samplers) == len(mark.samplers) and all(
            a is b for a, b in zip(now.samplers, mark.samplers, strict=True)
        )
        return not same or now.passes != mark.passes

    def first_free_step(self, trained: int, control: ControlGroup) -> float:
        """Return the first step of the epoch of which no rank has dealt anything; collective.

        Args:
            trained: Batches of this epoch that have begun to train.
            control: Messages between ranks.

        Returns:
            The step; infinite if only the next epoch can be dealt otherwise.
        """
        own = float(trained)
        for loader in self._loaders:
            sampler = dealt_in(loader)
            if isinstance(sampler, RankBatchSampler):
                dealt = sampler.dealt_steps(trained, steps_ahead(loader))
                own = max(own, float("inf") if dealt is None else float(dealt))
        return control.max(own)

    def deal(self, sizes: Sequence[int], from_step: float) -> None:
        """Deal other sizes from a step on, and in all later epochs."""
        for sampler in self._samplers:
            sampler.change_batch_sizes(sizes, from_step=from_step)


def _microbatches_of(loader: Any) -> tuple[int, ...] | None:
    collate = getattr(loader, "collate_fn", None)
    own = getattr(collate, "own", collate)  # a stream's collate holds one of its own
    return own.microbatch_sizes if isinstance(own, RankCollate) else None
