import math
import os
import pickle
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual_time import SharedTime, VirtualHost

from lightning_cephalo.accelerator.emulated.device import host_now_s
from lightning_cephalo.accelerator.emulated.rate import measure_flops_per_s
from lightning_cephalo.emulation import Emulation, active_device

WIDTH = 256
SAMPLES = 512
STEPS = 6
FLOPS_PER_S = 1e9

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


class Perceptron(LightningModule):
    def __init__(self, fail_at=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.fail_at = fail_at
        # made before the device is entered, as data in host memory
        self.data = TensorDataset(torch.ones(STEPS * SAMPLES, WIDTH))

    def training_step(self, batch, batch_index):
        if batch_index == self.fail_at:
            raise KeyError("wanted")
        return (self.layers(batch[0]) - batch[0]).square().mean()

    def validation_step(self, batch, batch_index):
        self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), foreach=True)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=SAMPLES)

    val_dataloader = train_dataloader


class Record(Callback):
    """Writes what a rank saw to a file, since forked ranks do not come back."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.ends_s = []

    def on_train_batch_end(self, *_):
        active_device().synchronize()  # without credit: no step is shorter than its virtual time
        self.ends_s.append(host_now_s())

    def on_train_end(self, trainer, pl_module):
        device = active_device()
        record = {
            "seconds": [after - before for before, after in pairwise(self.ends_s)],
            "flops": device.flops,
            "busy_s": device.busy_s,
            "flops_per_s": device.flops_per_s,
            "name": device.name,
            "threads": torch.get_num_threads(),
            "peak_bytes": device.peak_bytes,
        }
        path = os.path.join(self.folder, f"{trainer.global_rank}.pickle")
        with open(path, "wb") as file:
            pickle.dump(record, file)


def records(folder, ranks=2):
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


class Shared(Callback):
    """Ties the virtual times of all ranks together, until they end."""

    def __init__(self, host, folder):
        self.host, self.folder = host, str(folder)

    def setup(self, *_, **__):
        SharedTime(self.host, self.folder).__enter__()


def on_virtual_ranks(folder, speeds):
    """Callbacks that emulate ranks which share a virtual time."""
    host = VirtualHost()
    emulation = Emulation(speeds, total_flops_per_s=FLOPS_PER_S, clock=host.clock)
    (folder / "time").mkdir(exist_ok=True)
    return [Shared(host, folder / "time"), emulation, Record(folder)]


def reduce(state, bucket):
    """As DistributedDataParallel does, which waits in C++, where no virtual time passes."""
    total = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(total)
    reduced = torch.futures.Future()
    reduced.set_result(total)
    return reduced


def assert_in_lock_step(fast, slow):
    expected = [pytest.approx(slow["busy_s"] / STEPS)] * (STEPS - 1)
    assert slow["seconds"] == expected
    assert fast["seconds"] == expected


def trainer_of(folder, emulation, **options):
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": STEPS,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "callbacks": [emulation, Record(folder)],
            **options,
        }
    )


def fit_in_two_ranks(make):
    """Fit in two ranks that end their groups themselves.

    "ddp_fork" leaves them to the end of the process, where a thread of gloo may still release
    tensors (pytorch#190489): such a rank has ended with SIGSEGV.
    """
    # scripts of tests below import this file where its neighbours' helpers cannot be found
    from common import in_ranks

    def fit():
        make().fit(Perceptron())
        return active_device() is None

    assert in_ranks(2, fit) == [True, True]


@pytest.mark.processes
def test_ddp_runs_at_the_pace_of_its_slowest_rank(tmp_path):
    callbacks = on_virtual_ranks(tmp_path, (2, 1))

    def make():
        strategy = DDPStrategy(ddp_comm_hook=reduce)
        return trainer_of(tmp_path, None, strategy=strategy, devices=2, callbacks=callbacks)

    fit_in_two_ranks(make)
    fast, slow = records(tmp_path)
    assert (fast["name"], slow["name"]) == ("cpu x2", "cpu x1")
    assert fast["flops_per_s"] == pytest.approx(2 * slow["flops_per_s"])
    assert fast["flops"] == slow["flops"]
    assert fast["threads"] == slow["threads"] == 1
    assert_in_lock_step(fast, slow)


def test_single_rank_is_slowed_and_released(tmp_path):
    threads = torch.get_num_threads()
    emulation = Emulation((1,), total_flops_per_s=FLOPS_PER_S, clock=VirtualHost().clock)
    trainer = trainer_of(tmp_path, emulation)
    module = Perceptron()
    trainer.fit(module)
    (record,) = records(tmp_path, 1)
    # two layers forward, the backward of their weights, and of the second one's input
    flops = 5 * 2 * SAMPLES * WIDTH * 2 * WIDTH
    assert record["flops"] == STEPS * flops
    assert record["seconds"] == [pytest.approx(flops / FLOPS_PER_S)] * (STEPS - 1)
    assert emulation.device is None
    assert active_device() is None
    assert torch.get_num_threads() == threads
    trainer.validate(module, verbose=False)
    assert active_device() is None


def test_parameters_and_optimizer_state_count_as_device_memory(tmp_path):
    live_bytes = []

    class Live(Callback):
        def on_train_batch_start(self, *_):
            live_bytes.append(active_device().current_bytes)

    emulation = Emulation(speeds=(1,), total_flops_per_s=1e11)
    trainer_of(tmp_path, emulation, callbacks=[emulation, Live()]).fit(Perceptron())
    parameter_bytes = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH)
    batch_bytes = 4 * SAMPLES * WIDTH
    # weights; then also their gradients, which Lightning frees within the step, and two moments
    assert live_bytes[0] == pytest.approx(parameter_bytes + batch_bytes, rel=0.01)
    assert live_bytes[-1] == pytest.approx(4 * parameter_bytes + batch_bytes, rel=0.01)


def test_too_small_a_rank_runs_out_of_memory_and_is_released(tmp_path):
    threads = torch.get_num_threads()
    emulation = Emulation(speeds=(1,), capacity_bytes=(3 * 2**20,), total_flops_per_s=1e11)
    with pytest.raises(torch.OutOfMemoryError, match="'cpu x1'"):
        trainer_of(tmp_path, emulation).fit(Perceptron())
    assert active_device() is None
    assert torch.get_num_threads() == threads


def test_an_exception_in_training_releases_the_device(tmp_path):
    emulation = Emulation(speeds=(1,), total_flops_per_s=1e11)
    with pytest.raises(KeyError, match="wanted"):
        trainer_of(tmp_path, emulation).fit(Perceptron(fail_at=2))
    assert emulation.device is None
    assert active_device() is None
    trainer_of(tmp_path, emulation).fit(Perceptron())
    assert active_device() is None


@pytest.mark.processes
def test_all_ranks_share_the_rate_that_rank_zero_measured(tmp_path):
    options = {"strategy": "ddp", "max_steps": 1}
    fit_in_two_ranks(lambda: trainer_of(tmp_path, Emulation(speeds=(3, 1)), devices=2, **options))
    fast, slow = records(tmp_path)
    assert fast["flops_per_s"] == pytest.approx(3 * slow["flops_per_s"], rel=1e-12)


def test_measuring_leaves_threads_and_random_numbers_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert measure_flops_per_s(2) > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_measured_is_the_fastest_repetition_of_a_block():
    of_thread = threading.local()

    def now():
        """Every other repetition takes 2 s, the others 3 s."""
        of_thread.reads = reads = getattr(of_thread, "reads", 0) + 1
        of_thread.now_s = getattr(of_thread, "now_s", 0.0) + (2.0, 1.0, 3.0, 1.0)[reads % 4]
        return of_thread.now_s

    samples, length, width, heads = 4, 128, 256, 4
    # weights of 12 squares, forward and twice that backward; no gradient of the block's input
    linear = 2 * samples * length * width**2 * (3 * 12 - 3)
    attention = 7 * 2 * samples * heads * length**2 * (width // heads)
    assert measure_flops_per_s(2, now) == pytest.approx((linear + attention) / 2.0)


def test_rates_are_measured_once_and_obey_the_machine(tmp_path):
    emulation = Emulation(speeds=(1,))
    trainer = trainer_of(tmp_path, emulation, max_steps=1)
    trainer.fit(Perceptron())
    (first,) = records(tmp_path, 1)
    trainer_of(tmp_path, emulation, max_steps=1).fit(Perceptron())
    (second,) = records(tmp_path, 1)
    assert first["flops_per_s"] == second["flops_per_s"] > 0


def test_pickles_before_and_while_it_runs(tmp_path):
    emulation = Emulation(speeds=(1,), total_flops_per_s=1e11)

    class Pickle(Callback):
        def on_train_start(self, trainer, pl_module):
            assert emulation.device is not None
            assert pickle.loads(pickle.dumps(emulation)).device is None

    trainer_of(tmp_path, emulation, callbacks=[emulation, Pickle()]).fit(Perceptron())
    assert pickle.loads(pickle.dumps(emulation)).speeds == (1.0,)


def test_as_many_speeds_as_ranks(tmp_path):
    with pytest.raises(ValueError, match=r"speeds for 2 ranks, got 1\. Use Trainer\(devices=2\)"):
        trainer_of(tmp_path, Emulation(speeds=(3, 1))).fit(Perceptron())
    assert active_device() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": (3, 1), "link_bytes_per_s": (1e8, -1.0)}, "link_bytes_per_s: expected pos"),
        ({"speeds": (3, 1), "host_updates_per_s": math.nan}, "host_updates_per_s: expected pos"),
        ({"speeds": ()}, "speeds: expected a positive number per rank"),
        ({"speeds": (1, 0)}, "speeds: expected a positive number per rank"),
        ({"speeds": (1, float("nan"))}, "speeds: expected a positive number per rank"),
        ({"total_flops_per_s": -1.0}, "total_flops_per_s: expected a positive number or None"),
        ({"capacity_bytes": (10,)}, "expected one for each of the 2 speeds, got 1"),
        ({"link_bytes_per_s": (1.0,)}, "expected one number, or one for each of the 2 speeds"),
        ({"capacity_bytes": (10, -1)}, "capacity_bytes: expected positive numbers or None"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Emulation(**arguments)


SCRIPT = """
import sys
from pathlib import Path
from lightning.pytorch.strategies import ModelParallelStrategy
from test_callback import Perceptron, on_virtual_ranks, trainer_of
from torch.distributed.fsdp import fully_shard


class Sharded(Perceptron):
    def configure_model(self):
        for layer in self.layers[::2]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callbacks = on_virtual_ranks(folder, (3, 1))
    trainer = trainer_of(folder, None, devices=2, strategy=strategy, callbacks=callbacks)
    trainer.fit(Sharded())
"""


@pytest.mark.slow
def test_even_sharding_in_ranks_that_lightning_starts_as_scripts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    folders = [str(here), str(here.parent), str(here.parents[1])]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    fast, slow = records(tmp_path)
    assert fast["flops"] == slow["flops"]
    assert_in_lock_step(fast, slow)
