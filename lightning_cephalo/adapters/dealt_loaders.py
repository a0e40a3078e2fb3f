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
from lightning_cephalo.data.collate import collating_apart
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
    """Where the loaders stand: what deals them, and the passes that each has begun."""

    dealers: tuple[RankBatchSampler | DealtStream, ...]
    passes: tuple[int, ...]

    @property
    def have_begun(self) -> bool:
        """Whether any pass has begun."""
        return any(self.passes)


class DealtLoaders:
    """The training dataloaders of a running training."""

    def __init__(self, trainer: Trainer) -> None:
        self._combined: Any = trainer.fit_loop._combined_loader
        self._loaders = [] if self._combined is None else list(self._combined.flattened)
        found = [dealt_in(loader) for loader in self._loaders]
        self._dealers = tuple(each for each in found if each is not None)

    def refuse_other_sizes(self, old: Plan, new: Plan) -> None:
        """Raise if the loaders cannot deal the new plan's sizes."""
        batches = not _same_batches(old, new)
        for loader in self._loaders:
            apart = collating_apart(loader) is not None
            if not batches and (_same_parts(old, new) or not apart):
                continue
            why = self._fixed(loader, apart)
            if why is not None:
                sizes = "microbatch_sizes" if apart else "batches"
                raise UnsupportedError(
                    f"The new plan has other {sizes}, but {why}. A plan for this run may change"
                    f" shares, recomputation, offloading and resharding; keep its {sizes}."
                )

    def refuse_other_microbatches(self, old: Plan, new: Plan) -> None:
        """Raise if batches that are loaded cannot be cut in the new plan's microbatches."""
        if not _same_parts(old, new) and any(map(collating_apart, self._loaders)):
            raise UnsupportedError(
                "With collate_per_microbatch=True the microbatches of batches that are loaded stay"
                " as they are."
            )

    def _fixed(self, loader: Any, apart: bool) -> str | None:
        """Return why a loader cannot deal other sizes; None if it can."""
        is_stream = isinstance(loader, LockStepLoader)
        if is_stream and not isinstance(loader, DealtStream):
            return "each rank reads a stream of its own, in batches of fixed sizes"
        if (is_stream or apart) and getattr(loader, "persistent_workers", False):
            return "persistent_workers=True keeps workers that hold the sizes of batches"
        if len(self._dealers) > 1 and self._combined._mode == "max_size_cycle":
            lengths = {known_length(dealer) for dealer in self._dealers}
            if len(lengths) > 1 or None in lengths:
                return (
                    "of several training dataloaders the shorter ones begin anew inside of an epoch"
                    " (CombinedLoader mode 'max_size_cycle'; 'min_size' and 'max_size' can change)"
                )
        return None

    def mark(self) -> Mark:
        """Return where the loaders stand."""
        return Mark(self._dealers, tuple(dealer.passes for dealer in self._dealers))

    def is_behind(self, mark: Mark) -> bool:
        """Whether another pass may have begun since a mark; loaders of others have none."""
        now = self.mark()
        if not now.dealers:
            return True
        same = len(now.dealers) == len(mark.dealers) and all(
            a is b for a, b in zip(now.dealers, mark.dealers, strict=True)
        )
        return not same or now.passes != mark.passes

    def first_free_step(self, trained: int, control: ControlGroup) -> float:
        """Return the first step of which no rank has dealt anything; collective.

        Infinite: only the next epoch can be dealt otherwise.
        """
        own = float(trained)
        for loader in self._loaders:
            dealer = dealt_in(loader)
            if dealer is None:
                continue
            dealt = dealer.dealt_steps(trained, steps_ahead(loader))
            # workers hold the sizes of microbatches until their pass is over
            has_workers = bool(getattr(loader, "num_workers", 0))
            is_held = has_workers and collating_apart(loader) is not None
            own = max(own, float("inf") if dealt is None or is_held else float(dealt))
        return control.max(own)

    def deal_alike(self, old: Plan, new: Plan) -> bool:
        """Return whether the loaders yield the same for two plans."""
        apart = any(map(collating_apart, self._loaders))
        return _same_batches(old, new) and (_same_parts(old, new) or not apart)

    def deal(self, plan: Plan, rank: int, from_step: float) -> None:
        """Deal the sizes of a plan from a step on, and in all later epochs."""
        sizes, own = [each.batch_size for each in plan.ranks], plan.ranks[rank].microbatch_sizes
        for loader in self._loaders:
            dealer, collate = dealt_in(loader), collating_apart(loader)
            if isinstance(dealer, DealtStream):
                apart = None if collate is None else own
                dealer.change_batch_sizes(sizes, from_step=from_step, microbatch_sizes=apart)
            elif dealer is not None:
                dealer.change_batch_sizes(sizes, from_step=from_step)
                if collate is not None:  # running workers hold copies
                    collate.microbatch_sizes = own


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


def _same_batches(one: Plan, other: Plan) -> bool:
    return [rank.batch_size for rank in one.ranks] == [rank.batch_size for rank in other.ranks]


def _same_parts(one: Plan, other: Plan) -> bool:
    return [r.microbatch_sizes for r in one.ranks] == [r.microbatch_sizes for r in other.ranks]
