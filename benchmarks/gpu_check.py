"""Measures what only hardware can show, on this machine's GPUs, and writes a dated record.

    make gpu-check                            tests/gpu first, then this
    python benchmarks/gpu_check.py [--record FILE] [--without-tests]

One GPU is enough for all but the seconds of collectives. If there is only one, two ranks share it:
NCCL takes them for two hosts.

- overhead: a step on one rank against a step of plain Lightning with the same microbatch, and what
  a visit of a unit costs the host in a model that does next to nothing
- copies: a step that offloads boundary activations, or whose optimizer state is in host memory,
  against the same step that does not. The ratio is 1 if compute hides all copies.
- updates: a step that updates units inside the backward against one that does so behind it
- host waits: the synchronising calls that torch reports in steady steps; none is expected, except
  where state moves
- collectives: seconds to gather and to reduce a unit from uneven shares, and from even ones as
  lists and padded
- memory and step: the plan's prediction against the allocator's peak and the measured step
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan
from lightning_cephalo.profiling.network import mean_times
from lightning_cephalo.sharding.discovery import UnitKind

ROOT = Path(__file__).resolve().parent.parent
# the model comes from the main job
sys.path[:0] = [str(ROOT / "examples")]

from byte_gpt import ByteGPT  # noqa: E402

_WARM_UP = 3
_MIB = 2**20


@dataclass(frozen=True)
class Size:
    """How large the model and the runs are.

    Attributes:
        width: Of the GPT.
        depth: Its blocks.
        heads: Its attention heads.
        context: Bytes in a sample.
        microbatch: Samples in a microbatch.
        microbatches: Microbatches of a step, where there are several.
        steps: Steps of a run that are timed.
        rounds: Runs of each contender, in turn.
    """

    width: int = 1024
    depth: int = 12
    heads: int = 16
    context: int = 512
    microbatch: int = 8
    microbatches: int = 4
    steps: int = 10
    rounds: int = 3


class GPT(LightningModule):
    """Learns to predict the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = ByteGPT(size.width, size.depth, size.heads, size.context)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.network(tokens)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(Callback):
    """Times steady steps, and counts the calls in them that wait for the device."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._start_s = 0.0
        self._caught = warnings.catch_warnings(record=True)
        self._said: list[warnings.WarningMessage] = []
        self.step_s = 0.0
        self.waits = 0
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # a step of plain Lightning may have several batches
        if trainer.global_step == _WARM_UP and not self._start_s:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._said = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == _WARM_UP + self._steps and not self.step_s:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            self.step_s = (time.perf_counter() - self._start_s) / self._steps
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self._caught.__exit__(None, None, None)
            self.waits = sum("synchronizing" in str(said.message) for said in self._said)


def _fit(
    size: Size,
    strategy: Any,
    samples: int,
    callbacks: Sequence[Callback] = (),
    accumulated: int = 1,
) -> Watch:
    """Train with so many samples a batch on all ranks, and return the watch."""
    steps = _WARM_UP + size.steps + 1
    watch = Watch(size.steps)
    generator = torch.Generator().manual_seed(0)
    rows = samples * steps * accumulated
    tokens = torch.randint(0, 256, (rows, size.context), generator=generator)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=devices,
        max_steps=steps,
        accumulate_grad_batches=accumulated,
        callbacks=[watch, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(size), DataLoader(TensorDataset(tokens), batch_size=samples))
    return watch


def _planned(*ranks: tuple[tuple[int, ...], float], **options: Any) -> CephaloStrategy:
    padded = options.pop("padded", None)
    parts = tuple(RankPlan(sizes, share) for sizes, share in ranks)
    plan = Plan(parts, padded=padded)
    # collectives are timed behind the last step, on gradients that early updates give back
    return _of_plan(plan, False, **options)


def _alone(sizes: tuple[int, ...], *, early: bool = False, **choices: Any) -> CephaloStrategy:
    plan = Plan((RankPlan(sizes, 1.0, **choices),))
    return _of_plan(plan, early, recompute=len(sizes) > 1)


def _of_plan(plan: Plan, early: bool = True, **options: Any) -> CephaloStrategy:
    return CephaloStrategy(
        plan=plan,
        global_batch_size=plan.global_batch_size,
        planner=Planner(verbose=False, early_update="auto" if early else False),
        **options,
    )


def on_one_rank(size: Size) -> dict[str, Any]:
    """Measure what one GPU can show."""
    one, several = (size.microbatch,), (size.microbatch,) * size.microbatches
    away = {"early": True, "resident_fraction": 0.0}
    contenders: dict[str, Callable[[], tuple[Any, int]]] = {
        "plain Lightning": lambda: ("auto", size.microbatch),
        "cephalo": lambda: (_alone(one), size.microbatch),
        "recomputing": lambda: (_alone(several), sum(several)),
        "offloading": lambda: (_alone(several, offload=True), sum(several)),
        "updating early": lambda: (_alone(several, early=True), sum(several)),
        "state streamed": lambda: (_alone(several, **away), sum(several)),
        "state updated by the host": lambda: (
            _alone(several, host_update_fraction=1.0, **away),
            sum(several),
        ),
    }
    found: dict[str, list[Watch]] = {name: [] for name in contenders}
    for _ in range(size.rounds):
        for name, make in contenders.items():
            strategy, samples = make()
            found[name].append(_fit(size, strategy, samples))
            torch.cuda.empty_cache()
    return {
        "step_s": {name: [watch.step_s for watch in own] for name, own in found.items()},
        "waits": {name: sum(watch.waits for watch in own) for name, own in found.items()},
        "peak_bytes": {name: own[-1].peak_bytes for name, own in found.items()},
        "visit_s": _visit_s(size),
        "predicted": _predicted(size, sum(several)),
    }


def _visit_s(size: Size) -> list[float]:
    """Return what a visit costs beside plain accumulation, in a model whose kernels are empty."""
    little = dataclasses.replace(size, width=32, heads=2, context=8, microbatch=1)
    sizes, found = (1,) * 8, []
    visits = little.depth * len(sizes)
    for _ in range(size.rounds):
        plain = _fit(little, "auto", 1, accumulated=len(sizes))
        ours = _fit(little, _of_plan(Plan((RankPlan(sizes, 1.0),)), recompute=False), len(sizes))
        found.append((ours.step_s - plain.step_s) / visits)
    return found


def _predicted(size: Size, samples: int) -> dict[str, list[float | None]]:
    """Train by a plan that is measured and solved; return predictions beside measurements."""
    kept = _Predictions()
    strategy = CephaloStrategy(
        global_batch_size=samples, planner=Planner(verbose=False, remeasure=True), replan=False
    )
    watch = _fit(size, strategy, samples, [kept])
    assert strategy.report.memory is not None
    measured = [rank.peak_bytes for rank in strategy.report.memory]
    return {
        "predicted_bytes": list(kept.bytes),
        "measured_bytes": list(measured),
        "step_s": [kept.step_s, watch.step_s],
    }


class _Collectives(Callback):
    """Times the collectives of the present shares after training."""

    def __init__(self) -> None:
        self.gather_s = self.reduce_s = 0.0

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        model = strategy.session.model
        blocks = model.of_kind(UnitKind.BLOCK)
        times = mean_times(model, model.accelerator.clock, blocks)
        self.gather_s, self.reduce_s = times.gather_s, times.reduce_s


class _Predictions(Callback):
    """Keeps the plan's predictions, which go with the session."""

    bytes: tuple[float | None, ...] = ()
    step_s: float | None = None

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        session = cast(CephaloStrategy, trainer.strategy).session
        self.bytes = tuple(rank.peak_bytes for rank in session.predicted_memory)
        self.step_s = session.plan.step_s


def on_several_ranks(size: Size) -> dict[str, Any]:
    """Measure what takes two GPUs or more."""
    ranks = int(os.environ["WORLD_SIZE"])
    sizes = (size.microbatch,) * size.microbatches
    even = [(sizes, 1 / ranks)] * ranks
    weights = [3.0 if rank % 2 else 1.0 for rank in range(ranks)]
    uneven = [(sizes, weight / sum(weights)) for weight in weights]
    samples = sum(sizes) * ranks
    found: dict[str, Any] = {"collectives": {}, "step_s": {}}
    for name, parts, padded in (
        ("uneven, lists", uneven, None),
        ("even, lists", even, False),
        ("even, padded", even, True),
    ):
        times = _Collectives()
        watch = _fit(size, _planned(*parts, padded=padded), samples, [times])
        found["step_s"][name] = watch.step_s
        found["collectives"][name] = [times.gather_s, times.reduce_s]
    found["predicted"] = _predicted(size, samples)
    return found


def measure_on_this_rank(folder: str, size: Size) -> None:
    """Measure with the ranks that a launcher has started; rank 0 writes the figures."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > torch.cuda.device_count():
        # a rank takes the device at its own place; NCCL refuses one device twice in a host
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    found = on_one_rank(size) if ranks == 1 else on_several_ranks(size)
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(folder) / f"{ranks}.json").write_text(json.dumps(found))


# -- the record -----------------------------------------------------------------------------------


class Machine(Protocol):
    """The GPUs to measure."""

    @property
    def description(self) -> str:
        """Names of the devices and versions, for the record."""

    @property
    def count(self) -> int:
        """Number of devices."""

    def measure(self, ranks: int, folder: Path, size: Size) -> None:
        """Call :func:`measure_on_this_rank` on each of so many ranks."""

    def test(self) -> str:
        """Run tests/gpu and return its summary."""


class ThisMachine:
    """The GPUs of this machine."""

    @property
    def description(self) -> str:
        names = [torch.cuda.get_device_name(index) for index in range(self.count)]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{', '.join(names)}; torch {torch.__version__}, NCCL {nccl}"

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def measure(self, ranks: int, folder: Path, size: Size) -> None:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        given = ["--measure", str(folder), "--size", json.dumps(dataclasses.asdict(size))]
        subprocess.run(
            [sys.executable, *(launcher if ranks > 1 else []), __file__, *given], check=True
        )

    def test(self) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "gpu")]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(run.stdout)
        return (run.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")


def check(machine: Machine, size: Size, today: datetime.date, *, tests: bool = True) -> str:
    """Measure and return the record as Markdown."""
    tested = machine.test() if tests else "not run"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine.measure(1, folder, size)
        alone = json.loads((folder / "1.json").read_text())
        ranks = max(2, machine.count)
        machine.measure(ranks, folder, size)
        together = json.loads((folder / f"{ranks}.json").read_text())
    lines = [
        f"# {today.isoformat()}, {machine.description}",
        "",
        f"`make gpu-check`, {size}.",
        "",
        f"- tests/gpu: {tested}",
        *_of_one_rank(alone),
    ]
    lines += _of_several_ranks(together, ranks, machine.count)
    return "\n".join(lines) + "\n"


def _of_one_rank(found: dict[str, Any]) -> list[str]:
    step_s = found["step_s"]

    def ratio(name: str, other: str) -> str:
        ratios = [a / b for a, b in zip(step_s[name], step_s[other], strict=True)]
        median_s = statistics.median(step_s[name])
        return f"{statistics.median(ratios):.3f} ({median_s * 1e3:.1f} ms a step)"

    waits = ", ".join(f"{name} {count}" for name, count in found["waits"].items())
    overhead = ratio("cephalo", "plain Lightning")
    visits_us = [1e6 * visit_s for visit_s in found["visit_s"]]
    peaks = ", ".join(f"{name} {size / _MIB:.0f}" for name, size in found["peak_bytes"].items())
    return [
        f"- one rank against plain Lightning, nothing recomputed: {overhead}",
        f"- with offloaded boundaries against without: {ratio('offloading', 'recomputing')}",
        "- updates inside the backward against behind it:"
        f" {ratio('updating early', 'recomputing')}",
        "- optimizer state in host memory against on the device, streamed:"
        f" {ratio('state streamed', 'updating early')}, updated by the host:"
        f" {ratio('state updated by the host', 'updating early')}",
        "- a visit of a unit beside plain accumulation, where kernels are empty:"
        f" {statistics.median(visits_us):.0f} µs ({min(visits_us):.0f} to {max(visits_us):.0f})",
        f"- synchronising calls in steady steps: {waits}",
        f"- peak memory in steady steps, MiB: {peaks}",
        "",
        *_predictions(found["predicted"]),
    ]


def _of_several_ranks(found: dict[str, Any], ranks: int, devices: int) -> list[str]:
    lines = ["", f"{ranks} ranks share {devices} GPU: no seconds are those of a link."]
    if ranks <= devices:
        lines = ["", f"| {ranks} ranks, shares | gather a unit | reduce a unit | step |"]
        lines.append("|---|---|---|---|")
        for name, (gather_s, reduce_s) in found["collectives"].items():
            times_ms = [gather_s * 1e3, reduce_s * 1e3, found["step_s"][name] * 1e3]
            lines.append(f"| {name} | " + " | ".join(f"{each:.2f} ms" for each in times_ms) + " |")
    return [*lines, "", *_predictions(found["predicted"])]


def _predictions(found: dict[str, list[float]]) -> list[str]:
    lines = ["| predicted and measured | predicted | measured | ratio |", "|---|---|---|---|"]
    predicted_s, measured_s = found["step_s"]
    times = f"{predicted_s * 1e3:.1f} ms | {measured_s * 1e3:.1f} ms"
    lines.append(f"| step | {times} | {predicted_s / measured_s:.3f} |")
    pairs = zip(found["predicted_bytes"], found["measured_bytes"], strict=True)
    for rank, (predicted, measured) in enumerate(pairs):
        sizes = f"{predicted / _MIB:.0f} MiB | {measured / _MIB:.0f} MiB"
        lines.append(f"| peak of rank {rank} | {sizes} | {predicted / measured:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=Path, help="file to write; default: in benchmarks/records")
    parser.add_argument("--without-tests", action="store_true", help="do not run tests/gpu first")
    parser.add_argument("--size", type=json.loads, default={}, help="fields of Size, as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size(**options.size)
    if options.measure:
        measure_on_this_rank(options.measure, size)
        return
    machine = ThisMachine()
    if not machine.count:
        raise SystemExit("No CUDA device: expected one or more. Everything else is in `make test`.")
    today = datetime.date.today()
    text = check(machine, size, today, tests=not options.without_tests)
    name = torch.cuda.get_device_name(0).lower().replace(" ", "_")
    record = options.record or ROOT / "benchmarks" / "records" / f"{today}_{name}.md"
    record.write_text(text)
    print(text)
    print(f"written to {record}")


if __name__ == "__main__":
    main()
