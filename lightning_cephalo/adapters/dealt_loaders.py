"""Where the loaders of a running training stand, and from which step on they deal other sizes.

Workers prefetch, so ranks have dealt different numbers of steps. The first step of which no rank
has dealt anything is the first that can have other sizes: nothing that is loaded is lost, and every
step keeps the samples of one device.
"""

from __future__ import annotations

import math
from typing import Any

from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.passes import Passes
from lightning_cephalo.data.rank_loaders import OwnPart
from lightning_cephalo.plan import Plan
from lightning_cephalo.ranks.control import ControlGroup


def passes_of(loader: Any) -> Passes | None:
    """Return the passes over a rebuilt loader; None if its ranks read samples of their own."""
    passes = getattr(loader, "passes", None)
    return passes if isinstance(passes, Passes) else None


def steps_ahead(loader: Any) -> int:
    """Return how many steps a loader, and Lightning, may have read ahead of training."""
    workers = getattr(loader, "num_workers", 0)
    return workers * (getattr(loader, "prefetch_factor", None) or 2) + 1


Mark = tuple[tuple[Passes, int], ...]
"""Where the loaders stand: their passes, and how many have begun."""


class DealtLoaders:
    """The training dataloaders of a running training."""

    def __init__(self, view: TrainerView) -> None:
        combined = view.training_loaders
        self.all = [] if combined is None else [(x, passes_of(x)) for x in combined.flattened]
        self.dealt = [passes for _, passes in self.all if passes is not None]
        # whether the shorter ones of several begin anew inside of an epoch
        self.cycle = len(self.all) > 1 and combined._mode == "max_size_cycle"

    def refuse_other_sizes(self, old: Plan, new: Plan) -> None:
        """Raise if the loaders cannot deal the new plan's sizes."""
        if deal_alike(old, new):
            return
        if self.cycle or any(isinstance(loader, OwnPart) for loader, _ in self.all):
            raise UnsupportedError(
                "The new plan has other batches, but the dataloaders cannot change theirs: each"
                " rank reads a stream of its own, or CombinedLoader begins the shorter ones anew"
                " (mode 'max_size_cycle'). Keep the batches: a plan may change shares,"
                " microbatches, recomputation, offloading and resharding."
            )

    def mark(self) -> Mark:
        """Return where the loaders stand."""
        return tuple((each, each.begun) for each in self.dealt)

    def are_behind(self, mark: Mark, batch: int) -> bool:
        """Whether ``batch`` is of a later pass than a mark; loaders of others have none."""
        if batch and any(begun for _, begun in mark):
            return False
        return not self.dealt or self.mark() != mark

    def first_free_step(self, trained: int, control: ControlGroup) -> float:
        """Return the first step of which no rank has dealt anything; collective.

        Infinite: only the next epoch can be dealt otherwise.
        """
        first = float(trained)
        for loader, passes in self.all:
            if passes is not None:
                dealt = passes.dealt_steps(trained, steps_ahead(loader))
                first = max(first, math.inf if dealt is None else dealt)
        return control.max(first)

    def deal(self, plan: Plan, from_step: float) -> None:
        """Deal the sizes of a plan from a step on, and in all later epochs."""
        sizes = tuple(each.batch_size for each in plan.ranks)
        for passes in self.dealt:
            passes.running.change(sizes, from_step)


class SamplerTakeover:
    """Takes over the insertion of samplers, which leaves the user's own loaders, until given back.

    ``deals`` is False if the user deals the samples, and has set ``use_distributed_sampler=False``.
    """

    _own: bool | None = None

    @property
    def deals(self) -> bool:
        return bool(self._own)

    def take(self, view: TrainerView) -> None:
        """Take over; does nothing the second time."""
        connector = view.connector("accelerator")
        if self._own is None:
            self._own = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def give_back(self, view: TrainerView) -> None:
        """Restore the user's own setting."""
        if self._own is not None:
            view.connector("accelerator").use_distributed_sampler = self._own
        self._own = None


def refuse_combined_evaluation(loader: Any) -> None:
    """Raise if an evaluation ends, or repeats samples, by the length of a rank's part."""
    if loader._mode in ("min_size", "max_size_cycle") and len(loader.flattened) > 1:
        raise UnsupportedError(
            f"CombinedLoader(..., {loader._mode!r}) in an evaluation counts by the shortest or the"
            " longest dataloader. Each rank would do so with its own part, so that other samples"
            " count than on one device. Use the mode 'sequential' or 'max_size', which take every"
            " sample once."
        )


def deal_alike(one: Plan, other: Plan) -> bool:
    """Return whether loaders yield the same for two plans."""
    return [rank.batch_size for rank in one.ranks] == [rank.batch_size for rank in other.ranks]
