"""Measures what only hardware can show, on this machine's GPUs, and writes a dated record.

    make gpu-check                            tests/gpu first, then this
    python benchmarks/gpu_check.py [--record FILE] [--without-tests]

One GPU is enough for the overhead, the overlap of copies with compute, and the host's waits. Two or
more are needed for collectives, and for predicted against measured memory.

- overhead: a step on one rank against a step of plain Lightning with the same microbatch
- copies: a step that offloads boundary activations against the same step that does not. The ratio
  is 1 if compute hides all copies.
- host waits: the synchronising calls that torch reports in steady steps; none is expected
- collectives: seconds to gather and to reduce a unit from uneven shares, and from even ones as
  lists and padded
- memory: the plan's prediction against the allocator's peak
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo import CephaloStrategy, Plan, RankPlan
from lightning_cephalo.profiling.network import mean_times

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
        self.forms: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == _WARM_UP:
            torch.cuda.synchronize()
            self._said = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == _WARM_UP + self._steps:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            self.step_s = (time.perf_counter() - self._start_s) / self._steps
            self._caught.__exit__(None, None, None)
            self.waits = sum("synchronizing" in str(said.message) for said in self._said)


def _fit(size: Size, strategy: Any, samples: int, callbacks: Sequence[Callback] = ()) -> Watch:
    """Train with this global batch on all ranks, and return the watch."""
    steps = _WARM_UP + size.steps + 1
    watch = Watch(size.steps)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (samples * steps, size.context), generator=generator)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=devices,
        max_steps=steps,
        callbacks=[watch, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(size), DataLoader(TensorDataset(tokens), batch_size=samples))
    return watch


def _planned(*ranks: tuple[tuple[int, ...], float], **options: Any) -> CephaloStrategy:
    offload, padded = options.pop("offload", False), options.pop("padded", None)
    parts = tuple(RankPlan(sizes, share, offload=offload) for sizes, share in ranks)
    plan = Plan(parts, padded=padded)
    # collectives are timed behind the last step, on gradients that early updates give back
    return CephaloStrategy(
        plan=plan,
        global_batch_size=plan.global_batch_size,
        early_update=False,
        verbose=False,
        **options,
    )


def on_one_rank(size: Size) -> dict[str, Any]:
    """Measure what one GPU can show."""
    one, several = (size.microbatch,), (size.microbatch,) * size.microbatches
    contenders = {
        "plain Lightning": lambda: ("auto", size.microbatch),
        "cephalo": lambda: (_planned((one, 1.0), recompute=False), size.microbatch),
        "recomputing": lambda: (_planned((several, 1.0)), sum(several)),
        "offloading": lambda: (_planned((several, 1.0), offload=True), sum(several)),
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
    }


class _Collectives(Callback):
    """Times the collectives of the present shares after training."""

    def __init__(self) -> None:
        self.gather_s = self.reduce_s = 0.0

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        model = strategy.session.model
        times = mean_times(model, model.accelerator.clock)
        self.gather_s, self.reduce_s = times.gather_s, times.reduce_s


class _Memory(Callback):
    """Keeps the plan's prediction, which goes with the session."""

    predicted_bytes: tuple[float | None, ...] = ()

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        predicted = strategy.session.predicted_memory
        self.predicted_bytes = tuple(rank.peak_bytes for rank in predicted)


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
    memory = _Memory()
    strategy = CephaloStrategy(global_batch_size=samples, verbose=False)
    _fit(size, strategy, samples, [memory])
    assert strategy.measured_memory is not None
    found["memory"] = [
        [predicted, rank.peak_bytes]
        for predicted, rank in zip(memory.predicted_bytes, strategy.measured_memory, strict=True)
    ]
    return found


def measure_on_this_rank(folder: str, size: Size) -> None:
    """Measure with the ranks that a launcher has started; rank 0 writes the figures."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
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
        together = None
        if machine.count > 1:
            machine.measure(machine.count, folder, size)
            together = json.loads((folder / f"{machine.count}.json").read_text())
    lines = [
        f"# {today.isoformat()}, {machine.description}",
        "",
        f"`make gpu-check`, {size}.",
        "",
        f"- tests/gpu: {tested}",
        *_of_one_rank(alone),
    ]
    if together is None:
        lines.append("- collectives and memory: need two GPUs")
    else:
        lines += _of_several_ranks(together, machine.count)
    return "\n".join(lines) + "\n"


def _of_one_rank(found: dict[str, Any]) -> list[str]:
    step_s = found["step_s"]

    def ratio(name: str, other: str) -> str:
        ratios = [a / b for a, b in zip(step_s[name], step_s[other], strict=True)]
        median_s = statistics.median(step_s[name])
        return f"{statistics.median(ratios):.3f} ({median_s * 1e3:.1f} ms a step)"

    waits = ", ".join(f"{name} {count}" for name, count in found["waits"].items())
    overhead = ratio("cephalo", "plain Lightning")
    return [
        f"- one rank against plain Lightning, nothing recomputed: {overhead}",
        f"- with offloaded boundaries against without: {ratio('offloading', 'recomputing')}",
        f"- synchronising calls in steady steps: {waits}",
    ]


def _of_several_ranks(found: dict[str, Any], ranks: int) -> list[str]:
    lines = [
        "",
        f"| {ranks} ranks, shares | gather a unit | reduce a unit | step |",
        "|---|---|---|---|",
    ]
    for name, (gather_s, reduce_s) in found["collectives"].items():
        times_ms = [gather_s * 1e3, reduce_s * 1e3, found["step_s"][name] * 1e3]
        lines.append(f"| {name} | " + " | ".join(f"{each:.2f} ms" for each in times_ms) + " |")
    lines += ["", "| rank | predicted peak | measured peak | ratio |", "|---|---|---|---|"]
    for rank, (predicted, measured) in enumerate(found["memory"]):
        sizes = f"{predicted / _MIB:.0f} MiB | {measured / _MIB:.0f} MiB"
        lines.append(f"| {rank} | {sizes} | {predicted / measured:.3f} |")
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
