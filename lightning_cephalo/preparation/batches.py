"""What a rank gets of each batch: from the loaders, for hooks, and for its microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lightning_cephalo.data.batch_layout import BatchLayout
from lightning_cephalo.data.cutting import BatchCutter, EmptyPredictions, shown
from lightning_cephalo.data.loaders import agreed_seed, dealt_loader, original_of, own_part
from lightning_cephalo.data.passes import Dealing
from lightning_cephalo.plan import Plan, RankPlan
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.ranks.control import ControlGroup


class Batches:
    """Deals loaders by a plan, and cuts what this rank gets of them."""

    def __init__(self, job: Job, control: ControlGroup, *, is_manual: bool) -> None:
        self._job, self._control, self._is_manual = job, control, is_manual
        self._layouts = itertools.cycle(job.loaders.layouts)
        self.cutter = BatchCutter((), None, ())
        self.predictions = EmptyPredictions()
        self.lacks: tuple[bool, ...] = (False,)  # of each loader, all samples of the present step

    def follow(self, own: RankPlan) -> None:
        """Cut this rank's batches by its part of a plan from now on."""
        # with one microbatch on each rank a batch stays whole
        sizes = () if self._is_manual else own.microbatch_sizes
        loaders = self._job.loaders
        self.cutter = BatchCutter(loaders.layouts, loaders.spec, sizes)

    def shown(self, batch: Any, trains: bool) -> Any:
        """Return what hooks see of a batch: without samples a repeated one that counts nowhere."""
        seen, self.lacks = shown(batch, self.cutter.spec if trains else None)
        return seen

    @property
    def are_lacking(self) -> bool:
        """Whether this rank has no samples in the present step, of any loader."""
        return all(self.lacks)

    def cut(self, batch: Any) -> tuple[list[tuple[Any, int]], Exception | None]:
        """Return the microbatches of a batch with their samples, or none and the error."""
        try:
            return self.cutter.cut(batch, self.lacks), None
        except Exception as failure:
            return [], failure

    def dealt(
        self,
        loader: Any,
        plan: Plan | None,
        before_reading: Callable[[], None],
        *,
        is_divided: bool,
        epoch: int,
        seed: int | None = None,
    ) -> Any:
        """Return a loader that yields this rank's share of each global batch; collective.

        Without ``plan`` it is dealt evenly, for evaluation. ``before_reading`` may communicate; it
        comes before ranks agree on a batch of a stream. ``is_divided``: the user deals.
        """
        control, options = self._control, self._job.options
        if control.world_size == 1 and (is_divided or plan is None):
            return original_of(loader)
        agreed = agreed_seed(control.broadcast)
        layout, sizes = BatchLayout(splitter=options.split_batch), (1,) * control.world_size
        if plan is not None:
            sizes = tuple(rank.batch_size for rank in plan.ranks)
            # Lightning passes all training dataloaders each time, in the order of their tree
            layout = next(self._layouts, layout)

        def gather(own: Any) -> Any:
            before_reading()
            return control.gather(own)

        dealing = Dealing(
            control.rank,
            sizes,
            agreed if seed is None else seed,
            control.broadcast,
            gather,
            epoch=epoch,
            trains=plan is not None,
            every_rank=plan is not None and self._is_manual,
            global_batch_size=None if plan is None else options.global_batch_size,
            layout=layout,
        )
        return (own_part if is_divided else dealt_loader)(loader, dealing)
