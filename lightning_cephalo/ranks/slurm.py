"""SLURM with nodes of different size, which Lightning's own environment refuses."""

from __future__ import annotations

from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_cephalo.accelerator.host import tasks_per_node


class UnevenSLURMEnvironment(SLURMEnvironment):
    """Ranks of an srun whose nodes have different numbers of tasks.

    ``Trainer(strategy="cephalo", plugins=[UnevenSLURMEnvironment()], ...)`` under ``srun --nodes=2
    --ntasks=3`` or a heterogeneous job. ``devices`` is the number of this node's tasks, which
    ``"auto"`` finds on nodes whose GPUs all take part; ``num_nodes`` that of all nodes.
    """

    @staticmethod
    def _validate_srun_variables() -> None:
        """Private: Lightning's refuses ``--ntasks`` without ``--ntasks-per-node``, which says
        nothing of use where nodes differ.
        """

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if the Trainer's settings are not those of srun on this node."""
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
