"""Changes how the loaders of a running training deal samples, at a step that no rank has dealt.

Workers prefetch, so ranks have dealt different numbers of steps. The first step of which no rank
has dealt anything is the first that can have other sizes: nothing that is loaded is lost, and every
step keeps the samples of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_cephalo.adapters.resuming import dealt_in, steps_ahead
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.lockstep import LockStepLoader
from lightning_cephalo.data.passes import Passes
from lightning_cephalo.data.streams import DealtStream
from lightning_cephalo.plan import Plan
from lightning_cephalo.ranks.control import ControlGroup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class Mark:
    """Where the loaders stand: their passes, and how many have begun."""

    dealt: tuple[Passes, ...]
    begun: tuple[int, ...]

    @property
    def have_begun(self) -> bool:
        """Whether any pass has begun."""
        return any(self.begun)


class DealtLoaders:
    """The training dataloaders of a running training."""

    def __init__(self, trainer: Trainer) -> None:
        self._combined: Any = trainer.fit_loop._combined_loader
        self._loaders = [] if self._combined is None else list(self._combined.flattened)
        found = [dealt_in(loader) for loader in self._loaders]
        self._dealt = tuple(each for each in found if each is not None)

    def refuse_other_sizes(self, old: Plan, new: Plan) -> None:
        """Raise if the loaders cannot deal the new plan's sizes."""
        for loader in self._loaders if not deal_alike(old, new) else ():
            why = self._fixed(loader)
            if why is not None:
                raise UnsupportedError(
                    f"The new plan has other batches, but {why}. A plan for this run may change"
                    " shares, microbatches, recomputation, offloading and resharding; keep its"
                    " batches."
                )

    def _fixed(self, loader: Any) -> str | None:
        """Return why a loader cannot deal other sizes; None if it can."""
        is_stream = isinstance(loader, LockStepLoader)
        if is_stream and not isinstance(loader, DealtStream):
            return "each rank reads a stream of its own, in batches of fixed sizes"
        if is_stream and getattr(loader, "persistent_workers", False):
            return "persistent_workers=True keeps workers that hold the sizes of batches"
        if len(self._dealt) > 1 and self._combined._mode == "max_size_cycle":
            lengths = {known_length(each) for each in self._loaders if dealt_in(each)}
            if len(lengths) > 1 or None in lengths:
                return (
                    "of several training dataloaders the shorter ones begin anew inside of an epoch"
                    " (CombinedLoader mode 'max_size_cycle'; 'min_size' and 'max_size' can change)"
                )
        return None

    def mark(self) -> Mark:
        """Return where the loaders stand."""
        return Mark(self._dealt, tuple(each.begun for each in self._dealt))

    def is_behind(self, mark: Mark) -> bool:
        """Whether another pass may have begun since a mark; loaders of others have none."""
        now = self.mark()
        if not now.dealt:
            return True
        return now != mark

    def first_free_step(self, trained: int, control: ControlGroup) -> float:
        """Return the first step of which no rank has dealt anything; collective.

        Infinite: only the next epoch can be dealt otherwise.
        """
        own = float(trained)
        for loader in self._loaders:
            passes = dealt_in(loader)
            if passes is not None:
                dealt = passes.dealt_steps(trained, steps_ahead(loader))
                own = max(own, float("inf") if dealt is None else float(dealt))
        return control.max(own)

    def deal(self, plan: Plan, from_step: float) -> None:
        """Deal the sizes of a plan from a step on, and in all later epochs."""
        sizes = [each.batch_size for each in plan.ranks]
        for dealt in self._dealt:
            dealt.change_batch_sizes(sizes, from_step=from_step)


class SamplerTakeover:
    """Takes over the insertion of samplers from a Trainer, until it is given back.

    ``deals`` is False if the user deals the samples, and has set ``use_distributed_sampler=False``.
    Private: ``_accelerator_connector`` is the only way to get the user's own loader;
    tests/lightning/test_data_order.py fails when it changes.
    """

    def __init__(self) -> None:
        self.deals = False
        self._is_taken = False

    def take(self, trainer: Trainer) -> None:
        """Take over; does nothing the second time."""
        connector = trainer._accelerator_connector
        if not self._is_taken:
            self.deals, self._is_taken = connector.use_distributed_sampler, True
        connector.use_distributed_sampler = False

    def give_back(self, trainer: Trainer) -> None:
        """Restore the Trainer's own setting."""
        if self._is_taken:
            trainer._accelerator_connector.use_distributed_sampler = self.deals
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
