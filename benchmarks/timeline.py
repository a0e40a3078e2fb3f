"""Record one step of two ranks, and print it beside the program that they ran.

    python benchmarks/timeline.py

Rank 0 has two microbatches and rank 1 has one, as in the program of docs/architecture.md.
Ranks are processes on the CPU; times are milliseconds since the step began.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "distributed")]

from harness import make_executor  # noqa: E402
from launch import run_ranks  # noqa: E402

from lightning_cephalo.accelerator.marks import HostMarks  # noqa: E402
from lightning_cephalo.execution.step import MicrobatchCall  # noqa: E402
from lightning_cephalo.observe.recorder import Recorder  # noqa: E402
from lightning_cephalo.plan.program import Operation  # noqa: E402
from lightning_cephalo.plan.timeline import Event, Stream  # noqa: E402

_WIDTH = 512
_SAMPLES = 256
_WARM_UP_STEPS = 5
_SHORT_S = 1e-4
_COLUMNS = (Stream.COMPUTE, Stream.COMMUNICATION, Stream.REDUCTION)
_HEADS = ("compute", "gathers", "reduces")


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(nn.Module):
    """Three units between two layers of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).square().mean()


def _record(rank: int) -> tuple[Event, ...]:
    torch.manual_seed(0)
    model = Model()
    executor = make_executor(model, (0.6, 0.4), recompute=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recorder = Recorder(HostMarks())
    executor.attach(recorder)
    samples = torch.randn(_SAMPLES, _WIDTH)
    call = MicrobatchCall(lambda: model(samples), lambda loss: (loss, float(_SAMPLES)))
    for _ in range(_WARM_UP_STEPS + 1):
        torch.distributed.barrier()
        recorder.restart()
        executor.forward([call, call] if rank == 0 else [call])
        executor.backward()
        with executor.update():
            optimizer.step()
        recorder.finish()
    time.sleep(0.1)  # until the threads of gloo have said when they were done
    return recorder.events(rank)


def table(events: tuple[Event, ...], origin_s: float) -> list[str]:
    """One line for each event, in the column of its stream."""
    lines = [f"{'ms':>13}  " + "".join(f"{head:<12}" for head in _HEADS).rstrip()]
    for event in sorted(events, key=lambda each: each.start_s):
        if event.operation is Operation.WAIT and event.end_s - event.start_s < _SHORT_S:
            continue
        start, end = (f"{(at - origin_s) * 1e3:.1f}" for at in (event.start_s, event.end_s))
        indent = " " * 12 * _COLUMNS.index(event.stream)
        lines.append(f"{start:>5} - {end:>5}  {indent}{event.instruction}")
    return lines


def main() -> None:
    """Print both ranks side by side."""
    ranks = run_ranks(2, _record)
    origin_s = min(event.start_s for events in ranks for event in events)
    tables = [table(events, origin_s) for events in ranks]
    width = max(len(line) for line in tables[0]) + 4
    print(f"{'rank 0':<{width}}rank 1")
    for index in range(max(map(len, tables))):
        left, right = (lines[index] if index < len(lines) else "" for lines in tables)
        print(f"{left:<{width}}{right}".rstrip())


if __name__ == "__main__":
    main()
