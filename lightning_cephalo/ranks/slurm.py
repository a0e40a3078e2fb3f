"""Supports SLURM jobs on nodes of different sizes, which Lightning's own environment rejects."""

from __future__ import annotations

from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_cephalo.accelerator.host import tasks_per_node


class UnevenSLURMEnvironment(SLURMEnvironment):
    """SLURM environment of an srun whose nodes have different numbers of tasks.

    Use ``Trainer(strategy="cephalo", plugins=[UnevenSLURMEnvironment()], ...)`` under ``srun
    --nodes=2 --ntasks=3`` or in a heterogeneous job. ``devices`` is the number of this node's
    tasks; ``"auto"`` finds it on nodes whose GPUs all take part. ``num_nodes`` is the number of all
    nodes.
    """

    @staticmethod
    def _validate_srun_variables() -> None:
        """Skip Lightning's check, which rejects ``--ntasks`` without ``--ntasks-per-node``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if the Trainer's settings differ from those of srun on this node."""
        tasks = tasks_per_node()
        if tasks is None:
            return
        if num_nodes != len(tasks):
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but srun runs tasks on {len(tasks)} nodes. "
                f"Set num_nodes={len(tasks)}."
            )
        own = tasks[self.node_rank()]
        if num_devices != own:
            raise ValueError(
                f"Trainer(devices={num_devices}), but srun runs {own} tasks on node "
                f"{self.node_rank()} (all nodes: {', '.join(map(str, tasks))}). Set "
                f"devices={own} there, or start {num_devices} tasks on it."
            )
