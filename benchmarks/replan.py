"""Train on two equal emulated ranks, of which one slows down for a while and recovers.

    python benchmarks/replan.py [--steps 160] [--factor 3] [--figure steps.svg]
    python benchmarks/replan.py --noise 0.1 [--steps 400]
    python benchmarks/replan.py --watching [--steps 400]

``--watching`` measures something else: the CPU seconds of what only watching for another plan does
in a step, as a share of those of the step. A busy machine moves both.

Runs with a fixed plan, with a plan that changes, and with a fresh plan for each of the two speeds:
that of ranks that have this speed from the beginning. Prints the median seconds of a step before
the slowdown, at its beginning, while it lasts, and behind it, and every change of plan. Both long
runs train the same samples: the largest difference of their losses is printed too.

``--noise`` draws the speed of each rank anew in each step, and counts the changes of plan: there
should be none.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "distributed")]

from launch import run_ranks, torchrun_environments  # noqa: E402

from lightning_cephalo import CephaloStrategy, Planner  # noqa: E402
from lightning_cephalo.emulation import Emulation  # noqa: E402
from lightning_cephalo.execution.overlay_slots import Start  # noqa: E402
from lightning_cephalo.observe.report import replan_line  # noqa: E402

_WIDTH, _LENGTH, _BATCH = 96, 32, 8
_TOTAL_FLOPS_PER_S = 4e9
_SLOW_RANK = 1
_WATCHED_BATCH = 16
_FRESH_STEPS = 50


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(LightningModule):
    """Four blocks; keeps losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        loss = hidden.square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SlowsDown(Callback):
    """Slows one rank's device down from one step to another, and times all steps.

    Args:
        emulation: Of the device.
        steps: Where that rank is slower.
        factor: By how much.
        noise: How far the speed of every rank is from its own, as a part of it, in the mean.
    """

    def __init__(
        self, emulation: Emulation, steps: range, factor: float, noise: float = 0.0
    ) -> None:
        self.emulation, self.steps, self.factor, self.noise = emulation, steps, factor, noise
        self._dice: random.Random | None = None
        self.times_s: list[float] = []
        self._last_s: float | None = None
        self._rate: float | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Any, *rest: Any) -> None:
        device = self.emulation.device
        assert device is not None and device.flops_per_s is not None
        self._rate = self._rate or device.flops_per_s
        is_slow = trainer.global_rank == _SLOW_RANK and trainer.global_step in self.steps
        self._dice = self._dice or random.Random(trainer.global_rank)
        longer = max(0.5, self._dice.gauss(1.0, self.noise)) if self.noise else 1.0
        device.flops_per_s = self._rate / (self.factor if is_slow else 1.0) / longer

    def on_train_batch_end(self, *_: Any) -> None:
        now_s = time.perf_counter()
        if self._last_s is not None:
            self.times_s.append(now_s - self._last_s)
        self._last_s = now_s


@dataclass(frozen=True)
class Run:
    """What a run has shown on rank 0."""

    times_s: list[float]
    losses: list[float]
    lines: list[str]
    changes: list[tuple[int, list[int]]]


def _train(
    replan: bool, count: int, slow: range, factor: float, noise: float = 0.0, speed: float = 1.0
) -> Run:
    """Train.

    Args:
        replan: Whether the plan may change.
        count: Steps.
        slow: Where one rank is slower.
        factor: By how much.
        noise: Of the speeds in each step.
        speed: Of that rank, all the time, as a part of the other one's.
    """
    rate = _TOTAL_FLOPS_PER_S / 2
    emulation = Emulation(speeds=(1, speed), total_flops_per_s=rate * (1 + speed))
    times = SlowsDown(emulation, slow, factor, noise)
    strategy = CephaloStrategy(replan=replan, planner=Planner(verbose=False, budget_s=20))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[emulation, times],
        max_steps=count,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4096, _LENGTH, _WIDTH, generator=generator))
    trainer.fit(model, DataLoader(data, _BATCH))
    found = strategy.report.replans
    return Run(
        times.times_s,
        model.losses,
        [replan_line(change) for change in found],
        [(change.step, [rank.batch_size for rank in change.plan.ranks]) for change in found],
    )


def _in_all_ranks(cache: str, function: Any, *args: Any) -> list[Any]:
    environments = torchrun_environments(2)

    def script(rank: int) -> Any:
        import os

        os.environ.update(environments[rank], OMP_NUM_THREADS="1", LIGHTNING_CEPHALO_CACHE=cache)
        return function(*args)

    return list(run_ranks(2, script, process_group=False, timeout_s=1200))


class Counted:
    """Calls an object's methods, and counts the CPU seconds of this thread that they take.

    What they call of their arguments, such as the forward itself, does not count.
    """

    def __init__(self, what: Any, spent: Callable[[float], None]) -> None:
        self._what, self._spent = what, spent

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._what, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            within_s = 0.0

            def excepted(function: Callable[..., Any]) -> Callable[..., Any]:
                def run(*own: Any) -> Any:
                    nonlocal within_s
                    begun_s = time.thread_time()
                    try:
                        return function(*own)
                    finally:
                        within_s += time.thread_time() - begun_s

                return run

            begun_s = time.thread_time()
            try:
                return value(*(excepted(arg) if callable(arg) else arg for arg in args), **options)
            finally:
                self._spent(time.thread_time() - begun_s - within_s)

        return call


class CountsWatching(Callback):
    """Counts the CPU seconds of all steps, and of what only watching does in them."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.watching_s: list[float] = []
        self._of_step_s = self._last_s = 0.0
        self._keeping_s: list[float] = []

    def _spend(self, seconds: float) -> None:
        self._of_step_s += seconds

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, CephaloStrategy) and strategy._training is not None
        training: Any = strategy._training
        assert training.replanning is not None and training.repeated.may_repeat
        policy = training.replanning._policy
        if policy is not None:
            policy.judge = lambda *_: None  # it looks, but no plan changes
        training.replanning = Counted(training.replanning, self._spend)
        training.repeated = Counted(training.repeated, self._spend)
        # what a repetition would need of modules is kept within another function
        self._places = strategy.session.model.executor.overlay.places

    def on_train_batch_end(self, *_: Any) -> None:
        now_s = time.process_time()
        if self._last_s:
            begun_s = time.thread_time()
            Start(self._places)
            self._spend(time.thread_time() - begun_s)
            self.step_s.append(now_s - self._last_s)
            self.watching_s.append(self._of_step_s)
        self._of_step_s, self._last_s = 0.0, time.process_time()


def _watch(count: int) -> tuple[list[float], list[float]]:
    counts = CountsWatching()
    strategy = CephaloStrategy(replan=True, planner=Planner(verbose=False, budget_s=2))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[counts],
        max_steps=count,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(_WATCHED_BATCH * 8, _LENGTH, _WIDTH, generator=generator))
    data = torch.utils.data.ConcatDataset([data] * (count // 4))
    trainer.fit(Model(), DataLoader(data, _WATCHED_BATCH))
    return counts.step_s, counts.watching_s


def _show_watching(runs: list[tuple[list[float], list[float]]]) -> None:
    print(f"{'CPU ms of a step, median':26}{'step':>12}{'watching':>12}{'share':>10}")
    for rank, (steps_s, watching_s) in enumerate(runs):
        step_s, own_s = median(steps_s), median(watching_s)
        # means show what is rare: a look for another plan
        print(f"{f'rank {rank}':26}{1e3 * step_s:12.3f}{1e3 * own_s:12.3f}{own_s / step_s:10.2%}")
        share = sum(watching_s) / sum(steps_s)
        print(f"{'       in the mean':50}{share:10.2%}")


def _show_noise(count: int, noise: float) -> None:
    with tempfile.TemporaryDirectory() as cache:
        run = _in_all_ranks(cache, _train, True, count, range(0), 1.0, noise)[0]
    print(f"{count} steps with {noise:.0%} of noise: {len(run.changes)} changes of plan")
    for line in run.lines:
        print(line)


def _draw(path: str, runs: dict[str, Run], slow: range) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3))
    for name, run in runs.items():
        axes.plot(range(1, len(run.times_s) + 1), run.times_s, label=name, linewidth=1)
    axes.axvspan(slow.start, slow.stop, alpha=0.1, color="black")
    axes.set_xlabel("step; one rank is slower in the grey ones")
    axes.set_ylabel("seconds of a step")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--figure", help="write a figure of the seconds of all steps here")
    parser.add_argument("--noise", type=float, help="noise of each rank's speed, such as 0.1")
    parser.add_argument("--watching", action="store_true", help="measure what watching costs")
    options = parser.parse_args()
    count = options.steps
    if options.watching:
        with tempfile.TemporaryDirectory() as cache:
            _show_watching(_in_all_ranks(cache, _watch, count))
        return
    if options.noise is not None:
        _show_noise(count, options.noise)
        return
    slow = range(count // 4, count * 5 // 8)
    with tempfile.TemporaryDirectory() as cache:
        runs = {
            name: _in_all_ranks(cache, _train, replan, count, slow, options.factor)[0]
            for name, replan in (("fixed plan", False), ("plan that changes", True))
        }
        fresh = {
            name: _in_all_ranks(cache, _train, False, _FRESH_STEPS, range(0), 1.0, 0.0, speed)[0]
            for name, speed in (("slow, settled", 1 / options.factor), ("behind it, settled", 1.0))
        }
    # a change takes two looks, ten steps apart
    settled = slow.start + min(40, len(slow) * 2 // 3)
    phases = {
        "before": range(10, slow.start - 1),
        "slow, first steps": range(slow.start + 1, slow.start + 10),
        "slow, settled": range(settled, slow.stop - 1),
        "behind it, settled": range(min(count - 10, slow.stop + 40), count - 1),
    }
    print(f"{'median seconds of a step':26}" + "".join(f"{name:>20}" for name in phases))
    for name, run in runs.items():
        medians = [median(run.times_s[step] for step in steps) for steps in phases.values()]
        print(f"{name:26}" + "".join(f"{seconds:20.3f}" for seconds in medians))
    fresh_s = {name: median(run.times_s[10:]) for name, run in fresh.items()}
    shown = "".join(f"{fresh_s[name]:20.3f}" if name in fresh_s else " " * 20 for name in phases)
    print(f"{'fresh plan':26}{shown}")
    own = runs["plan that changes"].times_s
    for name, seconds in fresh_s.items():
        longer = median(own[step] for step in phases[name]) / seconds - 1
        print(f"{name}: {longer:+.1%} beside a fresh plan")
    for line, (_, batches) in zip(
        runs["plan that changes"].lines, runs["plan that changes"].changes, strict=True
    ):
        print(f"{line} Batches: {batches}")
    losses = [run.losses for run in runs.values()]
    apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
    print(f"largest difference of losses: {apart:.1e}")
    if options.figure:
        _draw(options.figure, runs, slow)


if __name__ == "__main__":
    main()
