"""Faults that end a run: rows of the table of ``faults.py``, which calls this.

Three ranks train a small model, forked from this process. A row counts how the runs ended, and
gives the seconds from the fault until the last rank was gone that had not been lost. Lightning's
DDP has the same faults where they mean something there. Cut links, limits of threads and full disks
need root, and Linux; where they cannot be made, a row says so.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from side_by_side.links import INTERFACE, LinkError, ShapedHosts, address, enter

from faulting.surroundings import full_disk, take_threads, thread_group

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "distributed")]

_LIMITED = "may start no threads"
_TWICE = "an error in a hook, and another Trainer"
_CACHES = ("a full disk for its cache", "no folder for its cache")
_MEASURED = ("while profiling", *_CACHES)

RANKS, GLOBAL_BATCH, SAMPLES, WIDTH = 3, 9, 540, 64
TIMEOUT_S, GRACE_S = 10.0, 15.0
"""The timeout of collectives where a rank freezes, and what it may take longer."""

LIMIT_S = 45.0
"""A run that has not ended so long after a fault does not end."""

_START_S = 240.0
# the second epoch begins before them
_RESUMED_STEPS = 90
_OWN_TIMEOUT_S = 1800.0


# -- a rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What ranks do.

    Attributes:
        way: "cephalo" or "ddp".
        what: What happens in a rank, or how it trains; empty: it trains.
        rank: The rank where it happens.
        timeout_s: Timeout of collectives.
        cut: Where a file is cut, as a fraction.
        resumes: A checkpoint to go on from.
        steps: Where training ends.
        group: A control group for a rank that may start no threads.
        more_threads: Threads that it may start yet.
    """

    way: str
    what: str = ""
    rank: int = 0
    timeout_s: float = _OWN_TIMEOUT_S
    cut: float = 0.5
    resumes: Path | None = None
    steps: int = 480
    group: Path | None = None
    more_threads: int = 0


def _train(job: Job, rank: int, folder: Path) -> None:
    """Run one rank's training, and tell what it does in files of the folder."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import LearningRateFinder, OnExceptionCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan

    is_searching = job.what == "in the LR finder"

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.learning_rate = 1e-3
            blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
            self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 1)

        def _loss(self, batch: Any) -> Any:
            x = batch[0]
            for block in self.blocks:
                x = x + block(x)
            return nn.functional.mse_loss(self.head(x), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tell(folder / f"calls{rank}", time.monotonic())
            if job.what == "an error in a step" and rank == job.rank and batch_idx == 8:
                self._fail()
            loss = self._loss(batch)
            if not is_searching:
                self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            tell(folder / f"validates{rank}", time.monotonic())
            self._loss(batch)

        def _fail(self) -> None:
            tell(folder / "fault", time.monotonic())
            raise KeyError("only here")

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    class Tells(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            time.sleep(0.01)
            if not is_searching:
                loss = float(trainer.callback_metrics["loss"])
                tell(folder / f"steps{rank}", [trainer.global_step, loss])
            if trainer.global_step == 8:
                _do(job, trainer, module, rank, folder)

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            tell(folder / f"raised{rank}", [time.monotonic(), trainer.global_step])

    class Cephalo(CephaloStrategy):
        def setup_environment(self) -> None:
            tell(folder / f"connects{rank}", time.monotonic())
            super().setup_environment()

    class DDP(DDPStrategy):
        def setup_environment(self) -> None:
            tell(folder / f"connects{rank}", time.monotonic())
            super().setup_environment()

    torch.manual_seed(7)
    x = torch.randn(SAMPLES, WIDTH)
    set_of = TensorDataset(x, torch.sin(x).sum(1, keepdim=True))
    batch_size = GLOBAL_BATCH // RANKS if job.way == "ddp" else GLOBAL_BATCH
    loaded = partial(DataLoader, set_of, batch_size=batch_size)
    plan = Plan((RankPlan((4,), 0.5), RankPlan((3,), 0.3), RankPlan((2,), 0.2)))
    timeout = timedelta(seconds=job.timeout_s)
    strategy: Any
    if job.way == "ddp":
        strategy = DDP(process_group_backend="gloo", timeout=timeout)
    else:
        strategy = Cephalo(
            plan=None if job.what in _MEASURED else plan,
            global_batch_size=GLOBAL_BATCH,
            planner=Planner(verbose=job.what in _CACHES),
            timeout=timeout,
        )
    callbacks: list[Any] = [OnExceptionCheckpoint(folder), Tells()]
    if is_searching:
        callbacks.append(LearningRateFinder(num_training_steps=400))
    validates = job.what == "in validation"
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=job.steps,
        val_check_interval=1 if validates else None,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    generator = torch.Generator().manual_seed(11)
    data = loaded(shuffle=True, generator=generator)
    trainer.fit(Net(), data, loaded() if validates else None, ckpt_path=job.resumes)


def _do(job: Job, trainer: Any, module: Any, rank: int, folder: Path) -> None:
    """Do what ranks do behind a step."""
    if job.what in ("a full disk", "kill -9 in mid-write"):
        kept = folder / "kept.ckpt"
        trainer.save_checkpoint(kept)
        if rank == 0:
            # the system ends a write behind so many bytes, with an error or with a signal
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if job.what == "kill -9 in mid-write":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            limit = int(kept.stat().st_size * job.cut)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            tell(folder / "fault", time.monotonic())
        trainer.save_checkpoint(kept)
    if rank != job.rank:
        return
    if job.what.startswith("alone: "):
        tell(folder / "fault", time.monotonic())
    if job.what == f"{_LIMITED}, in training":
        assert job.group is not None
        take_threads(job.group, os.getpid(), job.more_threads)
        tell(folder / "fault", time.monotonic())
    elif job.what == f"{_LIMITED}, and fails":
        assert job.group is not None
        take_threads(job.group, os.getpid(), job.more_threads)
        module._fail()
    elif job.what in ("an error in a hook", _TWICE):
        module._fail()
    elif job.what == "alone: save_checkpoint()":
        trainer.save_checkpoint(folder / "alone.ckpt")
    elif job.what == "alone: strategy.barrier()":
        trainer.strategy.barrier()
    elif job.what == "alone: should_stop":
        trainer.should_stop = True


def _rank_main(
    job: Job, rank: int, folder: Path, environment: dict[str, str], host: str | None
) -> None:
    """Run one rank in a fork, and tell how it ends."""
    import torch

    if host is not None:
        enter(host)
    gc.freeze()
    torch.set_num_threads(1)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cache = folder / "cache" if job.what in _MEASURED else folder
    os.environ.update(environment, OMP_NUM_THREADS="1", LIGHTNING_CEPHALO_CACHE=str(cache))
    try:
        if job.what == f"{_LIMITED}, at the start" and rank == job.rank:
            assert job.group is not None
            tell(folder / "fault", time.monotonic())
            take_threads(job.group, os.getpid(), job.more_threads)
        if job.what == _TWICE:
            with suppress(Exception):
                _train(job, rank, folder)
            if rank == job.rank:  # it is lost before it begins again
                time.sleep(_START_S)
            job = replace(job, what="")
        _train(job, rank, folder)
    except BaseException as error:
        tell(folder / f"ends{rank}", [type(error).__name__, str(error)])
        raise
    tell(folder / f"ends{rank}", ["", ""])


def tell(path: Path, line: Any) -> None:
    """Add a line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


# -- a run ----------------------------------------------------------------------------------------


class Run:
    """Three ranks that train.

    Args:
        job: What they do.
        folder: Where they tell it.
        hosts: A network namespace for each; empty: all are on this host.
    """

    def __init__(self, job: Job, folder: Path, hosts: Sequence[str] = ()) -> None:
        from launch import torchrun_environments

        folder.mkdir(parents=True, exist_ok=True)
        assert not (folder / "log0").exists(), "what an earlier run has told would be read"
        self.job, self.folder = job, folder
        self._exits: dict[int, float] = {}
        context = multiprocessing.get_context("fork")
        linked = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE} if hosts else {}
        self.ranks: list[BaseProcess] = [
            context.Process(
                target=_rank_main,
                args=(job, rank, folder, {**environment, **linked}, hosts[rank] if hosts else None),
            )
            for rank, environment in enumerate(torchrun_environments(RANKS))
        ]
        for process in self.ranks:
            process.start()

    def told(self, name: str) -> list[Any]:
        """Return what ranks have told so far."""
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, name: str, lines: int, ranks: int = RANKS) -> None:
        """Wait until so many ranks, or more, have told so many lines."""
        deadline = time.monotonic() + _START_S
        while sum(len(self.told(f"{name}{rank}")) >= lines for rank in range(RANKS)) < ranks:
            assert all(process.is_alive() for process in self.ranks), f"see {self.folder}"
            assert time.monotonic() < deadline, f"ranks do not begin, see {self.folder}"
            time.sleep(0.01)

    def wait_for_fault(self) -> float:
        """Wait until a rank has told its own fault, and return when."""
        deadline = time.monotonic() + _START_S
        while not self.told("fault"):
            assert time.monotonic() < deadline, f"nothing happens, see {self.folder}"
            time.sleep(0.01)
        return float(self.told("fault")[0])

    def send(self, number: int, ranks: Sequence[int]) -> float:
        """Send a signal to ranks, and return when."""
        now_s = time.monotonic()
        for rank in ranks:
            pid = self.ranks[rank].pid
            assert pid is not None
            os.kill(pid, number)
        return now_s

    def wait(self, ranks: Sequence[int], since_s: float, limit_s: float) -> float | None:
        """Return the seconds until ranks were gone; None: some are not within the limit."""
        left = set(ranks)
        while left and time.monotonic() < since_s + limit_s:
            left -= {rank for rank in left if not self.ranks[rank].is_alive()}
            time.sleep(0.002)
        return None if left else time.monotonic() - since_s

    def end(self) -> None:
        """Kill what is left."""
        for process in self.ranks:
            process.kill()
            process.join()

    def ends(self, rank: int) -> tuple[str, str]:
        """Return the kind of the error that ended a rank, and its text."""
        told = self.told(f"ends{rank}")
        return (told[0][0], told[0][1]) if told else ("", "")

    def names(self, lost: int, others: Sequence[int]) -> str:
        """Return how many ranks have named one."""
        named = [rank for rank in others if re.search(rf"[Rr]ank {lost}\b", self.ends(rank)[1])]
        return f"named by {_all(len(named), len(others))}"

    def checkpoint_step(self, name: str) -> int | None:
        """Return the step of a checkpoint; None if there is none."""
        import torch

        path = self.folder / name
        return int(torch.load(path, weights_only=False)["global_step"]) if path.exists() else None


def _all(count: int, of: int) -> str:
    return "all" if count == of else "none" if count == 0 else f"{count} of {of}"


# -- the faults -----------------------------------------------------------------------------------

Outcome = tuple[str, float | None]
"""In words, and the seconds until the ranks were gone; None: some were not."""


def _others(lost: int) -> list[int]:
    return [rank for rank in range(RANKS) if rank != lost]


def _lose(
    way: str, folder: Path, number: int, lost: int, timeout_s: float, behind: str = "steps"
) -> Outcome:
    """Send a signal to a rank behind a moment that ranks tell of: a few steps, or "connects"."""
    run = Run(Job(way, timeout_s=timeout_s), folder)
    try:
        run.wait_for(behind, random.randint(4, 12) if behind == "steps" else 1)
        time.sleep(random.random() * 0.05)
        since_s = run.send(number, [lost])
        others = _others(lost)
        took_s = run.wait(others, since_s, LIMIT_S)
        return f"the rank is {run.names(lost, others)}", took_s
    finally:
        run.end()


def _lose_connecting(way: str, folder: Path, number: int) -> Outcome:
    return _lose(way, folder, number, random.randrange(RANKS), TIMEOUT_S, "connects")


def _lose_between(way: str, folder: Path, number: int) -> Outcome:
    """Send a signal to a rank that has failed alone, while others wait for its next Trainer."""
    lost = random.randrange(RANKS)
    run = Run(Job(way, _TWICE, lost, TIMEOUT_S), folder)
    try:
        run.wait_for("connects", 2, RANKS - 1)
        time.sleep(random.random())
        others = _others(lost)
        took_s = run.wait(others, run.send(number, [lost]), LIMIT_S)
        return f"the rank is {run.names(lost, others)}", took_s
    finally:
        run.end()


def _freeze(way: str, folder: Path, lost: int) -> Outcome:
    outcome, took_s = _lose(way, folder, signal.SIGSTOP, lost, TIMEOUT_S)
    if took_s is not None and took_s > TIMEOUT_S + GRACE_S:
        outcome += f", later than {TIMEOUT_S + GRACE_S:g} s"
    return outcome, took_s


def _kill(way: str, folder: Path, lost: int) -> Outcome:
    return _lose(way, folder, signal.SIGKILL, lost, _OWN_TIMEOUT_S)


def _terminate(way: str, folder: Path, what: str, ranks: Sequence[int]) -> Outcome:
    told = {"in validation": "validates", "in training": "steps"}.get(what, "calls")
    run = Run(Job(way, what), folder)
    try:
        # a rank that is slow when it is measured may call the model seldom, or never in training
        least = 1 if what == "while profiling" else RANKS
        run.wait_for(told, random.randint(4, 12), least)
        time.sleep(random.random() * 0.05)
        took_s = run.wait(range(RANKS), run.send(signal.SIGTERM, ranks), LIMIT_S)
        kinds = {run.ends(rank)[0] for rank in range(RANKS)}
        if kinds != {"SIGTERMException"}:
            return "not all by SIGTERM", took_s
        if what in ("while profiling", "in the LR finder"):
            return "all by SIGTERM", took_s
        steps = {tuple(run.told(f"raised{rank}")[-1:][0][1:]) for rank in range(RANKS)}
        if len(steps) > 1:
            return "by SIGTERM after different steps", took_s
        ((step,),) = steps
        saved = run.checkpoint_step("on_exception.ckpt")
        return f"all after one step, {'saved' if saved == step else 'not saved'}", took_s
    finally:
        run.end()


def _terminate_one(way: str, folder: Path, what: str) -> Outcome:
    return _terminate(way, folder, what, [random.randrange(RANKS)])


def _fail(way: str, folder: Path, what: str) -> Outcome:
    lost = random.randrange(RANKS)
    run = Run(Job(way, what, lost), folder)
    try:
        took_s = run.wait(range(RANKS), run.wait_for_fault(), LIMIT_S)
        said = [rank for rank in _others(lost) if "only here" in run.ends(rank)[1]]
        return f"its error is told by {_all(len(said), RANKS - 1)}", took_s
    finally:
        run.end()


def _call_alone(way: str, folder: Path, what: str) -> Outcome:
    lost = random.randrange(RANKS)
    run = Run(Job(way, what, lost), folder)
    try:
        took_s = run.wait(range(RANKS), run.wait_for_fault(), LIMIT_S)
        return f"the rank is {run.names(lost, range(RANKS))}", took_s
    finally:
        run.end()


def _write(way: str, folder: Path, what: str) -> Outcome:
    run = Run(Job(way, what, cut=random.uniform(0.1, 0.9)), folder)
    try:
        dies = what == "kill -9 in mid-write"
        others = _others(0) if dies else range(RANKS)
        took_s = run.wait(others, run.wait_for_fault(), LIMIT_S)
        try:
            step = run.checkpoint_step("kept.ckpt")
        except Exception:  # whatever a torn file raises
            step = None
        file = "the file of before is whole" if step == 8 else "the file is torn"
        left = [path.name for path in folder.glob(".*.tmp*")]
        if left and not dies:
            file += ", a temporary file is left"
        return f"{file}, the rank is {run.names(0, _others(0))}", took_s
    finally:
        run.end()


def _cut(way: str, folder: Path, lost: int) -> Outcome:
    shaped = ShapedHosts(RANKS, 1000.0)
    with shaped as hosts:
        run = Run(Job(way, timeout_s=TIMEOUT_S), folder, hosts)
        try:
            run.wait_for("steps", random.randint(4, 12))
            time.sleep(random.random() * 0.05)
            since_s = time.monotonic()
            shaped.cut(lost)
            took_s = run.wait(range(RANKS), since_s, LIMIT_S)
            return f"the rank is {run.names(lost, _others(lost))}", took_s
        finally:
            run.end()


def _take_threads(way: str, folder: Path, when: str, of: Path) -> Outcome:
    """Let a rank start no threads; one that is to fail at the start may start some, by chance."""
    lost = random.randrange(RANKS)
    with thread_group() as group:
        more = random.randrange(4) if when == "at the start" else 0
        goes_on = when == "in training"
        steps, timeout_s = (_RESUMED_STEPS, _OWN_TIMEOUT_S) if goes_on else (480, TIMEOUT_S)
        what = f"{_LIMITED}, {when}"
        whole = _uninterrupted(way, of) if goes_on else {}
        run = Run(
            Job(way, what, lost, timeout_s, steps=steps, group=group, more_threads=more), folder
        )
        try:
            took_s = run.wait(range(RANKS), run.wait_for_fault(), LIMIT_S)
            if goes_on:
                return _compared(run, whole), took_s
            return f"the rank is {run.names(lost, _others(lost))}", took_s
        finally:
            run.end()


def _lack_cache(way: str, folder: Path, what: str) -> Outcome:
    cache = folder / "cache"
    begin_s = time.monotonic()
    with full_disk(cache) if what == "a full disk for its cache" else nullcontext():
        if what == "no folder for its cache":
            folder.mkdir(parents=True)
            cache.write_text("a file is in its place")
        run = Run(Job(way, what, steps=16), folder)
        try:
            took_s = run.wait(range(RANKS), begin_s, _START_S)
            ended = sum(run.ends(rank) == ("", "") for rank in range(RANKS))
            said = "told" if "will measure again" in (folder / "log0").read_text() else "not told"
            return f"{_all(ended, RANKS)} train to the end, {said}", took_s
        finally:
            run.end()


def _resume(way: str, folder: Path, whole: dict[int, float]) -> Outcome:
    run = Run(Job(way), folder / "first")
    try:
        run.wait_for("steps", random.randint(4, 12))
        run.send(signal.SIGTERM, range(RANKS))
        run.wait(range(RANKS), time.monotonic(), LIMIT_S)
    finally:
        run.end()
    saved = folder / "first" / "on_exception.ckpt"
    if not saved.exists():
        return "nothing is saved", None
    begin_s = time.monotonic()
    run = Run(Job(way, resumes=saved, steps=_RESUMED_STEPS), folder / "second")
    try:
        took_s = run.wait(range(RANKS), begin_s, _START_S)
        return _compared(run, whole), took_s
    finally:
        run.end()


def _compared(run: Run, whole: dict[int, float]) -> str:
    losses = dict(run.told("steps0"))
    same = sum(whole.get(step) == loss for step, loss in losses.items())
    if max(losses) < run.job.steps:
        return f"ends at step {max(losses)}"
    return f"{_all(same, len(losses))} of the losses equal"


def _read_plan(way: str, folder: Path, text: str) -> Outcome:
    from lightning_cephalo import Plan
    from lightning_cephalo.common.errors import CephaloError

    path = folder / "plan.json"
    folder.mkdir(parents=True)
    path.write_text(text)
    begin_s = time.monotonic()
    try:
        Plan.load(path)
    except CephaloError as error:
        return f"{type(error).__name__}", time.monotonic() - begin_s
    return "is read", time.monotonic() - begin_s


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        name: What happens.
        make: Makes it in a run of a strategy, in a folder.
        ways: Strategies.
    """

    name: str
    make: Callable[[str, Path], Outcome]
    ways: tuple[str, ...] = ("cephalo", "ddp")


def _faults(folder: Path) -> Iterator[Fault]:
    for rank, place in enumerate(("first", "middle", "last")):
        yield Fault(f"SIGSTOP of the {place} of three ranks", partial(_freeze, lost=rank))
    for rank, place in enumerate(("first", "middle", "last")):
        yield Fault(f"kill -9 of the {place} of three ranks", partial(_kill, lost=rank))
    for name, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
        lose = partial(_lose_connecting, number=number)
        yield Fault(f"{name} of a rank while all connect", lose)
    for name, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
        between = partial(_lose_between, number=number)
        # DDP does not end the first of the two Trainers
        yield Fault(f"{name} of a rank while others begin anew", between, ("cephalo",))
    for place in ("in training", "in validation", "in the LR finder", "while profiling"):
        ways = ("cephalo",) if place == "while profiling" else ("cephalo", "ddp")
        to_one = partial(_terminate_one, what=place)
        to_all = partial(_terminate, what=place, ranks=range(RANKS))
        yield Fault(f"SIGTERM to one rank {place}", to_one, ways)
        yield Fault(f"SIGTERM to all {place}", to_all, ways)
    yield Fault("SIGTERM to all, and resumed in mid-epoch", partial(_resumed, of=folder))
    for what in ("an error in a step", "an error in a hook"):
        yield Fault(f"{what} of one rank, OnExceptionCheckpoint", partial(_fail, what=what))
    for call in ("save_checkpoint()", "strategy.barrier()", "should_stop"):
        alone = partial(_call_alone, what=f"alone: {call}")
        yield Fault(f"{call} on one rank alone", alone)
    for what in ("a full disk", "kill -9 in mid-write"):
        yield Fault(f"a checkpoint, {what}", partial(_write, what=what))
    for rank, place in enumerate(("first", "middle", "last")):
        yield Fault(f"the link of the {place} of three ranks is cut", partial(_cut, lost=rank))
    for when in ("at the start", "in training", "and fails"):
        limited = partial(_take_threads, when=when, of=folder)
        yield Fault(f"a rank {_LIMITED}, {when}", limited)
    for what in _CACHES:
        yield Fault(f"a start with {what}", partial(_lack_cache, what=what), ("cephalo",))
    nested, digits = "[" * 2000 + "]" * 2000, f'{{"version": {"9" * 5000}}}'
    for name, text in (("nested 2,000 deep", nested), ("with a number of 5,000 digits", digits)):
        yield Fault(f"a plan {name}", partial(_read_plan, text=text), ("cephalo",))


def _resumed(way: str, at: Path, of: Path) -> Outcome:
    return _resume(way, at, _uninterrupted(way, of))


def _uninterrupted(way: str, of: Path) -> dict[int, float]:
    """Return the losses of a run without a fault, by step."""
    uninterrupted = of / f"whole {way}"
    if not uninterrupted.exists():
        run = Run(Job(way, steps=_RESUMED_STEPS), uninterrupted)
        for process in run.ranks:
            process.join()
    run_told = [json.loads(line) for line in (uninterrupted / "steps0").read_text().splitlines()]
    return dict(run_told)


# -- the table ------------------------------------------------------------------------------------


@contextmanager
def _load(processes: int) -> Iterator[None]:
    """Keep the processors busy with other processes."""
    context = multiprocessing.get_context("fork")
    busy = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def report(folder: Path, only: str, count: int, load: int, ways: Sequence[str]) -> None:
    """Print a row for each fault and strategy.

    Args:
        folder: For logs.
        only: The faults that contain this text.
        count: How often each is made.
        load: Processes that keep the processors busy meanwhile.
        ways: The strategies that are wanted.
    """
    wanted = [fault for fault in _faults(folder) if only in fault.name]
    if not wanted:
        return
    # ranks are forks of this process: none imports it again
    import lightning_cephalo.strategy  # noqa: F401

    print("| fault that ends a run | strategy | count | outcome | median seconds (longest) |")
    print("|---|---|---|---|---|", flush=True)
    with _load(load):
        for number, fault in enumerate(wanted):
            for way in (way for way in fault.ways if way in ways):
                try:
                    made = [
                        fault.make(way, folder / f"{number} {way} {time_}")
                        for time_ in range(count)
                    ]
                except (LinkError, OSError) as error:
                    print(f"| {fault.name} | {way} | 0 | cannot be made here: {error} | |")
                    continue
                print(_line(fault.name, way, made), flush=True)
    print(flush=True)


def _line(name: str, way: str, made: Sequence[Outcome]) -> str:
    words = Counter(
        said if took_s is not None else f"does not end within {LIMIT_S:g} s"
        for said, took_s in made
    )
    said = "; ".join(f"{count} x {words}" for words, count in words.most_common())
    seconds = [took_s for _, took_s in made if took_s is not None]
    took = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""
    return f"| {name} | {way} | {len(made)} | {said} | {took} |"
