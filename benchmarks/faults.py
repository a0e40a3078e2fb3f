"""Makes faults, and prints how often, what came of them, and how many seconds they took.

    python benchmarks/faults.py [--ends 5] [--kills 20] [--others 4] [--only TEXT] [--load 8]
    python benchmarks/faults.py --ends 20 --without-ddp --only SIGTERM

A first table is of faults that end a run (``faulting/ending.py``), beside Lightning's DDP. A second
one is of ranks that an agent starts again: every step is compared with a run without faults.

There two ranks train a small model with dropout on this host, started by ``python -m
lightning_cephalo.run``. They are killed at random moments, several times in one run. Each row of
the table is a fault: how often it was made, how many steps were repeated at most, whether each
step's loss and samples are those of a run that nobody interrupted, to the last bit, the seconds
from the fault to the next new step, and the processors' seconds that a fault costs over all
processes. A table behind it has the seconds by part: of the agent, imports, connecting, reading the
kept step, training again. ``--script-s`` adds seconds of a processor to the script before
``fit()``. The last rows are Lightning's DDP under torchrun,
with a checkpoint every 10 steps and ``ckpt_path="last"``. A third table is of hosts that go and
come (``faulting/hosts.py``). Seconds hold for a machine that does nothing else; all takes about an
hour.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulting import ending, hosts

ROOT = Path(__file__).resolve().parent.parent
RANKS, GLOBAL_BATCH, SAMPLES, PAUSE_S = 2, 8, 512, 0.01
STEPS_OF_EPOCH = SAMPLES // GLOBAL_BATCH
APART = 30
"""Steps from one fault to the next, at most."""
MOMENTS = ("the script runs", "it has imported", "all are connected", "training begins")
"""What rank 0 reaches after a fault, before its first step; steps are found and read at the end."""
_WAIT_S = 900.0
_PR_SET_CHILD_SUBREAPER = 36


# -- a rank ---------------------------------------------------------------------------------------


def train(
    folder: Path,
    steps: int,
    way: str,
    storage: str | None = None,
    copies: int = 0,
    script_s: float = 0.0,
) -> None:
    """Run one rank's training, and tell what it does in files of the folder."""
    is_first = os.environ["RANK"] == "0"

    def reaches(moment: str) -> None:
        if is_first:
            _tell(folder / "moments", [os.getpid(), moment, time.time()])

    reaches(MOMENTS[0])
    _tell(folder / "started", [int(os.environ["RANK"]), os.getpid()])
    while time.process_time() < script_s:
        pass
    if way == "hosts":  # the agent ends these ranks when another host comes
        wanted = folder / "wanted"
        while wanted.exists() and int(os.environ["WORLD_SIZE"]) < int(wanted.read_text() or 0):
            time.sleep(0.05)
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan, Recovery
    from lightning_cephalo.recovery import storage as storages
    from lightning_cephalo.recovery import store

    reaches(MOMENTS[1])

    # under another number of ranks dropout has other masks
    width, dropout = (256, 0.0) if way == "hosts" else (64, 0.1)

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = (
                nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
                for _ in range(4)
            )
            self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0]
            for block in self.blocks:
                x = x + block(x)
            loss = nn.functional.mse_loss(self.head(x), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Tells(Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            reaches(MOMENTS[2])

        def on_train_start(self, trainer: Any, module: Any) -> None:
            reaches(MOMENTS[3])

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            pause = folder / "pause_s"  # of the benchmark, while another host begins
            time.sleep(float(pause.read_text() or 0) if pause.exists() else PAUSE_S)
            told = [trainer.global_step, float(trainer.callback_metrics["loss"])]
            name = folder / f"steps{trainer.global_rank}"
            line = [*told, batch[0][:, 0].tolist(), time.time(), os.getpid(), trainer.world_size]
            _tell(name, line)
            # a mark of the benchmark: this rank dies in the middle of its next copy
            mark = folder / f"dies_in_copy{trainer.global_rank}"
            if mark.exists():
                mark.unlink()
                vars(store)["_HEAD"] = _Dies(store._HEAD)
            # and this one when it has sent all of a step but the list of what it has sent
            mark = folder / f"dies_in_upload{trainer.global_rank}"
            if mark.exists():
                mark.unlink()
                vars(storages)["_packed"] = _Dies(store._HEAD).pack

    torch.set_num_threads(1)
    torch.manual_seed(7)
    x = torch.randn(SAMPLES, width)
    # shuffled anew in every epoch, from a generator that a script makes alike at every start
    data = DataLoader(
        TensorDataset(x, torch.sin(x).sum(1, keepdim=True)),
        batch_size=GLOBAL_BATCH // RANKS if way.startswith("ddp") else GLOBAL_BATCH,
        shuffle=True,
    )
    plans = {
        1: Plan((RankPlan((4, 4), 1.0),)),
        2: Plan((RankPlan((3, 2), 0.7), RankPlan((3,), 0.3))),
        3: Plan((RankPlan((3,), 0.5), RankPlan((3,), 0.3), RankPlan((2,), 0.2))),
        4: Plan(tuple(RankPlan((2,), share) for share in (0.4, 0.3, 0.2, 0.1))),
    }
    plan = plans[int(os.environ["WORLD_SIZE"])]
    is_ddp = way.startswith("ddp")
    recover: Any = True
    if way == "hosts":
        recover = Recovery(every=1, copies=copies, storage=storage, storage_every_s=0.5)
    strategy: Any = (
        "ddp"
        if is_ddp
        else CephaloStrategy(
            plan=plan,
            global_batch_size=GLOBAL_BATCH,
            recover=recover,
            planner=Planner(verbose=False),
        )
    )
    callbacks: list[Any] = [Tells()]
    if is_ddp:
        saved = {"dirpath": folder, "every_n_train_steps": 10, "save_last": True}
        callbacks.append(ModelCheckpoint(**saved))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=-(-steps // STEPS_OF_EPOCH),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=is_ddp,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), data, ckpt_path="last" if is_ddp else None)


class _Dies:
    """Kills the process where a header is made: its tensors are copied, and it is void."""

    def __init__(self, whole: Any) -> None:
        self.size, self.unpack = whole.size, whole.unpack

    def pack(self, *_: Any) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


def _tell(path: Path, line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


# -- the faults -----------------------------------------------------------------------------------


class Run:
    """A training under an agent."""

    def __init__(self, folder: Path, steps: int, way: str, script_s: float = 0.0) -> None:
        folder.mkdir()
        self.folder, self.way = folder, way
        self._began_s = _processors_s()
        self.log = (folder / "log").open("w")
        agent = (
            ["lightning_cephalo.run"]
            if way in ("cephalo", "hosts")
            else ["torch.distributed.run", "--standalone", "--max-restarts=100"]
        )
        self.agent = subprocess.Popen(
            [
                *(sys.executable, "-m", *agent, f"--nproc-per-node={RANKS}"),
                *(__file__, "--train", way, "--folder", str(folder), "--steps", str(steps)),
                f"--script-s={script_s}",
            ],
            env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(way == "ddp, own store"))),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def told(self, name: str) -> list[Any]:
        """Return what ranks have told so far."""
        return told_in(self.folder / name)

    def steps(self) -> int:
        """Return the last step that rank 0 has told."""
        told = self.told("steps0")
        return told[-1][0] if told else 0

    def wait(self, until: Callable[[], bool]) -> bool:
        """Wait; return False if the training has ended before."""
        deadline = time.monotonic() + _WAIT_S
        while not until():
            if self.agent.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happens; see {self.folder}/log")
            time.sleep(0.005)
        return True

    def started(self, after: int = 0) -> dict[int, int]:
        """Return the process of each rank, of those that were started after some."""
        return dict(self.told("started")[after:])

    def end(self) -> int:
        """Wait for the end, and return the agent's exit status."""
        code = self.agent.wait(_WAIT_S)
        self.log.close()
        return code

    def processors_s(self) -> float:
        """Return the processors' seconds of all its processes, once it has ended."""
        with suppress(ChildProcessError):
            while True:  # those that the agent has left are this process's
                os.waitpid(-1, 0)
        return _processors_s() - self._began_s

    def stop(self) -> None:
        """End the agent and its ranks."""
        self.agent.terminate()
        self.end()


def _processors_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment(**more: str) -> dict[str, str]:
    """Return the environment of an agent."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def told_in(path: Path) -> list[Any]:
    """Return the lines that ranks have told."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def _kill(processes: Sequence[int], number: int = signal.SIGKILL) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _kill_one(run: Run) -> None:
    _kill([random.choice(list(run.started().values()))])


def _kill_all(run: Run) -> None:
    _kill(list(run.started().values()))


def _kill_in_copy(run: Run) -> None:
    rank = random.randrange(RANKS)
    (run.folder / f"dies_in_copy{rank}").touch()
    run.wait(lambda: not (run.folder / f"dies_in_copy{rank}").exists())


def _kill_in_recovery(run: Run) -> None:
    count = len(run.told("started"))
    _kill_one(run)
    run.wait(lambda: len(run.told("started")) >= count + RANKS)
    time.sleep(random.random() * 0.8)
    _kill([random.choice(list(run.started(count).values()))])


def _terminate_one(run: Run) -> None:
    _kill([random.choice(list(run.started().values()))], signal.SIGTERM)


FAULTS: dict[str, Callable[[Run], None]] = {
    "kill -9 of a rank": _kill_one,
    "kill -9 of both ranks": _kill_all,
    "kill -9 in a copy": _kill_in_copy,
    "kill -9, and again while recovering": _kill_in_recovery,
    "SIGTERM to a rank": _terminate_one,
}


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What came of a fault.

    Attributes:
        fault: Its name.
        count: How often it was made.
        repeated: Steps that were trained again, at most.
        equal: Steps whose loss and samples are those of the run without faults, of all.
        seconds: From each fault to the next new step.
        processors_s: Seconds of processors that each fault has cost, over all processes.
        parts: Of each fault, the seconds from it to the first of ``MOMENTS``, and so on, to the
            first step, and to the first new one.
    """

    fault: str
    count: int
    repeated: int
    equal: tuple[int, int]
    seconds: tuple[float, ...]
    processors_s: float
    parts: tuple[tuple[float, ...], ...] = ()

    def line_of_parts(self) -> str:
        """Return the median seconds of each part as a row."""
        medians = [statistics.median(part) for part in zip(*self.parts, strict=True)]
        return f"| {self.fault} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} |"

    def line(self) -> str:
        """Return the row."""
        same, of = self.equal
        took = f"{statistics.median(self.seconds):.1f} ({max(self.seconds):.1f})"
        return (
            f"| {self.fault} | {self.count} | {self.repeated} | {same} of {of} | {took}"
            f" | {self.processors_s:.1f} |"
        )


def _measure(
    name: str,
    fault: Callable[[Run], None],
    count: int,
    folder: Path,
    way: str,
    script_s: float = 0.0,
) -> Row:
    steps = (APART + 10) * count + 60
    whole = Run(folder / "whole", steps, way, script_s)
    assert whole.end() == 0, f"see {folder}/whole/log"
    whole_s = whole.processors_s()
    run = Run(folder / "faults", steps, way, script_s)
    try:
        return _compared(name, fault, count, whole, run, whole_s)
    finally:
        if run.agent.poll() is None:
            run.stop()


def _compared(
    name: str, fault: Callable[[Run], None], count: int, whole: Run, run: Run, whole_s: float
) -> Row:
    seconds, parts, repeated, made = [], [], 0, 0
    for _ in range(count):
        wanted = run.steps() + random.randint(5, APART)
        if not run.wait(lambda at=wanted: run.steps() >= at):
            break
        time.sleep(random.random() * 2 * PAUSE_S)
        before = time.time()
        fault(run)
        made += 1
        processes = {line[4] for line in run.told("steps0")}
        if not run.wait(lambda old=processes: run.told("steps0")[-1][4] not in old):
            break
        last = max(line[0] for line in run.told("steps0") if line[4] in processes)
        first = next(line for line in run.told("steps0") if line[4] not in processes)
        repeated = max(repeated, last + 1 - first[0])
        if not run.wait(lambda at=last: run.steps() > at):
            break
        new = next(line for line in run.told("steps0") if line[0] > last)
        seconds.append(new[3] - before)
        reached = [at for process, _, at in run.told("moments") if process == new[4]]
        if len(reached) == len(MOMENTS) and new[4] == first[4]:
            times = [before, *reached, first[3], new[3]]
            parts.append(tuple(end - begin for begin, end in itertools.pairwise(times)))
    assert run.end() == 0, f"see {run.folder}/log"
    same = of = 0
    for rank in range(RANKS):
        expected = {line[0]: line[1:3] for line in whole.told(f"steps{rank}")}
        told = run.told(f"steps{rank}")
        assert {line[0] for line in told} == set(expected)
        same += sum(line[1:3] == expected[line[0]] for line in told)
        of += len(told)
    cost_s = (run.processors_s() - whole_s) / max(1, made)
    return Row(name, made, repeated, (same, of), tuple(seconds), cost_s, tuple(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills of one rank (20)")
    parser.add_argument("--others", type=int, default=4, help="faults of every other kind (4)")
    parser.add_argument("--ends", type=int, default=5, help="faults of each kind that end (5)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside those (0)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (1)")
    parser.add_argument("--folder", type=Path, help="for logs (a temporary one)")
    parser.add_argument("--only", default="", help="the faults in which this is found")
    parser.add_argument("--script-s", type=float, default=0.0, help="of a script, before fit (0)")
    parser.add_argument("--without-ddp", action="store_true", help="this strategy alone")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--storage", help=argparse.SUPPRESS)
    parser.add_argument("--copies", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.folder, given.steps, given.train, given.storage, given.copies, given.script_s)
        return
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        ways = ("cephalo",) if given.without_ddp else ("cephalo", "ddp")
        ending.report(folder / "ends", given.only, given.ends, given.load, ways)
        # processes that an agent leaves behind become this one's, whose seconds are counted
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        print(
            "| fault | count | steps repeated, at most | steps as without | seconds (longest)"
            " | processors' seconds |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        rows = [(name, fault, "cephalo") for name, fault in FAULTS.items()]
        rows.append(("under plain torchrun: kill -9 of a rank", _kill_one, "torchrun"))
        ddp = "DDP under torchrun, a checkpoint every 10 steps: kill -9 of a rank"
        rows.append((ddp, _kill_one, "ddp"))
        rows.append((f"{ddp}, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", _kill_one, "ddp, own store"))
        of_parts: list[str] = []
        for index, (name, fault, way) in enumerate(rows):
            if re.search(given.only, name):
                (folder / str(index)).mkdir()
                count = given.kills if index < 1 else given.others
                try:
                    measured = _measure(
                        name, fault, count, folder / str(index), way, given.script_s
                    )
                    row = measured.line()
                    if measured.parts:
                        of_parts.append(measured.line_of_parts())
                except (TimeoutError, subprocess.TimeoutExpired, AssertionError) as error:
                    row = f"| {name} | does not go on: {error} | | | | |"
                print(row, flush=True)
        print(flush=True)
        if of_parts:
            parts = (*MOMENTS, "first step", "first new step")
            print(f"| median seconds until | {' | '.join(parts)} |")
            print(f"|---{'|---' * len(parts)}|")
            print("\n".join(of_parts), end="\n\n", flush=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
        hosts.report(folder, given.only)


if __name__ == "__main__":
    main()
