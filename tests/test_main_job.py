"""Every configuration composes to objects that exist, and the main job runs from end to end."""

import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import byte_data
import job
import pytest
import torch
from common import in_ranks
from forked_interpreter import forked_interpreter
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from launch import port_to_meet
from omegaconf import DictConfig, OmegaConf
from plans import plan_of
from train import with_record

from lightning_cephalo.offline.run_report import page

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
CHOICES = sorted(
    f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml") if file.parent != CONF
)


TWO_RANKS = ("cluster=this_machine", "cluster.accelerator=cpu", "cluster.devices=2")


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the text, for runs in forks of this process."""
    few = byte_data.standard_library_files()[::100]
    monkeypatch.setattr(byte_data, "standard_library_files", lambda: few)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def run_main_job(
    folder: Path, *overrides: str, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [interpreter, ROOT / "examples" / "train.py", *overrides]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "MASTER_PORT": str(port_to_meet())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            stdout, stderr = run.communicate(timeout=250)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGABRT)  # each rank says where it waits
            stdout, stderr = run.communicate()
            pytest.fail(f"no end in 250 s:\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, run.returncode, stdout, stderr)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_names_classes_and_arguments_that_exist(choice: str) -> None:
    config = composed(choice)
    OmegaConf.resolve(config)
    parts = [config.model, config.data, config.trainer, config.strategy]
    parts += [config.comparison.strategy]
    if config.cluster.emulation is not None:
        parts += [config.cluster.emulation]
    for part in parts:
        arguments = {name for name in part if name != "_target_"}
        accepted = inspect.signature(get_class(part._target_)).parameters
        assert arguments <= set(accepted), part._target_


def test_the_default_model_has_about_three_million_parameters() -> None:
    model = instantiate(composed().model)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(3e6, rel=0.1)
    assert len(model.network.blocks) >= 6


@pytest.mark.parametrize(
    ("overrides", "epochs"),
    [
        ((), 1),
        (("steps=12500",), 1),
        (("steps=12501",), 2),
        (("steps=12500", "trainer.accumulate_grad_batches=2"), 2),
        (("data.training_samples=8", "steps=3"), 3),
    ],
)
def test_the_trainer_knows_how_many_epochs_the_steps_take(
    overrides: tuple[str, ...], epochs: int
) -> None:
    assert job.epochs(composed(*overrides)) == epochs


def test_a_crop_depends_on_its_index_alone() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    crops, others = (byte_data.RandomCrops(text, 8, 100, seed=seed) for seed in (1, 2))
    tokens, following = crops[3]
    assert torch.equal(tokens[1:], following[:-1])
    crops[4]
    assert torch.equal(crops[3][0], tokens)
    assert any(not torch.equal(crops[i][0], others[i][0]) for i in range(10))
    with pytest.raises(ValueError, match="choose a smaller context"):
        byte_data.RandomCrops(text, 200, 1, seed=0)


def test_training_and_validation_text_come_from_different_files() -> None:
    data = byte_data.StandardLibraryBytes(batch_size=2, context=16)
    data.setup("fit")
    total = sum(file.stat().st_size for file in byte_data.standard_library_files())
    assert len(data.training.text) + len(data.validation.text) == total
    assert 0.01 < len(data.validation.text) / total < 0.15
    tokens, following = next(iter(data.train_dataloader()))
    assert tokens.shape == following.shape == (2, 16)


@pytest.mark.usefixtures("little_text")
def test_a_run_of_cephalo_leaves_a_full_report_and_measured_bytes_per_parameter(
    tmp_path: Path,
) -> None:
    plan = plan_of(((3, 3), 0.75), ((2,), 0.25), forward_s=0.1, backward_s=0.1, tail_s=0.1)
    replace(plan, step_s=0.5).save(tmp_path / "given.yaml")
    config = with_record(
        composed(
            "experiment=quick",
            *TWO_RANKS,
            "global_batch_size=8",
            f"+strategy.plan={tmp_path / 'given.yaml'}",
            "strategy.recompute=true",
            "+trainer.enable_progress_bar=false",
            "+trainer.enable_model_summary=false",
        ),
        tmp_path / "run",
    )
    (tmp_path / "run").mkdir()
    OmegaConf.save(config, tmp_path / "run" / "job.yaml", resolve=True)
    in_ranks(2, job.main, tmp_path / "run" / "job.yaml")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    held = metrics["bytes_per_parameter"]
    # Adam's two moments and the parameter: gradients are given back early
    assert [round(rank["between_steps"], 2) for rank in held] == [12.0, 12.0]
    assert all(12 < rank["within_a_step"] < 16 for rank in held)
    said = page(tmp_path / "run")
    assert "What is missing here" not in said
    for part in ("Where the time went", "A step, rank by rank", "Memory over the step"):
        assert part in said


def test_the_folder_of_a_record_may_be_another_one_and_other_strategies_have_none() -> None:
    folder = Path("outputs")
    assert with_record(composed(), folder).strategy.record == "outputs"
    assert with_record(composed("strategy.record=runs"), folder).strategy.record == "runs"
    assert "record" not in with_record(composed("strategy=ddp"), folder).strategy


@pytest.mark.usefixtures("little_text")
def test_a_run_ends_with_a_comparison_and_leaves_its_figures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with forked_interpreter(tmp_path) as interpreter:
        result = run_main_job(
            tmp_path,
            "experiment=quick",
            "strategy=ddp",
            *TWO_RANKS,
            f"hydra.run.dir={folder}",
            interpreter=interpreter,
        )
    assert result.returncode == 0, result.stderr
    assert "Side by side" in result.stdout and "Epoch 0/-" not in result.stdout
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["last_train_loss"] < metrics["first_train_loss"]
    assert len(metrics["step_s"]) == metrics["steps"] == 8
    comparison = json.loads((folder / "comparison.json").read_text())
    even = json.loads((folder / "comparison" / "metrics.json").read_text())
    assert even["strategy"] == "ModelParallelStrategy"
    assert comparison["ratio"] == metrics["samples_per_s"] / even["samples_per_s"]
    # even sharding and DDP see the same samples: whoever breaks the baseline breaks this
    assert even["train_loss"] == pytest.approx(metrics["train_loss"][: even["steps"]], rel=1e-4)


@pytest.mark.slow
def test_the_jobs_of_a_sweep_do_not_disturb_each_other(tmp_path: Path) -> None:
    result = run_main_job(
        tmp_path,
        "-m",
        "experiment=quick",
        "strategy=ddp,fsdp2",
        *TWO_RANKS,
        "steps=2",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert result.returncode == 0, result.stderr
    written = [json.loads(file.read_text()) for file in tmp_path.glob("sweep/*/metrics.json")]
    assert sorted(run["strategy"] for run in written) == ["DDPStrategy", "ModelParallelStrategy"]


@pytest.mark.slow
def test_a_failed_training_fails_the_run_and_says_why(tmp_path: Path) -> None:
    result = run_main_job(
        tmp_path,
        "experiment=quick",
        "strategy=ddp",
        *TWO_RANKS,
        "global_batch_size=7",
    )
    assert result.returncode != 0
    assert "not a multiple of the 2 ranks" in result.stderr
    assert "Side by side" not in result.stdout
