"""The main job: a byte-level GPT learns the Python standard library on ranks of unequal speed.

python examples/train.py                                        the defaults in conf/
python examples/train.py strategy=ddp global_batch_size=64      other choices
python examples/train.py -m strategy=cephalo,fsdp2,ddp          one after the other
python examples/train.py experiment=quick                       a named set of choices

Each run has a folder (outputs/ or multirun/) with its configuration, plan and figures. A single run
then trains the same model under Lightning's own even sharding and compares the two.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.table import Table


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(config: DictConfig) -> float:
    # unwind as for Ctrl-C, which also ends the training's processes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(HydraConfig.get().runtime.output_dir)
    console = Console()
    console.rule(f"{config.strategy._target_.rpartition('.')[2]} · {folder}")
    ours = train(config, folder)

    # the jobs of a sweep already are the comparison
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if config.comparison is not None and not is_sweep:
        other = even_sharding(config)
        console.rule(f"for comparison: {other.strategy._target_.rpartition('.')[2]}")
        theirs = train(other, folder / "comparison")
        comparison = compare(config, ours, theirs)
        (folder / "comparison.json").write_text(json.dumps(comparison, indent=2) + "\n")
        console.print(comparison_table(ours, theirs, comparison))
    if ours["bytes_per_parameter"] is not None:
        console.print(memory_table(ours))
    console.print(f"This run's folder: {folder}", soft_wrap=True)
    if (folder / "cephalo-run.json").exists():
        console.print(f"See it: cephalo report {folder}", soft_wrap=True)
    return ours["last_train_loss"]


def train(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Train in separate processes; return the figures that job.py wrote to ``folder``.

    Raises SystemExit with the training's exit status if it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = with_record(config, folder)
    OmegaConf.save(config, folder / "job.yaml", resolve=True)
    job = Path(__file__).with_name("job.py")
    with subprocess.Popen([sys.executable, job, folder / "job.yaml"]) as process:
        try:
            status = process.wait()
        finally:
            process.terminate()
    if status:
        raise SystemExit(status)
    return json.loads((folder / "metrics.json").read_text())


def with_record(config: DictConfig, folder: Path) -> DictConfig:
    """Return the job with its folder as the one for `cephalo report`, unless another is chosen."""
    config = config.copy()
    if config.strategy.get("record", "") is None:
        config.strategy.record = str(folder)
    return config


def even_sharding(config: DictConfig) -> DictConfig:
    """Return the same job with the other strategy and just enough steps to see its speed."""
    other = config.copy()
    with open_dict(other):
        other.strategy = config.comparison.strategy
        other.trainer.max_steps = config.comparison.steps
        other.trainer.limit_val_batches = 0
    return other


def compare(config: DictConfig, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return samples per second of both, their ratio, and the largest ratio that speeds allow."""
    emulation = config.cluster.emulation
    speeds = None if emulation is None else list(emulation.speeds)
    return {
        "samples_per_s": ours["samples_per_s"],
        "even_samples_per_s": theirs["samples_per_s"],
        "ratio": ours["samples_per_s"] / theirs["samples_per_s"],
        "largest_possible_ratio": speeds and sum(speeds) / (len(speeds) * min(speeds)),
    }


def comparison_table(
    ours: dict[str, Any], theirs: dict[str, Any], comparison: dict[str, Any]
) -> Table:
    limit = comparison["largest_possible_ratio"]
    caption = "same model, global batch and ranks; median step after warm-up"
    if limit is not None:
        caption += f"; the ranks' speeds allow a ratio of {limit:.2f}"
    table = Table(title="Side by side", caption=caption)
    table.add_column("strategy")
    for name in ("seconds per step", "samples per second", "ratio"):
        table.add_column(name, justify="right")
    for run in (ours, theirs):
        ratio = run["samples_per_s"] / theirs["samples_per_s"]
        table.add_row(
            run["strategy"],
            f"{run['median_step_s']:.3f}",
            f"{run['samples_per_s']:.2f}",
            f"{ratio:.2f}",
        )
    return table


def memory_table(run: dict[str, Any]) -> Table:
    table = Table(
        title="Parameters, gradients and optimizer state of each rank",
        caption="measured bytes for each parameter whose rows the rank holds",
    )
    table.add_column("rank", justify="right")
    for name in ("parameters", "between steps", "at most in a step"):
        table.add_column(name, justify="right")
    for rank, held in enumerate(run["bytes_per_parameter"]):
        table.add_row(
            str(rank),
            f"{held['parameters']:,}",
            f"{held['between_steps']:.2f}",
            f"{held['within_a_step']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
