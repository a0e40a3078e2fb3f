"""Whose samples are whose: takes the user's dataloaders over from Lightning and deals them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import RunningStage

from lightning_cephalo.adapters.sharded import ShardedStrategy
from lightning_cephalo.data import agreed_seed, rebuild_eval_loader, rebuild_train_loader
from lightning_cephalo.data.cutting import BatchCutter
from lightning_cephalo.preparation.prepare import PlanningOptions

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DealingStrategy(ShardedStrategy):
    """Deals the batches of dataloaders by the plan.

    Args:
        planning: What the user said about batches.
        options: Those of its base.
    """

    def __init__(self, *, planning: PlanningOptions, **options: Any) -> None:
        super().__init__(**options)
        self._planning = planning
        self._cutter: BatchCutter | None = None
        self._users_sampler_flag: bool | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        self._take_over_samplers()

    def _take_over_samplers(self) -> None:
        """Keep Lightning from putting a DistributedSampler into loaders that we deal ourselves.

        Private, and the only way to get the user's own loader (reference: lightning 3.3).
        """
        assert self.lightning_module is not None
        connector = self.lightning_module.trainer._accelerator_connector
        if self._users_sampler_flag is None:
            self._users_sampler_flag = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def _give_back_samplers(self, trainer: Trainer) -> None:
        if self._users_sampler_flag is not None:
            trainer._accelerator_connector.use_distributed_sampler = self._users_sampler_flag
            self._users_sampler_flag = None

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None and self._groups is not None
        if not self._users_sampler_flag:
            return dataloader  # use_distributed_sampler=False: the user deals the samples himself
        trainer = self.lightning_module.trainer
        control = self._groups.control
        options: dict[str, Any] = {
            "rank": self.global_rank,
            "seed": self._seed(),
            "broadcast": control.broadcast,
            "all_have_next": control.all,
            "epoch": trainer.current_epoch,
        }
        if trainer.state.stage == RunningStage.TRAINING and self.plan is not None:
            rank_plan = self.plan.ranks[self.global_rank]
            per_microbatch = self._planning.collate_per_microbatch
            return rebuild_train_loader(
                dataloader,
                batch_sizes=[rank.batch_size for rank in self.plan.ranks],
                global_batch_size=self._planning.global_batch_size,
                microbatch_sizes=rank_plan.microbatch_sizes if per_microbatch else None,
                layout=self._cutter.layouts[0] if self._cutter is not None else None,
                **options,
            )
        return rebuild_eval_loader(dataloader, world_size=self.world_size, **options)

    def _seed(self) -> int:
        assert self._groups is not None
        return agreed_seed(self._groups.control.broadcast)
