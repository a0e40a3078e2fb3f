"""Where the loaders of a running training stand, and from which step on they deal other sizes.

Workers prefetch, so ranks have dealt different numbers of steps. The first step of which no rank
has dealt anything is the first that can have other sizes: nothing that is loaded is lost, and every
step keeps the samples of one device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.passes import Passes
from lightning_cephalo.data.rank_loaders import OwnPart
from lightning_cephalo.plan import Plan
from lightning_cephalo.ranks.control import ControlGroup


class Dealt(NamedTuple):
    """A rebuilt loader, and the passes over it; None if its ranks read samples of their own."""

    loader: Any
    passes: Passes | None

    @property
    def ahead(self) -> int:
        """Steps that the loader, and Lightning, may have read ahead of training."""
        workers = getattr(self.loader, "num_workers", 0)
        return workers * (getattr(self.loader, "prefetch_factor", None) or 2) + 1


def dealt_in(loader: Any) -> Dealt:
    """Return a rebuilt loader with its passes."""
    passes = getattr(loader, "passes", None)
    return Dealt(loader, passes if isinstance(passes, Passes) else None)


Mark = tuple[tuple[Passes, int], ...]
"""Where the loaders stand: their passes, and how many have begun."""


class DealtLoaders:
    """The training dataloaders of a running training."""

    def __init__(self, view: TrainerView) -> None:
        combined = view.training_loaders
        loaders = [] if combined is None else combined.flattened
        self.all = [dealt_in(loader) for loader in loaders]
        self.dealt = [each.passes for each in self.all if each.passes is not None]
        # whether the shorter ones of several begin anew inside of an epoch
        self.cycle = len(self.all) > 1 and combined._mode == "max_size_cycle"

    def refuse_other_sizes(self, old: Plan, new: Plan) -> None:
        """Raise if the loaders cannot deal the new plan's sizes."""
        why = ""
        if any(isinstance(loader, OwnPart) for loader, _ in self.all):
            why = "each rank reads a stream of its own, in batches of fixed sizes"
        elif self.cycle:
            why = (
                "of several training dataloaders the shorter ones begin anew inside of an epoch"
                " (CombinedLoader mode 'max_size_cycle'; 'min_size' and 'max_size' can change)"
            )
        if why and not deal_alike(old, new):
            raise UnsupportedError(
                f"The new plan has other batches, but {why}. A plan for this run may change shares,"
                " microbatches, recomputation, offloading and resharding; keep its batches."
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
        steps = [
            passes.dealt_steps(trained, each.ahead)
            for each in self.all
            if (passes := each.passes) is not None
        ]
        own = [math.inf if step is None else float(step) for step in steps]
        return control.max(max([float(trained), *own]))

    def deal(self, plan: Plan, from_step: float) -> None:
        """Deal the sizes of a plan from a step on, and in all later epochs."""
        sizes = tuple(each.batch_size for each in plan.ranks)
        for passes in self.dealt:
            passes.running.change(sizes, from_step)


class SamplerTakeover:
    """Takes over the insertion of samplers, which leaves the user's own loaders, until given back.

    ``deals`` is False if the user deals the samples, and has set ``use_distributed_sampler=False``.
    """

    deals = _is_taken = False

    def take(self, view: TrainerView) -> None:
        """Take over; does nothing the second time."""
        connector = view.connector("accelerator")
        if not self._is_taken:
            self.deals, self._is_taken = connector.use_distributed_sampler, True
        connector.use_distributed_sampler = False

    def give_back(self, view: TrainerView) -> None:
        """Restore the user's own setting."""
        if self._is_taken:
            view.connector("accelerator").use_distributed_sampler = self.deals
        self.deals = self._is_taken = False


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
