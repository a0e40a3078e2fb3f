"""Runs one training: ``python examples/job.py RUN_FOLDER/job.yaml``, the file that train.py writes.

Each training has a process of its own. Lightning starts the other ranks by running this command
again. Its environment variables (addresses, ranks) do not reach the next training.
"""

import math
import sys
from pathlib import Path

from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from run_record import RunRecord


def main(path: Path) -> None:
    config = OmegaConf.load(path)
    folder = path.parent
    seed_everything(config.seed, verbose=False)

    # the emulation comes first, as it waits for the emulated device before the record reads a clock
    emulation = config.cluster.emulation
    callbacks = [] if emulation is None else [instantiate(emulation)]
    callbacks.append(RunRecord(folder, config.global_batch_size))
    if config.trainer.max_steps > 0 and "max_epochs" not in config.trainer:
        config.trainer.max_epochs = epochs(config)
    trainer = instantiate(config.trainer, _partial_=True)(
        strategy=instantiate(config.strategy),
        callbacks=callbacks,
        logger=CSVLogger(folder, name="", version="log", flush_logs_every_n_steps=10),
    )

    samples_per_rank, rest = divmod(config.global_batch_size, trainer.world_size)
    if rest or not samples_per_rank:
        raise SystemExit(
            f"global_batch_size={config.global_batch_size} is not a multiple of the "
            f"{trainer.world_size} ranks: as everywhere in Lightning, the loader's batch_size is "
            "the global batch divided by the ranks, however unevenly it is dealt out later."
        )
    data = instantiate(config.data, batch_size=samples_per_rank)
    trainer.fit(instantiate(config.model), datamodule=data)


def epochs(config: DictConfig) -> int:
    """Return how many epochs the steps take; with no limit, progress bars print "Epoch 0/-2"."""
    batches = config.trainer.max_steps * config.trainer.accumulate_grad_batches
    in_an_epoch = max(1, config.data.training_samples // config.global_batch_size)
    return math.ceil(batches / in_an_epoch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
