"""Each example trains on unequal ranks as on one device."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from common import assert_same_tensors, in_ranks, values_of
from plans import QUIET, plan_of

from lightning_cephalo import CephaloStrategy, Planner

EXAMPLES = Path(__file__).parents[1] / "examples"
README = EXAMPLES.with_name("README.md")

# for each: options, microbatches of both ranks, and the tolerance that its optimizer needs
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], float]] = {
    "contrastive": ({"samples": 128}, [(24, 24), (16,)], 1e-4),
    "gan": ({"samples": 128}, [(48,), (16,)], 1e-4),
    "momentum_teacher": ({"samples": 128}, [(24, 24), (16,)], 1e-5),
    "spot": ({"samples": 128, "pause_s": 0.0}, [(24, 24), (16,)], 1e-5),
    "streaming": ({"samples": 128}, [(24, 24), (16,)], 1e-5),
    "token_weights": ({"limit_train_batches": 4}, [(3, 3), (2,)], 1e-5),
}


def trained(name: str, plan: Any, options: dict[str, Any]) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    strategy: Any = "auto"
    if plan is not None:
        made = plan_of(*plan)
        strategy = CephaloStrategy(
            plan=made, global_batch_size=made.global_batch_size, planner=Planner(verbose=False)
        )
    devices = 1 if plan is None else len(plan)
    given = {**QUIET, "accelerator": "cpu", "devices": devices, "strategy": strategy, **options}
    return values_of(importlib.import_module(name).main(**given))


def all_trained(is_alone: bool) -> dict[str, Any]:
    """Every example's weights in this rank, or what has failed."""
    found: dict[str, Any] = {}
    for name, (options, (first, second), _) in CASES.items():
        plan = None if is_alone else [(first, 0.6), (second, 0.4)]
        try:
            found[name] = trained(name, plan, {**options, "max_epochs": 2})
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def both_trained() -> tuple[Any, Any]:
    """On one device, and on each of two ranks."""
    return in_ranks(1, all_trained, True)[0], in_ranks(2, all_trained, False)


@pytest.mark.parametrize("name", CASES)
def test_an_example_trains_as_on_one_device(name):
    wanted, found = both_trained()
    for values in (own[name] for own in (wanted, *found)):
        assert not isinstance(values, str), values
    for own in found:
        assert_same_tensors(own[name], wanted[name], CASES[name][2])


def test_the_script_of_the_readme_plans_and_trains(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "LIGHTNING_CEPHALO_CACHE": str(tmp_path / "cache")}
    found = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "global batch 64, units: 8 × Sequential" in found.stdout
    assert "Step: predicted" in found.stdout


def by_command_line(folder: Path, *options: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = sys.argv[:1]  # those of pytest
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of Lightning's own calls
    config = ["fit", f"--config={EXAMPLES / 'cli.yaml'}", "--data.samples=192"]
    trainer = {"accelerator": "cpu", "logger": "false", "default_root_dir": str(folder)}
    quiet = ["enable_progress_bar", "enable_model_summary"]
    given = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    given += [f"--trainer.{name}=false" for name in quiet]
    arguments = [*config, *given, *options]
    return values_of(importlib.import_module("cli").main(arguments))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_by_a_file_goes_on_elsewhere_as_on_one_device(tmp_path):
    """One epoch on two ranks, saved by Lightning's default, and one more on three."""
    plans = {
        2: plan_of(((24, 24), 0.6), ((16,), 0.4)),
        3: plan_of(((32,), 1.0), ((20,), 0), ((12,), 0)),
    }
    for ranks, plan in plans.items():
        plan.save(tmp_path / f"{ranks}.yaml")
    alone = ["--trainer.strategy=auto", "--trainer.devices=1"]
    (wanted,) = in_ranks(1, by_command_line, tmp_path / "one", *alone)

    def options(ranks):
        path = f"--trainer.strategy.init_args.plan={tmp_path / f'{ranks}.yaml'}"
        total = "--trainer.strategy.init_args.global_batch_size=64"
        return [f"--trainer.devices={ranks}", path, total]

    in_ranks(2, by_command_line, tmp_path / "two", *options(2), "--trainer.max_epochs=1")
    (saved,) = (tmp_path / "two").glob("checkpoints/*.ckpt")
    for values in in_ranks(
        3, by_command_line, tmp_path / "three", *options(3), f"--ckpt_path={saved}"
    ):
        assert_same_tensors(values, wanted, 1e-5)


def test_every_example_is_tested():
    main_job = {"byte_data", "byte_gpt", "job", "run_record", "train"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} - main_job == {*CASES, "cli"}
