"""Every way to start ranks trains the same; the slow ones start interpreters of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import Net, assert_same_tensors, by_plan, loader, trainer, values_of
from launch import port_to_meet, run_script
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from plans import PLANS

from lightning_cephalo import CephaloStrategy, Planner, UnevenSLURMEnvironment
from lightning_cephalo.accelerator import host
from lightning_cephalo.ranks import launch
from lightning_cephalo.ranks.starter import STARTER

TOLERANCE = 1e-5

QUIET = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def _fit(plan):
    model = Net()
    trainer(plan, max_epochs=2).fit(model, loader(), loader(8))
    return model.losses, values_of(model)


@pytest.fixture(scope="module")
def one_device():
    return by_plan(None, _fit)


def _fit_launched(model, runs):
    runs.fit(model, loader(), loader(8))
    return values_of(model), {name: float(value) for name, value in runs.callback_metrics.items()}


def _assert_trained(values, metrics, one_device):
    assert_same_tensors(values, one_device[1], TOLERANCE)
    assert metrics["loss_step"] == pytest.approx(one_device[0][-1], abs=TOLERANCE)


@pytest.fixture
def threads_in_use(monkeypatch):
    """A notebook that has computed on two threads; they do not survive a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(600, 600) @ torch.randn(600, 600)
    yield
    torch.set_num_threads(before)


def test_fork_gives_weights_and_metrics_back_to_the_script(one_device, threads_in_use):
    runs = trainer("3:1", {"start_method": "fork"}, max_epochs=2)
    _assert_trained(*_fit_launched(Net(), runs), one_device)
    # the script goes on with the same objects, and its own processes are gone
    assert runs.validate(Net(), loader(8), verbose=False)[0].keys() == {"val"}
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_spawn_gives_weights_and_metrics_back_to_the_script(one_device):
    runs = trainer("3:1", {"start_method": "spawn"}, max_epochs=2)
    _assert_trained(*_fit_launched(Net(), runs), one_device)


def test_ranks_that_a_script_starts_know_its_process(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, cwd: started.append(env))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    of_two = SimpleNamespace(num_processes=2, num_nodes=1)
    launch.make_launcher(of_two, "popen", LightningEnvironment())._call_children_scripts()
    assert [env[STARTER] for env in started] == [str(os.getpid())]
    assert STARTER not in os.environ


def test_the_name_for_notebooks_forks():
    runs = Trainer(strategy="cephalo_notebook", **QUIET)
    launcher = runs.strategy.launcher
    assert isinstance(launcher, _MultiProcessingLauncher)
    assert launcher._start_method == "fork" and launcher.is_interactive_compatible


@pytest.fixture
def plan_file(tmp_path):
    PLANS["3:1"].save(tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def test_hydra_instantiates_the_strategy_inside_the_trainer(plan_file, one_device):
    from hydra.utils import instantiate

    config = {
        "_target_": "lightning.pytorch.Trainer",
        **QUIET,
        "strategy": {
            "_target_": "lightning_cephalo.CephaloStrategy",
            "plan": str(plan_file),
            "global_batch_size": 8,
            "start_method": "fork",
            "planner": {"_target_": "lightning_cephalo.Planner", "verbose": False},
        },
    }
    _assert_trained(*_fit_launched(Net(), instantiate(config)), one_device)


@pytest.fixture
def command_line(monkeypatch):
    """A LightningCLI that was given these arguments."""

    # Lightning 2.6 calls jsonargparse in ways that its latest release deprecates
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def parse(*arguments):
        flags = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
        monkeypatch.setattr(sys, "argv", ["script.py", *flags, *arguments])
        return LightningCLI(Net, save_config_callback=None, seed_everything_default=1, run=False)

    return parse


def test_the_command_line_takes_the_name(command_line):
    interface = command_line("--trainer.strategy=cephalo")
    assert isinstance(interface.trainer.strategy, CephaloStrategy)


def test_the_command_line_takes_class_and_arguments(command_line, plan_file, one_device):
    interface = command_line(
        "--trainer.strategy=lightning_cephalo.CephaloStrategy",
        f"--trainer.strategy.plan={plan_file}",
        "--trainer.strategy.global_batch_size=8",
        "--trainer.strategy.start_method=fork",
        "--trainer.strategy.planner.verbose=false",
        "--trainer.strategy.planner.budget_s=3",
    )
    planner = interface.trainer.strategy._options.planner
    assert planner == Planner(verbose=False, budget_s=3.0, elementwise=[])
    _assert_trained(*_fit_launched(interface.model, interface.trainer), one_device)


def test_the_command_line_reads_class_path_and_init_args_from_yaml(
    command_line, plan_file, tmp_path
):
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent(
            f"""
            trainer:
              strategy:
                class_path: lightning_cephalo.CephaloStrategy
                init_args:
                  plan: {plan_file}
                  recompute: false
                  planner:
                    verbose: 2
                    early_update: false
                    elementwise: [Lion]
            """
        )
    )
    interface = command_line(f"--config={config}")
    assert isinstance(interface.trainer.strategy, CephaloStrategy)
    options = interface.trainer.strategy._options
    assert options.recompute is False
    assert options.planner == Planner(verbose=2, early_update=False, elementwise=["Lion"])


# -- interpreters of their own -----------------------------------------------------------------

SCRIPT = """
import json, os, sys, warnings
import lightning.pytorch as pl
import torch
from torch import nn

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 1)
        self.losses = []
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.layers(x)), y)
        self.log("loss", loss, sync_dist=True)
        return loss
    def on_train_batch_end(self, *args):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

def main(strategy, **options):
    torch.manual_seed(0)
    x = torch.randn(24, 6)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=options.pop("batch_size"))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, **options)
    model = Model()
    trainer.fit(model, loader)
    said = {"losses": model.losses, "world": trainer.world_size, "rank": trainer.global_rank,
            "local": trainer.local_rank, "node": trainer.node_rank,
            "imported_before": IMPORTED, "weights": float(model.head.weight.detach().sum())}
    with open(os.path.join(sys.argv[1], f"{trainer.global_rank}.json"), "w") as file:
        json.dump(said, file)

IMPORTED = any(name == "lightning_cephalo.strategy" for name in sys.modules)
if __name__ == "__main__":
    main({arguments})
"""


def _write(tmp_path, arguments, head=""):
    script = tmp_path / "script.py"
    script.write_text(head + SCRIPT.replace("{arguments}", arguments))
    return script


def _run(commands, environment=None, timeout=250):
    """Run commands at once; returns their outputs; whatever is left of them is ended."""
    # Lightning's launcher would choose a port that a connection of another test may take meanwhile
    address = {"MASTER_PORT": str(port_to_meet())}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **address, **(environment or {})}
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
        _wait_for_the_end_of_session(process.pid)
    return outputs


def _wait_for_the_end_of_session(session):
    """Launchers do not wait for their ranks' last moments; what stays for good is left behind."""
    end_s = time.monotonic() + 60.0
    while (left := _processes_of_session(session)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert left == []


def _processes_of_session(session):
    """What is left of a process group; Linux."""
    left = []
    for folder in Path("/proc").iterdir() if Path("/proc").exists() else []:
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if folder.name.isdigit() and int(fields[3]) == session and fields[0] != "Z":
            left.append(int(folder.name))
    return left


def _said(tmp_path, ranks):
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What the script says on one device, without cephalo."""
    folder = tmp_path_factory.mktemp("one")
    script = _write(folder, "'auto', devices=1, batch_size=8")
    run_script(script, [folder], [{}])
    return _said(folder, 1)[0]


def _assert_said(tmp_path, wanted, ranks):
    said = _said(tmp_path, ranks)
    for rank, one in enumerate(said):
        assert one["rank"] == rank and one["world"] == ranks
        assert one["losses"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
        assert one["weights"] == pytest.approx(wanted["weights"], abs=1e-4)
    return said


@pytest.mark.slow
def test_a_script_that_never_imports_the_package_trains_with_the_name(tmp_path, wanted):
    script = _write(tmp_path, "'cephalo', devices=2, batch_size=4")
    output = _run([[sys.executable, script, tmp_path]])[0]
    said = _assert_said(tmp_path, wanted, 2)
    assert not any(one["imported_before"] for one in said)
    assert "Plan" in output and "microbatches" in output


_GIVEN = """
from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan
def plan(*ranks):
    ranks = [RankPlan(microbatch_sizes=sizes, state_fraction=part) for sizes, part in ranks]
    plan = Plan(ranks=tuple(ranks))
    return CephaloStrategy(global_batch_size=8, planner=Planner(verbose=False), plan=plan)
"""


_COUNTS_THREADS = """
import atexit, glob, os, sys
def late():  # registered first, so that it runs last
    names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    with open(os.path.join(sys.argv[1], f"threads.{rank}"), "w") as file:
        file.write(str(sum("gloo_runloop" in name for name in names)))
atexit.register(late)
"""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """The folder of the ranks that torchrun has started: one on a node, two on another."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = _write(
        folder,
        "plan(((2, 2), 0.5), ((3,), 0.5), ((1,), 0.0)),"
        " devices=int(os.environ['LOCAL_WORLD_SIZE']), num_nodes=2, batch_size=8",
        _COUNTS_THREADS + _GIVEN,
    )
    port = port_to_meet()
    agents = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *(f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            *(script, folder),
        ]
        for node, ranks in enumerate((1, 2))
    ]
    _run(agents)
    return folder


@pytest.mark.slow
def test_torchrun_agents_with_one_and_two_ranks_are_nodes_of_different_size(torchrun, wanted):
    said = _assert_said(torchrun, wanted, 3)
    assert [(one["node"], one["local"]) for one in said] == [(0, 0), (1, 0), (1, 1)]
    _assert_threads_have_ended(torchrun, 3)


def _assert_threads_have_ended(folder, ranks):
    """Else one of them may abort the process, as happened once in about fifty runs."""
    # two may be the default group's, which torch's own caches keep; ours had six more
    if Path("/proc/self/task").exists():
        left = [int((folder / f"threads.{rank}").read_text()) for rank in range(ranks)]
        assert max(left) <= 2


def _slurm(ranks_of_nodes, even):
    """The environment that srun gives to each rank, as SLURM 22.05 was seen to."""
    rank = 0
    for node, ranks in enumerate(ranks_of_nodes):
        for local in range(ranks):
            # even nodes are started with --ntasks-per-node, uneven ones with --ntasks alone
            yield {
                **({"SLURM_NTASKS_PER_NODE": str(ranks)} if even else {}),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "cephalo",
                "SLURM_NTASKS": str(sum(ranks_of_nodes)),
                "SLURM_NNODES": str(len(ranks_of_nodes)),
                "SLURM_NODELIST": "na,nb",
                "SLURM_TASKS_PER_NODE": ",".join(map(str, ranks_of_nodes)),
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
            }
            rank += 1


def _run_slurm(script, tmp_path, ranks_of_nodes, even):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_to_meet())}
    run_script(script, [tmp_path], [rank | address for rank in _slurm(ranks_of_nodes, even)])


def test_slurm_starts_two_ranks(tmp_path, wanted):
    script = _write(tmp_path, "plan(((3, 3), 0.75), ((2,), 0.25)), devices=2, batch_size=8", _GIVEN)
    _run_slurm(script, tmp_path, (2,), even=True)
    _assert_said(tmp_path, wanted, 2)


def test_slurm_starts_nodes_of_different_size(tmp_path, wanted):
    script = _write(
        tmp_path,
        "plan(((2, 2), 0.5), ((3,), 0.3), ((1,), 0.2)), num_nodes=2, batch_size=8,"
        " devices=1 + int(os.environ['SLURM_NODEID']), plugins=[UnevenSLURMEnvironment()]",
        # forks end without what an interpreter runs at its end, and this one's is not theirs
        f"import atexit\natexit._clear()\n{_COUNTS_THREADS}{_GIVEN}"
        "from lightning_cephalo import UnevenSLURMEnvironment\n",
    )
    script.write_text(script.read_text() + "    atexit._run_exitfuncs()\n")
    _run_slurm(script, tmp_path, (1, 2), even=False)
    said = _assert_said(tmp_path, wanted, 3)
    assert [(one["node"], one["local"]) for one in said] == [(0, 0), (1, 0), (1, 1)]
    _assert_threads_have_ended(tmp_path, 3)


def test_slurm_need_not_name_the_only_node(monkeypatch):
    for name, value in list(_slurm((2,), even=True))[1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NODEID")
    for helper in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(helper, "rank", 0, raising=False)
    launch.set_world_ranks(SLURMEnvironment(), 1, 2)
    assert rank_zero_only.rank == fabric_rank_zero_only.rank == 1


@pytest.fixture
def uneven_slurm(monkeypatch):
    """In rank 2 of three tasks on two nodes."""
    for name, value in list(_slurm((1, 2), even=False))[2].items():
        monkeypatch.setenv(name, value)


def test_lightning_still_refuses_uneven_slurm_and_ours_does_not(uneven_slurm):
    with pytest.raises(RuntimeError, match="--ntasks=3"):  # else ours is not needed any more
        SLURMEnvironment()
    environment = UnevenSLURMEnvironment()
    environment.validate_settings(num_devices=2, num_nodes=2)
    assert environment.world_size() == 3
    with pytest.raises(ValueError, match=r"srun runs 2 tasks on node 1 .*1, 2.* Set devices=2"):
        environment.validate_settings(num_devices=1, num_nodes=2)
    with pytest.raises(ValueError, match=r"num_nodes=1\), but srun runs tasks on 2 nodes"):
        environment.validate_settings(num_devices=2, num_nodes=1)


def test_ranks_of_this_host_by_slurm(uneven_slurm, monkeypatch):
    assert host.processes_on_this_host(7) == 2
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3),1")
    assert host.tasks_per_node() == [2, 2, 2, 1]
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "many")
    assert host.tasks_per_node() is None
    assert host.processes_on_this_host(7) == 7
